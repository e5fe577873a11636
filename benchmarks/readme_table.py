"""Writes the table of a verify run into README.md.

make verify && python benchmarks/readme_table.py build/verify.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from blocks import ROOT, row, write

HEAD = "| operator | dtype | backend | checks that hold | recall mean / min | results | gradients | share of budget |"


def main() -> None:
    """Reads the records and replaces the block between the marks."""
    run = json.loads(Path(sys.argv[1]).read_text())
    # A backend that is absent here has one record, of no check.
    run["records"] = [record for record in run["records"] if record["operator"]]
    table = "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *rows(run["records"])])
    where = run["environment"]
    machine = f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, Python {where['python']}"
    suites = " and ".join(dict.fromkeys(record["suite"] for record in run["records"]))
    note = (
        f"Suites {suites} on {machine}, {where['date'][:10]}. Results and gradients: relative error "
        "against the float64 oracle, median of all cases / largest. The largest come from cases that are "
        "ill-conditioned on purpose, such as logits spread over 300 nats. The budget of each element is twice "
        "(gradients: three times) the error of a plain run in the same precision, as matrix units round, plus rounding "
        "of sums; more than 100 % of it is a failure."
    )
    write(ROOT / "README.md", {"verify": f"{table}\n\n{note}"})


def rows(records: list[dict[str, Any]]) -> list[str]:
    """One line per operator, dtype and backend."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: (record["dtype"] != "fp32", record["backend"])):
        groups.setdefault((record["operator"], record["dtype"], record["backend"]), []).append(record)
    lines = []
    for (operator, dtype, backend), group in groups.items():
        held = sum(record["verdict"] == "pass" for record in group)
        metrics = [record["metrics"] for record in group]
        recalls = [m for m in metrics if "recall_mean" in m]
        recall = "-"
        if recalls:
            recall = " / ".join(f"{min(m[key] for m in recalls):.3f}" for key in ("recall_mean", "recall_min"))
        results = [(name, found) for m in metrics for name, found in m.get("results", {}).items()]
        forward = [found["relative_error"] for name, found in results if not name.startswith("d_")]
        backward = [found["relative_error"] for name, found in results if name.startswith("d_")]
        shares = [found["share_of_budget"] for _, found in results]
        cells = [operator.replace(":", ", "), dtype, backend, f"{held} of {len(group)}", recall]
        cells += [f"{median(errors):.1e} / {max(errors):.1e}" if errors else "-" for errors in (forward, backward)]
        lines.append(row([*cells, f"{max(shares):.0%}" if shares else "-"]))
    return lines


if __name__ == "__main__":
    main()
