"""Packages that are built like the peers and compute the same by plain dense products, for tests without a network."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsattn import CausalLayout, attach_loss, indexer_loss, indexer_topk


def keep(indices: Tensor, keys: int) -> Tensor:
    """Which key each row selects, as a table."""
    table = torch.zeros(len(indices), keys + 1, dtype=torch.bool)
    return table.scatter_(1, indices.long().where(indices >= 0, keys), True)[:, :keys]


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __path__=[])
    return made


class Logger:
    """Wants a GPU, as the released one does."""

    @staticmethod
    def save_loss_to_tracker(**_: Any) -> None:
        raise RuntimeError("no GPU")


class DSAttention(nn.Module):
    """megatron-core's, dense: rows, batch, heads, width."""

    def __init__(self, config: Any, submodules: Any, pg_collection: Any, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.config, self.softmax_scale = config, softmax_scale
        self.indexer = submodules.indexer(config=config, pg_collection=pg_collection)

    def forward(self, query: Tensor, key: Tensor, value: None, mask: None, *inputs: Tensor, **rest: Any) -> Tensor:
        assert (value, mask, rest["attn_mask_type"]) == (None, None, "causal")
        assert self.training
        Logger.save_loss_to_tracker(loss=0)
        config, rows = self.config, query.shape[0]
        q, k, weights = (y[:, 0] for y in self.indexer.forward_before_topk(*inputs, None))
        layout = CausalLayout.batched(1, rows)
        topk = indexer_topk(q, k, weights, layout, top_k=config.dsa_indexer_topk, backend="torch")
        table = keep(topk.indices, rows)
        kv = key[:, 0, 0]
        logits = torch.einsum("thd,sd->hts", query[:, 0], kv) * self.softmax_scale
        shares = logits.masked_fill(~table, -torch.inf).softmax(-1)
        out = torch.einsum("hts,sl,hvl->thv", shares, kv[:, : config.kv_lora_rank], rest["up_v_weight"])
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "coeff": config.dsa_indexer_loss_coeff}
        loss = indexer_loss(q, k, weights, query[:, 0], kv, layout, topk=topk, backend="torch", **options)
        return attach_loss(out.flatten(1), loss)[:, None]


class Rotary(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.qk_rope_head_dim

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        speeds = 100.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = positions[..., None] * torch.cat([speeds, speeds])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embedding of halves."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn(q), turn(k)


def turned_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of neighbours."""
    halves = [torch.cat([x[..., 0::2], x[..., 1::2]], -1) for x in (q, k)]
    return turned(halves[0], halves[1], cos, sin)


class Indexer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.top_k, self.softmax_scale = config.index_topk, self.head_dim**-0.5
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, q_resid: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, -1))
        k = self.k_norm(self.wk(hidden)).unsqueeze(2)
        q_turned, k_turned = turned(q[..., : self.rope], k[..., : self.rope], *rotary, unsqueeze_dim=2)
        q, k = torch.cat([q_turned, q[..., self.rope :]], -1), torch.cat([k_turned, k[..., self.rope :]], -1)
        dots = (torch.einsum("bthd,bsd->bths", q, k[:, :, 0]) * self.softmax_scale).relu()
        scores = torch.einsum("bths,bth->bts", dots, self.weights_proj(hidden) * self.n_heads**-0.5)
        return scores.masked_fill(~mask, -torch.inf).topk(min(self.top_k, scores.shape[-1])).indices


class DeepseekV32Attention(nn.Module):
    """transformers', with keys and values of every head expanded and a table of rows x keys."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        assert config._attn_implementation == "sdpa"
        self.config, self.heads = config, config.num_attention_heads
        self.qk_nope_head_dim = nope = config.qk_nope_head_dim
        self.scaling = (nope + config.qk_rope_head_dim) ** -0.5
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * (nope + config.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, self.heads * (nope + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, position_ids: Tensor) -> Any:
        config, rope = self.config, self.config.qk_rope_head_dim
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_resid).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split([self.qk_nope_head_dim, config.v_head_dim], -1)
        q_rope, k_rope = turned_pairs(q[..., self.qk_nope_head_dim :], k_rope[:, None], *rotary)
        q = torch.cat([q[..., : self.qk_nope_head_dim], q_rope], -1)
        k = torch.cat([k, k_rope.expand(-1, self.heads, -1, -1)], -1)
        table = keep(self.indexer(hidden, q_resid, rotary, mask[:, 0])[0], hidden.shape[1]) & mask
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=table, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in in the place of megatron-core."""
    monkeypatch.setattr("dsattn.bench.peers.megatron.load", lambda _: None)
    base = "megatron.core.transformer"
    dsa = module("dsa", DSAttention=DSAttention, DSAIndexerLossLoggingHelper=Logger)
    enums = module(
        "enums", AttnMaskType=SimpleNamespace(causal="causal"), AttnBackend=SimpleNamespace(unfused="unfused")
    )
    named = {f"{base}.enums": enums, f"{base}.experimental_attention_variant": module("variant", dsa=dsa)}
    for name in ("megatron", "megatron.core", base):
        named[name] = module(name)
    for name, made in named.items():
        monkeypatch.setitem(sys.modules, name, made)


def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in in the place of transformers."""

    def mask(config: Any, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return torch.ones(1, 1, *(inputs_embeds.shape[1],) * 2, dtype=torch.bool).tril()

    modeling = module(
        "modeling_deepseek_v32",
        DeepseekV32Attention=DeepseekV32Attention,
        DeepseekV32RotaryEmbedding=Rotary,
        apply_rotary_pos_emb=turned,
        apply_rotary_pos_emb_interleave=turned_pairs,
    )
    named = {
        "transformers": module("transformers", DeepseekV32Config=SimpleNamespace),
        "transformers.masking_utils": module("masking_utils", create_causal_mask=mask),
        "transformers.models": module("models"),
        "transformers.models.deepseek_v32": module("deepseek_v32", modeling_deepseek_v32=modeling),
    }
    for name, made in named.items():
        monkeypatch.setitem(sys.modules, name, made)
