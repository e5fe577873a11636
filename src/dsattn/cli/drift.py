"""`dsattn drift`: what changed in the call contract between two releases of a kernel package."""

from __future__ import annotations

import argparse
import json as json_format
from pathlib import Path

from dsattn.backends.cudnn.contracts import distribution
from dsattn.cli.progress import progress
from dsattn.drift.compare import drift
from dsattn.drift.report import show
from dsattn.errors import BadInput
from dsattn.verify.records import write
from dsattn.verify.report import console

DESCRIPTION = """\
Show what changed in the call contract between two releases of a kernel package, what that means for a caller, and
which watched calls it touches. The wheels are downloaded by pip and read as text; nothing is imported or run.

Exit code: 0 nothing touches a watched call; 1 something does; 2 wrong usage, no network, or a broken wheel."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `main`."""
    parser.add_argument("old", metavar="OLD", help="a release, such as 1.25.0")
    parser.add_argument("new", metavar="NEW", help="the release to compare it with")
    parser.add_argument(
        "--package",
        metavar="NAME",
        default=distribution()["name"],
        help="a package on the index: of nvidia-cudnn-frontend (the default) its DSA is read, of megatron-core its "
        "sparse attention, of others everything",
    )
    parser.add_argument(
        "--watch",
        type=Path,
        metavar="FILE",
        help="the calls to watch, as TOML (default: dsattn's own calls of nvidia-cudnn-frontend)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")


def main(*, old: str, new: str, package: str, watch: Path | None, json: Path | None) -> int:
    """Runs `dsattn drift`; its exit code."""
    if json is not None and not json.parent.is_dir():
        raise BadInput(str(json), given="a folder that does not exist", fix=f"make {json.parent} first")
    with progress() as advance:
        found = drift(package, old, new, watch=watch, advance=advance)
    show(found, console())
    if json is not None:
        write(json, json_format.dumps(found.as_dict(), indent=1) + "\n")
    return 1 if found.touched else 0
