"""`python -m dsattn`: the command line."""

from __future__ import annotations

import sys

from dsattn.cli import main

sys.exit(main())
