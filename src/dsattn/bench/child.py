"""One measurement in a process of its own: `python -m dsattn.bench.child JSON` prints what it found as one JSON line.

The argument is a `Request` as JSON, or the question for the matrix peak: `{"peak": "fp32", "threads": 2}`. Without an
argument each line of stdin is one, and is answered by a fork.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsattn.bench import memory
from dsattn.bench.calls import Call
from dsattn.bench.peak import matrix_peak
from dsattn.bench.works import WORKS, Work
from dsattn.verify.run import DTYPES


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured.

    Attributes:
        work: name of the work.
        runner: what runs it: a backend of dsattn, or a peer.
        dtype: short name of the dtype.
        rows: tokens.
        threads: of PyTorch and of the kernels.
        results: where the results of the call that comes before the timed one are written; None for nowhere.
    """

    work: str
    runner: str
    dtype: str
    rows: int
    threads: int
    results: str | None = None

    def as_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was found.

    Attributes:
        wall: seconds of the call.
        cpu: seconds of all its threads.
        start: resident bytes before the inputs were made.
        held: resident bytes when they were there.
        peak: the most resident bytes during the call.
        inputs: bytes of the inputs.
        gradients: bytes of the inputs' gradients.
        exact: whether `peak` is of the call alone; else what made the inputs may have needed more.
    """

    wall: float
    cpu: float
    start: int
    held: int
    peak: int
    inputs: int
    gradients: int
    exact: bool


def measure(request: Request) -> Measurement:
    """Makes the call once on few rows, so that nothing is compiled or checked later, then on all, and times that."""
    torch.set_num_threads(request.threads)
    work = WORKS[request.work]
    _warm_up(work, request)
    gc.collect()
    memory.give_back()
    start = memory.resident()
    call = _made(work, request, request.rows)
    call.before()
    held, exact = memory.resident(), memory.forget()
    wall, cpu = time.perf_counter(), time.process_time()
    results = call.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = memory.highest()
    del results
    gradients = [x.grad for x in call.inputs if x.grad is not None]
    if not all(bool(x.isfinite().all()) for x in gradients):
        raise RuntimeError("a gradient is not finite")
    return Measurement(
        wall=wall,
        cpu=cpu,
        start=start,
        held=held,
        peak=peak,
        inputs=sum(x.nbytes for x in call.inputs),
        gradients=sum(x.nbytes for x in gradients),
        exact=exact,
    )


def _warm_up(work: Work, request: Request) -> None:
    call = _made(work, request, min(work.warm, request.rows))
    call.before()
    results = call.run()
    if request.results is not None:
        _write(Path(request.results), results)


def _made(work: Work, request: Request, rows: int) -> Call:
    """The call with its inputs: the same for everything that runs it."""
    torch.manual_seed(0)
    return work.make(work.sizes, rows, DTYPES[request.dtype], request.runner)


def _write(path: Path, results: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: x.detach().contiguous() for name, x in results.items()}, path)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What the process prints."""
    if "peak" in asked:
        figure, source = matrix_peak(DTYPES[asked["peak"]], asked["threads"])
        return {"peak": figure, "source": source}
    return asdict(measure(Request(**asked)))


def answered(question: str) -> str:
    """The line that is printed for a question; what goes wrong is told under "error"."""
    try:
        found = answer(json.loads(question))
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(found) + "\n"


def serve(questions: Iterable[str], tell: Callable[[str], object]) -> None:
    """Answers each question in a fork of this process, which has imported everything and computed nothing."""
    # The first call of an operator would import it.
    import_module("torch._dynamo")
    for question in questions:
        child = os.fork()
        if child == 0:
            tell(answered(question))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            why = "killed, as where memory runs out" if status == -signal.SIGKILL else f"ended with status {status}"
            tell(json.dumps({"error": f"the process was {why}"}) + "\n")


def main() -> None:
    """Answers the argument, or without one each line of stdin, on stdout; whatever else is printed goes to stderr."""
    told = os.dup(1)
    os.dup2(2, 1)

    def tell(line: str) -> None:
        os.write(told, line.encode())

    if len(sys.argv) > 1:
        tell(answered(sys.argv[1]))
    else:
        serve(sys.stdin, tell)


if __name__ == "__main__":
    main()
