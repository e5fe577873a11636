"""Suite `inputs`: calls that were captured in files (`dsattn-inputs/1`), and files made of the checks that failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout
from dsattn.spec.captured import CapturedCall, read, safetensors, write
from dsattn.spec.case import Case
from dsattn.spec.inputs import Inputs
from dsattn.verify.reference import Reference
from dsattn.verify.subject import Subject

SUITE = "inputs"
JUDGED_ROWS = 256
"""How many query rows the oracle judges of a call with more than `ALL_ROWS`; the operators run on all."""
ALL_ROWS = 512
TABLE_ELEMENTS = 1 << 24
"""The largest score table that is made."""


@dataclass(frozen=True, kw_only=True)
class CapturedCase(Case):
    """The sizes and options of a captured call.

    Attributes:
        given_scale: `softmax_scale` of the call.
    """

    given_scale: float

    @property
    def softmax_scale(self) -> float:
        """`softmax_scale` of the call."""
        return self.given_scale


def subjects(files: Iterable[Path], dtype: torch.dtype | None) -> list[tuple[Subject, torch.dtype]]:
    """Every call of every file, with the dtype to run it in.

    Args:
        files: files of the format `dsattn-inputs/1`; a case is named by a file's stem and the number of the call.
        dtype: what to convert to; None for each call's own.

    Raises:
        BadInput: a file that is no good, two files of one stem, or a call of both fp64 and lower precision where no
            dtype is given.
    """
    found: dict[str, Path] = {}
    result = []
    for file in files:
        other = found.setdefault(file.stem, file)
        if other is not file:
            if other.resolve() == file.resolve():
                continue
            raise BadInput("--inputs", given=f"{other} and {file}", needed="file names that differ")
        for number, call in enumerate(read(file)):
            subject = _subject(file, number, call)
            result.append((subject, _own(subject.case.name, call) if dtype is None else dtype))
    return result


def _own(name: str, call: CapturedCall) -> torch.dtype:
    if _mixed(call):
        given = f"index_q of {call.index_q.dtype} with kv of {call.kv.dtype}"
        raise BadInput(name, given=given, needed="both of fp64 or neither", fix="pass --dtype to convert both")
    return call.kv.dtype


def _mixed(call: CapturedCall) -> bool:
    return (call.index_q.dtype == torch.float64) != (call.kv.dtype == torch.float64)


def _subject(file: Path, number: int, call: CapturedCall) -> Subject:
    name, layout = f"{file.stem}[{number}]", call.layout
    t, s = layout.num_q, layout.num_k
    rows = None if t <= ALL_ROWS else _sample(layout, call.row_mask)
    case = CapturedCase(
        name=name,
        shows=" ".join(call.source.split()) or "captured inputs",
        layout=lambda: layout,
        index_heads=call.index_q.shape[1],
        index_width=call.index_q.shape[2],
        heads=call.q.shape[1],
        key_width=call.q.shape[2],
        value_width=call.value_dim,
        top_k=call.top_k,
        given_scale=call.softmax_scale,
        index_scale=call.scale,
        relu=call.relu,
        tags=(SUITE,),
    )
    skipped = {}
    if t * s > TABLE_ELEMENTS:
        skipped["indexer_scores"] = f"indexer_scores: a table of {t} x {s} scores is not made ({name})"
    facts = {"t": t, "s": s, "top_k": call.top_k, "judged_rows": t if rows is None else len(rows)}
    make = _Maker(file, number, rows)
    return Subject(suite=SUITE, case=case, make_inputs=make.inputs, rows=rows, facts=facts, file=file, skipped=skipped)


def _sample(layout: CausalLayout, row_mask: Tensor | None) -> Tensor:
    """`JUDGED_ROWS` rows, ascending: edges of segments first, then seeded random rows of segments, then padding.

    Of each kind those that count in the loss come first. So a file that was made of a sampled check, whose mask is True
    in judged rows only, is judged in the same rows again.
    """
    q_start, q_end = layout.table[:, 0], layout.table[:, :2].sum(1)
    steps = torch.zeros(layout.num_q + 1, dtype=torch.int64, device="cpu")
    steps.index_add_(0, q_start, torch.ones_like(q_start)).index_add_(0, q_end, -torch.ones_like(q_end))
    rank = 4 - 2 * steps[:-1].cumsum(0)
    rank[q_start] = rank[q_end - 1] = 0
    if row_mask is not None:
        rank += ~row_mask
    order = torch.randperm(layout.num_q, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return order[rank[order].argsort(stable=True)][:JUDGED_ROWS].sort().values


@dataclass(frozen=True)
class _Maker:
    """Makes the tensors of a subject of a captured call.

    They are read from the file each time: a wrong kernel may have written to those that were read before.
    """

    file: Path
    number: int
    rows: Tensor | None

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """The call's own tensors in its own dtype, converted ones in another; with a seeded `d_out`."""
        call = read(self.file)[self.number]
        as_they_are = dtype == call.kv.dtype and not _mixed(call)
        x = call if as_they_are else _converted(call, dtype)
        t, rows, row_mask = call.layout.num_q, self.rows, x.row_mask
        if rows is not None:
            # Only judged rows send gradients, so the gradients of all keys can be judged too.
            judged = torch.zeros(t, dtype=torch.bool, device="cpu")
            judged[rows] = True
            row_mask = judged if row_mask is None else judged & row_mask
        shape = t if rows is None else len(rows), call.q.shape[1], call.value_dim
        drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
        # Zeros that are never written take no memory.
        d_out = torch.zeros(t, *shape[1:], dtype=dtype, device="cpu")
        d_out[slice(None) if rows is None else rows] = drawn.to(dtype)
        return Inputs(
            index_q=x.index_q,
            index_k=x.index_k,
            weights=x.weights,
            q=x.q,
            kv=x.kv,
            d_out=d_out,
            sink=x.sink,
            row_mask=row_mask,
        )


