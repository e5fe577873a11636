"""Suite `frontend-defaults`: what the defaults that cuDNN frontend 1.26 changed do to a caller that trusts them.

Simulated releases are called twice: as one calls them who knows 1.25 alone (naive), and by dsattn. The naive calls show
the faults that were seen on GPUs, from 1.26 on and not before; those of dsattn show none.
"""

from dsattn.verify.frontend_defaults.rows import SUITE, Table, tables
from dsattn.verify.frontend_defaults.suite import RELEASES, run

__all__ = ["RELEASES", "SUITE", "Table", "run", "tables"]
