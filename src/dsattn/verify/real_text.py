"""Suite `real-text`: the source of the Python standard library as bytes, one document per file.

Every byte value has one row in each table of inputs, so equal bytes give equal keys: exact ties and repeats are those
of real text. All tables are on the dyadic grid (multiples of 1/8 in [-1, 1]), where scores are exact and ids must match
the oracle exactly. Head counts and widths are those of the real models; only the number of rows is small.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout
from dsattn.spec.cases import Case
from dsattn.spec.inputs import Inputs
from dsattn.verify.subject import Subject

SUITE = "real-text"
_EMBEDDING = 64
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Text:
    """Documents packed into t rows.

    Attributes:
        data: the bytes of all documents, one after the other.
        cu_seqlens: where each document starts, and the end of the last.
        rows: t; what the documents leave is a padding tail.
        top_k: k, which decides the share of rows that see more keys.
        asked: t before it was doubled.
    """

    data: bytes
    cu_seqlens: tuple[int, ...]
    rows: int
    top_k: int
    asked: int

    @property
    def share(self) -> float:
        """Share of the documents' rows that see more than k keys."""
        lengths = [end - begin for begin, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]
        return sum(max(0, length - self.top_k) for length in lengths) / max(1, len(self.data))

    def edges(self) -> list[int]:
        """First and last row of every document, ascending."""
        starts, ends = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        return sorted({*starts, *(end - 1 for end in ends)})

    def facts(self) -> dict[str, int | float]:
        """What the table prints of the text."""
        facts = {
            "t": self.rows,
            "documents": len(self.cu_seqlens) - 1,
            "document_rows": len(self.data),
            "top_k": self.top_k,
            "share_over_k": self.share,
        }
        return facts if self.rows == self.asked else {**facts, "t_asked": self.asked}


