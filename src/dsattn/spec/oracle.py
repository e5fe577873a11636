"""The float64 oracle: docs/semantics written out row by row, with every gradient derived by hand.

It is slow and plain on purpose and shares no code with `dsattn.ops`. All tensors are packed ([t, ...] and [s, ...]);
any input dtype is taken up to float64; results are on the device of the inputs. Beside each number stands the sum of
the absolute values of its terms, which says how large a rounding error may be.

A support (`Rows`) holds one ascending int64 tensor of key rows per query row. A row with an empty support has out 0,
lse -inf and zero gradients, and takes no part in a loss. Infinities and NaN follow IEEE arithmetic; since a row reads
nothing but the keys of its own support, they reach nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout

Rows = list[Tensor]

FLOOR_EPS = 8
"""An error floor is this many eps of the accumulation dtype, times `Exact.terms`."""


@dataclass(frozen=True)
class Exact:
    """A float64 result with the size of what it was added up from.

    Attributes:
        value: the numbers, float64.
        terms: the sum of the absolute values of the terms of each number; an error floor is a multiple of eps of it.
    """

    value: Float64[Tensor, "*shape"]
    terms: Float64[Tensor, "*shape"]


def visible_keys(layout: CausalLayout) -> Rows:
    """The key rows that each query row sees, on the CPU: the definition of a causal segment read literally.

    Args:
        layout: the segments; row i of one sees its first `clamp((q_offset + i + 1) // ratio, 0, k_len)` keys.
    """
    rows = [torch.empty(0, dtype=torch.int64, device="cpu") for _ in range(layout.num_q)]
    for segment in layout.segments:
        for i in range(segment.q_len):
            count = max(0, min((segment.q_offset + i + 1) // layout.ratio, segment.k_len))
            first = segment.k_start
            rows[segment.q_start + i] = torch.arange(first, first + count, dtype=torch.int64, device="cpu")
    return rows


def indexer_scores(
    index_q: Float[Tensor, "t h_i d_i"],
    index_k: Float[Tensor, "s d_i"],
    weights: Float[Tensor, "t h_i"],
    layout: CausalLayout,
    *,
    scale: float = 1.0,
    relu: bool = True,
    rows: Sequence[int] | Tensor | None = None,
) -> Exact:
    """The score table [t, s], -inf (with terms 0) where a key is not visible.

        score[i, j] = scale * sum_h weights[i, h] * relu(index_q[i, h] . index_k[j])

    Args:
        index_q: indexer queries.
        index_k: indexer keys.
        weights: head weights.
        layout: who sees whom.
        scale: multiplies the head sum.
        relu: False drops the relu.
        rows: query rows to compute; the table is then [len(rows), s], in that order.
    """
    index_q, index_k, weights = index_q.double(), index_k.double(), weights.double()
    chosen = range(layout.num_q) if rows is None else [int(row) for row in rows]
    scores = _zeros((len(chosen), layout.num_k), index_q.device)
    scores.value.fill_(-torch.inf)
    visible = visible_keys(layout)
    for place, i in enumerate(chosen):
        keys = visible[i].to(index_q.device)
        key = index_k.index_select(0, keys)
        scores.value[place, keys] = _score_row(_gate(index_q[i] @ key.T, relu), weights[i], scale)
        scores.terms[place, keys] = _score_row(index_q[i].abs() @ key.abs().T, weights[i].abs(), abs(scale))
    return scores


def indexer_topk(scores: Float64[Tensor, "t s"], visible: Rows, *, top_k: int) -> Rows:
    """The `min(top_k, visible)` selected key rows of each row of a score table, ascending, on the table's device.

    Args:
        scores: a float64 score table; NaN allowed.
        visible: the visible keys of each of its rows.
        top_k: keys to select.

    Semantics:
        The order is (score descending, key row ascending). NaN stands above all numbers, +inf included; -0 equals +0.
    """
    selected = []
    for row, keys in zip(scores, visible, strict=True):
        keys = keys.to(scores.device)
        score = row.index_select(0, keys)
        is_nan = score.isnan()
        # Two stable sorts, the less important key first: by score, then NaN to the front.
        order = torch.sort(-score.masked_fill(is_nan, 0.0), stable=True).indices
        order = order[torch.sort((~is_nan[order]).to(torch.int8), stable=True).indices]
        selected.append(keys[order[:top_k]].sort().values)
    return selected


def attention(
    q: Float[Tensor, "t h d_qk"],
    kv: Float[Tensor, "s d_qk"],
    support: Rows,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Float[Tensor, " h"] | None = None,
    d_out: Float[Tensor, "t h d_v"] | None = None,
) -> dict[str, Exact]:
    """The results `out` [t, h, d_v] and `lse` [t, h]; with `d_out` also `d_q`, `d_kv` and, given a sink, `d_sink`.

        logit[i, h, j] = softmax_scale * q[i, h] . kv[j]
        lse[i, h] = log sum_j exp logit                  (natural log, sink excluded)
        out[i, h] = sum_j exp(logit - logaddexp(lse, sink_h)) * kv[j, :value_dim]

    Args:
        q: queries.
        kv: key rows; the value is their first `value_dim` columns.
        support: the key rows of each query row.
        value_dim: d_v.
        softmax_scale: multiplies the dot products.
        sink: one extra logit per head that carries no value; -inf is the same as None.
        d_out: the gradient of the output.
    """
    (t, heads, _), device = q.shape, q.device
    q, kv = q.double(), kv.double()
    no_sink = torch.full((heads,), -torch.inf, dtype=torch.float64, device=device)
    extra = no_sink if sink is None else sink.double()
    out, lse = _zeros((t, heads, value_dim), device), _zeros((t, heads), device)
    lse.value.fill_(-torch.inf)
    result = {"out": out, "lse": lse}
    if d_out is not None:
        result |= {"d_q": _zeros(q.shape, device), "d_kv": _zeros(kv.shape, device)}
        result |= {} if sink is None else {"d_sink": _zeros((heads,), device)}

    for i, keys in _filled(support, device):
        key = kv.index_select(0, keys)
        value = key[:, :value_dim]
        logit = softmax_scale * (q[i] @ key.T)
        logit_terms = abs(softmax_scale) * (q[i].abs() @ key.abs().T)
        row_lse = logit.logsumexp(-1)
        lse.value[i] = row_lse
        lse.terms[i] = logit_terms.amax(-1) + row_lse.abs()
        norm = torch.logaddexp(row_lse, extra)
        prob = torch.exp(logit - norm[:, None])
        out.value[i] = prob @ value
        out.terms[i] = prob @ value.abs()
        if d_out is not None:
            # A sink of +inf takes everything; exp(inf - inf) would not say so.
            sink_prob = torch.where(extra == torch.inf, 1.0, torch.exp(extra - norm))
            _attention_backward_row(result, i, keys, q[i], key, prob, sink_prob, d_out[i].double(), softmax_scale)
    return result


def _attention_backward_row(
    result: dict[str, Exact],
    i: int,
    keys: Tensor,
    query: Tensor,
    key: Tensor,
    prob: Tensor,
    sink_prob: Tensor,
    d_out: Tensor,
    softmax_scale: float,
) -> None:
    """Adds the gradients of query row i: query [h, d_qk], key [n, d_qk], prob [h, n], sink_prob [h], d_out [h, d_v].

    d_prob = d_out . value             d_logit = prob * (d_prob - sum_j prob * d_prob)
    d_q = scale * d_logit . key        d_kv = scale * d_logit^T . q, and prob^T . d_out in the value columns
    d_sink = - sink_prob * sum_j prob * d_prob
    """
    value_dim = d_out.shape[-1]
    value = key[:, :value_dim]
    d_prob = d_out @ value.T
    d_prob_terms = d_out.abs() @ value.abs().T
    mean = (prob * d_prob).sum(-1, keepdim=True)
    mean_terms = (prob * d_prob_terms).sum(-1, keepdim=True)
    d_logit = softmax_scale * prob * (d_prob - mean)
    d_logit_terms = abs(softmax_scale) * prob * (d_prob_terms + mean_terms)

    result["d_q"].value[i] = d_logit @ key
    result["d_q"].terms[i] = d_logit_terms @ key.abs()
    d_kv = result["d_kv"]
    d_kv.value.index_add_(0, keys, d_logit.T @ query)
    d_kv.terms.index_add_(0, keys, d_logit_terms.T @ query.abs())
    d_kv.value[:, :value_dim].index_add_(0, keys, prob.T @ d_out)
    d_kv.terms[:, :value_dim].index_add_(0, keys, prob.T @ d_out.abs())
    if "d_sink" in result:
        result["d_sink"].value.sub_(sink_prob * mean[:, 0])
        result["d_sink"].terms.add_(sink_prob * mean_terms[:, 0])


def head_probabilities(
    q: Float[Tensor, "t h d_qk"], kv: Float[Tensor, "s d_qk"], support: Rows, *, softmax_scale: float
) -> Rows:
    """The teacher before it is normalised, float64: softmax_j(logit) summed over heads, per row and key of the support.

    A tensor-parallel group adds these over its ranks and gives the sums to `indexer_loss` as `teacher`.

    Args:
        q: queries.
        kv: key rows.
        support: the key rows of each query row.
        softmax_scale: multiplies the dot products. A sink plays no part.
    """
    q, kv = q.double(), kv.double()
    sums = [torch.zeros(len(keys), dtype=torch.float64, device=q.device) for keys in support]
    for i, keys in _filled(support, q.device):
        logit = softmax_scale * (q[i] @ kv.index_select(0, keys).T)
        sums[i] = torch.exp(logit - logit.logsumexp(-1, keepdim=True)).sum(0)
    return sums


def indexer_loss(
    index_q: Float[Tensor, "t h_i d_i"],
    index_k: Float[Tensor, "s d_i"],
    weights: Float[Tensor, "t h_i"],
    q: Float[Tensor, "t h d_qk"],
    kv: Float[Tensor, "s d_qk"],
    support: Rows,
    *,
    softmax_scale: float,
    scale: float = 1.0,
    relu: bool = True,
    coeff: float = 1.0,
    reduction: str = "mean",
    num_rows: int | Tensor | None = None,
    row_mask: Bool[Tensor, " t"] | None = None,
    teacher: Rows | None = None,
) -> dict[str, Exact]:
    """The results `loss` [] and its gradients `d_index_q`, `d_index_k`, `d_weights`.

        teacher = head_probabilities / their sum over the support; student = softmax of the scores over the support
        loss = coeff * sum_i row_weight_i * sum_j teacher * (log teacher - log student)          (0 log 0 = 0)
        d_score[i, j] = coeff * row_weight_i * (student - teacher)

    Args:
        index_q: indexer queries.
        index_k: indexer keys.
        weights: head weights.
        q: attention queries; no gradient.
        kv: key rows; no gradient.
        support: the key rows of each query row.
        softmax_scale: multiplies the attention's dot products.
        scale: multiplies the indexer's head sum.
        relu: False drops the relu of the scores.
        coeff: multiplies the loss; 0 makes the loss and its gradients exactly 0, whatever the inputs hold.
        reduction: "mean" (1 / rows that count) or "sum" (1); unused where `num_rows` is given.
        num_rows: weighs each row by 1 / num_rows.
        row_mask: rows with False do not count.
        teacher: head-summed probabilities to use in place of those of `q` and `kv`.

    Raises:
        BadInput: an unknown reduction.
    """
    counted = [i for i, _ in _filled(support, q.device) if row_mask is None or bool(row_mask[i])]
    result = {"loss": _zeros((), q.device)}
    for name, source in (("d_index_q", index_q), ("d_index_k", index_k), ("d_weights", weights)):
        result[name] = _zeros(source.shape, source.device)
    row_weight = _row_weight(len(counted), reduction, num_rows)
    if coeff == 0:
        return result
    uncounted = set(range(len(support))) - set(counted)
    support = [keys[:0] if i in uncounted else keys for i, keys in enumerate(support)]
    mass = head_probabilities(q, kv, support, softmax_scale=softmax_scale) if teacher is None else teacher
    index_q, index_k, weights = index_q.double(), index_k.double(), weights.double()
    for i, keys in _filled(support, q.device):
        row_mass = mass[i].to(q.device, torch.float64)
        key = index_k.index_select(0, keys)
        _loss_row(
            result, i, keys, index_q[i], key, weights[i], row_mass / row_mass.sum(), scale, relu, coeff * row_weight
        )
    return result


def _row_weight(counted: int, reduction: str, num_rows: int | Tensor | None) -> float:
    """The weight of a row that counts."""
    if reduction not in ("mean", "sum"):
        raise BadInput("reduction", given=repr(reduction), needed='"mean" or "sum"')
    if num_rows is not None:
        return 1.0 / float(num_rows)
    return 1.0 / max(counted, 1) if reduction == "mean" else 1.0


def _loss_row(
    result: dict[str, Exact],
    i: int,
    keys: Tensor,
    index_q: Tensor,
    key: Tensor,
    weights: Tensor,
    teacher: Tensor,
    scale: float,
    relu: bool,
    factor: float,
) -> None:
    """Adds row i: index_q [h_i, d_i], key [n, d_i], weights [h_i], teacher [n]; factor = coeff * row_weight."""
    dot = index_q @ key.T
    gated, gated_terms = _gate(dot, relu), index_q.abs() @ key.abs().T
    score = _score_row(gated, weights, scale)
    score_terms = _score_row(gated_terms, weights.abs(), abs(scale))
    lse = score.logsumexp(-1)
    log_student = score - lse
    log_student_terms = score_terms + lse.abs()
    kl = teacher * (teacher.log() - log_student)
    kl_terms = teacher * (teacher.log().abs() + log_student_terms)
    absent = teacher == 0
    result["loss"].value.add_(factor * kl.masked_fill(absent, 0.0).sum())
    result["loss"].terms.add_(abs(factor) * kl_terms.masked_fill(absent, 0.0).sum())

    student = log_student.exp()
    d_score = factor * (student - teacher)
    d_score_terms = abs(factor) * (student + teacher)
    result["d_weights"].value[i] = scale * (gated @ d_score)
    result["d_weights"].terms[i] = abs(scale) * (gated_terms @ d_score_terms)
    d_dot = scale * weights[:, None] * d_score
    d_dot_terms = abs(scale) * weights.abs()[:, None] * d_score_terms
    if relu:
        d_dot = d_dot.masked_fill(dot <= 0, 0.0)
        # In fp32 a dot product this near to 0 (but not 0) may fall on either side of the gate: the floor taken of
        # these terms has to cover all of the key's gradient.
        rounding = FLOOR_EPS * torch.finfo(torch.float32).eps
        doubtful = (dot != 0) & (dot.abs() < rounding * gated_terms)
        d_dot_terms = torch.where(doubtful, d_dot_terms / rounding, d_dot_terms.masked_fill(dot <= 0, 0.0))
    result["d_index_q"].value[i] = d_dot @ key
    result["d_index_q"].terms[i] = d_dot_terms @ key.abs()
    result["d_index_k"].value.index_add_(0, keys, d_dot.T @ index_q)
    result["d_index_k"].terms.index_add_(0, keys, d_dot_terms.T @ index_q.abs())


def _gate(dot: Tensor, relu: bool) -> Tensor:
    """The dot products after the relu, if there is one (NaN stays NaN)."""
    return torch.relu(dot) if relu else dot


def _score_row(gated: Tensor, weights: Tensor, scale: float) -> Tensor:
    """scale * sum_h weights[h] * gated[h, :]; adding 0 makes +0 of -0."""
    return scale * (weights @ gated) + 0.0


def _filled(support: Rows, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The rows that have keys, with their keys on the device."""
    for i, keys in enumerate(support):
        if keys.numel():
            yield i, keys.to(device)


def _zeros(shape: Sequence[int], device: torch.device) -> Exact:
    """Zero values and terms."""
    return Exact(*(torch.zeros(tuple(shape), dtype=torch.float64, device=device) for _ in range(2)))
