"""The dense and the selecting wrappers of the frontend, called so that no default matters, on any release.

What differs between releases is read from the release's contract, and a parameter is passed where the wrapper itself
takes it. Inputs are folded tensors (see `folding`): rows [T, ...] and keys [S, ...] of one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.caller import Caller
from dsattn.backends.cudnn.contracts import Wrapper
from dsattn.backends.cudnn.folding import Fold, int32
from dsattn.backends.cudnn.sizes import (
    INDEX_WIDTH,
    KEY_WIDTHS,
    SCORE_HEADS,
    fitting_heads,
    fitting_width,
    padded,
    ready,
)
from dsattn.errors import ContractDrift


class DenseCalls(Caller):
    """The dense and the selecting wrappers."""

    def squared(self, name: str) -> bool:
        """Whether a wrapper takes no offsets, so that pieces have to be brought into a form that needs none."""
        return self.steps.squared(name, self.wrapper(name).alignment)

    def scores(self, q: Tensor, k: Tensor, w: Tensor, fold: Fold, scale: float) -> Tensor:
        """Indexer scores fp32 [T, max_keys] from bf16 or, where the release takes them, fp32 weights.

        Args:
            q: [T, h_i, d_i].
            k: [S, d_i].
            w: [T, h_i].
            fold: what the rows and keys are.
            scale: multiplies the head sum.
        """
        name = "indexer_forward"
        heads = heads_of(self.wrapper(name), q.shape[1])
        parts = self.parts(name, w)
        common = {"q": padded(q, heads=heads, width=INDEX_WIDTH), "k": padded(k, width=INDEX_WIDTH)[:, None]}
        tables = [
            self._dense(name, fold, **common, w=padded(part, heads=heads), sm_scale=scale)["scores"] for part in parts
        ]
        return sum(tables[1:], tables[0])

    def parts(self, name: str, weights: Tensor) -> tuple[Tensor, ...]:
        """The weights as the wrapper takes them."""
        taken = self.wrapper(name).dtypes_of("w")
        if str(weights.dtype).removeprefix("torch.") in taken:
            return (weights,)
        return self.steps.weight_parts(name, weights, 3)

    def dense_indexer(self, q: Tensor, k: Tensor, w: Tensor, fold: Fold, scale: float) -> tuple[Tensor, Tensor]:
        """Indexer scores fp32 [T, max_keys], -inf at unseen keys, and their log-sum-exp [T]; arguments as `scores`."""
        name = "dense_indexer_score_recompute"
        heads = heads_of(self.wrapper(name), q.shape[1])
        common = {"q": padded(q, heads=heads, width=INDEX_WIDTH), "k": padded(k, width=INDEX_WIDTH)[:, None]}
        tables = [
            self._dense(name, fold, **common, weights=padded(part, heads=heads), sm_scale=scale)["out"]
            for part in self.steps.weight_parts(name, w, 3)
        ]
        table = sum(tables[1:], tables[0])
        table = self.steps.masked(name, table, fold.seen(table.device), -torch.inf)
        return table, table.logsumexp(1)

    def dense_attention_mass(
        self, q: Tensor, kv: Tensor, lse: Tensor, fold: Fold, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention probabilities summed over the heads, fp32 [T, max_keys], 0 at unseen keys, and their sums [T].

        Args:
            q: [T, h, d_qk].
            kv: [S, d_qk].
            lse: [T, h], natural, -inf for rows without a key.
            fold: what the rows and keys are.
            scale: multiplies the dots.
        """
        name = "dense_attn_score_recompute"
        heads, width = heads_of(self.wrapper(name), q.shape[1]), width_of(q.shape[2])
        table = self._dense(
            name,
            fold,
            q=padded(q, heads=heads, width=width),
            k=padded(kv, width=width)[:, None],
            lse=self.steps.lse_of_heads(self.steps.lse_to_kernel(lse), heads),
            softmax_scale=scale,
        )["out"]
        table = self.steps.masked(name, table, fold.seen(table.device), 0.0)
        return table, table.sum(1)

    def _dense(self, name: str, fold: Fold, **tensors: Any) -> dict[str, Tensor]:
        """The tables [T, max_keys] (and sums [T]) of one dense wrapper, its rows one after the other."""
        wrapper = self.wrapper(name)
        if fold.batch is None and "cu_seqlens_q" in wrapper.host_reads:
            return self._one_by_one(name, fold, tensors)
        batched, sequences = self._sequences(name, fold, tensors["q"].device)
        rows = {key: x for key, x in tensors.items() if isinstance(x, Tensor) and key != "k"}
        given = {key: ready(_shaped(x, fold.batch) if batched else x) for key, x in rows.items()}
        given["k"] = ready(_shaped(tensors["k"], fold.batch) if batched else tensors["k"])
        options = {key: x for key, x in tensors.items() if not isinstance(x, Tensor)}
        result = self.run(name, **given, **options, **sequences, ratio=fold.ratio, qhead_per_kv_head=None)
        tables = {key: result[key] for key in wrapper.returns}
        return {key: x.reshape(fold.q_starts[-1], *x.shape[2 if batched else 1 :]) for key, x in tables.items()}

    def _one_by_one(self, name: str, fold: Fold, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """`_dense` with a launch for each piece, where a launch for all reads their lengths back to the host."""
        tables: dict[str, Tensor] = {}
        for number, piece in enumerate(fold.alone()):
            q, k = (slice(starts[number], starts[number + 1]) for starts in (fold.q_starts, fold.k_starts))
            own = {key: x[k if key == "k" else q] if isinstance(x, Tensor) else x for key, x in tensors.items()}
            for key, x in self._dense(name, piece, **own).items():
                if key not in tables:
                    shape = (fold.q_starts[-1], fold.max_keys) if x.ndim == 2 else (fold.q_starts[-1],)
                    tables[key] = x.new_full(shape, -torch.inf)
                if x.ndim == 2:
                    tables[key][q, : x.shape[1]] = x
                else:
                    tables[key][q] = x
        return tables

    def dense_backward(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        fold: Fold,
        scale: float,
        *,
        teacher: Tensor,
        scores: Tensor,
        lse: Tensor,
        row_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q and w (bf16) and of k (fp32) for row_weight * KL(teacher || softmax of the scores).

        Args:
            q: [T, h_i, d_i].
            k: [S, d_i].
            w: [T, h_i], bf16.
            fold: what the rows and keys are.
            scale: of the scores.
            teacher: [T, max_keys], 0 at unseen keys and in rows that do not count.
            scores: [T, max_keys], -inf at unseen keys, raised as `Steps.raised` says.
            lse: [T], log-sum-exp of the scores; +inf for rows that do not count.
            row_weight: one element.
        """
        name = "dense_indexer_backward"
        heads = heads_of(self.wrapper(name), q.shape[1])
        batched, sequences = self._sequences(name, fold, q.device)
        given = {
            "index_q": padded(q, heads=heads, width=INDEX_WIDTH),
            "weights": padded(w, heads=heads),
            "attn_score": self.steps.scratch(teacher),
            "attn_l1norm": torch.ones_like(lse),
            "index_score": self.steps.scratch(scores),
            "index_lse": lse,
        }
        keys = padded(k, width=INDEX_WIDTH)
        sums = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
        if batched:
            given = {key: _shaped(x, fold.batch) for key, x in given.items()}
            keys, sums = _shaped(keys, fold.batch), _shaped(sums, fold.batch)
        result = self.run(
            name,
            **{key: ready(x) for key, x in given.items()},
            **sequences,
            index_k=ready(keys),
            sm_scale=scale,
            loss_coeff=1.0,
            grad_loss=self.steps.upstream(row_weight, fold.q_starts[-1]),
            ratio=fold.ratio,
            d_index_q=None,
            d_weights=None,
            d_index_k=sums,
        )
        d_q = result["d_index_q"].reshape(-1, heads, INDEX_WIDTH)[:, : q.shape[1], : q.shape[2]]
        d_w = result["d_weights"].reshape(-1, heads)[:, : q.shape[1]]
        return d_q, d_w, result["d_index_k"].reshape(-1, INDEX_WIDTH)[:, : k.shape[1]]

    def _sequences(self, name: str, fold: Fold, device: torch.device) -> tuple[bool, dict[str, Any]]:
        """Whether the launch is a BSHD one, and the arguments that say what its sequences are.

        Raises:
            ContractDrift: offsets are needed, and the wrapper of a release that wants them takes none.
        """
        wrapper = self.wrapper(name)
        gate = wrapper.gate
        gated = gate is not None and "bshd" in gate.layouts
        batched = fold.batch is not None and (
            not gated or gate is None or gate.allows(fold.max_rows, fold.max_keys, fold.ratio)
        )
        arguments: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None}
        arguments["max_seqlen_k"] = None
        if not batched:
            arguments = {
                "cu_seqlens_q": int32(tuple(fold.q_starts), device),
                "cu_seqlens_k": int32(tuple(fold.k_starts), device),
                "max_seqlen_q": fold.max_rows,
                "max_seqlen_k": fold.max_keys,
            }
        if wrapper.alignment == "top-left" and not fold.aligned:
            if not self.namespace.accepts(name, "q_causal_offsets"):
                raise ContractDrift(
                    f"cuDNN frontend {self.namespace.version}: {name}",
                    given="no parameter q_causal_offsets",
                    needed="one: the causal offsets of this call are not zero, and what it would take is not known",
                )
            arguments["q_causal_offsets"] = self.steps.offsets(name, fold, device)
        return batched, arguments

    def top_k(self, scores: Tensor, lengths: Tensor, top_k: int) -> tuple[Tensor, Tensor, bool]:
        """The columns int32 [T, k] of the largest of each row's first `lengths` scores, in no order, -1 where unused.

        Args:
            scores: fp32 [T, n], ranked as `Steps.ranked` says.
            lengths: int32 [T], at least 1.
            top_k: how many.

        Returns:
            The columns, their scores, and whether the release itself gives ties to the lowest column.
        """
        name = "indexer_top_k"
        ties = self.namespace.accepts(name, "tie_break")
        rule = {"tie_break": 1} if ties else {}
        result = self.run(name, input_values=ready(scores), seq_lens=ready(lengths), top_k=top_k, **rule)
        return result["indices"], result["values"], ties


def heads_of(wrapper: Wrapper, heads: int, choices: tuple[int, ...] = SCORE_HEADS) -> int:
    """The heads that a call of the wrapper is padded to.

    Raises:
        ContractDrift: it takes no such number.
    """
    found = fitting_heads(heads, choices, wrapper.heads)
    if found is None:
        raise ContractDrift(wrapper.name, given=f"{heads} heads", needed=str(wrapper.heads))
    return found


def width_of(width: int) -> int:
    """The width that key rows are padded to.

    Raises:
        ContractDrift: no kernel has one.
    """
    found = fitting_width(width)
    if found is None:
        raise ContractDrift("width of a key row", given=str(width), needed=f"at most {KEY_WIDTHS[-1]}")
    return found


def _shaped(x: Tensor, batch: int | None) -> Tensor:
    """Folded rows as [batch, rows, ...]."""
    return x.unflatten(0, (batch or 1, -1))
