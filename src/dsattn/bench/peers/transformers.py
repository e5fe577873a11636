"""transformers as released: the attention of one DeepseekV32 layer with its indexer.

The release is installed into an environment of its own in dsattn's cache, on the torch of the interpreter that makes
it. `DeepseekV32Attention` has in the work `transformers` a hidden size of 256, a low rank of queries of 128, 8 heads
with keys of 32 + 32 and values of 32, and latent rows of 64 + 32; in `transformers-wide` DeepSeek-V3.2's widths of a
head (keys 128 + 64, values 128, latent rows 512 + 64) and a sixteenth of its hidden size (448), low rank (96) and
heads (8). The indexer has 8 heads of 64 and selects 256 keys. The attention implementation is sdpa, the library's own
choice. Mask and rotary tables, which a model makes once for all layers, are made before. What is timed is `forward`
and the backward of its output, with all projections. The library does not train its indexer, which runs without
gradients.

dsattn's side is the same module with the same weights: its projections, norms and rotary embeddings, and in place of
its scores, mask and attention `dsa_attention` in the absorbed form, `kv_b_proj` folded into queries and outputs. It
also trains the indexer: loss over the selected keys, `attach_loss`, gradients of the indexer's projections. Outputs
and the gradients of the input and of all weights that both sides train are compared on 512 tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dsattn
from dsattn.bench.calls import Call, normal
from dsattn.bench.environments import environment
from dsattn.bench.peers.peer import Peer, Place
from dsattn.bench.sizes import Sizes
from dsattn.layouts import CausalLayout

PACKAGE, RELEASE = "transformers", "5.24.0"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What the module has beside the sizes of the operators.

    Attributes:
        hidden: width of its input.
        query_rank: width of the low rank of queries.
        nope: width of a head's key without its rotary part.
        value: width of a head's value.
    """

    hidden: int
    query_rank: int
    nope: int
    value: int


SMALL = Layer(hidden=256, query_rank=128, nope=32, value=32)
WIDE = Layer(hidden=448, query_rank=96, nope=128, value=128)
"""DeepSeek-V3.2's widths of a head."""


def place() -> Place:
    """An environment that has the release."""
    return Place(python=environment(PACKAGE, RELEASE))


PEER = Peer("transformers", PACKAGE, RELEASE, inspect.cleandoc(__doc__ or ""), place)


def call(sizes: Sizes, rows: int, dtype: torch.dtype, runner: str, shape: Layer = SMALL) -> Call:
    """Forward and backward of the module, as it is or with its core on a backend of dsattn, on the same numbers."""
    from transformers.masking_utils import create_causal_mask  # pyrefly: ignore[missing-import]
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as released  # pyrefly: ignore[missing-import]

    config = _config(sizes, shape)
    layer = released.DeepseekV32Attention(config, 0).to(dtype).train()
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    hidden = normal(1, rows, shape.hidden, dtype=dtype, grad=True)
    d_out = normal(1, rows, shape.hidden, dtype=dtype)
    positions = torch.arange(rows, device="cpu")[None]
    rotary = released.DeepseekV32RotaryEmbedding(config)(hidden, positions)
    inputs = [*layer.parameters(), hidden, d_out, *rotary]
    if runner == PEER.name:
        mask = create_causal_mask(
            config=config,
            inputs_embeds=hidden,
            attention_mask=None,
            cache=None,
            position_ids=positions,
            allow_is_causal_skip=False,
        )
        inputs.append(mask)

        def forward() -> Tensor:
            return layer(hidden, rotary, mask, position_ids=positions)[0]
    else:
        layout = CausalLayout.batched(1, rows)

        def forward() -> Tensor:
            return _absorbed(released, layer, hidden, rotary, layout, sizes, runner)

    def run() -> Mapping[str, Tensor]:
        out = forward()
        out.backward(d_out)
        trained = {name: x.grad for name, x in layer.named_parameters() if not name.startswith("indexer.")}
        found = {"out": out, "d_hidden": hidden.grad, **{f"d_{name}": x for name, x in trained.items()}}
        return {name: x for name, x in found.items() if x is not None}

    return Call(inputs, run)


def _config(sizes: Sizes, shape: Layer) -> Any:
    from transformers import DeepseekV32Config  # pyrefly: ignore[missing-import]

    config = DeepseekV32Config(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        q_lora_rank=shape.query_rank,
        kv_lora_rank=sizes.value_width,
        qk_rope_head_dim=sizes.key_width - sizes.value_width,
        qk_nope_head_dim=shape.nope,
        v_head_dim=shape.value,
        index_n_heads=sizes.index_heads,
        index_head_dim=sizes.index_width,
        index_topk=sizes.top_k,
        mlp_layer_types=["dense"],
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return config


def _absorbed(
    released: Any,
    layer: Any,
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    layout: CausalLayout,
    sizes: Sizes,
    backend: str,
) -> Tensor:
    """The module's output by `dsa_attention`, with the indexer's loss attached."""
    rows, rope, nope = hidden.shape[1], sizes.key_width - sizes.value_width, layer.qk_nope_head_dim
    q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden))
    queries = layer.q_b_proj(q_resid).view(1, rows, sizes.heads, -1).transpose(1, 2)
    q_nope, q_rope = queries.split([nope, rope], dim=-1)
    latent, k_rope = layer.kv_a_proj_with_mqa(hidden).split([sizes.value_width, rope], dim=-1)
    latent = layer.kv_a_layernorm(latent)[0]
    q_rope, k_rope = released.apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *rotary)
    # Its rows are, head by head, what makes keys and what makes values of a latent row.
    keys, values = layer.kv_b_proj.weight.unflatten(0, (sizes.heads, -1)).tensor_split([nope], dim=1)
    absorbed = torch.einsum("htn,hnl->thl", q_nope[0], keys)
    index_q, index_k, weights = _indexer(released, layer.indexer, hidden.detach(), q_resid.detach(), rotary, rope)
    result = dsattn.dsa_attention(
        torch.cat([absorbed, q_rope[0].transpose(0, 1)], -1),
        torch.cat([latent, k_rope[0, 0]], -1),
        index_q,
        index_k,
        weights,
        layout,
        top_k=sizes.top_k,
        value_dim=sizes.value_width,
        softmax_scale=layer.scaling,
        scale=layer.indexer.softmax_scale,
        loss="selected",
        backend=backend,
    )
    if result.loss is None:
        raise RuntimeError("dsa_attention gave no loss")
    out = torch.einsum("thl,hvl->thv", result.out, values).flatten(1)
    return dsattn.attach_loss(layer.o_proj(out)[None], result.loss)


def _indexer(
    released: Any, indexer: Any, hidden: Tensor, q_resid: Tensor, rotary: tuple[Tensor, Tensor], rope: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What the module's indexer computes before its scores; the main model gets no gradient of it."""
    queries = indexer.wq_b(q_resid).view(1, hidden.shape[1], indexer.n_heads, -1)
    keys = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    q_rope, k_rope = released.apply_rotary_pos_emb(queries[..., :rope], keys[..., :rope], *rotary, unsqueeze_dim=2)
    index_q, index_k = torch.cat([q_rope, queries[..., rope:]], -1), torch.cat([k_rope, keys[..., rope:]], -1)
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return index_q[0], index_k[0, :, 0], weights[0]
