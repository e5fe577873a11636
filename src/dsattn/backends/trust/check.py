"""Runs a backend on the small problem and compares every result with the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsattn.backends.base import Backend, Launch
from dsattn.backends.trust.answers import Expected, Values, answers, attended, values_of
from dsattn.backends.trust.diagnosis import NO_CAUSE, likely_cause
from dsattn.backends.trust.keys import Key
from dsattn.backends.trust.problems import Sample, sample_for
from dsattn.backends.trust.quiet import undisturbed
from dsattn.backends.trust.verdicts import Verdict
from dsattn.errors import ContractDrift, DsattnError
from dsattn.layouts import TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.ops.numerics import accumulation_dtype, unscaled_gradient_dtype
from dsattn.spec.metrics import FORWARD_FACTOR, GRADIENT_FACTOR, compare, compare_topk, tau

Results = dict[str, Tensor | TopK]

_OF_KEYS = ("d_kv", "d_index_k")


def check(backend: Backend, key: Key, launch: Launch, device: torch.device) -> Verdict:
    """The verdict on a kernel.

    Args:
        backend: whose kernel.
        key: what it is compiled for.
        launch: how its sequences are told.
        device: where it runs.

    Raises:
        DsattnError: the backend refuses the problem for another reason than a contract that it does not know.
    """
    with undisturbed(device):
        sample = sample_for(key, launch)
        try:
            results = run(backend, sample, device)
        except ContractDrift as error:
            return Verdict(False, "the call is refused", str(error), lasting=False)
        except (DsattnError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            return Verdict(False, "the call fails", f"{type(error).__name__}: {error}", lasting=False)
        expected = answers(sample)
        found = judge(sample, results, expected)
        return Verdict(False, _cause(backend, sample, device, results), found) if found else Verdict(True)


def _cause(backend: Backend, sample: Sample, device: torch.device, results: Results) -> str:
    """The likely cause; of a loss whose gradients were not asked for it is looked for in these, row by row."""
    try:
        if sample.operator == "indexer_loss" and not sample.gradients:
            sample = replace(sample, gradients=True)
            results = run(backend, sample, device)
        return likely_cause(sample, _numbers(results), values_of(sample))
    except Exception:
        # Results so odd that they cannot be looked at are no less wrong.
        return NO_CAUSE


def run(backend: Backend, sample: Sample, device: torch.device) -> Results:
    """What the backend makes of the sample on `device`; results on the CPU."""
    x, a, layout = sample.x, sample.a, sample.layout
    x = None if x is None else _indexer_to(x, device)
    a = None if a is None else _attention_to(a, device)
    topk = None if sample.topk is None else sample.topk.to(device)
    upstream = None if sample.upstream is None else sample.upstream.to(device)
    found: dict[str, Tensor | TopK | None] = {}
    if x is not None and sample.operator == "indexer_topk":
        found = {"topk": backend.indexer_topk(x, layout, sample.top_k or 1, True).to("cpu")}
    elif x is not None and sample.operator == "indexer_scores":
        if upstream is None:
            found = {"scores": backend.indexer_scores(x, layout)}
        else:
            gradients = backend.indexer_scores_backward(x, layout, upstream)
            found = dict(zip(("d_index_q", "d_index_k", "d_weights"), gradients, strict=True))
    elif x is not None and a is not None and sample.operator == "indexer_loss":
        options = sample.options
        if options.row_mask is not None:
            options = replace(options, row_mask=options.row_mask.to(device))
        loss, gradients = backend.indexer_loss(x, a, layout, topk, None, options, sample.gradients)
        found = {"loss": loss}
        if gradients is not None:
            found |= dict(zip(("d_index_q", "d_index_k", "d_weights"), gradients, strict=True))
    elif a is not None:
        found = _attend(backend, sample, a, topk, upstream)
    return {name: x if isinstance(x, TopK) else x.cpu() for name, x in found.items() if x is not None}


def _attend(
    backend: Backend, sample: Sample, a: AttentionInputs, topk: TopK | None, upstream: Tensor | None
) -> dict[str, Tensor | TopK | None]:
    if upstream is None:
        found = backend.dense_attention(a, sample.layout) if topk is None else backend.sparse_attention(a, topk)
        return dict(zip(("out", "lse"), found, strict=True))
    if sample.a is None:
        raise ValueError("an attention without its inputs")
    out, lse = (tensor.to(a.kv.device) for tensor in attended(sample, sample.a))
    if topk is None:
        gradients = backend.dense_attention_backward(a, sample.layout, out, lse, upstream)
    else:
        gradients = backend.sparse_attention_backward(a, topk, out, lse, upstream)
    return dict(zip(("d_q", "d_kv", "d_sink"), gradients, strict=True))


def judge(sample: Sample, results: Results, expected: dict[str, Expected]) -> str:
    """What is wrong with the results, in the words of the first comparison that fails; "" if nothing is.

    Args:
        sample: the problem.
        results: what came out, on the CPU.
        expected: what must have come out: each of these is looked for.
    """
    if sample.operator == "indexer_topk":
        return _judge_selection(sample, results["topk"], expected["scores"])
    for name, number in expected.items():
        got = results.get(name)
        if not isinstance(got, Tensor):
            return f"{name}: none came out"
        batches = sample.key_entries if name in _OF_KEYS else sample.row_entries
        batches = None if name in ("d_sink", "loss") else batches
        factor = GRADIENT_FACTOR if name.startswith("d_") else FORWARD_FACTOR
        options = {"factor": factor, "dtype": _dtype(sample, name), "batches": batches}
        found = compare(name, got, number.exact, number.plain, **options)
        if not found.verdict:
            return found.reason
    return ""


def _judge_selection(sample: Sample, topk: Tensor | TopK, table: Expected) -> str:
    if not isinstance(topk, TopK) or sample.x is None:
        return "topk: none came out"
    for name, ids in (("indices", topk.indices), ("lengths", topk.lengths)):
        if ids.dtype != torch.int32:
            return f"topk.{name}: dtype {ids.dtype}, needed torch.int32"
    x = sample.x
    found = compare_topk(
        topk.indices,
        topk.lengths,
        table.exact,
        sample.support,
        top_k=sample.top_k or 1,
        tau=tau(x.index_q, x.index_k, x.weights, sample.layout, scale=x.scale, rows=sample.judged),
        exact_ids=sample.exact_ids,
        returned_scores=topk.scores,
        rows=sample.judged,
    )
    return found.reason and f"topk: {found.reason}"


def _dtype(sample: Sample, name: str) -> torch.dtype | None:
    """The dtype that a result must have."""
    x, a = sample.x, sample.a
    if sample.operator == "indexer_loss" and x is not None:
        sources = {"d_index_q": x.index_q, "d_index_k": x.index_k, "d_weights": x.weights}
        return x.dtype if name == "loss" else unscaled_gradient_dtype(sources[name].dtype)
    if x is not None:
        sources = {"d_index_q": x.index_q, "d_index_k": x.index_k, "d_weights": x.weights}
        return sources[name].dtype if name in sources else x.dtype
    if a is None:
        return None
    if name == "d_sink":
        return None if a.sink is None else a.sink.dtype
    return accumulation_dtype(a.kv.dtype) if name == "lse" else a.kv.dtype


def _numbers(results: Results) -> Values:
    """The results as float64 numbers, a selection as its ids and scores."""
    found = {name: x.double() for name, x in results.items() if not isinstance(x, TopK)}
    topk = results.get("topk")
    if isinstance(topk, TopK):
        found["topk"] = topk.indices
        if topk.scores is not None:
            found["topk_scores"] = topk.scores.double()
    return found


def _indexer_to(x: IndexerInputs, device: torch.device) -> IndexerInputs:
    tensors = {name: getattr(x, name).to(device) for name in ("index_q", "index_k", "weights")}
    return replace(x, **tensors)


def _attention_to(a: AttentionInputs, device: torch.device) -> AttentionInputs:
    return replace(a, q=a.q.to(device), kv=a.kv.to(device), sink=None if a.sink is None else a.sink.to(device))
