"""Suite `megatron`: a released Megatron-LM on releases of the cuDNN frontend, before and after `install()`.

Its own functions are called, downloaded by pip where none is installed, in a process of its own. On simulated frontends
this needs no GPU.
"""

from dsattn.verify.frontend_defaults.rows import Table
from dsattn.verify.megatron_suite.rows import SUITE, tables
from dsattn.verify.megatron_suite.suite import NEWEST, RELEASES, run

__all__ = ["NEWEST", "RELEASES", "SUITE", "Table", "run", "tables"]
