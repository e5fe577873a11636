"""The selection of a top-k, and every conversion between id spaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts.causal import CausalLayout
from dsattn.layouts.checks import Space, one_of, whole_number
from dsattn.layouts.ids_checks import (
    check_form,
    check_has_values,
    check_tensor,
    check_values,
    entry_name,
    first_bad_rows,
)

SPACES = ("flat", "local", "seq_major")
_UNUSED = 2**31 - 1  # sorts behind every key row


@dataclass(frozen=True, eq=False, repr=False)
class TopK:
    """The keys that each query row selected, as rows of the flat key buffer.

    Built by a caller it is validated, which waits for the device once; those that dsattn makes are trusted. Editing
    the tensors of a TopK ends that trust: build a new one.

    Semantics:
        indices are key rows 0 to num_k - 1 (for BSHD b_index * sk + j), strictly ascending in each row, with -1 in the
        unused slots at the end. A row that selects nothing has length 0. A selection carries no gradient.

    Attributes:
        indices: int32 [t, k] or [b, sq, k].
        lengths: number of used slots of each row, int32 [t] or [b, sq].
        scores: score of each slot, -inf in unused ones; fp32 (fp64 for fp64 inputs) as indices, or None.
        num_q: query rows of the call: t, or b * sq.
        num_k: key rows of the call.

    Raises:
        BadInput: a field of another shape, dtype or device, or the first row that breaks a rule above.
    """

    indices: Int32[Tensor, "*rows k"]
    lengths: Int32[Tensor, "*rows"]
    scores: Float[Tensor, "*rows k"] | None = None
    num_q: int = field(kw_only=True)
    num_k: int = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_q", whole_number("num_q", self.num_q))
        object.__setattr__(self, "num_k", whole_number("num_k", self.num_k))
        check_form(self.indices, self.lengths, self.scores)
        if self.lengths.numel() != self.num_q:
            given = f"{self.num_q}, with indices of shape {list(self.indices.shape)}"
            raise BadInput("num_q", given=given, needed=f"{self.lengths.numel()}, the rows of indices")
        check_values(self.indices, self.lengths, self.scores, self.num_k)

    @classmethod
    def _trusted(cls, indices: Tensor, lengths: Tensor, scores: Tensor | None, num_q: int, num_k: int) -> TopK:
        """The selection of tensors that are known to keep the rules: nothing is checked, no device is waited for."""
        topk = object.__new__(cls)
        object.__setattr__(topk, "indices", indices)
        object.__setattr__(topk, "lengths", lengths)
        object.__setattr__(topk, "scores", scores)
        object.__setattr__(topk, "num_q", num_q)
        object.__setattr__(topk, "num_k", num_k)
        return topk

    @classmethod
    def from_ids(cls, ids: Shaped[Tensor, "*rows k"], layout: CausalLayout, *, space: Space = "flat") -> TopK:
        """The selection that the ids of another library mean: sorted, compacted and validated.

        Waits for the device once, and where the layout's windows or key ranges have to be copied to it.

        Semantics:
            Any order. -1 and every id out of range is an unused slot: outside [0, num_k) for "flat" and "seq_major",
            outside the key range of the row's segment for "local". A key that the row cannot see is refused and not
            dropped, since it mostly means another id space.

        Args:
            ids: int32 or int64, [t, k] or [b, sq, k].
            layout: who sees whom in the call that the ids belong to.
            space: "flat": key rows; "local": positions inside the key range of the row's segment; "seq_major":
                j * b + b_index, for ids of shape [b, sq, k].

        Returns:
            The selection, with the shape of ids and no scores.

        Raises:
            BadInput: ids of another form, a duplicate, or a key outside the row's window.
        """
        one_of("space", space, SPACES)
        _check_layout(layout)
        check_tensor("ids", ids, (torch.int32, torch.int64), ("[t, k]", "[b, sq, k]"))
        check_has_values("ids", ids)
        if ids.shape[:-1].numel() != layout.num_q:
            needed = f"{layout.num_q} rows, as the layout has"
            raise BadInput("ids", given=f"shape {list(ids.shape)}", needed=needed)
        keys = _to_flat(ids, layout, space).flatten(0, -2).sort(dim=-1).values
        used = keys != _UNUSED
        _check_keys(keys, used, layout, space, ids.shape)
        indices = keys.masked_fill(~used, -1).reshape(ids.shape)
        lengths = used.sum(-1, dtype=torch.int32).reshape(ids.shape[:-1])
        return cls._trusted(indices, lengths, None, layout.num_q, layout.num_k)

    def to_ids(self, layout: CausalLayout, *, space: Space = "flat") -> Int32[Tensor, "*rows k"]:
        """The selection as ids of another space; a new tensor of the shape of indices, -1 in unused slots.

        "local" waits for the device once, to check that the layout is the one that the selection was made for.

        Args:
            layout: who sees whom in the call that the selection belongs to.
            space: as in `from_ids`; "seq_major" needs indices of shape [b, sq, k].

        Returns:
            The ids.

        Raises:
            BadInput: a layout of other sizes, or one whose segments do not hold the selected keys.
        """
        one_of("space", space, SPACES)
        _check_layout(layout)
        if (layout.num_q, layout.num_k) != (self.num_q, self.num_k):
            given = f"num_q {layout.num_q} and num_k {layout.num_k}"
            raise BadInput("layout", given=given, needed=f"num_q {self.num_q} and num_k {self.num_k}, as the TopK has")
        if space == "flat":
            return self.indices.clone()
        if space == "seq_major":
            b, sk = _batch_sizes("indices", self.indices, layout)
            ids = self.indices % max(sk, 1) * b + self.indices // max(sk, 1)
            return torch.where(self.indices < 0, -1, ids)
        start, length = _row_ranges(self.indices, layout)
        ids = self.indices - start
        used = self.indices >= 0
        outside = used & ((ids < 0) | (ids >= length))
        (bad,) = first_bad_rows([outside.flatten(0, -2)])
        if bad is not None:
            raise BadInput(
                "layout",
                given=f"segments that do not hold the keys of {entry_name('indices', bad, None, self.indices.shape)}",
                needed="the layout that the selection was made for",
            )
        return torch.where(used, ids, -1)

    def to(self, device: torch.device | str) -> TopK:
        """The same selection on another device.

        Args:
            device: where the tensors go.

        Returns:
            The selection.
        """
        scores = None if self.scores is None else self.scores.to(device)
        return self._trusted(self.indices.to(device), self.lengths.to(device), scores, self.num_q, self.num_k)

    def _packed(self) -> TopK:
        """The same selection with packed shapes [t, k] and [t], not checked again."""
        return self._shaped((self.num_q,))

    def _batched(self, b: int, sq: int | None = None) -> TopK:
        """The same selection with BSHD shapes [b, sq, k] and [b, sq], not checked again."""
        return self._shaped((b, self.num_q // max(b, 1) if sq is None else sq))

    def _shaped(self, rows: tuple[int, ...]) -> TopK:
        shape = (*rows, self.indices.shape[-1])
        scores = None if self.scores is None else self.scores.reshape(shape)
        return self._trusted(self.indices.reshape(shape), self.lengths.reshape(rows), scores, self.num_q, self.num_k)

    def __repr__(self) -> str:
        scores = "no scores" if self.scores is None else f"scores {self.scores.dtype}"
        sizes = f"num_q={self.num_q}, num_k={self.num_k}"
        return f"TopK({list(self.indices.shape)} on {self.indices.device}, {scores}, {sizes})"


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, CausalLayout):
        raise BadInput("layout", given=type(layout).__name__, needed="a dsattn.CausalLayout")


def _check_keys(keys: Tensor, used: Tensor, layout: CausalLayout, space: Space, shape: torch.Size) -> None:
    """Refuses sorted key rows [t, k] that a row cannot see or that it has twice; waits for the device once."""
    start, end = (bound[:, None] for bound in layout._shared_bounds(keys.device))
    twice = used[:, 1:] & (keys[:, 1:] == keys[:, :-1])
    unseen = used & ((keys < start) | (keys >= end))
    bad_twice, bad_unseen = first_bad_rows([twice, unseen])
    if bad_unseen is not None:
        key = int(keys[bad_unseen][unseen[bad_unseen]][0])
        window = f"[{int(start[bad_unseen])}, {int(end[bad_unseen])})"
        raise BadInput(
            entry_name("ids", bad_unseen, None, shape),
            given=f"an id that means key row {key} in space {space!r}",
            needed=f"key rows in {window}, the window of query row {bad_unseen}",
            fix="check space=, and that the layout is that of the ids",
        )
    if bad_twice is not None:
        key = int(keys[bad_twice, 1:][twice[bad_twice]][0])
        what = entry_name("ids", bad_twice, None, shape)
        raise BadInput(what, given=f"key row {key} twice (space {space!r})", needed="no duplicates in a row")


def _to_flat(ids: Tensor, layout: CausalLayout, space: Space) -> Tensor:
    """The ids as int32 key rows, with _UNUSED in unused slots."""
    if space == "local":
        start, length = _row_ranges(ids, layout)
        used = (ids >= 0) & (ids < length)
        keys = ids + start
    else:
        used = (ids >= 0) & (ids < layout.num_k)
        keys = ids
        if space == "seq_major":
            b, sk = _batch_sizes("ids", ids, layout)
            keys = ids % max(b, 1) * sk + ids // max(b, 1)
    # Out-of-range ids may have wrapped around above; they are masked here.
    return torch.where(used, keys, _UNUSED).to(torch.int32)


def _batch_sizes(what: str, ids: Tensor, layout: CausalLayout) -> tuple[int, int]:
    """Sizes b and sk of a BSHD call."""
    if ids.ndim != 3:
        needed = "shape [b, sq, k] for space 'seq_major', which interleaves the sequences"
        raise BadInput(what, given=f"shape {list(ids.shape)}", needed=needed)
    b = ids.shape[0]
    if layout.num_k % max(b, 1):
        raise BadInput("num_k", given=layout.num_k, needed=f"a multiple of b = {b} for space 'seq_major'")
    return b, layout.num_k // max(b, 1)


def _row_ranges(ids: Tensor, layout: CausalLayout) -> tuple[Tensor, Tensor]:
    """First key row and number of keys of each row's segment, shaped to meet ids and in their dtype."""
    start, length = (part.to(ids.device, ids.dtype) for part in layout._key_ranges())
    return start.reshape(*ids.shape[:-1], 1), length.reshape(*ids.shape[:-1], 1)
