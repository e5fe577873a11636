"""The faults of the cuDNN calls: every step that makes them exact, left out or done as a caller of 1.25 would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.contracts import contract
from dsattn.backends.cudnn.contracts_table import parsed
from dsattn.layouts import CausalLayout
from dsattn.verify.mutants.steps import RIGHT, Place, StepFault

SCORES, SELECTION, ATTENTION = "indexer_scores", "indexer_topk", "sparse_attention"
SELECTED, VISIBLE = "indexer_loss:selected", "indexer_loss:visible"


def _by_position(name: str, wrapper: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """A call by the positions of 1.25, with scalars as tensors so that no check refuses them, and no buffers."""
    names = [parameter.name for parameter in contract(parsed("1.25.0"), "sm90").wrapper(name).parameters]
    given = [None if key.startswith("d_") else arguments[key] for key in names]
    return wrapper(*(torch.tensor([x], device="cpu") if isinstance(x, float) else x for x in given))


def _without(parameter: str, name: str, wrapper: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """A call that leaves one parameter to its default."""
    return wrapper(**{key: value for key, value in arguments.items() if key != parameter})


def _local_ids(ids: Tensor, layout: CausalLayout) -> Tensor:
    """Ids that count from the first key of their segment."""
    start, _ = layout.bounds(ids.device)
    return torch.where(ids >= 0, ids - start[:, None], -1)


def _columns_as_they_come(
    scores: Tensor, seen: Tensor, columns: Tensor, values: Tensor, used: Tensor, counts: Tensor
) -> Tensor:
    """The kernel's own selection."""
    slots = torch.where(used, columns, scores.shape[1]).long()
    return torch.zeros_like(torch.nn.functional.pad(seen, (0, 1))).scatter_(1, slots, True)[:, :-1]


def _parts(count: int) -> Callable[..., tuple[Tensor, ...]]:
    return lambda name, weights, parts: RIGHT.weight_parts(name, weights, count)


def _at(release: str, wrapper: str, check: str, case: str) -> Place:
    return Place(wrapper=wrapper, release=release, check=check, case=case)


# 1.25 has no offsets; 1.29.1 races and keeps no batch on Blackwell; from 1.30 on Hopper's gradients are right.
_HOPPER, _BLACKWELL, _OLD = "1.30.0 sm90", "1.29.1 sm100", "1.25.0 sm90"
_FORWARD, _TOP_K = "indexer_forward", "indexer_top_k"
_TEACHER, _BACKWARD = "sparse_attn_score_recompute", "indexer_backward"
_DENSE_TEACHER, _DENSE_STUDENT = "dense_attn_score_recompute", "dense_indexer_score_recompute"
_DENSE_BACKWARD = "dense_indexer_backward"
_ATTENTION, _ATTENTION_BACKWARD = "sparse_attention_forward", "sparse_attention_backward"

