"""What makes a call of the frontend exact on every release: one guarantee per method, and nothing else.

A mutant of the self-test overrides one method and has to be caught, so each line that a right result hangs on stands
here and is known to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.cudnn.folding import Fold, int32
from dsattn.backends.cudnn.sizes import slots_for
from dsattn.layouts import CausalLayout
from dsattn.ops.inputs import IndexerInputs
from dsattn.ops.topk import choose_from, order_of

# The kernels drop the teacher's term of a slot whose probability is below e^-100, or is no normal number (e^-87).
LEAST_PROBABILITY = torch.finfo(torch.float32).tiny
LEAST_LOG_PROBABILITY = -87.0
# Log-sum-exp of a row without a key, and of a head of padding: exp(logit - this) is 0, on releases too that define
# nothing for infinities.
FAR = 1e30
# Heads that fill a tile of a kernel over selected keys, so that no two rows share one.
TILE_HEADS = 64


class Steps:
    """The guarantees. `name` is the wrapper that is called; of a release only what a step hangs on is known."""

    def invoke(self, name: str, wrapper: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls a wrapper by keywords only: positions moved in 1.26, 1.27 and 1.29."""
        return wrapper(**arguments)

    def positive(self, x: IndexerInputs) -> IndexerInputs:
        """The same scores with a scale that is not negative: the kernels gate on the sign of scale * dot."""
        return x if x.scale >= 0 else replace(x, weights=-x.weights, scale=-x.scale)

    def squared(self, name: str, alignment: str | None) -> bool:
        """Whether pieces are brought into the form that needs no offset, for a release with that default alignment."""
        return alignment == "bottom-right"

    def offsets(self, name: str, fold: Fold, device: torch.device) -> Tensor | None:
        """The causal offset of every piece, int32, in memory of its own (a slice may be misaligned)."""
        return int32(tuple(fold.offsets), device)

    def id_space(self, name: str) -> dict[str, bool]:
        """The argument that says what ids are: rows of the flat key buffer."""
        return {"topk_indices_global": True}

    def flat_ids(self, ids: Tensor, layout: CausalLayout) -> Tensor:
        """Selected keys [t, k] as rows of the flat key buffer, which all kernels get, folded or with its batch."""
        return ids

    def launch_rows(self, most: int, resident: int) -> int:
        """Rows of a launch in which a later row of a block overwrites what an earlier one reads: one for each block.

        Args:
            most: rows that a launch may have.
            resident: blocks that run at a time.
        """
        return min(most, resident)

    def slots(self, name: str, top_k: int, *, power_of_two: bool = False) -> int:
        """Slots for `top_k` keys: a kernel leaves those past its last whole block unwritten."""
        return slots_for(top_k, power_of_two=power_of_two)

    def tiled_heads(self, heads: int, *, shared: bool) -> int:
        """The least heads of an attention backward: a whole tile, where rows that share one share their ids too."""
        return max(TILE_HEADS, heads) if shared else heads

    def masked(self, name: str, scores: Tensor, seen: Tensor, fill: float) -> Tensor:
        """A wrapper's table of scores with `fill` at keys that no row sees, whatever the release leaves there."""
        return scores.masked_fill(~seen, fill)

    def scratch(self, buffer: Tensor) -> Tensor:
        """A buffer that the kernel may use as scratch: a copy."""
        return buffer.clone()

    def upstream(self, row_weight: Tensor, rows: int) -> Tensor:
        """`grad_loss`, one fp32 element: the wrappers divide by all rows of the call, whether they count or not."""
        return (row_weight * rows).reshape(1).to(torch.float32)

    def weight_parts(self, name: str, weights: Tensor, parts: int) -> tuple[Tensor, ...]:
        """fp32 weights as bf16 numbers that add up to them, for wrappers that are linear in bf16 weights.

        A high and a low part leave out 2^-17 of a weight, a third one nothing.
        """
        if weights.dtype == torch.bfloat16:
            return (weights,)
        found: list[Tensor] = []
        for _ in range(parts):
            found.append(weights.to(torch.bfloat16))
            weights = weights - found[-1].to(weights.dtype)
        return tuple(found)

    def ranked(self, scores: Tensor) -> Tensor:
        """Scores as the radix sort of the kernels ranks them right: -0 is 0, and every NaN is the positive one."""
        return torch.where(torch.isnan(scores), torch.nan, scores + 0.0)

    def repaired(
        self, scores: Tensor, seen: Tensor, columns: Tensor, values: Tensor, used: Tensor, counts: Tensor
    ) -> Tensor:
        """Which keys each row selects, when the kernel took any of those that share the last score.

        Args:
            scores: [c, n].
            seen: who sees which key.
            columns: what the kernel selected, [c, k].
            values: the scores of those.
            used: which of those slots it used.
            counts: how many keys each row selects.
        """
        order = order_of(scores).masked_fill_(~seen, torch.iinfo(torch.int32).min)
        last = order_of(values).masked_fill_(~used, torch.iinfo(torch.int32).max).amin(1, keepdim=True)
        return choose_from(order, last, seen, counts)

    def student(self, probabilities: Tensor, used: Tensor) -> Tensor:
        """Student probabilities of at least the smallest normal number in used slots, exactly 0 in the others."""
        return probabilities.clamp(min=LEAST_PROBABILITY).masked_fill(~used, 0.0)

    def raised(self, scores: Tensor, lse: Tensor) -> Tensor:
        """Dense student scores of at least log-sum-exp - 87, in a copy."""
        return torch.maximum(scores, (lse + LEAST_LOG_PROBABILITY)[:, None])

    def silenced(self, teacher: Tensor, lse: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Dense teacher [t, n] and log-sum-exp of the scores [t] that send nothing from rows that do not count.

        The loss of such a row has no teacher; exp(score - inf) is 0, so it has no student either.
        """
        return teacher.masked_fill(~counted[:, None], 0.0), lse.masked_fill(~counted, torch.inf)

    def with_a_key(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """A selection in which each row has a key: one without leaves memory unwritten, or hangs, before 1.29."""
        first = F.pad(ids.new_zeros(1, 1), (0, ids.shape[1] - 1), value=-1)
        return torch.where(lengths[:, None] == 0, first, ids), lengths.clamp(min=1)

    def lse_to_kernel(self, lse: Tensor) -> Tensor:
        """A log-sum-exp that gives every key probability 0 in rows without a key, where ours is -inf."""
        return torch.where(lse == -torch.inf, FAR, lse)

    def lse_of_heads(self, lse: Tensor, heads: int) -> Tensor:
        """A log-sum-exp [t, h] for more heads, of which those of padding give every key probability 0."""
        return F.pad(lse, (0, heads - lse.shape[1]), value=FAR)

    def lse_from_kernel(self, lse: Tensor, empty: Tensor) -> Tensor:
        """A kernel's log-sum-exp with -inf for rows without a key."""
        return lse.masked_fill(empty[:, None], -torch.inf)
