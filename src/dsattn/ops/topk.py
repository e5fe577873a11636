"""Exact top-k with ties to the lowest key row, ids ascending."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dsattn.ops.blocks import Block, run_blocks
from dsattn.ops.indexer import block_scores
from dsattn.ops.inputs import IndexerInputs
from dsattn.ops.numerics import exact_products
from dsattn.ops.support import Visible

Selection = tuple[Int[Tensor, "t k"], Int[Tensor, " t"], Tensor | None]


def select(x: IndexerInputs, support: Visible, top_k: int, return_scores: bool) -> Selection:
    """Ids int32 [t, k], lengths int32 [t] and scores [t, k] (None unless asked for) of every row's top-k.

    Semantics: the min(k, visible) visible keys first in (score descending, key row ascending), exactly for the scores
    computed here; NaN ranks above all numbers; ids ascending, unused slots -1 with score -inf.
    """
    device = x.index_q.device
    ids = torch.full((support.num_q, top_k), -1, dtype=torch.int32, device=device)
    lengths = (support.end - support.start).clamp(max=top_k)
    kept = torch.full((support.num_q, top_k), -torch.inf, dtype=x.dtype, device=device) if return_scores else None

    def work(block: Block) -> None:
        rows = slice(block.q_begin, block.q_end)
        scores = block_scores(x, block, support.keys(block, x.index_k, x.dtype))
        chosen = choose(scores, support.seen(block), lengths[rows], top_k)
        compact(chosen, block.k_begin, scores, ids[rows], None if kept is None else kept[rows])

    with exact_products(device):
        run_blocks(work, support.blocks(x.dtype.itemsize, 0), device)
    return ids, lengths, kept


def choose(
    scores: Float[Tensor, "c n"], seen: Bool[Tensor, "c n"], counts: Int[Tensor, " c"], top_k: int
) -> Bool[Tensor, "c n"]:
    """Which keys each row selects: its `counts` = min(top_k, visible) first ones.

    `torch.topk` gives the k-th score but any of the keys that share it; those are taken here in key order. The order
    runs on integers that sort as the scores do: there NaN is a number, above inf, and -inf is above an unseen key.
    """
    if scores.shape[1] <= top_k:
        return seen
    order = order_of(scores).masked_fill_(~seen, torch.iinfo(_order_dtype(scores.dtype)).min)
    threshold = order.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    return choose_from(order, threshold, seen, counts)


def choose_from(
    order: Int[Tensor, "c n"], threshold: Int[Tensor, "c 1"], seen: Bool[Tensor, "c n"], counts: Int[Tensor, " c"]
) -> Bool[Tensor, "c n"]:
    """The keys whose order is above the one of the last selected key, and the first of those that share it.

    Args:
        order: `order_of` the scores, the least integer at unseen keys.
        threshold: the order of the key that each row selects last.
        seen: who sees which key.
        counts: how many keys each row selects.
    """
    above = order > threshold
    tied = (order == threshold) & seen
    wanted = counts[:, None] - above.sum(1, keepdim=True)
    return above | (tied & (tied.cumsum(1) <= wanted))


def _order_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def order_of(scores: Float[Tensor, "c n"]) -> Int[Tensor, "c n"]:
    """Integers that sort as the scores do (IEEE bits with the negative half flipped); every NaN is the largest."""
    dtype = _order_dtype(scores.dtype)
    bits = scores.view(dtype)
    largest = torch.iinfo(dtype).max
    flipped = bits ^ ((bits >> (8 * dtype.itemsize - 1)) & largest)
    return flipped.masked_fill_(torch.isnan(scores), largest)


def compact(
    chosen: Bool[Tensor, "c n"], first_key: int, scores: Float[Tensor, "c n"], ids: Tensor, kept: Tensor | None
) -> None:
    """Writes the chosen keys of each row to the front of `ids` (and `kept`), in key order."""
    top_k = ids.shape[1]
    # Keys that are not chosen go to one slot past the end, which is cut off: no device synchronisation.
    slots = torch.where(chosen, chosen.cumsum(1) - 1, top_k)
    keys = torch.arange(first_key, first_key + chosen.shape[1], dtype=torch.int32, device=ids.device)
    wide = ids.new_full((len(ids), top_k + 1), -1)
    ids.copy_(wide.scatter_(1, slots, keys.expand_as(slots))[:, :top_k])
    if kept is not None:
        wide_scores = kept.new_full((len(ids), top_k + 1), -torch.inf)
        kept.copy_(wide_scores.scatter_(1, slots, scores)[:, :top_k])
