"""Native kernels for CPUs: C sources, their build, and the backend that calls them."""