FAULTS: tuple[StepFault, ...] = (
    StepFault(
        name="cudnn: arguments by position",
        imitates="the order of 1.25 given to a later release: a buffer stands where the id flag or the offsets are",
        step="invoke",
        wrong=_by_position,
        places=(
            _at(_HOPPER, _BACKWARD, SELECTED, "bshd-b3"),
            _at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "packed-offset"),
        ),
    ),
    StepFault(
        name="cudnn: ratio left to its default",
        imitates="4 in one wrapper; the 1 of the others hides no key",
        step="invoke",
        wrong=partial(_without, "ratio"),
        places=(_at(_BLACKWELL, _FORWARD, SELECTION, "packed"),),
    ),
    StepFault(
        name="cudnn: sm_scale left to its default",
        imitates="1, whatever the scale of the scores is",
        step="invoke",
        wrong=partial(_without, "sm_scale"),
        places=(
            _at(_BLACKWELL, _FORWARD, SCORES, "bshd-b1"),
            _at(_BLACKWELL, _DENSE_STUDENT, VISIBLE, "bshd-b1"),
            _at(_BLACKWELL, _BACKWARD, SELECTED, "bshd-b1"),
            _at(_BLACKWELL, _DENSE_BACKWARD, VISIBLE, "bshd-b1"),
        ),
    ),
    StepFault(
        name="cudnn: softmax_scale left to its default",
        imitates="that of the width which the key rows were padded to",
        step="invoke",
        wrong=partial(_without, "softmax_scale"),
        places=(
            _at(_BLACKWELL, _ATTENTION, ATTENTION, "bshd-b1"),
            _at(_HOPPER, _ATTENTION_BACKWARD, ATTENTION, "bshd-b1"),
        ),
    ),
    StepFault(
        name="cudnn: negative scale",
        imitates="the relu's gate by the sign of scale * dot",
        step="positive",
        wrong=lambda x: x,
        places=(
            _at(_HOPPER, _BACKWARD, SELECTED, "negative-scale"),
            _at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "negative-scale"),
        ),
    ),
    StepFault(
        name="cudnn: squared form dropped",
        imitates="the last query of each sequence takes the last key for its own, where a release knows no offsets",
        step="squared",
        wrong=lambda name, alignment: False,
        places=(
            _at(_OLD, _FORWARD, SELECTION, "rect-more-queries"),
            _at(_OLD, _DENSE_TEACHER, VISIBLE, "no-gradients"),
        ),
    ),
    StepFault(
        name="cudnn: offsets dropped",
        imitates="a call as for 1.25, whose rows end with the keys; they begin with them since 1.26",
        step="offsets",
        wrong=lambda name, fold, device: None,
        places=tuple(
            _at(_BLACKWELL, wrapper, SELECTION if wrapper == _FORWARD else VISIBLE, "packed-offset")
            for wrapper in (_FORWARD, _DENSE_TEACHER, _DENSE_STUDENT, _DENSE_BACKWARD)
        ),
    ),
    StepFault(
        name="cudnn: id flag dropped",
        imitates="flat ids of a batch taken as local: every entry but the first sends no gradient since 1.26",
        step="id_space",
        wrong=lambda name: {},
        places=(
            _at(_HOPPER, _TEACHER, SELECTED, "bshd-b3"),
            _at(_HOPPER, _BACKWARD, SELECTED, "bshd-b3"),
            _at("1.31.0 sm100", _TEACHER, SELECTED, "bshd-b3"),
            _at("1.31.0 sm100", _BACKWARD, SELECTED, "bshd-b3"),
        ),
    ),
    StepFault(
        name="cudnn: fold dropped",
        imitates="ids that count from the first key of their document, in a call that is one batch entry",
        step="flat_ids",
        wrong=_local_ids,
        places=(_at(_HOPPER, _BACKWARD, SELECTED, "packed"), _at(_BLACKWELL, _BACKWARD, SELECTED, "bshd-b3")),
    ),
    StepFault(
        name="cudnn: a block takes several rows",
        imitates="the race of Blackwell's score kernels before 1.31",
        step="launch_rows",
        wrong=lambda most, resident: most,
        places=(_at(_BLACKWELL, _TEACHER, SELECTED, "packed-long"),),
    ),
    StepFault(
        name="cudnn: top-k not padded to whole blocks",
        imitates="320 slots, of which Hopper leaves the last 64 unwritten",
        step="slots",
        wrong=lambda name, top_k, power_of_two=False: max(128, -(-top_k // 64) * 64),
        places=(_at(_HOPPER, _TEACHER, SELECTED, "many-keys"),),
    ),
    StepFault(
        name="cudnn: top-k not padded to a power of two",
        imitates="384 slots, with which Blackwell's score kernels hang or mix blocks before 1.31",
        step="slots",
        wrong=lambda name, top_k, power_of_two=False: RIGHT.slots(name, top_k),
        places=(_at(_BLACKWELL, _TEACHER, SELECTED, "many-keys"),),
    ),
    StepFault(
        name="cudnn: tile of several rows",
        imitates="Hopper's attention backward before 1.27, where rows of a tile share the ids of its first",
        step="tiled_heads",
        wrong=lambda heads, shared: heads,
        places=(_at(_OLD, _ATTENTION_BACKWARD, ATTENTION, "packed"),),
    ),
    StepFault(
        name="cudnn: fill trusted",
        imitates="what the kernel leaves at masked keys: 0, -inf in a sum of probabilities, or an unmasked score",
        step="masked",
        wrong=lambda name, scores, seen, fill: scores,
        places=(
            _at(_HOPPER, _FORWARD, SCORES, "prefill-past-1"),
            _at(_OLD, _DENSE_STUDENT, VISIBLE, "no-gradients"),
            _at(_BLACKWELL, _DENSE_TEACHER, VISIBLE, "bshd-b1"),
        ),
    ),
    StepFault(
        name="cudnn: clone omitted",
        imitates="scores that the first of two calls destroyed",
        step="scratch",
        wrong=lambda buffer: buffer,
        places=(
            # The kernel takes a teacher of NaN for 0: the low part of the weights sends nothing.
            _at(_HOPPER, _BACKWARD, SELECTED, "weights-opposed"),
            _at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "bshd-b1"),
            _at(_BLACKWELL, _DENSE_BACKWARD, VISIBLE, "bshd-b1"),
        ),
    ),
    StepFault(
        name="cudnn: divisor of all rows",
        imitates="a grad_loss of 1: the mean over all rows of the call, whether they count or not",
        step="upstream",
        wrong=lambda row_weight, rows: torch.ones_like(row_weight).reshape(1),
        places=(
            _at(_HOPPER, _BACKWARD, SELECTED, "padded-right"),
            _at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "padded-right"),
        ),
    ),
    StepFault(
        name="cudnn: low weight part dropped",
        imitates="fp32 weights rounded to the bf16 that a kernel takes",
        step="weight_parts",
        wrong=_parts(1),
        places=(
            _at(_BLACKWELL, _FORWARD, SCORES, "bshd-b1"),
            _at(_HOPPER, _FORWARD, SELECTION, "bshd-b1"),
            _at(_HOPPER, _DENSE_STUDENT, VISIBLE, "bshd-b1"),
            _at(_HOPPER, _BACKWARD, SELECTED, "weights-opposed"),
            _at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "weights-opposed"),
        ),
    ),
    StepFault(
        name="cudnn: third weight part dropped",
        imitates="scores of fp32 weights in two parts, short of 2^-17 of a weight",
        step="weight_parts",
        wrong=_parts(2),
        places=(
            _at(_BLACKWELL, _FORWARD, SCORES, "weights-opposed"),
            _at(_HOPPER, _DENSE_STUDENT, VISIBLE, "unscaled"),
        ),
    ),
    StepFault(
        name="cudnn: -0 ranked below 0",
        imitates="the radix sort, which takes a score of -0 for less than one of 0",
        step="ranked",
        wrong=lambda scores: scores,
        places=(
            _at(_BLACKWELL, _TOP_K, SELECTION, "negative-weights"),
            _at("1.32.0 sm100", _TOP_K, SELECTION, "negative-weights"),
        ),
    ),
    StepFault(
        name="cudnn: tie repair off",
        imitates="any of the keys that share the last score, before 1.31",
        step="repaired",
        wrong=_columns_as_they_come,
        places=(_at(_BLACKWELL, _TOP_K, SELECTION, "all-equal"), _at(_HOPPER, _TOP_K, SELECTION, "plateau")),
    ),
    StepFault(
        name="cudnn: underflow guard off, selected keys",
        imitates="a student probability of 0, where the kernels drop the teacher's term",
        step="student",
        wrong=lambda probabilities, used: probabilities,
        places=(_at(_HOPPER, _BACKWARD, SELECTED, "wide"),),
    ),
    StepFault(
        name="cudnn: underflow guard off, visible keys",
        imitates="a score more than 100 nats below the log-sum-exp, where the kernels drop the teacher's term",
        step="raised",
        wrong=lambda scores, lse: scores.clone(),
        places=(_at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "wide"),),
    ),
    StepFault(
        name="cudnn: rows that do not count send gradients",
        imitates="a kernel that knows no row mask",
        step="silenced",
        wrong=lambda teacher, lse, counted: (teacher, lse),
        places=(_at(_HOPPER, _DENSE_BACKWARD, VISIBLE, "loss-mean-masked"),),
    ),
    StepFault(
        name="cudnn: rows without a key",
        imitates="memory that the attention backward leaves unwritten before 1.29",
        step="with_a_key",
        wrong=lambda ids, lengths: (ids, lengths),
        places=(_at("1.25.0 sm100", _ATTENTION_BACKWARD, ATTENTION, "no-key-row"),),
    ),
    StepFault(
        name="cudnn: lse not converted to the kernel",
        imitates="-inf of rows without a key, which is undefined there",
        step="lse_to_kernel",
        wrong=lambda lse: lse,
        places=(
            _at(_OLD, _ATTENTION_BACKWARD, ATTENTION, "no-key-row"),
            _at(_BLACKWELL, _ATTENTION_BACKWARD, ATTENTION, "no-key-row"),
        ),
    ),
    StepFault(
        name="cudnn: lse not converted from the kernel",
        imitates="+inf for rows without a key",
        step="lse_from_kernel",
        wrong=lambda lse, empty: lse,
        places=(_at(_BLACKWELL, _ATTENTION, ATTENTION, "no-key-row"),),
    ),
    StepFault(
        name="cudnn: heads of padding have mass",
        imitates="zeros in the log-sum-exp of heads that fill up the 64 of a kernel",
        step="lse_of_heads",
        wrong=lambda lse, heads: torch.nn.functional.pad(lse, (0, heads - lse.shape[1])),
        places=(_at(_HOPPER, _TEACHER, SELECTED, "bshd-b1"), _at(_HOPPER, _DENSE_TEACHER, VISIBLE, "bshd-b1")),
    ),
)
"""Every fault of a step; each makes one mutant of each place."""
