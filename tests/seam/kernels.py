"""Every kernel that the backend's calls need, compiled by the installed release, beside what the backend says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.functional.problems import problem_of
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Problem
from seam.frontend import SeamFrontend

INDEX_HEADS = (32, 64)
ATTENTION = ((16, 576), (64, 512), (128, 512), (128, 576))
TOP_K = (512, 2048)
LAYOUTS = {
    "a document": CausalLayout.packed([0, 8]),
    "a chunk after others": CausalLayout.packed([0, 16]).slice_queries(8, 16),
    "documents": CausalLayout.packed([0, 6, 16]),
    "a batch": CausalLayout.batched(2, 8, 8),
    "keys of four tokens": CausalLayout.packed([0, 8], ratio=4),
}


@dataclass(frozen=True)
class Asked:
    """One call of the backend.

    Attributes:
        what: the operator and its sizes.
        problem: what `supports` is asked.
        run: makes the call.
    """

    what: str
    problem: Problem
    run: Callable[[CudnnBackend], Any]


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


def _indexer(layout: CausalLayout, heads: int) -> IndexerInputs:
    t, s = layout.num_q, layout.num_k
    weights = _normal(t, heads, dtype=torch.float32)
    return IndexerInputs(_normal(t, heads, 128), _normal(s, 128), weights, heads**-0.5, relu=True)


def _attention(t: int, s: int, heads: int, width: int) -> AttentionInputs:
    sink = _normal(heads, dtype=torch.float32)
    return AttentionInputs(_normal(t, heads, width), _normal(s, width), 512, width**-0.5, sink)


def _selection(layout: CausalLayout, top_k: int) -> TopK:
    """All keys that a row sees."""
    start, end = layout.bounds("cpu")
    slots = torch.arange(top_k)
    ids = torch.where(slots < (end - start)[:, None], start[:, None] + slots, -1)
    return TopK.from_ids(ids.int(), layout, space="flat")


def asked() -> Iterator[Asked]:
    """The calls: the sizes of published models and of their parts under tensor parallelism, with few rows."""
    for name, layout in LAYOUTS.items():
        for heads in INDEX_HEADS:
            yield _scores(f"{heads} heads, {name}", layout, heads)
    for top_k in TOP_K:
        yield _topk(top_k)
    for heads, width in ATTENTION:
        yield from _sparse(f"{heads} heads, width {width}, k 2048", heads, width, 2048)
    yield from _sparse("128 heads, width 576, k 512", 128, 576, 512)
    for heads, width in ATTENTION:
        what = f"64 / {heads} heads, width {width}"
        yield _loss(f"{what}, k 2048", LAYOUTS["documents"], 64, (heads, width), 2048)
        yield _loss(f"{what}, documents", LAYOUTS["documents"], 64, (heads, width), None)
    for name, layout in LAYOUTS.items():
        for index_heads, top_k in ((32, None), (64, None), (32, 512)):
            what = f"{index_heads} / 128 heads, width 576, {name}"
            yield _loss(f"{what}, k {top_k}" if top_k else what, layout, index_heads, (128, 576), top_k)


def _scores(what: str, layout: CausalLayout, heads: int) -> Asked:
    x = _indexer(layout, heads)
    problem = problem_of("indexer_scores", x, None, layout=layout)
    return Asked(f"scores: {what}", problem, lambda backend: backend.indexer_scores(x, layout))


def _topk(top_k: int) -> Asked:
    layout = CausalLayout.packed([0, 2 * top_k]).slice_queries(2 * top_k - 4, 2 * top_k)
    x = _indexer(layout, 64)
    problem = problem_of("indexer_topk", x, None, layout=layout, top_k=top_k)
    return Asked(f"top-k: {top_k}", problem, lambda backend: backend.indexer_topk(x, layout, top_k, True))


def _sparse(what: str, heads: int, width: int, top_k: int) -> Iterator[Asked]:
    layout = LAYOUTS["documents"]
    a, topk = _attention(layout.num_q, layout.num_k, heads, width), _selection(layout, top_k)
    forward = problem_of("sparse_attention", None, a, top_k=top_k, requires_grad=True)
    yield Asked(f"attention: {what}", forward, lambda backend: backend.sparse_attention(a, topk))
    out, lse = _normal(layout.num_q, heads, 512), _normal(layout.num_q, heads, dtype=torch.float32)
    yield Asked(
        f"attention backward: {what}",
        forward.directions()[1],
        lambda backend: backend.sparse_attention_backward(a, topk, out, lse, out),
    )


def _loss(what: str, layout: CausalLayout, index_heads: int, sizes: tuple[int, int], top_k: int | None) -> Asked:
    x, a = _indexer(layout, index_heads), _attention(layout.num_q, layout.num_k, *sizes)
    topk = None if top_k is None else _selection(layout, top_k)
    lse, support = _normal(layout.num_q, sizes[0], dtype=torch.float32), "visible" if topk is None else "selected"
    rest = {"layout": layout, "top_k": top_k, "support": support, "requires_grad": True}
    problem = problem_of("indexer_loss", x, a, **rest)
    given = (x, a, layout, topk, lse, LossOptions(), True)
    return Asked(f"loss over {support} keys: {what}", problem, lambda backend: backend.indexer_loss(*given))


def compile_all(frontend: SeamFrontend, only: str) -> int:
    """Makes every call and prints what was compiled for it; the number of calls that the backend takes in vain."""
    backend = CudnnBackend(frontend.namespace())
    release, arch = frontend.version.public, frontend.gpu.arch
    contradictions, totals, begin = 0, Counter[str](), time.perf_counter()
    for one in asked():
        if only not in one.what:
            continue
        reason = backend.supports(one.problem)
        frontend.gpu.kernels.clear()
        error = _error(one, backend)
        kernels = list(frontend.gpu.kernels)
        refused = next((f"{kernel.kernel}: {kernel.refused}" for kernel in kernels if kernel.refused), error)
        wrong = reason is None and refused is not None
        contradictions += wrong
        totals.update(kernel.kernel for kernel in kernels if kernel.refused is None)
        seconds = sum(kernel.seconds for kernel in kernels)
        compiled = f"{sum(kernel.refused is None for kernel in kernels)} compiled in {seconds:.1f} s"
        took = "takes it" if reason is None else f"refuses it: {reason}"
        print(f"{'!' if wrong else ' '} {release} {arch} {one.what:58} {compiled}; the backend {took}", flush=True)
        if refused is not None:
            print(f"      {_short(refused)}", flush=True)
    kinds = ", ".join(f"{count} {kernel}" for kernel, count in sorted(totals.items()))
    print(f"{release} {arch}: {totals.total()} kernels in {time.perf_counter() - begin:.0f} s ({kinds})")
    print(f"{release} {arch}: {contradictions} calls that the backend takes do not compile")
    return contradictions


def _error(one: Asked, backend: CudnnBackend) -> str | None:
    try:
        one.run(backend)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _short(text: str) -> str:
    return " ".join(text.split())[:240]
