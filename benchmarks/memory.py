"""Peak memory of one layer's forward and backward, in a fresh process.

    python benchmarks/memory.py [--rows 16384] [--record benchmarks/results/FILE.jsonl]

The layer selects keys, attends to them and trains the indexer on the selected keys. Reported is the peak resident
memory of the whole process less the bytes of the inputs and of their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

import dsattn

H_I, D_I, H, D_QK, D_V, TOP_K = 64, 128, 16, 576, 512, 2048
GIB = 2**30


def resident() -> int:
    """Peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(rows: int) -> dict[str, float | int]:
    """Runs one forward and backward and gives its memory and time."""
    torch.manual_seed(0)
    layout = dsattn.CausalLayout.batched(1, rows)
    shapes = (rows, H, D_QK), (rows, D_QK), (rows, H_I, D_I), (rows, D_I), (rows, H_I)
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    held = sum(x.nbytes for x in inputs)
    begin = time.perf_counter()
    result = dsattn.dsa_attention(
        *inputs,
        layout,
        top_k=TOP_K,
        value_dim=D_V,
        softmax_scale=D_QK**-0.5,
        scale=(H_I * D_I) ** -0.5,
        loss="selected",
    )
    torch.autograd.backward([result.out, result.loss], [torch.ones_like(result.out), torch.ones(())])
    seconds = time.perf_counter() - begin
    if not all(x.grad is not None and bool(x.grad.isfinite().all()) for x in inputs):
        raise RuntimeError("a gradient is missing or not finite")
    return {"rows": rows, "inputs": held, "gradients": held, "peak": resident(), "seconds": seconds}


def main() -> None:
    """Measures in a fresh process and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="query rows = key rows")
    parser.add_argument("--record", type=Path, help="append the result to this JSON-lines file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(step(options.rows)))
        return
    command = [sys.executable, __file__, "--child", "--rows", str(options.rows)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    above = found["peak"] - found["inputs"] - found["gradients"]
    row = {
        "benchmark": "memory",
        "work": f"t = s = {options.rows}, h_i {H_I}, d_i {D_I}, h {H}, {D_QK}/{D_V}, k {TOP_K}, bf16, selected loss, "
        "forward and backward, backend torch",
        "above_inputs_and_gradients_gib": round(above / GIB, 3),
        "peak_gib": round(found["peak"] / GIB, 3),
        "seconds": round(found["seconds"], 1),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dsattn": dsattn.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(row, indent=2))
    if options.record:
        with options.record.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _cpu() -> str:
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
