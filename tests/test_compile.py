"""torch.compile, checkpointing and opcheck: the operators inside what people train with."""

from __future__ import annotations

import pytest
from conftest import RunPython

COMMON = """
import torch, dsattn
from dsattn import CausalLayout, dsa_attention
torch.manual_seed(0)
torch.set_num_threads(1)

def tensors(t):
    make = lambda *shape: torch.randn(*shape, requires_grad=True)
    return make(t, 4, 24), make(t, 24), make(t, 3, 16), make(t, 16), make(t, 3)

def layer(q, kv, index_q, index_k, weights, layout):
    result = dsa_attention(
        q, kv, index_q, index_k, weights, layout,
        top_k=8, value_dim=16, softmax_scale=0.2, loss="selected", sink=torch.zeros(4),
    )
    dense = dsattn.dense_attention(q, kv, layout, value_dim=16, softmax_scale=0.2)
    warm = dsattn.indexer_loss(index_q, index_k, weights, q, kv, layout, softmax_scale=0.2)
    return result.out + dense, result.loss + warm, result.topk.indices
"""

PACKINGS = """
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(layer, backend=counter, fullgraph=True)
generator = torch.Generator().manual_seed(1)
for step in range(20):
    cuts = torch.randperm(63, generator=generator)[: 1 + step % 7].add(1).sort().values.tolist()
    layout = CausalLayout.packed([0, *cuts, 64], num_q=64 + step % 3, num_k=64 + step % 3)
    x = tensors(layout.num_q)
    results = [f(*x, layout) for f in (compiled, layer)]
    gradients = [torch.autograd.grad(out.sum() + loss, x) for out, loss, _ in results]
    assert torch.equal(results[0][2], results[1][2]), step
    for got, wanted in zip((*results[0][:2], *gradients[0]), (*results[1][:2], *gradients[1])):
        torch.testing.assert_close(got, wanted)
print("graphs", counter.frame_count)
assert counter.frame_count <= 3, counter.frame_count
"""

NUMBERS = """
from torch._dynamo.testing import CompileCounterWithBackend

q, kv, index_q, index_k, weights = tensors(40)
layout = CausalLayout.packed([0, 20, 40])
index = index_q, index_k, weights
calls = {
    "coeff": lambda x: dsattn.indexer_loss(*index, q, kv, layout, softmax_scale=0.2, coeff=x),
    "scale": lambda x: dsattn.indexer_loss(*index, q, kv, layout, softmax_scale=x, scale=x),
    "num_rows": lambda n: dsattn.indexer_loss(*index, q, kv, layout, softmax_scale=0.2, num_rows=n),
    "top_k": lambda n: dsattn.indexer_topk(*index, layout, top_k=n).indices,
    "attach": lambda x: dsattn.attach_loss(q * 2, index_q.sum(), scale=x),
}
for name, call in calls.items():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    counts = name in ("num_rows", "top_k")
    # Counts may change with every batch; a float is compiled for each value that it takes.
    for step in range(12 if counts else 3):
        value = 3 + step if counts else 0.3 + 0.1 * step
        torch.testing.assert_close(compiled(value), call(value))
    assert counter.frame_count <= (3 if counts else 4), (name, counter.frame_count)
print("numbers change")
"""

CHECKPOINT = """
from torch.utils.checkpoint import checkpoint

layout = CausalLayout.packed([0, 20, 50])
for reentrant in (True, False):
    x, y = tensors(50), tensors(50)
    expected = []
    for inputs in (x, y):
        out, loss, _ = layer(*inputs, layout)
        expected += torch.autograd.grad(out.sum() + loss, inputs)
    first = checkpoint(layer, *x, layout, use_reentrant=reentrant)
    second = checkpoint(layer, *y, layout, use_reentrant=reentrant)
    (second[0].sum() + second[1]).backward()
    (first[0].sum() + first[1]).backward()
    for leaf, wanted in zip((*x, *y), expected):
        assert torch.equal(leaf.grad, wanted)
print("checkpointed")
"""