def read_text(rows: int, top_k: int) -> Text:
    """The standard library's sources packed into `rows` rows, or more where too few rows would see more than k keys.

    Whole non-empty files in path order that are no longer than rows / 2, until the next does not fit. Where fewer than
    half of the documents' rows see more than `top_k` keys, `rows` is doubled until they do.

    Args:
        rows: t to start with.
        top_k: k.

    Raises:
        BadInput: no standard library with enough source files is found.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_sources(root), key=lambda file: file.relative_to(root).as_posix())
    sizes = [(file, file.stat().st_size) for file in files]
    asked = rows
    while rows <= _LARGEST:
        text = _pack(sizes, rows, top_k, asked)
        if len(text.data) and text.share >= 0.5:
            return text
        rows *= 2
    raise BadInput(
        "suite real-text",
        given=f"{len(files)} Python files under {root}",
        needed=f"enough text that half of the rows see more than {top_k} keys",
        fix="install the standard library's sources, or leave the suite out",
    )


def _sources(root: Path) -> list[Path]:
    installed = {"site-packages", "dist-packages"}
    return [file for file in root.rglob("*.py") if installed.isdisjoint(file.relative_to(root).parts)]


def _pack(sizes: list[tuple[Path, int]], rows: int, top_k: int, asked: int) -> Text:
    data, cu_seqlens = b"", [0]
    for file, size in sizes:
        if not 0 < size <= rows // 2:
            continue
        if len(data) + size > rows:
            break
        data += file.read_bytes()
        cu_seqlens.append(len(data))
    return Text(data, tuple(cu_seqlens), rows, top_k, asked)


_DEEPSEEK = {"index_heads": 64, "index_width": 128, "heads": 128, "key_width": 576, "value_width": 512}
_FAMILIES = {"deepseek-v3.2": _DEEPSEEK, "glm-5": {**_DEEPSEEK, "index_heads": 32, "heads": 64}}


def subjects(*, rows: int = 512, top_k: int = 64, sampled: int | None = None) -> list[Subject]:
    """One subject per model family over the same text.

    Args:
        rows: t.
        top_k: k.
        sampled: how many query rows the oracle judges, document edges first; None for all. The operators run on all.

    Raises:
        BadInput: there is not enough text.
    """
    text = read_text(rows, top_k)
    layout = CausalLayout.packed(text.cu_seqlens, num_q=text.rows, num_k=text.rows)
    judged = None if sampled is None else _sample(text, sampled)
    facts = text.facts() if judged is None else {**text.facts(), "judged_rows": len(judged)}
    result = []
    for family, sizes in _FAMILIES.items():
        case = Case(
            name=f"{family}-t{text.rows}",
            shows=f"{len(text.cu_seqlens) - 1} files of the Python standard library at {family}'s heads and widths",
            layout=lambda: layout,
            top_k=top_k,
            grid=True,
            # A power of two keeps scores exact; this one spreads the student about as far as the teacher.
            index_scale=2.0**-5,
            num_rows=text.rows,
            sink="normal" if family.startswith("deepseek") else None,
            tags=(SUITE,),
            **sizes,
        )
        tables = _Tables(case, text, judged)
        result.append(Subject(suite=SUITE, case=case, make_inputs=tables.inputs, rows=judged, facts=facts))
    return result


def _sample(text: Text, count: int) -> Tensor:
    """`count` rows, ascending: all edges of documents, then seeded random rows of documents."""
    edges = torch.tensor(text.edges(), device="cpu")
    order = torch.randperm(len(text.data), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    others = order[~torch.isin(order, edges)][: max(0, count - len(edges))]
    return torch.cat([edges, others]).sort().values


@dataclass(frozen=True)
class _Tables:
    """Makes the inputs of one family: a row per byte value, looked up with the text."""

    case: Case
    text: Text
    judged: Tensor | None

    def inputs(self, dtype: torch.dtype) -> Inputs:
        case, rows = self.case, self.text.rows
        generator = torch.Generator("cpu").manual_seed(case.seed)

        def grid(*shape: int) -> Tensor:
            return torch.randint(-8, 9, shape, generator=generator, device="cpu").double() / 8

        embedding = grid(256, _EMBEDDING)
        # The padding tail repeats byte 0: its rows are never seen and must have no effect.
        tokens = torch.zeros(rows, dtype=torch.int64, device="cpu")
        tokens[: len(self.text.data)] = torch.frombuffer(bytearray(self.text.data), dtype=torch.uint8).long()

        def project(*shape: int) -> Tensor:
            # A power of two keeps the products exact. This one leaves entries spread over the whole grid.
            table = embedding @ grid(_EMBEDDING, torch.Size(shape).numel()) / 2
            table = ((table * 8).round() / 8).clamp(-1, 1)
            return table.to(dtype).index_select(0, tokens).unflatten(1, shape)

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        index_q, index_k = project(case.index_heads, case.index_width), project(case.index_width)
        weights = project(case.index_heads).to(wide)
        q, kv = project(case.heads, case.key_width), project(case.key_width)
        d_out = torch.randint(-8, 9, (256, case.heads * case.value_width), generator=generator, device="cpu") / 8
        d_out = d_out.to(dtype).index_select(0, torch.arange(rows, device="cpu") % 251)
        d_out = d_out.unflatten(1, (case.heads, case.value_width))
        row_mask = None
        if self.judged is not None:
            # Only judged rows send gradients, so the gradients of all keys can be judged too.
            row_mask = torch.zeros(rows, dtype=torch.bool, device="cpu")
            row_mask[self.judged] = True
            d_out.mul_(row_mask[:, None, None])
        sink = None
        if case.sink is not None:
            sink = (torch.arange(case.heads, device="cpu") % 33 - 16).to(wide) / 8
        return Inputs(
            index_q=index_q,
            index_k=index_k,
            weights=weights,
            q=q,
            kv=kv,
            d_out=d_out,
            sink=sink,
            row_mask=row_mask,
        )
