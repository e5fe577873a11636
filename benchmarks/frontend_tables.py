"""Writes two tables of README.md from the records of one run: what defaults do to a caller, and Megatron's repair.

dsattn verify --suite frontend-defaults --suite megatron --json build/frontend.json
python benchmarks/frontend_tables.py build/frontend.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blocks import ROOT, row, write

RECALLS = {
    "recall-one-document-cp1": "1 document",
    "recall-one-document-cp2-rank1": "CP 2, rank 1",
    "recall-documents-cp2-rank1": "documents, CP 2, rank 1",
}
RANKS = {
    "one-document-cp2": "1 document, CP 2",
    "documents-cp2": "documents, CP 2",
    "documents-cp4": "documents, CP 4",
    "padding-cp2": "padding, CP 2",
    "slice-cp2": "slice, CP 2",
}
Records = list[dict[str, Any]]


def main() -> None:
    """Reads the records and replaces the blocks between the marks."""
    run = json.loads(Path(sys.argv[1]).read_text())
    write(ROOT / "README.md", {name: table(run["records"]) for name, table in TABLES.items()})


def groups(records: Records, suite: str) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(release, caller) -> case -> metrics of one suite, on Blackwell."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["suite"] == suite and record["arch"] == "sm100":
            found.setdefault((record["release"], record["caller"]), {})[record["case"]] = record["metrics"]
    return found


def defaults(records: Records) -> str:
    """One line per release and caller: gradients of the second batch entry, recalls, dense gradients."""
    head = ["frontend", "calls", "d_index_q of batch entry 1", *(f"recall, {name}" for name in RECALLS.values())]
    lines = [row([*head, "dense d_index_q"]), row(["---"] * (len(head) + 1))]
    for (release, caller), cases in groups(records, "frontend-defaults").items():
        loss, dense = cases["indexer-backward-b2"], cases["dense-b2"]
        recalls = [f"{cases[case]['recall_mean']:.3f} / {cases[case]['recall_min']:.3f}" for case in RECALLS]
        called = {"naive": "as for 1.25", "dsattn": "dsattn"}[caller]
        lines.append(row([release, called, error(loss, 1), *recalls, error(dense, None)]))
    note = (
        "Relative errors of gradients, and top-k recall as mean / minimum of a row, on simulated releases (Blackwell); "
        "`dsattn verify --suite frontend-defaults` prints all of it."
    )
    return "\n".join([*lines, "", note])


def error(metrics: dict[str, Any], batch: int | None) -> str:
    """The error of d_index_q, of one batch entry or the largest; a gradient that is all zero is called so."""
    errors, zero = metrics["errors"]["d_index_q"], metrics.get("zero", {}).get("d_index_q")
    if batch is not None and zero and zero[batch]:
        return "exactly 0"
    found = errors[batch] if batch is not None else max(errors) if isinstance(errors, list) else errors
    return f"{found:.1e}" if found >= 1e-3 else "right" if found < 1e-5 else f"{found:.0e}"


def megatron(records: Records) -> str:
    """One line per release and caller: gradients of sequences after the first, recall of the worst rank."""
    head = ["frontend", "megatron-core", "gradients after the first sequence", *RANKS.values()]
    lines = [row(head), row(["---"] * len(head))]
    version = ""
    for (release, caller), cases in groups(records, "megatron").items():
        version = next(iter(cases.values()))["megatron"]
        wrong = [e for case in ("loss-b2", "loss-b3") for errors in cases[case]["errors"].values() for e in errors[1:]]
        recalls = []
        for prefix in RANKS:
            ranks = [metrics["recall_mean"] for case, metrics in cases.items() if case.startswith(f"{prefix}-rank")]
            recalls.append(f"{min(ranks):.3f}")
        gradients = "right" if max(wrong) < 1e-6 else "wrong or exactly 0"
        called = {"naive": f"{version} as released", "dsattn": "after `install(scorer=True)`"}[caller]
        lines.append(row([release, called, gradients, *recalls]))
    note = (
        "Recall of the worst rank, and gradients of the sparse indexer loss with micro-batches of 2 and 3: Megatron's "
        f"own functions of {version} on simulated releases (Blackwell); "
        "`dsattn verify --suite megatron` prints all of it."
    )
    return "\n".join([*lines, "", note])


TABLES = {"defaults": defaults, "megatron": megatron}

if __name__ == "__main__":
    main()
