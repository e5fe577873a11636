"""The kernels of the backend `cpu` under the address and the undefined-behaviour sanitizer: python tests/sanitize.py.

Every case of `dsattn verify` runs, and odd shapes that the cases lack, on every instruction set that this CPU has. New
memory is full of NaN, so a number that nobody wrote shows as a wrong result. A fault ends its process. Functions with a
fault on purpose run first, and each must be found out.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
from cpu_problems import Unchecked, difference, drawn, edges, everything, sizes
from test_edges_views import WAYS

from dsattn import TopK, sparse_attention
from dsattn.backends.cpu import build
from dsattn.errors import BackendMissing, DsattnError
from dsattn.verify import suites
from dsattn.verify.reference import References
from dsattn.verify.run import DTYPES, run

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
# Bytes of 255 are NaN in all dtypes. What Python keeps to its end is no leak.
OPTIONS = "detect_leaks=0:max_malloc_fill_size=2147483647:malloc_fill_byte=255"
# Short tracebacks of allocations, and memory that is kept: a third of the time.
OPTIONS += ":malloc_context_size=2:allocator_release_to_os_interval_ms=-1"
CASES, SHAPES = ("fp32", "bf16", "fp16"), "shapes"
DRAWN = 28

NOT_WRITTEN = "nan"
CONTROLS = {
    "heap-buffer-overflow": "return x[n];",
    "use-after-poison": """
        arena memory = {aligned_alloc(64, 1024), 0};
        float *piece = TAKE(&memory, float, n), *next = TAKE(&memory, float, n);
        next[0] = x[0];
        return piece[n];""",
    "signed integer overflow": "return (float)(n + INT64_MAX + (int64_t)x[0]);",
    NOT_WRITTEN: "float *volatile piece = malloc(n * sizeof(float)); return piece[n - 1] * x[0];",
}
"""What must be said of a function of n numbers x, whose body is this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "sanitize", help="where libraries are kept")
    parser.add_argument("part", nargs="?", help="run only this, in this process, where the sanitizers are loaded")
    given = parser.parse_args()
    if given.part is not None:
        return inside(given.part)
    try:
        environment = {**os.environ, **preloaded(), "DSATTN_CACHE_DIR": str(given.cache.resolve())}
    except DsattnError as error:
        print(error, file=sys.stderr)
        return 2
    # The longest first.
    parts = [*CONTROLS, SHAPES, *CASES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        holds = [judged(done) for done in pool.map(lambda part: in_process(part, environment), parts)]
    print(f"{'PASS' if all(holds) else 'FAIL'}: {holds.count(True)} of {len(parts)} parts hold")
    return 0 if all(holds) else 1


def preloaded() -> dict[str, str]:
    """The environment in which Python can load libraries with sanitizers.

    Raises:
        BackendMissing: there is no C compiler, or it has no such library.
    """
    command, found = build.compiler(), []
    # An exception of C++ passes through the first one on its way to the second, which must be there from the start.
    for name in ("libasan.so", "libstdc++.so.6"):
        done = subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if not Path(done.stdout.strip()).is_absolute():
            raise BackendMissing(name, given=f"none beside {command[0]}", fix="set CC to a gcc that has it")
        found.append(done.stdout.strip())
    options = {"ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": "print_stacktrace=1"}
    # Threads of PyTorch that wait by running would take the cores from the other parts.
    return {"LD_PRELOAD": " ".join(found), "OMP_WAIT_POLICY": "PASSIVE", **options}


def in_process(part: str, environment: dict[str, str]) -> tuple[str, int, str]:
    """What came of a part: its name, exit code and output."""
    command = [sys.executable, "-W", "ignore", __file__, part]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return part, done.returncode, done.stdout


def judged(done: tuple[str, int, str]) -> bool:
    """Whether a part came out as it must; prints what there is to say."""
    part, code, output = done
    if part not in CONTROLS:
        print(output.strip(), flush=True)
        return code == 0
    ends = part != NOT_WRITTEN
    found = part in output and (code != 0) == ends
    print(f"control: {part!r} {'is' if found else 'is NOT'} found", flush=True)
    if not found:
        print(output.strip())
    return found


def inside(part: str) -> int:
    """Runs a part with all kernels built for the sanitizers; its exit code."""
    # The compiler is to run without them.
    os.environ.pop("LD_PRELOAD", None)
    build.FLAGS = (*build.FLAGS, *CHECKS)
    if part in CONTROLS:
        return control(part)
    if not bool(torch.empty(100_003, device="cpu").isnan().all()):
        print("new memory is not full of NaN: the sanitizer is not loaded")
        return 1
    return shapes() if part == SHAPES else cases(part)


def control(name: str) -> int:
    """Calls the function that is wrong in a way."""
    with tempfile.TemporaryDirectory() as folder:
        text = f'#include "rows.h"\nEXPORT float fault(const float *x, int64_t n) {{ {CONTROLS[name]} }}\n'
        Path(folder, "control.c").write_text(text, encoding="utf-8")
        os.environ["DSATTN_CACHE_DIR"] = folder
        build.FLAGS = (*build.FLAGS, f"-I{build.FOLDER}")
        with patch.object(build, "FOLDER", Path(folder)):
            fault = build.library("control", torch.float32).fault
        fault.argtypes, fault.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_float
        x = torch.ones(3, device="cpu")
        print(fault(x.data_ptr(), len(x)))
    return 0


def levels() -> list[str]:
    """The instruction sets that this CPU has, best first."""
    names = list(build.LEVELS)
    return names[names.index(build.level()) :]


def cases(dtype: str) -> int:
    """Runs the suite quick of verify in a dtype."""
    torch.set_num_threads(1)
    tasks, _ = suites.plan(("quick",), backends=["cpu"], device=CPU, dtype=dtype)
    references, wrong = References(keep=None), 0
    for level in levels():
        with patch.object(build, "level", lambda level=level: level):
            for record in run(tasks, references):
                if record.verdict != "pass":
                    print(
                        f"{dtype}, {level}, {record.case}, {record.operator}: {record.verdict}: {record.reason}",
                        flush=True,
                    )
                    wrong += 1
        print(f"{dtype}, {level}: {len(tasks)} checks of verify", flush=True)
    return int(wrong > 0 or not tasks)


def shapes() -> int:
    """Runs shapes that the cases lack, each as views of a kind, and compares them with the torch backend."""
    torch.set_num_threads(2)
    problems = [*edges(), *sizes(), *drawn(DRAWN)]
    backend, ways, wrong = Unchecked(), [None, *WAYS], 0
    for shift, short in enumerate(CASES):
        dtype = DTYPES[short]
        wanted = [everything(problem, dtype, "torch") for _, problem in problems]
        for turn, level in enumerate(levels()):
            with patch.object(build, "level", lambda level=level: level):
                for number, (name, problem) in enumerate(problems):
                    way = ways[(number + shift + 2 * turn) % len(ways)]
                    differing = difference(everything(problem, dtype, backend, way), wanted[number], dtype)
                    if differing:
                        view = "as it is" if way is None else way.__name__
                        print(f"{short}, {level}, {name}, {view}: {differing}", flush=True)
                        wrong += 1
                no_slots(dtype, backend)
            print(f"{short}, {level}: {len(problems)} odd shapes", flush=True)
    return int(wrong > 0)


def no_slots(dtype: torch.dtype, backend: Unchecked) -> None:
    """Attention over a selection that has no slots: the address of its ids is that of nothing."""
    topk = TopK(torch.empty(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), num_q=3, num_k=5)
    q, kv = torch.ones(3, 2, 8, dtype=dtype, requires_grad=True), torch.ones(5, 8, dtype=dtype)
    sparse_attention(q, kv, topk, value_dim=4, softmax_scale=1.0, backend=backend).sum().backward()


if __name__ == "__main__":
    raise SystemExit(main())
