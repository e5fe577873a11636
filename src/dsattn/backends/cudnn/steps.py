"""What makes a call of the frontend exact on every release: one guarantee per method, and nothing else.

A mutant of the self-test overrides one method and has to be caught, so each line that a right result hangs on stands
here and is known to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.cudnn.folding import Fold
from dsattn.ops.topk import choose_from, order_of

# The kernels drop the teacher's term of a slot whose probability is below e^-100, or is no normal number (e^-87).
LEAST_PROBABILITY = torch.finfo(torch.float32).tiny
LEAST_LOG_PROBABILITY = -87.0
# Log-sum-exp of a row without a key, and of a head of padding: exp(logit - this) is 0, on releases too that define
# nothing for infinities.
FAR = 1e30


class Steps:
    """The guarantees. Tensors in, tensors out; no release is known here."""

    def invoke(self, wrapper: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls a wrapper by keywords only: positions moved in 1.26, 1.27 and 1.29."""
        return wrapper(**arguments)

    def offsets(self, fold: Fold, device: torch.device) -> Tensor | None:
        """The causal offset of every piece, int32, in memory of its own (a slice may be misaligned)."""
        return torch.tensor(fold.offsets, dtype=torch.int32, device=device)

    def id_space(self) -> dict[str, bool]:
        """The argument that says what ids are: rows of the flat key buffer."""
        return {"topk_indices_global": True}

    def folded_ids(self, ids: Tensor) -> Tensor:
        """Ids for a call whose batch is folded to one entry: local and global ids are the same there."""
        return ids

    def masked(self, scores: Tensor, seen: Tensor, fill: float) -> Tensor:
        """A table of scores with `fill` at keys that no row sees, whatever the release leaves there."""
        return scores.masked_fill(~seen, fill)

    def scratch(self, buffer: Tensor) -> Tensor:
        """A buffer that the kernel may use as scratch: a copy."""
        return buffer.clone()

    def padded_slots(self, table: Tensor, slots: int, fill: float) -> Tensor:
        """A table [t, k] with `fill` in further slots: a kernel leaves those past its last whole block unwritten."""
        return F.pad(table, (0, slots - table.shape[1]), value=fill)

    def upstream(self, row_weight: Tensor, rows: int) -> Tensor:
        """`grad_loss`, one fp32 element: the wrappers divide by all rows of the call, whether they count or not."""
        return (row_weight * rows).reshape(1).to(torch.float32)

    def weight_parts(self, weights: Tensor, parts: int = 2) -> tuple[Tensor, ...]:
        """fp32 weights as bf16 numbers that add up to them, for kernels that are linear in bf16 weights.

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

    def repaired(self, scores: Tensor, seen: Tensor, values: Tensor, used: Tensor, counts: Tensor) -> Tensor:
        """Which keys each row selects, when the kernel took any of those that share the last score.

        Args:
            scores: [c, n].
            seen: who sees which key.
            values: the scores that the kernel selected, [c, k].
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

    def lse_to_kernel(self, lse: Tensor) -> Tensor:
        """A log-sum-exp that gives every key probability 0 in rows without a key, where ours is -inf."""
        return torch.where(lse == -torch.inf, FAR, lse)

    def lse_from_kernel(self, lse: Tensor, empty: Tensor) -> Tensor:
        """A kernel's log-sum-exp with -inf for rows without a key."""
        return lse.masked_fill(empty[:, None], -torch.inf)
