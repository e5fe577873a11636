"""Whether a Megatron says itself what the frontend's defaults no longer say: its functions are tried, not its version.

They run on a few zeros, in a copy of their namespace that holds a recorder in place of the frontend. Nothing of
Megatron's is changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dsattn.integrations.megatron_module import HELD, LOADER, MANY_DOCUMENTS, ONE_DOCUMENT, Names

_HELPERS = ("_wrapper_accepts_kwarg", "_call_sparse_indexer_backward")
"""Functions of a repaired Megatron."""
_BACKWARD = "_run_sparse_indexer_backward"


def is_fixed(names: Names) -> bool:
    """Whether Megatron's functions name the id space and the offsets in calls that need them.

    Args:
        names: the namespace of its kernels.

    Semantics:
        It is tried with a sparse backward of two batch entries, and with the selections of one and of many documents on
        a context-parallel rank. Where these cannot be called, since functions are others than in release 0.19, the
        helpers that a repaired Megatron has decide.
    """
    recorder = _Recorder()
    copied = _copied(names, recorder)
    try:
        with torch.no_grad(), torch.device("cpu"):
            for call in _calls(copied):
                recorder.said.clear()
                call()
                if not recorder.said or not all(recorder.said):
                    return False
    except Exception:
        return all(callable(names.get(name)) for name in _HELPERS)
    return True


class _Recorder:
    """The wrappers that are tried, with the arguments of release 1.26; `said`: whether calls named what they had to."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def indexer_backward_wrapper(
        self,
        index_q: Tensor,
        weights: Tensor,
        index_k: Tensor,
        attn_score: Tensor,
        index_score: Tensor,
        topk_indices: Tensor,
        sm_scale: float = 1.0,
        loss_coeff: float = 1.0,
        grad_loss: Any = 1.0,
        block_I: int = 128,
        topk_indices_global: bool | None = None,
    ) -> dict[str, Tensor]:
        """Takes note of the id space."""
        self.said.append(topk_indices_global is not None)
        return {"d_index_q": index_q, "d_weights": weights, "d_index_k": index_k}

    def indexer_forward_wrapper(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        ratio: int = 4,
        sm_scale: float = 1.0,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        q_causal_offsets: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Takes note of the offsets where they matter."""
        packed = cu_seqlens_q is not None
        if packed or q.shape[1] != k.shape[1]:
            self.said.append(q_causal_offsets is not None)
        columns = (max_seqlen_k or 0) if packed else k.shape[1]
        return {"scores": torch.zeros(*q.shape[:-2], columns)}

    def indexer_top_k_wrapper(
        self, input_values: Tensor, seq_lens: Tensor, top_k: int, next_n: int = 1, return_val: bool = True
    ) -> dict[str, Tensor]:
        """The first keys."""
        shape = (input_values.shape[0], top_k)
        return {"indices": torch.zeros(shape, dtype=torch.int32), "values": torch.zeros(shape)}


def _copied(names: Names, frontend: Any) -> Names:
    """A copy of a namespace whose functions look up their globals in it, and find the frontend given."""
    copied = dict(names)
    for name, value in names.items():
        if isinstance(value, FunctionType) and value.__globals__ is names:
            own = FunctionType(value.__code__, copied, value.__name__, value.__defaults__, value.__closure__)
            own.__kwdefaults__ = value.__kwdefaults__
            copied[name] = own
    copied[HELD], copied[LOADER] = frontend, lambda: None
    return copied


def _calls(names: Names) -> Iterator[Callable[[], Any]]:
    """Calls in which a default would be wrong: rank 0 of two, documents of four rows and of eight keys in all."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    scores, ids = torch.zeros(2, 1, 128), torch.zeros(2, 1, 128, dtype=torch.int32)
    yield lambda: names[_BACKWARD](
        zeros(2, 1, 64, 8),
        zeros(2, 1, 64),
        zeros(2, 4, 8),
        scores,
        scores.clone(),
        ids,
        loss_coeff=1.0,
        grad_loss=torch.ones(()),
        block_i=128,
    )
    yield lambda: names[ONE_DOCUMENT](zeros(1, 2, 1, 8), zeros(1, 4, 1, 8), zeros(1, 2, 1), 1, False, 0)
    starts, ends = torch.tensor([0, 0, 4, 4]), torch.tensor([1, 4, 5, 8])
    lengths = torch.tensor([0, 4, 8], dtype=torch.int32)
    yield lambda: names[MANY_DOCUMENTS](
        zeros(1, 4, 1, 8), zeros(1, 8, 1, 8), zeros(1, 4, 1), 1, False, starts, ends, lengths, lengths, 4, 4, 2, 0
    )
