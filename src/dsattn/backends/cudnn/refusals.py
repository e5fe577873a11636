"""Why the backend does not take a problem: no such kernel, a size or dtype it lacks, or a defect of the release."""

from __future__ import annotations

import torch

from dsattn.backends.cudnn.contracts import Contract
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.sizes import (
    ATTENTION_HEADS,
    INDEX_WIDTH,
    KEY_WIDTHS,
    SCORE_HEADS,
    VALUE_WIDTH,
    fitting_heads,
)
from dsattn.layouts import DeviceLayout
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Problem


def refusal(problem: Problem, namespace: Namespace) -> str | None:
    """Why the release does not take `problem`; None if it does."""
    if isinstance(problem.layout, DeviceLayout):
        return "device layout: the calls need the segments on the host"
    reasons = {
        "indexer_scores": _scores,
        "indexer_topk": _topk,
        "sparse_attention": _attention,
        "dense_attention": lambda *_: "the frontend has no attention over all keys",
        "indexer_loss": _loss,
    }
    return reasons[problem.operator](problem, namespace)


def _scores(problem: Problem, namespace: Namespace) -> str | None:
    if problem.backward:
        return "the frontend has no gradient of raw scores"
    return _indexer(problem, namespace, "indexer_forward")


def _topk(problem: Problem, namespace: Namespace) -> str | None:
    reason = _indexer(problem, namespace, "indexer_forward") or _lacks(namespace, "indexer_top_k")
    limits = namespace.contract.wrapper("indexer_top_k").top_k if reason is None else None
    if reason is None and limits is not None and problem.top_k is not None and not limits.allows(problem.top_k):
        return f"top_k {problem.top_k}; the kernel takes {limits}"
    return reason


def _attention(problem: Problem, namespace: Namespace) -> str | None:
    name = "sparse_attention_backward" if problem.backward else "sparse_attention_forward"
    if (reason := _lacks(namespace, name)) is not None or problem.attention is None:
        return reason
    sizes = problem.attention
    if (reason := _key_rows(sizes)) is not None:
        return reason
    if sizes.dtype not in (torch.bfloat16, torch.float16):
        return f"{sizes.dtype}; the kernel takes bfloat16 and float16"
    if problem.backward:
        if fitting_heads(sizes.heads, ATTENTION_HEADS, namespace.contract.wrapper(name).heads) is None:
            return f"{sizes.heads} heads; the kernel was written for at most {ATTENTION_HEADS[-1]}"
        if sizes.key_width > KEY_WIDTHS[0]:
            return _defect(namespace.contract, "sm100-attn-bwd-dkv-race")
    return None


def _loss(problem: Problem, namespace: Namespace) -> str | None:
    visible = problem.support == "visible"
    names = ["dense_attn_score_recompute", "dense_indexer_score_recompute"] if visible else []
    names += [] if visible else ["sparse_attn_score_recompute"]
    backward = "dense_indexer_backward" if visible else "indexer_backward"
    if problem.attention is None or problem.indexer is None:
        return None
    for name in [*names, backward] if problem.requires_grad else names:
        reason = _lacks(namespace, name)
        if reason is None and "indexer" in name:
            reason = _indexer(problem, namespace, name)
        if reason is None and "attn" in name:
            reason = _teacher(problem.attention, namespace, name)
        if reason is not None:
            return reason
    defects = ["sm100-dense-score-slots"] if visible else []
    if problem.requires_grad:
        defects += ["sm90-dk-race", *(["sm100-dense-dq-race"] if visible else ["sm100-weights-race"])]
    return _indexer_inputs(problem.indexer) or next(
        (reason for reason in (_defect(namespace.contract, id) for id in defects) if reason is not None), None
    )


def _teacher(sizes: AttentionSizes, namespace: Namespace, name: str) -> str | None:
    if sizes.dtype != torch.bfloat16:
        return f"{sizes.dtype} q and kv; the kernel takes bfloat16"
    if sizes.key_width > KEY_WIDTHS[-1]:
        return f"key rows of {sizes.key_width}; the kernel was written for at most {KEY_WIDTHS[-1]}"
    if fitting_heads(sizes.heads, SCORE_HEADS, namespace.contract.wrapper(name).heads) is None:
        return f"{sizes.heads} heads; the kernel was written for at most {SCORE_HEADS[-1]}"
    return None


def _key_rows(sizes: AttentionSizes) -> str | None:
    if sizes.key_width > KEY_WIDTHS[-1] or sizes.value_width > VALUE_WIDTH:
        needed = f"at most {KEY_WIDTHS[-1]}, values at most {VALUE_WIDTH}"
        return f"key rows of {sizes.key_width}, values of {sizes.value_width}; the kernel takes {needed}"
    return None


def _indexer(problem: Problem, namespace: Namespace, name: str) -> str | None:
    """Whether a wrapper takes the indexer's side."""
    if (reason := _lacks(namespace, name)) is not None or problem.indexer is None:
        return reason
    limits = namespace.contract.wrapper(name).heads
    if fitting_heads(problem.indexer.heads, SCORE_HEADS, limits) is None:
        return f"{problem.indexer.heads} indexer heads; {name} takes {limits}"
    return _indexer_inputs(problem.indexer)


def _indexer_inputs(sizes: IndexerSizes) -> str | None:
    if not sizes.relu:
        return "relu=False; the kernels always apply the relu"
    if sizes.dtype != torch.bfloat16:
        return f"{sizes.dtype} index_q and index_k; the kernels take bfloat16"
    if sizes.width > INDEX_WIDTH:
        return f"indexer width {sizes.width}; the kernels take {INDEX_WIDTH}"
    return None


def _lacks(namespace: Namespace, name: str) -> str | None:
    """Whether the release has no such kernel on this architecture."""
    release = f"release {namespace.version}"
    if not namespace.contract.has(name):
        return f"{release} has no {name}"
    if not namespace.contract.wrapper(name).runs:
        return f"{release} has no {name} on {namespace.arch}"
    return None


def _defect(contract: Contract, id: str) -> str | None:
    found = contract.defect(id)
    return None if found is None else f"release {contract.version} has a known defect on {contract.arch}: {found.what}"
