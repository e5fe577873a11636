"""The releases' own wrappers, run without a GPU: on CPU tensors, with the kernels emulated or only compiled."""
