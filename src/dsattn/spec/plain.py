"""The operators in plain PyTorch with autograd: the yardstick of error budgets.

The arithmetic is fp32 on the rounded inputs (fp64 for fp64 inputs), without any of the reordering that a fast operator
needs, and the results have the dtypes that the operators return. What this loses against the oracle is what any
implementation in that precision loses. Signatures follow `dsattn.spec.oracle`, but the formulas are others (a sink is
one more column of a softmax, gradients come from autograd), so that the two check each other.

Query rows are taken in blocks to bound memory; a row's arithmetic does not depend on its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout
from dsattn.spec.oracle import Rows, visible_keys

BLOCK_ROWS = 64
BLOCK_ELEMENTS = 1 << 24


def indexer_scores(
    index_q: Float[Tensor, "t h_i d_i"],
    index_k: Float[Tensor, "s d_i"],
    weights: Float[Tensor, "t h_i"],
    layout: CausalLayout,
    *,
    scale: float = 1.0,
    relu: bool = True,
    rows: Sequence[int] | Tensor | None = None,
) -> Float[Tensor, "r s"]:
    """The score table [t, s] in fp32 (fp64 for fp64 inputs), -inf where a key is not visible.

    Args:
        index_q: indexer queries.
        index_k: indexer keys.
        weights: head weights.
        layout: who sees whom.
        scale: multiplies the head sum.
        relu: False drops the relu.
        rows: query rows to compute; the table is then [len(rows), s], in that order.
    """
    dtype, device = _accumulation(index_q), index_q.device
    chosen = list(range(layout.num_q)) if rows is None else [int(row) for row in rows]
    visible = visible_keys(layout)
    table = torch.full((len(chosen), layout.num_k), -torch.inf, dtype=dtype, device=device)
    step = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // max(1, index_q.shape[1] * layout.num_k)))
    # In the backward of a product over all keys, 0 * NaN would reach keys that a row does not see.
    isolated = not all(bool(x.isfinite().all()) for x in (index_q, index_k, weights))
    if isolated:
        step = 1
    for begin in range(0, len(chosen), step):
        block = chosen[begin : begin + step]
        places = torch.tensor(block, dtype=torch.int64, device=device)
        seen = visible[block[0]].to(device) if isolated else torch.arange(layout.num_k, device=device)
        dots = index_q.index_select(0, places).to(dtype) @ index_k.index_select(0, seen).to(dtype).T
        dots = torch.relu(dots) if relu else dots
        score = scale * (dots * weights.index_select(0, places).to(dtype)[..., None]).sum(1)
        for place, row in enumerate(block):
            keys = visible[row].to(device)
            table[begin + place, keys] = score[place] if isolated else score[place, keys]
    return table + 0.0


def attention(
    q: Float[Tensor, "t h d_qk"],
    kv: Float[Tensor, "s d_qk"],
    support: Rows,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Float[Tensor, " h"] | None = None,
    d_out: Float[Tensor, "t h d_v"] | None = None,
) -> dict[str, Tensor]:
    """The results `out` [t, h, d_v] and `lse` [t, h]; with `d_out` also `d_q`, `d_kv` and, given a sink, `d_sink`.

    `out` has kv's dtype, lse is fp32 (fp64 for fp64 inputs), gradients have the dtype of their input. For inputs of
    16 bits what matrix units lose counts as well, in the second product of each direction: probabilities and gradients
    of logits enter their products rounded to that dtype, and the backward takes sum_j prob * d_prob as d_out . out from
    `out` as it was returned. What the latter loses is one number per row and head, which may be small by chance; it is
    taken for two standard deviations.

    Args:
        q: queries.
        kv: key rows; the value is their first `value_dim` columns.
        support: the key rows of each query row.
        value_dim: d_v.
        softmax_scale: multiplies the dot products.
        sink: one extra logit per head that carries no value.
        d_out: the gradient of the output.
    """
    (t, heads, _), dtype, device = q.shape, _accumulation(q), q.device
    result = {
        "out": torch.zeros(t, heads, value_dim, dtype=kv.dtype, device=device),
        "lse": torch.full((t, heads), -torch.inf, dtype=dtype, device=device),
    }
    leaf_kv, leaf_sink = _leaf(kv, dtype), None if sink is None else _leaf(sink, dtype)
    d_q = torch.zeros_like(q) if d_out is not None else None
    for rows, ids, mask in _blocks(support, q.shape[-1] + heads, device):
        leaf_q = _leaf(q.index_select(0, rows), dtype)
        with torch.set_grad_enabled(d_out is not None):
            key, logit = _logits(leaf_q, leaf_kv, ids, mask, softmax_scale)
            logit = _RoundedGradient.apply(logit, kv.dtype)
            with_sink = logit if leaf_sink is None else torch.cat([logit, _column(leaf_sink, logit)], -1)
            prob = torch.softmax(with_sink, -1)[..., : logit.shape[-1]]
            out = _Rounded.apply(prob, kv.dtype) @ key[..., :value_dim]
            row_lse = with_sink.logsumexp(-1)
        result["out"][rows] = out.detach().to(kv.dtype)
        result["lse"][rows] = logit.detach().logsumexp(-1)
        if d_out is not None and d_q is not None:
            d_block = d_out.index_select(0, rows).to(dtype)
            lost = _lost(out.detach(), prob.detach(), key.detach()[..., :value_dim], d_block, kv.dtype)
            _backward_of(out, row_lse, d_block, lost)
            d_q[rows] = _gradient(leaf_q, q.dtype)
    if d_q is not None:
        result |= {"d_q": d_q, "d_kv": _gradient(leaf_kv, kv.dtype)}
        if sink is not None and leaf_sink is not None:
            result["d_sink"] = _gradient(leaf_sink, sink.dtype)
    return result


class _Rounded(torch.autograd.Function):
    """x rounded to a dtype and back; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return d_x, None


