"""What the results of a sample must be: the oracle's numbers, and the plain run's, whose error is the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.trust.problems import Sample
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec import oracle, plain
from dsattn.spec.oracle import Exact

Values = dict[str, Tensor]

_INDEXER = ("d_index_q", "d_index_k", "d_weights")


@dataclass(frozen=True)
class Expected:
    """One result: the oracle's number and the plain run's."""

    exact: Exact
    plain: Tensor


def answers(sample: Sample) -> dict[str, Expected]:
    """Every number that the operator, in its direction, has to give; for `indexer_topk` its table of scores."""
    exact, mine = exact_of(sample), _plain_of(sample)
    return {name: Expected(number, mine[name]) for name, number in exact.items()}


def values_of(sample: Sample) -> Values:
    """The oracle's numbers alone."""
    return {name: number.value for name, number in exact_of(sample).items()}


def exact_of(sample: Sample) -> dict[str, Exact]:
    """The oracle's numbers."""
    x, a = sample.x, sample.a
    if sample.operator in ("indexer_scores", "indexer_topk") and x is not None:
        if sample.backward:
            return _score_gradients(sample, x)
        options: dict[str, Any] = {"scale": x.scale, "relu": x.relu, "rows": sample.judged}
        return {"scores": oracle.indexer_scores(x.index_q, x.index_k, x.weights, sample.layout, **options)}
    if sample.operator == "indexer_loss" and x is not None and a is not None:
        found = oracle.indexer_loss(*_learning(x, a), sample.support, **loss_options(sample, x, a))
        return found if sample.gradients else {"loss": found["loss"]}
    if a is None:
        raise ValueError(f"{sample.operator} without its inputs")
    return _one_way(sample, oracle.attention(a.q, a.kv, sample.support, **_attending(sample, a)))


def _plain_of(sample: Sample) -> Values:
    x, a = sample.x, sample.a
    if sample.operator in ("indexer_scores", "indexer_topk") and x is not None:
        if sample.backward and sample.upstream is not None:
            return dict(zip(_INDEXER, _gradients(sample, _tensors(x), x.scale, x.relu, sample.upstream), strict=True))
        options: dict[str, Any] = {"scale": x.scale, "relu": x.relu, "rows": sample.judged}
        return {"scores": plain.indexer_scores(x.index_q, x.index_k, x.weights, sample.layout, **options)}
    if sample.operator == "indexer_loss" and x is not None and a is not None:
        return plain.indexer_loss(*_learning(x, a), sample.support, **loss_options(sample, x, a))
    if a is None:
        raise ValueError(f"{sample.operator} without its inputs")
    return _one_way(sample, plain.attention(a.q, a.kv, sample.support, **_attending(sample, a)))


def attended(sample: Sample, a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp that a backward is given."""
    options = {"value_dim": a.value_dim, "softmax_scale": a.softmax_scale, "sink": a.sink}
    found = plain.attention(a.q, a.kv, sample.support, **options)
    return found["out"], found["lse"]


def loss_options(sample: Sample, x: IndexerInputs, a: AttentionInputs) -> dict[str, Any]:
    """The options of a loss."""
    options = sample.options
    return {
        "softmax_scale": a.softmax_scale,
        "scale": x.scale,
        "relu": x.relu,
        "coeff": options.coeff,
        "reduction": options.reduction,
        "num_rows": options.num_rows,
        "row_mask": options.row_mask,
    }


def _learning(x: IndexerInputs, a: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return x.index_q, x.index_k, x.weights, a.q, a.kv


def _attending(sample: Sample, a: AttentionInputs) -> dict[str, Any]:
    options = {"value_dim": a.value_dim, "softmax_scale": a.softmax_scale, "sink": a.sink}
    return {**options, "d_out": sample.upstream}


def _one_way(sample: Sample, results: dict[str, Any]) -> dict[str, Any]:
    """The results of the direction that is asked for."""
    return {name: result for name, result in results.items() if name.startswith("d_") == sample.backward}


def _tensors(x: IndexerInputs) -> tuple[Tensor, Tensor, Tensor]:
    return x.index_q, x.index_k, x.weights


def _score_gradients(sample: Sample, x: IndexerInputs) -> dict[str, Exact]:
    if sample.upstream is None:
        raise ValueError("a backward without a gradient that comes in")
    wide = [tensor.double() for tensor in _tensors(x)]
    values = _gradients(sample, wide, x.scale, x.relu, sample.upstream.double())
    # Without the relu's gate and with absolute values a gradient is the sum of the absolute values of its terms.
    sizes = [tensor.abs() for tensor in wide]
    terms = _gradients(sample, sizes, abs(x.scale), False, sample.upstream.double().abs())
    return {name: Exact(*numbers) for name, *numbers in zip(_INDEXER, values, terms, strict=True)}


def _gradients(sample: Sample, tensors: Sequence[Tensor], scale: float, relu: bool, upstream: Tensor) -> list[Tensor]:
    """Gradients of the plain score table by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with torch.enable_grad():
        table = plain.indexer_scores(leaves[0], leaves[1], leaves[2], sample.layout, scale=scale, relu=relu)
    if table.requires_grad:
        table.backward(upstream.to(table.dtype))
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
