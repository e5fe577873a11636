"""Softmax over the visible or selected keys of each row, shared by attention and the indexer loss.

All of it runs on `torch.softmax` and a log-sum-exp that is read off it: `exp` and `torch.logsumexp` of widely spread
logits produce denormal numbers, which are ten times slower on CPUs.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def unseen_or_none(seen: Bool[Tensor, "*r"]) -> Bool[Tensor, "*r"] | None:
    """~seen; None where all is seen, so that nothing has to be masked. An accelerator is not asked: it would wait."""
    return None if seen.device.type == "cpu" and bool(seen.all()) else ~seen


def masked_softmax(logits: Float[Tensor, "*r n"], seen: Bool[Tensor, "*#r n"]) -> tuple[Tensor, Tensor]:
    """Probabilities (exactly 0 at unseen keys) and natural log-sum-exp of the seen logits; `logits` is overwritten.

    A row that sees nothing has probabilities 0 and log-sum-exp -inf. A row with a NaN or a +inf logit has NaN
    probabilities at its seen keys only; its log-sum-exp is NaN or +inf.
    """
    unseen = unseen_or_none(seen)
    if unseen is not None:
        logits.masked_fill_(unseen, -torch.inf)
    highest = logits.amax(-1)
    probabilities = torch.softmax(logits, -1)
    if unseen is not None:
        probabilities.masked_fill_(unseen, 0)
    # softmax at the highest logit is exp(0) / sum, so its logarithm is minus the rest of the log-sum-exp.
    lse = torch.where(torch.isinf(highest), highest, highest - probabilities.amax(-1).log())
    return probabilities, lse
