"""Calls of Megatron's cuDNN path as `dsattn.capture` sees them: who selects what, and what is attended to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsattn.functional.call import Call, tell
from dsattn.integrations.megatron_scorer import layout_of
from dsattn.layouts import CausalLayout, Segment, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs

ATTEND_NEEDS = ("query", "kv_full", "topk_indices", "softmax_scale", "d_v")
"""Parameters by which the function is known."""


def tell_selection(arguments: dict[str, Any]) -> None:
    """Tells the observers of a selection.

    Args:
        arguments: of Megatron's function, by name: q_bshd [b, sq, h_i, d_i], k_bsd [b, sk, d_i], w_bsh [b, sq, h_i],
            topk, and the windows, None for plain causal ones. Keys that are out of order have no layout, and their
            calls are left out.
    """
    if arguments["key_positions"] is not None:
        return
    q, k, weights = (arguments[name] for name in ("q_bshd", "k_bsd", "w_bsh"))
    layout = _layout(q.shape[0], q.shape[1], k.shape[1], arguments["varlen_starts"], arguments["varlen_ends"])
    x = IndexerInputs(q.flatten(0, 1), k.flatten(0, 1), weights.flatten(0, 1), 1.0, True)
    tell(Call(operator="indexer_topk", batch=_batch(q.shape[0]), x=x, layout=layout, top_k=int(arguments["topk"])))


def tell_attention(arguments: dict[str, Any]) -> None:
    """Tells the observers of an attention over selected keys.

    Args:
        arguments: of Megatron's function, by name: query [sq, b, h, d_qk], kv_full [sk, b, d_qk], topk_indices
            [b, sq, k], softmax_scale, d_v.
    """
    q, kv = arguments["query"].transpose(0, 1).flatten(0, 1), arguments["kv_full"].transpose(0, 1).flatten(0, 1)
    ids: Tensor = arguments["topk_indices"].flatten(0, 1)
    a = AttentionInputs(q, kv, int(arguments["d_v"]), float(arguments["softmax_scale"]))
    # Megatron's ids count inside their batch entry; nobody reads them here.
    topk = TopK._trusted(ids, (ids >= 0).sum(-1), None, q.shape[0], kv.shape[0])
    batch = _batch(arguments["query"].shape[1])
    tell(Call(operator="sparse_attention", batch=batch, a=a, topk=topk, top_k=ids.shape[1]))


def _layout(batch: int, rows: int, keys: int, starts: Tensor | None, ends: Tensor | None) -> CausalLayout:
    if starts is None or ends is None:
        return CausalLayout.batched(batch, rows, keys, q_offset=0)
    one = layout_of(starts, ends, keys)
    if batch == 1:
        return one
    segments = [
        Segment(s.q_start + b * rows, s.q_len, s.k_start + b * keys, s.k_len, s.q_offset)
        for b in range(batch)
        for s in one.segments
    ]
    return CausalLayout.from_segments(segments, num_q=batch * rows, num_k=batch * keys)


def _batch(entries: int) -> int | None:
    return None if entries == 1 else entries
