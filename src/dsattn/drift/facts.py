"""What it means for a caller that a fact of the contract table is another one."""

from __future__ import annotations

from itertools import product
from typing import Any

from dsattn.backends.cudnn.contracts import Gate, Limits
from dsattn.backends.cudnn.contracts_table import LIMITS, NUMBERS, PARAMETERS
from dsattn.drift.findings import Effect

# Facts about a wrapper's own parameters; of PAIRS with a value for each.
PAIRS = ("dtypes", "aligned")
OF_PARAMETERS = (*PARAMETERS, *PAIRS)
CHANGED: Effect = "changed behaviour"
_COUNTS = range(1, 4097)
_LENGTHS = range(13)
_TAKES = "takes all that it took"
_REFUSES = "calls beyond the new limits, or gets them wrong"


def told(fact: str, value: Any) -> str:
    """The value of a fact in words."""
    if value is None or value in ((), {}):
        return "no limit" if fact in (*LIMITS, *NUMBERS, "gate", "pairs") else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Gate):
        return f"no more queries than keys in {' and '.join(value.layouts)}" + (", but the tail" if value.tail else "")
    if isinstance(value, dict):
        return ", ".join(name if each is True else f"{name} {told(fact, each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return "/".join(told(fact, each) for each in value)
    return str(value)


def meaning(fact: str, was: Any, now: Any) -> tuple[Effect, str]:
    """What a change of a fact does to a caller, and that in words.

    Args:
        fact: a fact of the contract table.
        was: its value in the old release; of a fact in OF_PARAMETERS, parameter -> value.
        now: its value in the new one.
    """
    if fact == "runs":
        return ("harmless", "runs now") if now else ("breaks", "no longer runs")
    if fact in (*LIMITS, *NUMBERS, "pairs", "layouts", "gate", *PAIRS, "contiguous"):
        return ("harmless", _TAKES) if _takes(fact, was, now) else ("may refuse", _REFUSES)
    if fact in ("destroys", "accumulates"):
        less = not set(now) - set(was)
        return ("harmless", "leaves them alone") if less else (CHANGED, "the caller's tensors do not keep their values")
    if fact in ("host_reads", "recompiles"):
        slower = "waits for the GPU, or compiles for every new shape"
        return ("read", slower) if set(now) - set(was) else ("harmless", "faster")
    if fact == "deterministic" and now:
        return "harmless", "can be asked for"
    if fact == "view" and not now:
        return "harmless", "the result is contiguous"
    if fact == "returns" and set(was or ()) <= set(now or ()):
        return "harmless", "returns more"
    if was in ("undefined", "unwritten", "nan"):
        return "harmless", "defined now"
    return CHANGED, "other results without an error"


def _takes(fact: str, was: Any, now: Any) -> bool:
    """Whether all that was taken is taken."""
    if fact in LIMITS:
        before, after = was or Limits(), now or Limits()
        return all(after.allows(count) for count in _COUNTS if before.allows(count))
    if fact in NUMBERS:
        return now is None or (was is not None and was <= now)
    if fact == "gate":
        return all(
            _lets(now, *asked)
            for asked in product(("bshd", "thd"), _LENGTHS, (0, 1, 3), (1, 2, 4))
            if _lets(was, *asked)
        )
    if fact == "dtypes":
        return all(name in was and set(was[name]) <= set(dtypes) for name, dtypes in now.items())
    if fact == "aligned":
        return all(bytes_ <= was.get(name, 1) for name, bytes_ in now.items())
    if fact == "contiguous":
        return set(now) <= set(was)
    return not now or (bool(was) and set(was) <= set(now))


def _lets(gate: Gate | None, layout: str, q_len: int, k_len: int, ratio: int) -> bool:
    return gate is None or layout not in gate.layouts or gate.allows(q_len, k_len, ratio)
