"""What is judged: a case with its tensors and the rows that the oracle looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dsattn.spec.cases import Case
from dsattn.spec.inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case as one suite runs it.

    Attributes:
        suite: the suite's name.
        case: sizes and options.
        make_inputs: the packed tensors on the CPU for a dtype, the same at every call.
        rows: int64, ascending: the query rows that the oracle judges; None for all. Where given, no other row may
            send a gradient (`d_out` is zero there, `row_mask` False).
        facts: what the report says of the subject beside its verdicts.
        file: the file of captured inputs that it is from, if it is.
        skipped: operators that are not run though the case has them, and why.
    """

    suite: str
    case: Case
    make_inputs: Callable[[torch.dtype], Inputs]
    rows: Tensor | None = None
    facts: Mapping[str, int | float] = field(default_factory=dict)
    file: Path | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
