"""Whether two processes computed the same: relative differences of the results that they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsattn.errors import ContractDrift

MOST = 0.05
"""What differs by more, in the norm of a result, is other work. Rounding of results to bf16 makes 0.003."""


def differences(mine: Path, theirs: Path) -> dict[str, float]:
    """||mine - theirs|| / ||theirs|| of each result, by name.

    Args:
        mine: a file of safetensors.
        theirs: another.

    Raises:
        ContractDrift: one of them has other results, or other shapes.
    """
    from safetensors.torch import load_file

    ours, peers = load_file(mine), load_file(theirs)
    shapes = [{name: list(x.shape) for name, x in found.items()} for found in (ours, peers)]
    if shapes[0] != shapes[1]:
        raise ContractDrift("results of the peer", given=str(shapes[1]), needed=str(shapes[0]))
    found = {}
    for name, x in sorted(ours.items()):
        size = peers[name].double().norm().item()
        apart = (x.double() - peers[name].double()).norm().item()
        found[name] = apart / size if size else float(apart > 0)
    return found


def fault(found: Mapping[str, float]) -> str | None:
    """What is wrong with some differences; None where they are rounding."""
    for name, apart in found.items():
        # NaN is no rounding.
        if not apart <= MOST:
            return f"{name} differs from the peer's by {apart:.1e}"
    return None