def _converted(call: CapturedCall, dtype: torch.dtype) -> CapturedCall:
    """The call in another dtype; sinks and weights keep fp32 beside lower precision, weights if they had it."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = wide if call.weights.dtype in (torch.float32, torch.float64) else dtype
    tensors = {name: getattr(call, name).to(dtype) for name in ("index_q", "index_k", "q", "kv")}
    sink = None if call.sink is None else call.sink.to(wide)
    return replace(call, **tensors, weights=call.weights.to(weights), sink=sink)


class Dump:
    """Writes the inputs of checks into a folder, those of a case and dtype once.

    Args:
        folder: where the files go; it is made if it is not there.

    Raises:
        BadInput: the folder cannot be made.
        BackendMissing: the package safetensors is absent.
    """

    def __init__(self, folder: Path) -> None:
        safetensors()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(str(folder), given=error.strerror, needed="a folder that can be made") from error
        self.folder = folder
        self._written: set[Path] = set()

    def write(self, reference: Reference, dtype: str) -> Path:
        """The file with the inputs of a reference's checks.

        Args:
            reference: what the checks were judged by.
            dtype: the dtype's short name.

        Raises:
            BadInput: the file cannot be written.
        """
        subject, case = reference.subject, reference.case
        file = self.folder / f"{subject.suite}-{case.name}-{dtype}.safetensors"
        if file in self._written:
            return file
        # Made anew: a wrong kernel may have written to those that it was given.
        x = subject.make_inputs(reference.dtype)
        call = CapturedCall(
            index_q=x.index_q,
            index_k=x.index_k,
            weights=x.weights,
            q=x.q,
            kv=x.kv,
            sink=x.sink,
            row_mask=x.row_mask,
            layout=reference.layout,
            top_k=case.top_k,
            value_dim=case.value_width,
            softmax_scale=case.softmax_scale,
            scale=case.scale,
            relu=case.relu,
            source=f"dsattn verify: case {case.name} of suite {subject.suite} in {dtype}",
        )
        write(file, [call])
        self._written.add(file)
        return file
