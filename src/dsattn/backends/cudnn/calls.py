"""Every call that the backend makes of the frontend."""

from __future__ import annotations

from dsattn.backends.cudnn.dense_calls import DenseCalls
from dsattn.backends.cudnn.sparse_calls import SparseCalls


class Calls(DenseCalls, SparseCalls):
    """The calls of one release on one architecture, exact whatever its defaults are."""
