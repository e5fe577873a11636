"""The `flash_mla` backend: sparse attention's forward by FlashMLA's sparse prefill kernel, on Hopper and Blackwell.

Packages called `flash_mla` differ in the base of the log-sum-exp, in the value of rows without a key, in the widths,
head counts and GPUs that they have kernels for, and in the parameters of the function. No version is asked: the
function's own signature says what it takes, and two tiny calls per kernel show what it returns.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.base import Backend
from dsattn.errors import BackendMissing, ContractDrift, DsattnError, UnsupportedProblem
from dsattn.layouts import TopK
from dsattn.ops.inputs import AttentionInputs
from dsattn.spec.problem import Problem

_PACKAGE, _FUNCTION = "flash_mla", "flash_mla_sparse_fwd"
_VALUES = 512
_WIDTHS = (512, 576)
_HEADS = (64, 128)
# Two blocks of 64 ids on Hopper, one of 128 on Blackwell.
_SLOTS = 128
# Blackwell loads 8 ids at once; the tensor copy engine and asynchronous copies want 16 bytes.
_ALIGNMENT = 32
# Ids and log-sum-exps are addressed by 32-bit integers; held for every buffer, which costs one launch in 2^31 elements.
_MAX_ELEMENTS = 2**31 - 1
_NEEDED_GPU = "Hopper (9.0) or Blackwell (10.x) is needed"


@dataclass(frozen=True, eq=False)
class _Kernel:
    """One way to call the function on one device, and what the probe saw of it.

    Attributes:
        function: the package's.
        width: columns of queries and keys.
        heads: query heads.
        options: further keywords.
        takes_lengths: whether `topk_length` may be passed.
        takes_sink: whether `attn_sink` may be passed and stays out of the log-sum-exp.
        nats: natural units in one unit of its log-sum-exp: 1, or ln 2 where the base is 2.
    """

    function: Callable[..., Any]
    width: int
    heads: int
    options: dict[str, Any]
    takes_lengths: bool
    takes_sink: bool
    nats: float = 1.0

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.width} columns"

    def __call__(
        self, q: Tensor, kv: Tensor, ids: Tensor, lengths: Tensor, scale: float, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output [t, heads, 512] and log-sum-exp [t, heads] in the kernel's own base."""
        options = dict(self.options)
        if self.takes_lengths:
            options["topk_length"] = lengths
        if sink is not None:
            options["attn_sink"] = sink
        # Releases to this day ask the current device for its architecture, and not that of the tensors.
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            results = self.function(q=q, kv=kv, indices=ids, sm_scale=scale, d_v=_VALUES, **options)
        # max_logits is between them; a branch of the package returns a fourth tensor.
        return results[0], results[2]


_Kernels = dict[int, list[_Kernel] | DsattnError]