class _RoundedGradient(torch.autograd.Function):
    """x, whose gradient is rounded to a dtype and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return d_x.to(ctx.dtype).to(d_x.dtype), None


def _lost(out: Tensor, prob: Tensor, value: Tensor, d_out: Tensor, dtype: torch.dtype) -> Tensor:
    """What d_out . out loses [r, h] when `out` and the probabilities behind it are rounded to `dtype`."""
    if dtype.itemsize >= out.dtype.itemsize:
        return torch.zeros(out.shape[:2], dtype=out.dtype, device=out.device)
    sample = (d_out * (out.to(dtype).to(out.dtype) - prob @ value)).sum(-1)
    # A rounding error is spread evenly over half a unit in the last place to both sides.
    squares = (d_out * out).square().sum(-1) + (prob * (d_out @ value.mT)).square().sum(-1)
    deviation = torch.finfo(dtype).eps / 2 * (squares / 3).sqrt()
    return torch.where(sample < 0, -2 * deviation, 2 * deviation)


def _backward_of(out: Tensor, lse: Tensor, d_out: Tensor, lost: Tensor) -> None:
    """The backward of a block in which sum_j prob * d_prob is off by `lost`.

    That changes the gradient of logit j by -lost * prob_j, which is the gradient of -lost * log-sum-exp.
    """
    # A product that is not finite has spoiled the gradient already.
    torch.autograd.backward([out, lse], [d_out, -torch.where(lost.isfinite(), lost, 0.0)])


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
) -> dict[str, Tensor]:
    """The results `loss` [] and its gradients `d_index_q`, `d_index_k`, `d_weights`.

    The loss is fp32 (fp64 for fp64 inputs), gradients have the dtype of their input. For inputs of 16 bits the
    gradients of dots enter their products rounded to that dtype, as in matrix units.

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
        coeff: multiplies the loss; 0 makes everything exactly 0.
        reduction: "mean" or "sum"; unused where `num_rows` is given.
        num_rows: weighs each row by 1 / num_rows.
        row_mask: rows with False do not count.
        teacher: head-summed probabilities to use in place of those of `q` and `kv`.

    Raises:
        BadInput: an unknown reduction.
    """
    dtype, device = _accumulation(index_q), index_q.device
    kept = [keys if row_mask is None or bool(row_mask[i]) else keys[:0] for i, keys in enumerate(support)]
    counted = sum(len(keys) > 0 for keys in kept)
    factor = coeff * _row_weight(counted, reduction, num_rows)
    loss, leaf_k = torch.zeros((), dtype=dtype, device=device), _leaf(index_k, dtype)
    d_index_q, d_weights = torch.zeros_like(index_q), torch.zeros_like(weights)
    width = index_q.shape[1] + index_q.shape[2] + q.shape[1] + q.shape[2]
    for rows, ids, mask in _blocks(kept if coeff != 0 else [], width, device):
        target = _teacher(q, kv, rows, ids, mask, softmax_scale, dtype)
        if teacher is not None:
            given = [teacher[int(row)].to(device, dtype) for row in rows]
            target = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
        target = target / target.sum(-1, keepdim=True)
        leaf_q, leaf_w = (_leaf(x.index_select(0, rows), dtype) for x in (index_q, weights))
        with torch.enable_grad():
            _, dots = _logits(leaf_q, leaf_k, ids, mask, 1.0, fill=0.0)
            dots = _RoundedGradient.apply(dots, index_q.dtype)
            score = scale * ((torch.relu(dots) if relu else dots) * leaf_w[..., None]).sum(1)
            log_student = torch.log_softmax(score.masked_fill(~mask, -torch.inf), -1)
            kl = torch.xlogy(target, target) - target * log_student.masked_fill(target == 0, 0.0)
            block = factor * kl.sum()
        block.backward()
        loss += block.detach()
        d_index_q[rows], d_weights[rows] = _gradient(leaf_q, index_q.dtype), _gradient(leaf_w, weights.dtype)
    return {
        "loss": loss,
        "d_index_q": d_index_q,
        "d_index_k": _gradient(leaf_k, index_k.dtype),
        "d_weights": d_weights,
    }


def _row_weight(counted: int, reduction: str, num_rows: int | Tensor | None) -> float:
    """The weight of a row that counts."""
    if reduction not in ("mean", "sum"):
        raise BadInput("reduction", given=repr(reduction), needed='"mean" or "sum"')
    divisor = num_rows if num_rows is not None else counted if reduction == "mean" else 1
    return 1.0 / float(divisor) if counted else 0.0


def _teacher(
    q: Tensor, kv: Tensor, rows: Tensor, ids: Tensor, mask: Tensor, softmax_scale: float, dtype: torch.dtype
) -> Tensor:
    """The head-summed probabilities of a block, [rows, n], 0 in unused slots."""
    with torch.no_grad():
        _, logit = _logits(q.index_select(0, rows).to(dtype), kv.to(dtype), ids, mask, softmax_scale)
        return torch.softmax(logit, -1).sum(1)


def _logits(
    query: Tensor, keys: Tensor, ids: Tensor, mask: Tensor, scale: float, fill: float = -torch.inf
) -> tuple[Tensor, Tensor]:
    """The keys [r, n, d] of a block (0 in unused slots, so that nothing leaks from there) and the logits [r, h, n]."""
    rows, n = ids.shape
    key = keys.index_select(0, ids.flatten()).view(rows, n, keys.shape[-1]).masked_fill(~mask[..., None], 0.0)
    return key, (scale * (query @ key.mT)).masked_fill(~mask[:, None, :], fill)


def _blocks(support: Rows, width: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of the rows with keys: (row numbers [r], key rows [r, n] padded with 0, mask [r, n] of used slots)."""
    filled = [i for i, keys in enumerate(support) if keys.numel()]
    longest = max((len(support[i]) for i in filled), default=1)
    step = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // (longest * width)))
    for begin in range(0, len(filled), step):
        block = filled[begin : begin + step]
        ids = torch.nn.utils.rnn.pad_sequence(
            [support[i].to(device) for i in block], batch_first=True, padding_value=-1
        )
        yield torch.tensor(block, dtype=torch.int64, device=device), ids.clamp(min=0), ids >= 0


def _column(sink: Tensor, logit: Tensor) -> Tensor:
    """The sink [h] as one more key of logits [rows, h, n]."""
    # A sink of +inf takes everything, as a huge one does; softmax of inf is NaN.
    finite = torch.where(sink == torch.inf, torch.finfo(sink.dtype).max / 2, sink)
    return finite[:, None].expand(logit.shape[0], -1, 1)


def _accumulation(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached copy that gathers a gradient."""
    return x.detach().to(dtype).clone().requires_grad_()


def _gradient(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The gathered gradient, zero where no row reached the leaf."""
    return torch.zeros_like(leaf, dtype=dtype) if leaf.grad is None else leaf.grad.to(dtype)
