"""Sizes of a timed call, and how many flops its matrix products have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Heads, widths and slots of a call; 0 for what it does not have.

    Attributes:
        index_heads: h_i.
        index_width: d_i.
        heads: h.
        key_width: d_qk.
        value_width: d_v.
        top_k: k.
    """

    index_heads: int = 0
    index_width: int = 0
    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    top_k: int = 0

    def __str__(self) -> str:
        parts = []
        if self.index_heads:
            parts.append(f"h_i {self.index_heads} x {self.index_width}")
        if self.heads:
            parts.append(f"h {self.heads}, {self.key_width}/{self.value_width}")
        if self.top_k:
            parts.append(f"k {self.top_k}")
        return ", ".join(parts)


def visible(rows: int) -> int:
    """Pairs of a query row and a key that it sees, in one causal document."""
    return rows * (rows + 1) // 2


def selected(sizes: Sizes, rows: int) -> int:
    """Pairs of a query row and a key that it selects, in one causal document."""
    full = min(rows, sizes.top_k)
    return visible(full) + (rows - full) * sizes.top_k


def scores(sizes: Sizes, rows: int) -> int:
    """The dots of all visible pairs."""
    return 2 * sizes.index_heads * sizes.index_width * visible(rows)


def sparse(sizes: Sizes, rows: int) -> int:
    """Logits and output of the selected pairs."""
    return _attention(sizes) * selected(sizes, rows)


def sparse_backward(sizes: Sizes, rows: int) -> int:
    """Logits once more, then the gradients of probabilities, values, queries and keys, of the selected pairs."""
    return _attention_backward(sizes) * selected(sizes, rows)


def dense(sizes: Sizes, rows: int) -> int:
    """Logits and output of the visible pairs."""
    return _attention(sizes) * visible(rows)


def loss_selected(sizes: Sizes, rows: int) -> int:
    """Logits of the teacher, scores, and the gradients of index_q and index_k, of the selected pairs."""
    return _loss(sizes) * selected(sizes, rows)


def loss_visible(sizes: Sizes, rows: int) -> int:
    """As `loss_selected`, of the visible pairs."""
    return _loss(sizes) * visible(rows)


def layer_selected(sizes: Sizes, rows: int) -> int:
    """Scores, attention over the selected keys forward and backward, and the loss over the same keys."""
    return _layer(sizes, rows) + loss_selected(sizes, rows)


def layer_visible(sizes: Sizes, rows: int) -> int:
    """As `layer_selected`, with the loss over the visible keys."""
    return _layer(sizes, rows) + loss_visible(sizes, rows)


def _attention(sizes: Sizes) -> int:
    return 2 * sizes.heads * (sizes.key_width + sizes.value_width)


def _attention_backward(sizes: Sizes) -> int:
    return 2 * sizes.heads * (3 * sizes.key_width + 2 * sizes.value_width)


def _loss(sizes: Sizes) -> int:
    return 2 * sizes.heads * sizes.key_width + 6 * sizes.index_heads * sizes.index_width


def _layer(sizes: Sizes, rows: int) -> int:
    return scores(sizes, rows) + sparse(sizes, rows) + sparse_backward(sizes, rows)
