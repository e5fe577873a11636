"""megatron-core as released: `DSAttention` of one layer, on its native path.

The wheel is unpacked into dsattn's cache and imported in a process that is there for nothing else. `DSAttention` is
built by its own constructor for absorbed MLA: one key row of 512 + 64 for all heads, `up_v_weight` for values of 128,
one sequence, no parallelism, the sparse indexer loss with coefficient 0.01. It is called forward and backward; all of
its code runs as released. Two things stand in for what it cannot have here: an indexer that hands out the inputs of
the call in place of projections, which are timed on neither side, and a logger that does nothing in place of one that
wants a GPU. Where there is no triton, an empty module has its name during the import.

dsattn's side gets the same tensors: `dsa_attention` with the loss over the selected keys, `attach_loss`, and the same
product with `up_v_weight`. Outputs and all gradients are compared on 512 tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dsattn
from dsattn.bench.calls import Call, normal
from dsattn.bench.peers.peer import Peer, Place
from dsattn.bench.sizes import Sizes
from dsattn.integrations.megatron_module import DISTRIBUTION
from dsattn.layouts import CausalLayout
from dsattn.verify.megatron_suite import NEWEST
from dsattn.verify.megatron_suite.host import load
from dsattn.verify.megatron_suite.wheel import unpacked

_COEFFICIENT = 0.01
_VALUE = 128
_SOFTMAX_SCALE = 192**-0.5


def place() -> Place:
    """The unpacked release."""
    return Place(path=(unpacked(NEWEST),))


PEER = Peer("megatron", DISTRIBUTION, NEWEST, inspect.cleandoc(__doc__ or ""), place)


def call(sizes: Sizes, rows: int, dtype: torch.dtype, runner: str) -> Call:
    """Forward and backward of one layer, by Megatron's functions or by a backend of dsattn, on the same numbers."""
    q = normal(rows, sizes.heads, sizes.key_width, dtype=dtype, grad=True)
    kv = normal(rows, sizes.key_width, dtype=dtype, grad=True)
    index_q = normal(rows, sizes.index_heads, sizes.index_width, dtype=dtype, grad=True)
    index_k = normal(rows, sizes.index_width, dtype=dtype, grad=True)
    weights = normal(rows, sizes.index_heads, dtype=dtype, grad=True)
    up_v = (normal(sizes.heads, _VALUE, sizes.value_width, dtype=dtype) * 0.02).requires_grad_()
    d_out = normal(rows, sizes.heads * _VALUE, dtype=dtype)
    leaves = {"q": q, "kv": kv, "index_q": index_q, "index_k": index_k, "weights": weights, "up_v": up_v}
    scale = (sizes.index_heads * sizes.index_width) ** -0.5
    if runner == PEER.name:
        layer = _layer(sizes)

        def forward() -> Tensor:
            # Rows, batch, heads, width; the indexer's scale is in its weights.
            layer.indexer.made = index_q[:, None], index_k[:, None], weights[:, None] * scale
            hidden = torch.empty(rows, 1, 1, dtype=dtype, device="cpu")
            # No value and no mask tensor: both are in the key and in the kind of mask.
            out = layer(
                q[:, None], kv[:, None, None], None, None, hidden, hidden, attn_mask_type=layer.causal, up_v_weight=up_v
            )
            return out[:, 0]
    else:
        layout = CausalLayout.batched(1, rows)

        def forward() -> Tensor:
            result = dsattn.dsa_attention(
                q,
                kv,
                index_q,
                index_k,
                weights * scale,
                layout,
                top_k=sizes.top_k,
                value_dim=sizes.value_width,
                softmax_scale=_SOFTMAX_SCALE,
                loss="selected",
                coeff=_COEFFICIENT,
                backend=runner,
            )
            if result.loss is None:
                raise RuntimeError("dsa_attention gave no loss")
            out = torch.einsum("thl,hvl->thv", result.out, up_v).flatten(1)
            return dsattn.attach_loss(out, result.loss)

    def run() -> Mapping[str, Tensor]:
        out = forward()
        out.backward(d_out)
        return {"out": out, **{f"d_{name}": x.grad for name, x in leaves.items() if x.grad is not None}}

    return Call((*leaves.values(), d_out), run)


class _Indexer(torch.nn.Module):
    """Hands out the inputs of the call in place of projections."""

    made: tuple[Tensor, Tensor, Tensor]

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward_before_topk(self, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and weights."""
        return self.made


def _layer(sizes: Sizes) -> Any:
    """A `DSAttention` for absorbed MLA, in training."""
    load(None)
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType  # pyrefly: ignore[missing-import]
    from megatron.core.transformer.experimental_attention_variant import dsa  # pyrefly: ignore[missing-import]

    dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker = staticmethod(lambda **_: None)
    config = SimpleNamespace(
        kv_lora_rank=sizes.value_width,
        qk_pos_emb_head_dim=sizes.key_width - sizes.value_width,
        num_layers=1,
        sequence_parallel=False,
        calculate_per_token_loss=False,
        attention_backend=AttnBackend.unfused,
        dsa_kernel_backend="none",
        dsa_indexer_topk=sizes.top_k,
        dsa_indexer_topk_freq=1,
        dsa_indexer_skip_topk_offset=0,
        dsa_indexer_loss_coeff=_COEFFICIENT,
        dsa_indexer_use_sparse_loss=True,
        dsa_indexer_scoring_relu=True,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    layer = dsa.DSAttention(
        config=config,
        submodules=SimpleNamespace(indexer=_Indexer),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=_SOFTMAX_SCALE,
        pg_collection=SimpleNamespace(tp=alone, cp=alone),
    )
    layer.causal = AttnMaskType.causal
    return layer.train()
