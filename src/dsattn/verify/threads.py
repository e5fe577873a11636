"""One thread for work on small tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Generator[None]:
    """PyTorch's operators run on one thread; also a decorator.

    References and comparisons are made of thousands of small operators. A team of threads gains nothing on those, and
    where another process wants the same cores the team waits for whole time slices: ten times slower was seen.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
