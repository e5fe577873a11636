"""`dsattn bench`: how fast the operators are, beside the released functions of other libraries."""
