"""A CPU stand-in for the package flash_mla: the gates of its releases, and every freedom that they take.

Read from the sources of github.com/deepseek-ai/FlashMLA, run on no GPU. A check that raises there raises here; one that
ends the process, or memory read beyond a buffer, raises `ProcessEnded`, which no `except Exception` catches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RELEASES = ("first", "second", "branch", "third", "fork")
"""2025-09; 2026-04 with sink and lengths; branch nv_dev; 2026-09-30, Blackwell and 512 columns only; the fork for
SGLang, which keeps what the third dropped behind a flag."""
ARCHS = ("sm90", "sm100")
LOG2_E = 1 / math.log(2)
MAX_INIT = -1e30


class ProcessEnded(BaseException):
    """exit(1), or a read beyond a buffer."""


@dataclass
class FakeFlashMLA:
    """A module `flash_mla`.

    Attributes:
        release: one of `RELEASES`.
        arch: one of `ARCHS`.
        base2: whether its log-sum-exp is in base 2.
        empty_lse: its log-sum-exp of a row without a key.
        empty_out: its output there.
        sink_in_lse: whether the sink counts in the log-sum-exp.
        seed: of the order in which keys are summed.
        defect: what it does wrong, "" for nothing.
        calls: the shape of q and of indices of every call, and the names of its optional arguments.
    """

    release: str = "second"
    arch: str = "sm90"
    base2: bool = False
    empty_lse: float = math.inf
    empty_out: float = math.nan
    sink_in_lse: bool = False
    seed: int = 0
    defect: str = ""
    calls: list[tuple[tuple[int, ...], tuple[int, ...], frozenset[str]]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether the release has a kernel for the architecture at all."""
        return not (self.release == "third" and self.arch == "sm90")

    @property
    def flash_mla_sparse_fwd(self) -> Callable[..., Any]:
        """The function with its release's own signature."""

        def first(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> Any:
            return self._call(q, kv, indices, sm_scale, d_v)

        def second(
            q: Tensor,
            kv: Tensor,
            indices: Tensor,
            sm_scale: float,
            d_v: int = 512,
            attn_sink: Tensor | None = None,
            topk_length: Tensor | None = None,
        ) -> Any:
            return self._call(q, kv, indices, sm_scale, d_v, attn_sink=attn_sink, topk_length=topk_length)

        def branch(
            q: Tensor,
            kv: Tensor,
            indices: Tensor,
            sm_scale: float,
            d_v: int = 512,
            attn_sink: Tensor | None = None,
            topk_length: Tensor | None = None,
            indexer_topk: int = 0,
        ) -> Any:
            results = self._call(q, kv, indices, sm_scale, d_v, attn_sink=attn_sink, topk_length=topk_length)
            return *results, results[2] + math.nan

        def fork(
            q: Tensor,
            kv: Tensor,
            indices: Tensor,
            sm_scale: float,
            d_v: int = 512,
            attn_sink: Tensor | None = None,
            topk_length: Tensor | None = None,
            use_legacy: bool = False,
            return_log2_lse: bool | None = None,
        ) -> Any:
            options = {"attn_sink": attn_sink, "topk_length": topk_length}
            return self._call(q, kv, indices, sm_scale, d_v, legacy=use_legacy, **options)

        return {"first": first, "second": second, "branch": branch, "third": second, "fork": fork}[self.release]

    def _call(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        d_v: int,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
        legacy: bool = True,
    ) -> Any:
        given = {"attn_sink": attn_sink, "topk_length": topk_length}
        names = frozenset(name for name, x in given.items() if x is not None)
        self.calls.append((tuple(q.shape), tuple(indices.shape), names))
        if self.defect == "unknown argument":
            raise TypeError("flash_mla_sparse_fwd() missing 1 required keyword-only argument: 'mode'")
        if self.defect == "no sink" and attn_sink is not None:
            raise RuntimeError("The chosen implementation does not support all required features.")
        self._check(q, kv, indices, d_v, attn_sink, topk_length, legacy)
        out, most, lse = self._attend(q, kv[:, 0], indices[:, 0], scale, attn_sink, topk_length)
        if self.defect == "lse of bf16":
            lse = lse.bfloat16()
        return (out, lse) if self.defect == "no max_logits" else (out, most, lse)

    def _check(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        d_v: int,
        sink: Tensor | None,
        lengths: Tensor | None,
        legacy: bool,
    ) -> None:
        """The gates of csrc/api and of the kernels' launchers."""
        (s_q, heads, width), slots = q.shape, indices.shape[2]
        newest = self.release == "third" or (self.release == "fork" and not legacy)
        check(
            not (newest and self.arch == "sm90"), "only supported on SM100f architectures.\nException raised from ..."
        )
        check(q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32, "dtype")
        check(kv.shape[1:] == (1, width) and indices.shape == (s_q, 1, slots), "shape")
        for x, dtype, size in ((sink, torch.float32, heads), (lengths, torch.int32, s_q)):
            check(x is None or (x.dtype == dtype and tuple(x.shape) == (size,)), "shape or dtype of an optional tensor")
        for x in (q, kv, indices, sink, lengths):
            check(x is None or x.shape[-1] == 1 or x.stride(-1) == 1, "must have contiguous last dimension")
        if self.release == "first":
            # No width is checked there: the kernels copy 576 columns of whatever they are given.
            end(width == 576 and d_v == 512, "reads beyond the keys")
            end(heads % 64 == 0 if self.arch == "sm90" else heads == 128, "h_q")
            end(slots > 0 and slots % 128 == 0 and s_q > 0 and kv.shape[0] > 0, "topk")
        else:
            check(width == 512 or (width == 576 and not newest), f"Invalid d_qk: {width}\nException raised from ...")
            check(d_v == 512 and heads in (64, 128), f"Unsupported h_q: {heads}")
            check(slots > 0 and slots % 128 == 0, "params.topk % (2*B_TOPK) == 0")
            check(s_q > 0 and kv.shape[0] > 0, "res == CUresult::CUDA_SUCCESS")
        end(q.data_ptr() % 16 == 0 and kv.data_ptr() % 16 == 0 and indices.data_ptr() % 32 == 0, "misaligned address")
        end(s_q * max(slots, heads) < 2**31, "32-bit address")
        end(bool(((indices >= -1) & (indices < kv.shape[0])).all()), "id beyond the keys")

    def _attend(
        self, q: Tensor, kv: Tensor, ids: Tensor, scale: float, sink: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernels compute it: probabilities rounded to bf16, -inf scaled like any logit, maxima blind to NaN."""
        slots = torch.arange(ids.shape[1], device="cpu")
        used = ids >= 0
        if lengths is not None:
            used &= slots < (lengths - int(self.defect == "last slot"))[:, None]
        order = slots[torch.randperm(len(slots), generator=torch.Generator("cpu").manual_seed(self.seed))]
        ids, used = ids[:, order], used[:, order]
        row = {"-1 is first": 0, "-1 is last": kv.shape[0] - 1}.get(self.defect)
        # Slots that are not used are filled with zeros, and not loaded.
        keys = kv.float()[ids.long().clamp(min=0)].masked_fill(~used[..., None], 0)
        if row is not None:
            keys = torch.where(used[..., None], keys, kv.float()[row])
            used = torch.ones_like(used)
        seen = q.float().clone()
        if self.defect == "last column":
            seen[..., -1] = 0
        logits = (seen @ keys.transpose(1, 2)).masked_fill(~used[:, None], -math.inf)
        factor = scale**2 if self.defect == "scale twice" else scale
        factor *= LOG2_E
        most = logits.masked_fill(logits.isnan(), -math.inf).amax(-1, keepdim=True) * factor
        most = most.clamp(min=MAX_INIT)
        weights = torch.exp2(logits * factor - most)
        total, most = weights.sum(-1), most[..., 0]
        values = keys[..., -512:] if self.defect == "last values" else keys[..., :512]
        with_sink, share = total, total
        if sink is not None and self.defect != "sink ignored":
            unit = 1.0 if self.defect == "sink base 2" else LOG2_E
            with_sink = total + torch.exp2(sink * unit - most)
            share = with_sink if self.sink_in_lse else total
        out = (weights.bfloat16().float() @ values) / with_sink[..., None]
        if self.defect == "half":
            out /= 2
        lse = share.log2() + most
        lse = lse if self.base2 else lse / (math.log2(10) if self.defect == "base 10" else LOG2_E)
        empty = total == 0
        return (
            out.masked_fill(empty[..., None], self.empty_out).bfloat16(),
            most,
            lse.masked_fill(empty, self.empty_lse).float(),
        )


def check(right: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not right:
        raise RuntimeError(message)


def end(right: bool, message: str) -> None:
    """FLASH_ASSERT, and the bus."""
    if not right:
        raise ProcessEnded(message)
