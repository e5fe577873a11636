"""The operators in plain PyTorch: chunked, exact, bounded in memory, with hand-written backwards.

`functions.py` and `topk.py` are the ways in; everything is packed (THD) here. Nothing of `dsattn.spec` is imported: the
operators and their judge share no line.
"""
