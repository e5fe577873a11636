"""The wrappers over selected keys, called so that no default matters, on any release.

None of them takes cu_seqlens, and whether ids are local to a batch entry changed in 1.26: a call is folded to one batch
entry, where local and global ids are the same, or keeps its batch and says what its ids are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.cudnn.caller import Caller
from dsattn.backends.cudnn.dense_calls import heads_of, width_of
from dsattn.backends.cudnn.folding import MIN_ROWS
from dsattn.backends.cudnn.sizes import (
    ATTENTION_HEADS,
    GRID_ROWS,
    INDEX_WIDTH,
    INDEXABLE,
    VALUE_WIDTH,
    bucket,
    padded,
    processors,
    ready,
)
from dsattn.errors import ContractDrift

# Heads that any kernel of this kind takes at once.
_GROUP = 64
# Ids, teacher and student of the selected keys, each [t, slots].
Tables = tuple[Tensor, Tensor, Tensor]


class SparseCalls(Caller):
    """The wrappers over selected keys."""

    def attention_mass(
        self, q: Tensor, kv: Tensor, lse: Tensor, ids: Tensor, lengths: Tensor, scale: float, batch: int
    ) -> Tensor:
        """Attention probabilities of the selected keys, averaged over the heads, fp32 [t, k]; 0 in unused slots.

        Args:
            q: [t, h, d_qk].
            kv: [s, d_qk].
            lse: [t, h], natural, -inf for rows without a key.
            ids: int32 [t, k], flat key rows, -1 in unused slots at the end.
            lengths: int32 [t].
            scale: multiplies the dots.
            batch: entries of equal size that rows and keys may be called as.
        """
        name, width = "sparse_attn_score_recompute", width_of(q.shape[2])
        slots = self.steps.slots(name, ids.shape[1], power_of_two=self.has("sm100-score-slots"))
        padded_ids, lse = _with_slots(ids, slots, -1), self.steps.lse_to_kernel(lse)
        q, kv = padded(q, width=width), ready(padded(kv, width=width))
        group = _GROUP if self.has("sm100-score-shared-memory") else q.shape[1]
        heads = heads_of(self.wrapper(name), group)
        mass = torch.zeros(padded_ids.shape, dtype=torch.float32, device=q.device)
        for rows, entries in self._launches(name, len(q), batch, heads * width):
            for part in range(0, q.shape[1], group):
                own = slice(part, part + group)
                own_q, own_lse = q[rows, own], lse[rows, own]
                found = self._mass(
                    name,
                    padded(own_q, heads=heads),
                    kv,
                    self.steps.lse_of_heads(own_lse, heads),
                    (padded_ids[rows], lengths[rows]),
                    scale,
                    entries,
                )
                # Every call divides by its own sum: the number of its heads.
                mass[rows] += found * (own_q.shape[1] / q.shape[1])
        return mass[:, : ids.shape[1]].masked_fill(ids < 0, 0.0)

    def _mass(
        self, name: str, q: Tensor, kv: Tensor, lse: Tensor, selected: tuple[Tensor, Tensor], scale: float, entries: int
    ) -> Tensor:
        """One launch of `attention_mass`."""
        ids, lengths = selected
        count = max(len(q), MIN_ROWS)
        given = {"q_attn": q, "lse": lse}
        given = {key: padded(x, rows=count) for key, x in given.items()}
        given["topk_indices"] = F.pad(ids, (0, 0, 0, count - len(ids)), value=-1)
        given["topk_length"] = padded(lengths, rows=count)
        shaped: dict[str, Tensor | None] = {key: ready(x.unflatten(0, (entries, -1))) for key, x in given.items()}
        if self.has("sm100-attn-score-topk-length"):
            shaped["topk_length"] = None
        result = self.run(
            name,
            **shaped,
            **self._id_space(name, entries),
            k_attn=kv.unflatten(0, (entries, -1)),
            softmax_scale=scale,
            qhead_per_kv_head=None,
            out=None,
        )
        return result["target"].flatten(0, 1)[: len(q)]

    def backward_tables(self, ids: Tensor, teacher: Tensor, student: Tensor) -> Tables:
        """The tables of `indexer_backward`, with slots as it takes them.

        Args:
            ids: int32 [t, k], flat key rows; -1 in unused slots and in rows that do not count.
            teacher: [t, k], 0 where ids are -1.
            student: [t, k], 0 where ids are -1.
        """
        slots = self.steps.slots("indexer_backward", ids.shape[1])
        return _with_slots(ids, slots, -1), _with_slots(teacher, slots, 0.0), _with_slots(student, slots, 0.0)

    def indexer_backward(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        tables: Tables,
        scale: float,
        batch: int,
        row_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q and w (bf16) and of k (fp32) for row_weight * KL(teacher || student).

        Args:
            q: [t, h_i, d_i].
            k: [s, d_i].
            w: [t, h_i], bf16.
            tables: `backward_tables`, which stay as they are.
            scale: of the scores.
            batch: entries of equal size that rows and keys may be called as.
            row_weight: one element.
        """
        name = "indexer_backward"
        wrapper = self.wrapper(name)
        heads, rounded = heads_of(wrapper, q.shape[1]), bool(wrapper.recompiles)
        ids, teacher, student = tables
        keys = padded(k, width=INDEX_WIDTH, rows=bucket(len(k)) if rounded else None)
        (_, own_heads, own_width), own_keys = q.shape, k.shape
        q, w = padded(q, heads=heads, width=INDEX_WIDTH), padded(w, heads=heads)
        d_q, d_w = torch.empty_like(q), torch.empty_like(w)
        d_k = torch.zeros(keys.shape, dtype=torch.float32, device=k.device)
        for rows, entries in self._launches(name, len(q), 1 if rounded else batch, heads * INDEX_WIDTH):
            count = rows.stop - rows.start
            whole = bucket(count) if rounded else count
            given = {
                "index_q": padded(q[rows], rows=whole),
                "weights": padded(w[rows], rows=whole),
                "attn_score": self.steps.scratch(padded(teacher[rows], rows=whole)),
                "index_score": self.steps.scratch(padded(student[rows], rows=whole)),
                "topk_indices": F.pad(ids[rows], (0, 0, 0, whole - count), value=-1),
            }
            shaped = {key: ready(x.unflatten(0, (entries, -1))) for key, x in given.items()}
            result = self.run(
                name,
                **shaped,
                **self._id_space(name, entries),
                index_k=ready(keys).unflatten(0, (entries, -1)),
                sm_scale=scale,
                loss_coeff=1.0,
                grad_loss=self.steps.upstream(row_weight, whole),
                d_index_q=None,
                d_weights=None,
                d_index_k=torch.zeros_like(d_k).unflatten(0, (entries, -1)),
            )
            d_q[rows] = result["d_index_q"].flatten(0, 1)[:count]
            d_w[rows] = result["d_weights"].flatten(0, 1)[:count]
            d_k += result["d_index_k"].flatten(0, 1)
        return d_q[:, :own_heads, :own_width], d_w[:, :own_heads], d_k[: own_keys[0], : own_keys[1]]

    def attention(
        self, q: Tensor, kv: Tensor, ids: Tensor, lengths: Tensor, scale: float, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output [t, h, 512] and natural log-sum-exp fp32 [t, h], sink excluded; arguments as `attention_mass`."""
        name, width = "sparse_attention_forward", width_of(q.shape[2])
        pairs = self.wrapper(name).pairs
        group = 2 * _GROUP if q.shape[1] > _GROUP and (2 * _GROUP, width) in pairs else _GROUP
        kv = ready(padded(kv, width=width))
        outs, sums = [], []
        for part in range(0, q.shape[1], group):
            own = q[:, part : part + group]
            count = own.shape[1]
            # A head of padding has zero queries, and its result is dropped.
            extra = None if sink is None else ready(F.pad(sink[part : part + group], (0, group - count)))
            found = [
                self.run(
                    name,
                    q=ready(padded(own[rows], heads=group, width=width)),
                    kv=kv,
                    topk_idxs=ready(ids[rows]),
                    attn_sink=extra,
                    topk_length=ready(lengths[rows]),
                    softmax_scale=scale,
                )
                for rows, _ in self._launches(name, len(q), 1, group * width)
            ]
            outs.append(torch.cat([result["out"][:, :count] for result in found]))
            sums.append(torch.cat([result["lse"][:, :count] for result in found]))
        empty = lengths == 0
        lse = self.steps.lse_from_kernel(torch.cat(sums, 1), empty)
        return torch.cat(outs, 1).masked_fill(empty[:, None, None], 0), lse

    def attention_backward(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        d_out: Tensor,
        lse: Tensor,
        ids: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of q [t, h, d_qk] and kv (fp32 [s, d_qk]) for probabilities exp(logit - lse).

        Args:
            q: [t, h, d_qk].
            kv: [s, d_qk].
            out: [t, h, d_v].
            d_out: [t, h, d_v].
            lse: [t, h], natural, the sink included, -inf for rows without a key.
            ids: int32 [t, k].
            lengths: int32 [t].
            scale: multiplies the dots.
        """
        name, width = "sparse_attention_backward", width_of(q.shape[2])
        least = self.steps.tiled_heads(q.shape[1], shared=self.has("sm90-attn-bwd-h64"))
        heads = heads_of(self.wrapper(name), least, ATTENTION_HEADS)
        # What a row gets that has no key has probability 0.
        (ids, lengths), lse = self.steps.with_a_key(ids, lengths), self.steps.lse_to_kernel(lse)
        no_sink = torch.full((heads,), -torch.inf, dtype=torch.float32, device=q.device)
        d_q, d_kv = torch.empty_like(q), torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        keys = ready(padded(kv, width=width))
        for rows, _ in self._launches(name, len(q), 1, heads * width):
            result = self.run(
                name,
                q=ready(padded(q[rows], heads=heads, width=width)),
                kv=keys,
                out=ready(padded(out[rows], heads=heads, width=VALUE_WIDTH)),
                dout=ready(padded(d_out[rows], heads=heads, width=VALUE_WIDTH)),
                lse=ready(self.steps.lse_of_heads(lse[rows], heads)),
                attn_sink=no_sink,
                topk_idxs=ready(ids[rows]),
                softmax_scale=scale,
                topk_length=ready(lengths[rows]),
                dq=None,
                dkv=None,
            )
            d_q[rows] = result["dq"][:, : q.shape[1], : q.shape[2]]
            d_kv += result["dkv"][:, : kv.shape[1]]
        return d_q, d_kv

    def _launches(self, name: str, rows: int, batch: int, row_elements: int) -> Iterator[tuple[slice, int]]:
        """Row ranges of single launches, with the batch entries of each: all at once where nothing limits it."""
        wrapper = self.wrapper(name)
        most = min(wrapper.max_rows or GRID_ROWS, max(1, INDEXABLE // row_elements))
        if any(defect.id == "sm100-score-race" for defect in self.namespace.contract.defects_of(name)):
            # A block that takes no second row has nothing to overwrite.
            most = self.steps.launch_rows(most, processors())
        elif MIN_ROWS <= rows // batch <= most and batch <= GRID_ROWS and rows * row_elements <= INDEXABLE:
            yield slice(0, rows), batch
            return
        for begin in range(0, rows, most):
            yield slice(begin, min(begin + most, rows)), 1

    def _id_space(self, name: str, entries: int) -> dict[str, bool]:
        """The argument that says what flat ids are, where the wrapper has one.

        Raises:
            ContractDrift: it has none, keeps a batch, and does not take flat ids by itself.
        """
        if self.namespace.accepts(name, "topk_indices_global"):
            return self.steps.id_space(name)
        if entries > 1 and self.wrapper(name).ids != "global":
            raise ContractDrift(
                f"cuDNN frontend {self.namespace.version}: {name}",
                given="no parameter topk_indices_global",
                needed="one: ids of a batch are flat here, and what it takes them for is not known",
            )
        return {}


def _with_slots(table: Tensor, slots: int, fill: float) -> Tensor:
    """A table [t, k] with `fill` in further slots."""
    return F.pad(table, (0, slots - table.shape[1]), value=fill)
