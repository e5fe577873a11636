"""Inputs of real calls in a file that other machines can read: the format `dsattn-inputs/1`.

One safetensors file. Its tensors are packed: `index_q` [t, h_i, d_i], `index_k` [s, d_i], `weights` [t, h_i],
`q` [t, h, d_qk], `kv` [s, d_qk], and where the call has them `sink` [h] and `row_mask` bool [t]. Its metadata are
strings:

| key                        | value                                                                         |
|----------------------------|-------------------------------------------------------------------------------|
| `format`                   | `dsattn-inputs/1`                                                             |
| `segments`                 | JSON list of [q_start, q_len, k_start, k_len, q_offset]                       |
| `num_q`, `num_k`, `ratio`  | integers of the layout                                                        |
| `top_k`, `value_dim`       | integers                                                                      |
| `softmax_scale`, `scale`   | numbers                                                                       |
| `relu`                     | `true` or `false`                                                             |
| `source`                   | free text: where the inputs are from; may be left out                         |

A file of several calls has the tensors `0.index_q`, ..., `1.index_q`, ...; its metadata are `format`, and under the
keys `0`, `1`, ... one JSON object each that holds the other entries of the table as strings. A single call is written
in the plain form and read in both. Nothing in a file is ever run: tensors are bytes, and metadata are read as JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.errors import BackendMissing, BadInput
from dsattn.layouts import CausalLayout, Segment
from dsattn.layouts.checks import whole_number

FORMAT = "dsattn-inputs/1"

_AXES = {
    "index_q": "t h_i d_i",
    "index_k": "s d_i",
    "weights": "t h_i",
    "q": "t h d_qk",
    "kv": "s d_qk",
    "sink": "h",
    "row_mask": "t",
}
_OPTIONAL = ("sink", "row_mask")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """The inputs of one call, packed, on the CPU; checked when it is built.

    Attributes:
        index_q: indexer queries.
        index_k: indexer keys, of index_q's dtype.
        weights: head weights, of index_q's dtype or fp32.
        q: attention queries.
        kv: attention keys, of q's dtype.
        layout: who sees whom.
        top_k: k.
        value_dim: d_v.
        softmax_scale: multiplies the attention's dots.
        scale: multiplies the indexer's head sum.
        relu: whether the indexer's dots pass a relu.
        sink: fp32 (fp64 with fp64 kv), or None.
        row_mask: the rows that count in the loss, or None.
        source: where the inputs are from, free text.

    Raises:
        BadInput: a shape, a dtype or a number that does not fit.
    """

    index_q: Float[Tensor, "t h_i d_i"]
    index_k: Float[Tensor, "s d_i"]
    weights: Float[Tensor, "t h_i"]
    q: Float[Tensor, "t h d_qk"]
    kv: Float[Tensor, "s d_qk"]
    layout: CausalLayout
    top_k: int
    value_dim: int
    softmax_scale: float
    scale: float = 1.0
    relu: bool = True
    sink: Float[Tensor, " h"] | None = None
    row_mask: Bool[Tensor, " t"] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _check_shapes(self.tensors(), {"t": self.layout.num_q, "s": self.layout.num_k})
        _check_dtypes(self.tensors())
        whole_number("top_k", self.top_k, low=1)
        whole_number("value_dim", self.value_dim, low=1, below=self.q.shape[-1] + 1)
        for name in ("softmax_scale", "scale"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise BadInput(name, given=value, needed="a finite number")

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the call has, by name."""
        return {name: x for name in _AXES if (x := getattr(self, name)) is not None}

    def metadata(self) -> dict[str, str]:
        """The other fields, as the file has them."""
        segments = [[getattr(segment, field.name) for field in fields(Segment)] for segment in self.layout.segments]
        values = {
            "segments": segments,
            "num_q": self.layout.num_q,
            "num_k": self.layout.num_k,
            "ratio": self.layout.ratio,
            **{name: getattr(self, name) for name in ("top_k", "value_dim", "softmax_scale", "scale", "relu")},
        }
        return {name: json.dumps(value) for name, value in values.items()} | {"source": self.source}


