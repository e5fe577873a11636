"""The cuDNN frontend: what each of its releases does, and the calls that mean the same on all of them."""
