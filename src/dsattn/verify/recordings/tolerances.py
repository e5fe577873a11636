"""How far results of a GPU and of a stand-in may be apart, relative to the largest recorded value of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Products of 16-bit numbers are exact in fp32 and only their order differs, but a sum over heads may cancel to a small
# part of its terms, and the accumulators of matrix units keep fewer bits than an fp32 addition.
_SUM = 2.0**-12
# An exponent of up to some hundreds, in fp32, goes through the fast exponential.
_EXP = 2.0**-10
# Probabilities, and gradients of dots, enter a second product rounded to bf16, each off by up to 2^-9.
_TWICE = 2.0**-6

OF_WRAPPER: dict[str, float] = {
    "indexer_forward": _SUM,
    "indexer_top_k": _SUM,
    "indexer_forward_top_k": _SUM,
    "dense_indexer_score_recompute": _SUM,
    "sparse_indexer_score_recompute": _EXP,
    "dense_attn_score_recompute": _EXP,
    "sparse_attn_score_recompute": _EXP,
    "indexer_backward": _TWICE,
    "dense_indexer_backward": _TWICE,
    "sparse_attention_forward": _TWICE,
    "sparse_attention_backward": _TWICE,
}
"""By wrapper: what comes from the order of sums and from factors that are rounded on the way."""
# The log-sum-exp of a wrapper that rounds its probabilities afterwards.
OF_RESULT: dict[tuple[str, str], float] = {
    ("sparse_attention_forward", "lse"): _EXP,
    ("sparse_attention_forward", "lse_indexer"): _EXP,
    ("sparse_attention_forward", "max_logits"): _EXP,
}
"""By wrapper and result, in place of the wrapper's own."""
OF_DTYPE: dict[str, float] = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By dtype of the result, added: one step between its numbers at the largest value, on either side."""
OF_SUMS = 8.0
"""Times the tolerance of a value, relative to a sum of absolute values: most are smaller than the largest by more."""
OF_ARGUMENTS = 2.0**-5
"""Of sums over arguments, which are made from earlier results: twice the largest of the others."""

# Numbers that cancel to nothing in theory (keys that are all equal, rows with one key) are what rounding left of their
# terms, whose size the arguments tell.
_TERMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("indexer_backward", "d_index_q"): ("grad_loss", "sm_scale", "weights", "index_k"),
    ("indexer_backward", "d_weights"): ("grad_loss", "sm_scale", "index_q", "index_k"),
    ("indexer_backward", "d_index_k"): ("grad_loss", "sm_scale", "weights", "index_q"),
    ("sparse_attention_backward", "dq"): ("softmax_scale", "dout", "kv", "kv"),
    ("sparse_attention_backward", "dkv"): ("softmax_scale", "dout", "kv", "q"),
}
_TERMS |= {("dense_indexer_backward", name): terms for (of, name), terms in _TERMS.items() if of == "indexer_backward"}
_ROUNDING = 2.0**-9
# Losses are means over the rows of a table.
_ROWS = "attn_score"
_LEAST = 1e-30


def relative(wrapper: str, result: str, dtype: str) -> float:
    """The tolerance of a result as a share of its largest recorded value."""
    own = OF_RESULT.get((wrapper, result), OF_WRAPPER.get(wrapper, _TWICE))
    return own + OF_DTYPE.get(dtype, 0.0)


def absolute(wrapper: str, result: str, recorded: Mapping[str, Any], arguments: Mapping[str, Any]) -> float:
    """The tolerance of every value of a recorded result, given the recorded arguments."""
    terms = _TERMS.get((wrapper, result))
    floor = 0.0 if terms is None else _ROUNDING * math.prod(_size(arguments.get(name)) for name in terms)
    table = arguments.get(_ROWS)
    if isinstance(table, dict):
        floor /= max(1, math.prod(table["shape"][:-1]))
    return max(_LEAST, floor, relative(wrapper, result, recorded["dtype"]) * recorded["max"])


def _size(argument: Any) -> float:
    """The largest value of a recorded argument; of a parameter that the release does not have, 1."""
    value = argument.get("max") if isinstance(argument, dict) else argument
    return abs(value) if isinstance(value, (int, float)) else 1.0