def write(path: str | os.PathLike[str], calls: Sequence[CapturedCall]) -> None:
    """Writes calls to a file; it appears whole or not at all.

    Args:
        path: the file; one that is there is replaced.
        calls: at least one.

    Raises:
        BadInput: no call, or the file cannot be written.
        BackendMissing: the package safetensors is absent.
    """
    path, library = Path(path), safetensors()
    if not calls:
        raise BadInput(str(path), given="no call", needed="at least one")
    tensors, metadata = calls[0].tensors(), calls[0].metadata()
    if len(calls) > 1:
        tensors = {f"{i}.{name}": x for i, call in enumerate(calls) for name, x in call.tensors().items()}
        metadata = {str(i): json.dumps(call.metadata()) for i, call in enumerate(calls)}
    # Contiguous copies have to live until the file is written, which reads their memory.
    tensors = {name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}
    entries = {name: _entry(library, x) for name, x in tensors.items()}
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        library.serialize_file(entries, unfinished, {"format": FORMAT, **metadata})
        unfinished.replace(path)
    except (OSError, library.SafetensorError) as error:
        raise BadInput(str(path), given=str(error), fix="choose a file in a folder that can be written to") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> list[CapturedCall]:
    """The calls of a file, each checked; their tensors stay in the file until they are used.

    Args:
        path: a file of the format `dsattn-inputs/1`.

    Raises:
        BadInput: no such file, another format, or a call whose parts are missing or do not fit.
        BackendMissing: the package safetensors is absent.
    """
    path, library = Path(path), safetensors()
    if not path.is_file():
        raise BadInput(str(path), given="a folder" if path.is_dir() else "no such file", needed="a file")
    try:
        with library.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, library.SafetensorError) as error:
        raise BadInput(str(path), given=f"a file that safetensors cannot read ({error})", needed=FORMAT) from error
    if "0" not in metadata:
        return [_call(path, "", metadata, tensors)]
    names = list(takewhile(lambda name: name in metadata, map(str, count())))
    several = {f"{name}.": _json(path, name, metadata[name], _is_strings, "a JSON object of strings") for name in names}
    for name in tensors:
        if not name.startswith(tuple(several)):
            raise BadInput(
                f"{path}: tensor {name}", given="no call in the metadata", needed=f"one of {', '.join(names)}"
            )
    return [
        _call(path, prefix, entry, {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)})
        for prefix, entry in several.items()
    ]


def safetensors() -> ModuleType:
    """The package safetensors, which nothing else of dsattn needs.

    Raises:
        BackendMissing: it is not installed, or broken; the message has the cause.
    """
    try:
        import safetensors
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise BackendMissing("captured inputs", given=f"a broken package safetensors ({error})") from error
        cause = "the package safetensors is not installed"
        raise BackendMissing("captured inputs", given=cause, fix="pip install safetensors") from error
    except ImportError as error:
        raise BackendMissing("captured inputs", given=f"a broken package safetensors ({error})") from error
    return safetensors


