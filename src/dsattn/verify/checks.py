"""One check per operator: call the public function, go backward, compare every result with its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import dsattn
from dsattn.layouts import TopK
from dsattn.spec.oracle import Rows
from dsattn.spec.problem import Support
from dsattn.verify.call import Call, Outcome, fault


def _check_scores(call: Call) -> Outcome:
    reference = call.reference
    scores = dsattn.indexer_scores(*call.index, call.layout, **call.scoring)
    call.backward((scores, reference.d_scores.to(call.device, scores.dtype)))
    expected = reference.scores
    found = call.compare_rows("scores", scores, expected["scores"], reference.wide)
    return {"scores": found, **call.compare_gradients(expected)}


def _check_topk(call: Call) -> Outcome:
    topk = dsattn.indexer_topk(*call.index, call.layout, top_k=call.case.top_k, return_scores=True, **call.scoring)
    found = call.compare_selection(topk)
    if topk.scores is None and found.verdict:
        found = replace(found, verdict=False, reason="topk: scores were asked for and none came out")
    return {"topk": found}


def _check_sparse(call: Call) -> Outcome:
    x, topk = call.x, call.topk()
    out, lse = dsattn.sparse_attention(x.q, x.kv, topk, return_lse=True, backend=call.backend, **call.attending)
    call.backward((out, x.d_out))
    return call.compare_attention(out, lse, call.reference.attention("selected"))


def _check_dense(call: Call) -> Outcome:
    x, layout = call.x, call.layout
    out, lse = dsattn.dense_attention(x.q, x.kv, layout, return_lse=True, backend=call.backend, **call.attending)
    call.backward((out, x.d_out))
    return call.compare_attention(out, lse, call.reference.attention("visible"))


def _check_loss(call: Call, support: Support) -> Outcome:
    loss = dsattn.indexer_loss(
        *call.index,
        call.x.q,
        call.x.kv,
        call.layout,
        softmax_scale=call.case.softmax_scale,
        topk=call.topk() if support == "selected" else None,
        **call.losing,
        **call.scoring,
    )
    call.backward((loss, torch.full_like(loss, call.x.d_loss)))
    return {**call.compare_loss(loss, call.reference.loss(support)), **_teacher(call)}


def _teacher(call: Call) -> Outcome:
    """A fault where the loss sent a gradient to the attention, which is its teacher."""
    for name in ("q", "kv"):
        gradient = getattr(call.x, name).grad
        if gradient is not None and (gradient != 0).any():
            return {f"d_{name}": fault(f"d_{name}: the loss reaches {name}, which is detached in it")}
    return {}


def _check_whole(call: Call, support: Support) -> Outcome:
    x, case, reference = call.x, call.case, call.reference
    losing = call.losing
    if case.num_rows is not None:
        # The other form that the count may have.
        losing["num_rows"] = torch.tensor(case.num_rows, device=call.device)
    result = dsattn.dsa_attention(
        x.q,
        x.kv,
        *call.index,
        call.layout,
        top_k=case.top_k,
        attend=support,
        loss=support,
        **call.attending,
        **losing,
        **call.scoring,
    )
    if result.loss is None:
        return {"loss": fault("loss: none came out")}
    call.backward((result.out, x.d_out), (result.loss, torch.full_like(result.loss, x.d_loss)))
    outcome: Outcome = {}
    keys: Rows | None = None
    if support == "selected":
        if result.topk is None:
            return {"topk": fault("topk: no selection came out")}
        outcome["topk"] = call.compare_selection(result.topk)
        if not outcome["topk"].verdict:
            return outcome
        # Attention and loss are judged over the keys that were selected; near ties may differ from the oracle's.
        keys = _rows_of(call, result.topk)
    attention, loss = reference.attention(support, keys), reference.loss(support, keys)
    return {
        **outcome,
        **call.compare_attention(result.out, result.lse, attention),
        **call.compare_loss(result.loss, loss),
    }


def _rows_of(call: Call, topk: TopK) -> Rows | None:
    """The selected keys of the judged rows; None where they are the oracle's."""
    mine, oracles = call.packed(topk.indices).cpu(), call.reference.topk.indices
    rows = call.reference.rows
    if torch.equal(mine[rows], oracles[rows]):
        return None
    return [mine[row][mine[row] >= 0].long() for row in rows]


CHECKS: dict[str, Callable[[Call], Outcome]] = {
    "indexer_scores": _check_scores,
    "indexer_topk": _check_topk,
    "sparse_attention": _check_sparse,
    "dense_attention": _check_dense,
    "indexer_loss:selected": lambda call: _check_loss(call, "selected"),
    "indexer_loss:visible": lambda call: _check_loss(call, "visible"),
    "dsa_attention:selected": lambda call: _check_whole(call, "selected"),
    "dsa_attention:visible": lambda call: _check_whole(call, "visible"),
}
"""Every check by the name of its operator; where the keys may be chosen, that follows a colon."""
