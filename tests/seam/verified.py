"""The backend over the seam, judged by `dsattn verify`'s own cases."""

from __future__ import annotations

from collections import Counter

import torch

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.verify.run import run, tasks
from dsattn.verify.simulated import Chain
from dsattn.verify.suites import parts
from seam.frontend import SeamFrontend


def verify(frontend: SeamFrontend, only: str) -> int:
    """Runs every named case and prints what fails, and how many hold; the number of those that fail."""
    release, arch = frontend.version.public, frontend.gpu.arch
    chain = Chain(CudnnBackend(frontend.namespace()), release=release, arch=arch, simulated=True)
    verdicts: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for part in parts("quick", simulated=True):
        subjects = [subject for subject in part.subjects if only in subject.case.name]
        for record in run(tasks(subjects, [chain], torch.device("cpu"), part.dtypes)):
            kernels.update(frontend.gpu.launches)
            frontend.gpu.launches.clear()
            verdicts[record.verdict] += 1
            if record.verdict == "fail":
                print(f"  {release} {arch} {record.case} {record.operator}: {record.reason}")
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(
        f"{release} {arch} backend on the cases of verify: {told}; {kernels.total()} launches of {len(kernels)} kernels"
    )
    return verdicts["fail"] + (not verdicts["pass"] and not only)