def _entry(library: ModuleType, x: Tensor) -> Any:
    """A contiguous CPU tensor as safetensors takes it; its own writer for torch wants numpy, which may be absent."""
    form = {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    size = x.numel() * x.element_size()
    if hasattr(library, "TensorSpec"):
        return library.TensorSpec(**form, data_ptr=x.data_ptr(), data_len=size)
    # Before version 0.8.
    return {**form, "data": ctypes.string_at(x.data_ptr(), size) if size else b""}


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    found = metadata.get("format")
    if found != FORMAT:
        given = "no metadata entry `format`" if found is None else f"format {found!r}"
        raise BadInput(str(path), given=given, needed=FORMAT, fix="dsattn.capture writes such files")


def _call(path: Path, prefix: str, metadata: Mapping[str, str], tensors: dict[str, Tensor]) -> CapturedCall:
    """One call of a file from its part of the metadata and its tensors without their prefix."""
    missing = [name for name in _AXES if name not in tensors and name not in _OPTIONAL]
    unknown = [name for name in tensors if name not in _AXES]
    if missing or unknown:
        given = f"no tensor {prefix}{missing[0]}" if missing else f"an unknown tensor {prefix}{unknown[0]}"
        raise BadInput(str(path), given=given, needed=f"{', '.join(_AXES)} (the last two where the call has them)")

    def value(name: str, fits: Callable[[Any], bool], needed: str) -> Any:
        if name not in metadata:
            raise BadInput(str(path), given=f"no metadata entry {prefix}{name}", needed=needed)
        return _json(path, prefix + name, metadata[name], fits, needed)

    parts: dict[str, Any] = {**tensors, "source": metadata.get("source", "")}
    for name in ("top_k", "value_dim"):
        parts[name] = value(name, _is_integer, "an integer")
    for name in ("softmax_scale", "scale"):
        parts[name] = float(value(name, _is_number, "a finite number"))
    parts["relu"] = value("relu", lambda x: isinstance(x, bool), "true or false")
    rows = value("segments", _is_segments, "a JSON list of lists of five integers")
    sizes = {name: value(name, _is_integer, "an integer") for name in ("num_q", "num_k", "ratio")}
    try:
        layout = CausalLayout.from_segments([Segment(*row) for row in rows], **sizes)
        return CapturedCall(**parts, layout=layout)
    except BadInput as error:
        what = f"{path}: {prefix}{error.what}"
        raise BadInput(what, given=error.given, needed=error.needed, fix=error.fix) from error


def _json(path: Path, name: str, text: str, fits: Callable[[Any], bool], needed: str) -> Any:
    """A metadata entry read as JSON, of the form that `fits` asks for."""
    try:
        value = json.loads(text)
        right = fits(value)
    except (ValueError, OverflowError, RecursionError):
        right, value = False, None
    if not right:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise BadInput(f"{path}: metadata entry {name}", given=repr(shown), needed=needed)
    return value


def _is_integer(x: Any) -> bool:
    return type(x) is int


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


def _is_segments(x: Any) -> bool:
    return isinstance(x, list) and all(
        isinstance(row, list) and len(row) == 5 and all(map(_is_integer, row)) for row in x
    )


def _is_strings(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(text, str) for text in x.values())


def _check_shapes(tensors: Mapping[str, Tensor], sizes: dict[str, int]) -> None:
    """That every axis has one size, in whichever tensors it is; `sizes` has those that are known."""
    known = {axis: f"the layout's {'num_q' if axis == 't' else 'num_k'}" for axis in sizes}
    for name, x in tensors.items():
        axes = _AXES[name].split()
        if x.ndim != len(axes):
            raise BadInput(name, given=f"shape {list(x.shape)}", needed=f"[{', '.join(axes)}]")
        for axis, size in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                needed = f"[{', '.join(axes)}] with {axis} = {sizes[axis]}, {known[axis]}"
                raise BadInput(name, given=f"shape {list(x.shape)}", needed=needed)
            known.setdefault(axis, f"as in {name}")
            if axis not in ("t", "s") and size < 1:
                raise BadInput(name, given=f"shape {list(x.shape)}", needed=f"{axis} of at least 1")


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    index, attention = tensors["index_q"].dtype, tensors["q"].dtype
    allowed = {
        "index_q": _DTYPES,
        "index_k": (index,),
        "weights": (index, torch.float32),
        "q": _DTYPES,
        "kv": (attention,),
        "sink": (torch.float64 if attention == torch.float64 else torch.float32,),
        "row_mask": (torch.bool,),
    }
    for name, x in tensors.items():
        if x.dtype not in allowed[name]:
            needed = " or ".join(map(str, dict.fromkeys(allowed[name])))
            raise BadInput(name, given=x.dtype, needed=needed)