class FlashMLABackend(Backend):
    """FlashMLA's sparse forward: bf16, keys of up to 576 columns, values of up to 512.

    Args:
        module: what has the function `flash_mla_sparse_fwd`, taken as it is and on any device; None for the installed
            package, which is imported only when it is asked for.

    Semantics:
        A row with no key gives output 0 and log-sum-exp -inf, written here whatever the kernel leaves there. Heads are
        padded to 64 or 128 (more run in groups), columns with zeros, ids with -1.
    """

    name = "flash_mla"

    def __init__(self, module: Any | None = None) -> None:
        self._given, self.checked, self.package = module, module is None, _PACKAGE if module is None else None
        self._probed: dict[torch.device, _Kernels] = {}

    def missing(self) -> str | None:
        """Not installed, no usable GPU, cannot be imported, or without a kernel for this GPU; None if usable.

        The last is found by the tiny calls of the probe, made once on the current device.
        """
        if self._given is not None:
            return None
        if self._not_installed is not None:
            return self._not_installed
        if not torch.cuda.is_available():
            return f"no usable GPU: torch sees no CUDA device; {_NEEDED_GPU}"
        device = torch.device("cuda", torch.cuda.current_device())
        reason = _capability_reason(device)
        if reason is not None or (torch.cuda.is_current_stream_capturing() and device not in self._probed):
            return reason
        if isinstance(self._loaded, BackendMissing):
            return str(self._loaded.given)
        return _refusal(_narrowest(self._kernels(device), 0))

    def supports(self, problem: Problem) -> str | None:
        """Why not. What the probe saw on the problem's device counts, once it was made there."""
        sizes = problem.attention
        if problem.operator != "sparse_attention" or sizes is None:
            return "FlashMLA has attention over selected keys only"
        if problem.backward:
            return "FlashMLA has no backward"
        if sizes.dtype != torch.bfloat16:
            return f"FlashMLA takes bfloat16 only, and not {sizes.dtype}"
        if sizes.key_width > _WIDTHS[-1] or sizes.value_width > _VALUES:
            return (
                f"FlashMLA takes up to 576 columns with 512 of values, not {sizes.key_width} with {sizes.value_width}"
            )
        if self._given is None and _capability_reason(problem.device) is not None:
            return _capability_reason(problem.device)
        kernels = self._probed.get(problem.device)
        return None if kernels is None else _refusal(_narrowest(kernels, sizes.key_width))

    def non_finite(self, problem: Problem) -> str | None:
        """The reason; see `Backend.non_finite`."""
        return (
            "FlashMLA was not shown to pass NaN and infinities on; by its source, Blackwell kernels take a row whose "
            "logits are all NaN for a row with no key"
        )

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`.

        Raises:
            BackendMissing: the package is absent or cannot be imported.
            UnsupportedProblem: it has no kernel of this width for this GPU, or was not called before a graph capture.
            ContractDrift: the probe saw results that no known release returns.
        """
        (t, heads, width), slots = a.q.shape, topk.indices.shape[1]
        if 0 in (t, slots, a.kv.shape[0]):
            # Kernels cannot describe empty buffers: they refuse the call, the first of them end the process.
            return _empty_rows_written(*_buffers(a), torch.zeros_like(topk.lengths))
        kernels = _narrowest(self._kernels(a.q.device), width)
        if isinstance(kernels, DsattnError):
            raise copy.copy(kernels) from kernels.__cause__
        kv = _padded(a.kv, 0, kernels[0].width - width)[:, None]
        ids, lengths = _padded_ids(topk.indices), topk.lengths.contiguous()
        groups = list(_groups(heads, kernels))
        blocks = list(_blocks(t, groups[0][1], ids.shape[-1]))
        if len(groups) == len(blocks) == 1:
            # No buffer beside the kernel's own.
            (part, kernel), rows = groups[0], blocks[0]
            out, lse = (x.contiguous() for x in _run(kernel, a, kv, ids, lengths, rows, part))
        else:
            out, lse = _buffers(a)
            for rows in blocks:
                for part, kernel in groups:
                    out[rows, part], lse[rows, part] = _run(kernel, a, kv, ids, lengths, rows, part)
        return _empty_rows_written(out, lse, lengths)

    @cached_property
    def _not_installed(self) -> str | None:
        try:
            spec = importlib.util.find_spec(_PACKAGE)
        except (ImportError, ValueError) as error:
            return f"cannot be imported: looking for {_PACKAGE} fails: {_told(error)}"
        # A folder of that name on the path is a namespace package, which has no origin.
        if spec is None or spec.origin is None:
            return f"not installed: no module {_PACKAGE}; see github.com/deepseek-ai/FlashMLA"
        return None

    @cached_property
    def _loaded(self) -> Callable[..., Any] | BackendMissing:
        """The function, imported now; or the error to raise, with its cause."""
        try:
            module = importlib.import_module(_PACKAGE) if self._given is None else self._given
            return getattr(module, _FUNCTION)
        except Exception as error:
            absent = BackendMissing("backend 'flash_mla'", given=f"cannot be imported: {_PACKAGE}: {_told(error)}")
            absent.__cause__ = error
            return absent

    def _kernels(self, device: torch.device) -> _Kernels:
        """What the probe saw on `device`: the kernels of each width by their heads, or why there is none."""
        if device not in self._probed:
            if isinstance(self._loaded, BackendMissing):
                raise copy.copy(self._loaded) from self._loaded.__cause__
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                fix = "call it once on this device before the capture"
                raise UnsupportedProblem("flash_mla in a graph capture", given="no call before it", fix=fix)
            self._probed[device] = _find_kernels(self._loaded, device)
        return self._probed[device]


def _capability_reason(device: torch.device) -> str | None:
    """Why FlashMLA has no kernels for a device; None if it may have."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and FlashMLA runs on CUDA devices"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 10 or (major, minor) == (9, 0):
        return None
    return f"no usable GPU: the CUDA device has compute capability {major}.{minor}; {_NEEDED_GPU}"


def _told(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def _parameters(function: Callable[..., Any]) -> set[str]:
    """What the function's own signature names; where it takes **kwargs, both optional tensors too."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    open_ended = any(each.kind is each.VAR_KEYWORD for each in found.values())
    return {*found, *(("topk_length", "attn_sink") if open_ended else ())}


def _find_kernels(function: Callable[..., Any], device: torch.device) -> _Kernels:
    """Probes every width and head count that may be sent to the function on `device`."""
    takes = _parameters(function)
    lengths, sink = "topk_length" in takes, "attn_sink" in takes
    # The first release (2025-09) takes neither; it has 576 columns only, reads beyond the keys without a word if there
    # are fewer, and ends the process on Blackwell if there are other than 128 heads.
    first = not lengths and not sink
    widths = _WIDTHS[-1:] if first else _WIDTHS
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    heads = _HEADS[-1:] if first and not hopper else _HEADS
    # A fork keeps what upstream dropped in 2026-09 (Hopper, 576 columns) behind this flag.
    ways = [{}, {"use_legacy": True}] if "use_legacy" in takes else [{}]
    found: _Kernels = {}
    for width in widths:
        kernels: list[_Kernel] = []
        refused = UnsupportedProblem(_FUNCTION)
        for count in heads:
            for options in ways:
                answer = _probe(_Kernel(function, width, count, options, lengths, sink), device)
                if isinstance(answer, _Kernel):
                    kernels.append(answer)
                    break
                if isinstance(answer, ContractDrift):
                    return dict.fromkeys(widths, answer)
                refused = answer
        found[width] = kernels or refused
    return found


def _narrowest(kernels: _Kernels, width: int) -> list[_Kernel] | DsattnError:
    """The kernels of the smallest width that holds `width` columns; why there is none if all were refused."""
    fitting = [found for each, found in sorted(kernels.items()) if each >= width]
    return next((found for found in fitting if _refusal(found) is None), fitting[-1])


def _refusal(found: list[_Kernel] | DsattnError) -> str | None:
    return str(found.given) if isinstance(found, UnsupportedProblem) else None


def _probe(kernel: _Kernel, device: torch.device) -> _Kernel | UnsupportedProblem | ContractDrift:
    """The kernel with what two tiny calls show of it; `UnsupportedProblem` where it refuses, else `ContractDrift`.

    Three rows: two keys with logit 0, no key, one key with logit 1. The keys that no row selects are NaN.
    """
    q = torch.zeros(3, kernel.heads, kernel.width, dtype=torch.bfloat16, device=device)
    q[2, :, 0] = q[2, :, -1] = 1
    values = torch.tensor([math.nan, 1.0, 3.0, 1.0, math.nan], dtype=torch.bfloat16, device="cpu")
    kv = values[:, None, None].repeat(1, 1, kernel.width).to(device)
    kv[1:3, :, _VALUES:] = 0
    ids = _padded_ids(torch.tensor([[1, 2], [-1, -1], [3, -1]], dtype=torch.int32, device=device))
    call = q, kv, ids, torch.tensor([2, 0, 1], dtype=torch.int32, device=device), 0.5
    plain = _seen(kernel, *call, None)
    if isinstance(plain, DsattnError):
        return plain
    nats = next((u for u in (1.0, math.log(2)) if _shows(plain, 2, 1, math.log(2) / u, 1 / u)), None)
    if nats is None:
        return _drift(kernel, plain, "2.0000 and 1.0000, 0.6931 and 1.0000 (in base 2: 1.0000 and 1.4427)")
    kernel = replace(kernel, nats=nats)
    if not kernel.takes_sink:
        return kernel
    # A sink of 1: one of 0 would count the same in every base.
    sunk = _seen(kernel, *call, torch.ones(kernel.heads, device=device))
    if isinstance(sunk, DsattnError):
        return replace(kernel, takes_sink=False) if isinstance(sunk, UnsupportedProblem) else sunk
    out = 4 / (2 + math.e), 0.5
    if _shows(sunk, *out, math.log(2) / nats, 1 / nats):
        return kernel
    if _shows(sunk, *out, math.log(2 + math.e) / nats, math.log(2 * math.e) / nats):
        # Taking the sink out again would lose the digits of a log-sum-exp far below it.
        return replace(kernel, takes_sink=False)
    return _drift(kernel, sunk, "0.8477 and 0.5000 with a sink of 1, and log-sum-exps as without it")


def _seen(kernel: _Kernel, q: Tensor, *rest: Any) -> list[Tensor] | UnsupportedProblem | ContractDrift:
    """What a call returns in its first and its last row: both outputs, then both log-sum-exps."""
    what = f"{_FUNCTION} on {kernel}"
    try:
        out, lse = kernel(q, *rest)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # Nothing that the package decided; the next call probes again.
        raise
    except Exception as error:
        kind = ContractDrift if isinstance(error, (TypeError, IndexError)) else UnsupportedProblem
        refused = kind(what, given=f"FlashMLA refuses {kernel} on this device: {_told(error)}")
        refused.__cause__ = error
        return refused
    needed = [(torch.bfloat16, [3, kernel.heads, _VALUES]), (torch.float32, [3, kernel.heads])]
    given = [(getattr(x, "dtype", type(x)), list(getattr(x, "shape", ()))) for x in (out, lse)]
    if given != needed:
        return ContractDrift(what, given=given, needed=str(needed))
    return [x[row].float().cpu() for x in (out, lse) for row in (0, -1)]


def _shows(seen: Sequence[Tensor], *wanted: float) -> bool:
    """Whether all numbers are these, in the order of `_seen`; NaN is none of them."""
    return all(bool(((x - number).abs() <= 0.01).all()) for x, number in zip(seen, wanted, strict=True))


def _drift(kernel: _Kernel, seen: Sequence[Tensor], needed: str) -> ContractDrift:
    given = ", ".join(f"{float(x.min()):.4f} to {float(x.max()):.4f}" for x in seen)
    what = f"{_FUNCTION} on {kernel}: two outputs and two log-sum-exps of the probe"
    return ContractDrift(what, given=given, needed=needed, fix="pass another backend, and report this release")


def _groups(heads: int, kernels: list[_Kernel]) -> Iterator[tuple[slice, _Kernel]]:
    """The heads and the kernel of each group: heads are independent, so any kernel may take any of them."""
    begin = 0
    while begin < heads:
        kernel = next((each for each in kernels if each.heads >= heads - begin), kernels[-1])
        yield slice(begin, min(begin + kernel.heads, heads)), kernel
        begin += kernel.heads


def _blocks(t: int, kernel: _Kernel, slots: int) -> Iterator[slice]:
    """Rows of one call each, few enough for 32-bit addresses in every buffer."""
    rows = max(1, _MAX_ELEMENTS // max(kernel.heads * kernel.width, slots))
    return (slice(begin, min(begin + rows, t)) for begin in range(0, t, rows))


def _run(
    kernel: _Kernel, a: AttentionInputs, kv: Tensor, ids: Tensor, lengths: Tensor, rows: slice, part: slice
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of some rows and heads, right in every row with a key."""
    q, scale = _positive_scale(a.q[rows, part], a.softmax_scale)
    sink, heads = None if a.sink is None else a.sink[part], q.shape[1]
    q = _padded(q, 0, kernel.width - q.shape[2], 0, kernel.heads - heads)
    inside = _padded(sink, 0, kernel.heads - heads) if sink is not None and kernel.takes_sink else None
    out, lse = kernel(q, kv, ids[rows], lengths[rows], scale, inside)
    out, lse = out[:, :heads, : a.value_dim], lse[:, :heads].mul_(kernel.nats)
    if sink is not None and inside is None:
        # Exact but for one more rounding to bf16, as large as the kernel's own of its output: not worth a refusal.
        out.mul_(torch.sigmoid(lse - sink)[..., None])
    return out, lse


def _padded(x: Tensor, *pads: int, value: float = 0) -> Tensor:
    """x, contiguous and aligned, with `value` beyond its ends as `torch.nn.functional.pad` counts them."""
    x = F.pad(x, pads, value=value) if any(pads) else x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _padded_ids(ids: Tensor) -> Tensor:
    return _padded(ids, 0, -ids.shape[1] % _SLOTS, value=-1)[:, None]


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above 0 with the same logits: the kernels scale -inf too, which 0 makes NaN, -1 +inf."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        # What fp32 cannot hold is 0 to the kernels.
        return q * 0, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _buffers(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    lse = torch.empty(a.q.shape[:2], dtype=torch.float32, device=a.q.device)
    return a.q.new_empty(*a.q.shape[:2], a.value_dim), lse


def _empty_rows_written(out: Tensor, lse: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    empty = lengths == 0
    return out.masked_fill_(empty[:, None, None], 0), lse.masked_fill_(empty[:, None], -math.inf)
