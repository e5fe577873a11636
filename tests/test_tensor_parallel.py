"""The loss with heads spread over tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

from conftest import RunPython

RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import dsattn
from dsattn import CausalLayout, indexer_loss, indexer_topk
from dsattn.ops import blocks

# Many blocks, whose rows must not depend on how many heads a rank has.
blocks._CPU_BYTES = 60_000


def rank_main(rank, file, ranks, with_group):
    torch.set_num_threads(2)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layout = CausalLayout.packed([0, 150, 400])
    index_q, index_k, weights = (torch.randn(400, *shape, requires_grad=True) for shape in ((3, 16), (16,), (3,)))
    q, kv = torch.randn(400, 4, 24), torch.randn(400, 24)
    topk = indexer_topk(index_q, index_k, weights, layout, top_k=20)
    mine = q.split([1, 3], dim=1)[rank]
    group = dist.group.WORLD if with_group else None
    for selection in (topk, None):
        # Every rank has to call the group in the same order, whatever its threads do.
        options = dict(softmax_scale=0.2, topk=selection)
        whole = indexer_loss(index_q, index_k, weights, q, kv, layout, **options)
        part = indexer_loss(index_q, index_k, weights, mine, kv, layout, tp_group=group, **options)
        torch.testing.assert_close(part, whole)
        leaves = index_q, index_k, weights
        for got, wanted in zip(torch.autograd.grad(part, leaves), torch.autograd.grad(whole, leaves)):
            torch.testing.assert_close(got, wanted)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, (sys.argv[1], 2, sys.argv[2] == "group"), nprocs=2, start_method="fork")
    print("equal")
"""


def test_ranks_with_a_part_of_the_heads_each_have_the_loss_and_gradients_of_all(
    run_python: RunPython, tmp_path: Path
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_python("-W", "ignore", str(script), str(tmp_path / "store"), "group")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal\n")


def test_without_the_group_each_rank_teaches_by_its_own_heads(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_python("-W", "ignore", str(script), str(tmp_path / "store"), "no group")
    assert done.returncode != 0
    assert "not close" in done.stderr
