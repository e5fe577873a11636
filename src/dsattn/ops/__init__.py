"""The operators in plain PyTorch: chunked, exact, bounded in memory, with hand-written backwards.

Each file has one operator, forward and backward, without autograd; everything is packed (THD) here. Nothing of
`dsattn.spec` is imported: the operators and their judge share no line.
"""
