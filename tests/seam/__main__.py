"""One installed release on one architecture: compare its wrappers with the simulator, or compile its kernels.

Run in an environment that has the release; `environments` makes them, and `make frontend-seam` runs all.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter

from dsattn.backends.cudnn.simulator import SimulatedFrontend
from seam import cases
from seam.compare import differences, see
from seam.frontend import SeamFrontend, forget
from seam.kernels import compile_all
from seam.verified import verify


def compare(arch: str, only: str, against: str | None, *, verbose: bool) -> int:
    """Makes every call on both and prints what differs; how many calls do."""
    frontend = SeamFrontend(arch)
    version = against or frontend.version.public
    made: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for case in cases.every():
        minor = frontend.version.release[1]
        contract = SimulatedFrontend(version, arch).contract
        fits = case.arch in (None, arch) and case.since <= minor < case.until and contract.has(case.wrapper)
        fits = fits and not any(contract.defect(id) for id in case.defects)
        if not fits or only not in str(case):
            continue
        forget()
        seam = see(frontend, case)
        simulated = see(SimulatedFrontend(version, arch, races=False), case)
        found = list(differences(seam, simulated, case))
        made[case.wrapper] += 1
        refused[case.wrapper] += seam.raised is not None
        failed[case.wrapper] += bool(found)
        for text in found:
            print(f"  {version} {arch} {case}: {text}")
        if verbose and found:
            for seen in (seam, simulated):
                if seen.raised is not None:
                    traceback.print_exception(seen.raised, limit=-4)
    for wrapper, count in made.items():
        print(
            f"{version} {arch} {wrapper}: {count - failed[wrapper]} of {count} calls agree ({refused[wrapper]} raise)"
        )
    # Nothing to compare holds no release to anything.
    return failed.total() + (not made and not only)


def main() -> int:
    """The exit code: 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m seam", description=__doc__)
    parser.add_argument("--arch", choices=("sm90", "sm100"), required=True)
    parser.add_argument("--verify", action="store_true", help="run the backend on verify's cases instead")
    parser.add_argument("--kernels", action="store_true", help="compile the kernels of the backend's calls instead")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--against", help="simulate this release and not the installed one: it should differ")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    # Where a release leaves the architecture to the compiler, this is what it takes without a GPU.
    os.environ["CUTE_DSL_ARCH"] = f"{options.arch.replace('sm', 'sm_')}a"
    if options.kernels:
        return int(compile_all(SeamFrontend(options.arch, compiles=True), options.only) > 0)
    if options.verify:
        return int(verify(SeamFrontend(options.arch), options.only) > 0)
    return int(compare(options.arch, options.only, options.against, verbose=options.verbose) > 0)


if __name__ == "__main__":
    sys.exit(main())