OPCHECK = """
from dsattn.functional import custom_ops as ops

layout = CausalLayout.packed([0, 20, 50])
q, kv, index_q, index_k, weights = tensors(50)
sizes, table = [50, 50, 1], layout.table
common = dict(batch=None, requires_grad=True, backend="auto")
scoring = dict(scale=1.0, relu=True)
topk = dsattn.indexer_topk(index_q, index_k, weights, layout, top_k=5)
ids, lengths = topk.indices, topk.lengths
select = dict(sizes=sizes, top_k=5, batch=None, backend="auto", **scoring)
attend = dict(sizes=sizes, value_dim=16, softmax_scale=0.2, **common)
lossy = dict(sizes=sizes, softmax_scale=0.2, reduction="mean", num_rows=None, tp_group=None, **scoring, **common)
sink = torch.zeros(4, requires_grad=True)
x = index_q, index_k, weights
plain = [y.detach() for y in x]
calls = [
    (ops.indexer_scores, (*x, table), dict(sizes=sizes, **scoring, **common)),
    (ops.indexer_topk, (*plain, table), dict(return_scores=True, **select)),
    (ops.indexer_topk, (*plain, table), dict(return_scores=False, **select)),
    (ops.attention, (q, kv, sink, ids, lengths, None), attend),
    (ops.attention, (q, kv, None, None, None, table), attend),
]
for coeff in (0.5, 0.0):
    for where in ((ids, lengths), (None, None)):
        arguments = (*x, q.detach(), kv.detach(), table, *where, None, None, None)
        calls.append((ops.indexer_loss, arguments, dict(coeff=coeff, **lossy)))
out, lse = ops.attention(q, kv, sink, ids, lengths, None, **attend)
saved = [y.detach() for y in (torch.ones_like(out), out, lse, q, kv)]
calls.append((ops.attention_backward, (*saved, sink.detach(), ids, lengths, None), attend))
calls.append((ops.attention_backward, (*saved, None, None, None, table), attend))
calls.append((ops.indexer_scores_backward, (torch.ones(50, 50), *plain, table), dict(sizes=sizes, **scoring, **common)))
for op, arguments, keywords in calls:
    found = torch.library.opcheck(op, arguments, keywords)
    assert set(found.values()) == {"SUCCESS"}, (op, found)
print("checked", len(calls))
"""

DIRECTIONS = """
from dsattn.backends import TorchBackend
from dsattn.functional import problems

class OneWay(TorchBackend):
    def __init__(self, name, backward):
        self.name, self.backward, self.ran = name, backward, []

    def supports(self, problem):
        return None if problem.backward == self.backward else "another direction"

    def dense_attention(self, *arguments):
        self.ran.append("forward")
        return super().dense_attention(*arguments)

    def dense_attention_backward(self, *arguments):
        self.ran.append("backward")
        return super().dense_attention_backward(*arguments)

layout = CausalLayout.packed([0, 20, 50])
q, kv, *_ = tensors(50)

def attend(backend):
    return dsattn.dense_attention(q, kv, layout, value_dim=16, softmax_scale=0.2, backend=backend)

expected = torch.autograd.grad(attend("torch").cos().sum(), (q, kv))
fore, back = OneWay("fore", False), OneWay("back", True)
problems.ordered = lambda: (fore, back)
compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
found = torch.autograd.grad(compiled("auto").cos().sum(), (q, kv))
assert all(torch.equal(*pair) for pair in zip(found, expected))
assert (fore.ran, back.ran) == (["forward"], ["backward"]), (fore.ran, back.ran)
try:
    compiled("fore")
except dsattn.UnsupportedProblem as error:
    print(error)
assert fore.ran == ["forward"], fore.ran
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (PACKINGS, "graphs"),
        (NUMBERS, "numbers change"),
        (CHECKPOINT, "checkpointed"),
        (OPCHECK, "checked 12"),
        (DIRECTIONS, "the backward of dense_attention on backend 'fore'"),
    ],
    ids=lambda x: x[:12],
)
def test_in_a_fresh_interpreter(code: str, said: str, run_python: RunPython) -> None:
    done = run_python("-W", "ignore", "-c", COMMON + code)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
