"""Small random problems for the tests of operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn import CausalLayout


@dataclass
class Tensors:
    """Packed inputs of one call."""

    index_q: Tensor
    index_k: Tensor
    weights: Tensor
    q: Tensor
    kv: Tensor

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.index_q, self.index_k, self.weights

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order of `indexer_loss`."""
        return self.index_q, self.index_k, self.weights, self.q, self.kv

    def dsa(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order of `dsa_attention`."""
        return self.q, self.kv, self.index_q, self.index_k, self.weights

    def requires_grad_(self) -> Tensors:
        for x in self.all():
            x.requires_grad_()
        return self


def random_tensors(
    layout: CausalLayout, *, h_i: int = 3, d_i: int = 16, h: int = 4, d_qk: int = 24, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Normal inputs for a layout, from the global generator."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    t, s = layout.num_q, layout.num_k
    return Tensors(normal(t, h_i, d_i), normal(s, d_i), normal(t, h_i), normal(t, h, d_qk), normal(s, d_qk))


def grid_tensors(layout: CausalLayout, **sizes: Any) -> Tensors:
    """Inputs on multiples of 1/8 in [-1, 1], on which every sum is exact."""
    x = random_tensors(layout, **sizes)
    return Tensors(*(torch.randint(-8, 9, y.shape) / 8 for y in x.all()))
