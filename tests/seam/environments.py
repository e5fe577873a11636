"""Real releases of the frontend in environments of their own, and the checks of this folder run in each.

Releases up to 1.26 and later ones pin different versions of nvidia-cutlass-dsl, so no environment holds two. Each is
made once, beside the wheels that the tests keep, and sees the packages of the interpreter that makes it: torch is not
installed again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import ROOT
from wheels import cache_folder

from dsattn.backends.cudnn.contracts import ARCHS, distribution

RELEASES = ("1.25.0", "1.26.0", "1.29.1", "1.32.0")
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def environment(release: str) -> Path:
    """The interpreter of an environment that has the release; made on first use."""
    folder = cache_folder().parent / "frontends" / release
    python, done = folder / "bin" / "python", folder / ".ready"
    if not done.exists():
        print(f"== frontend {release} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    # Written anew each time: the packages of the caller may have moved.
    own = Path(subprocess.check_output([python, "-c", PACKAGES], text=True).strip())
    seen = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")]
    (own / "packages-of-caller.pth").write_text("\n".join(seen) + "\n")
    if not done.exists():
        names = distribution()
        package = f"{names['name']}[{names['extra']}]=={release}"
        subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
        done.touch()
    return python


def run(release: str, arch: str, *options: str) -> bool:
    """Runs this folder's checks with a release; whether they hold."""
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    known = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [environment(release), "-m", "seam", "--arch", arch, *options]
    return subprocess.run(command, env=known, check=False).returncode == 0


def main() -> int:
    """The exit code: 1 where a check of a release does not hold."""
    parser = argparse.ArgumentParser(prog="python -m seam.environments", description=__doc__)
    parser.add_argument("--release", action="append", help="only this release; repeat it for several")
    parser.add_argument("--arch", choices=ARCHS, action="append", help="only this architecture")
    parser.add_argument("--kernels", action="store_true", help="compile the kernels instead of comparing")
    parser.add_argument("--only", default="", help="only what has this in its name")
    options = parser.parse_args()
    checks = [["--kernels"]] if options.kernels else [[], ["--verify"]]
    failed, begin = [], time.perf_counter()
    for release in options.release or RELEASES:
        for arch in options.arch or ARCHS:
            held = [run(release, arch, "--only", options.only, *check) for check in checks]
            failed += [] if all(held) else [f"{release} on {arch}"]
    told = f"not as it should be: {', '.join(failed)}" if failed else "all as it should be"
    print(f"{told}; {time.perf_counter() - begin:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
