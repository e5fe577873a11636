"""One call of a wrapper of the frontend: by keywords, with nothing left to a default that a release may change."""

from __future__ import annotations

from typing import Any

import torch

from dsattn.backends.cudnn.contracts import Wrapper
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.steps import Steps
from dsattn.errors import ContractDrift

# Parameters of some releases only, whose default another release may change: passed wherever they are taken.
SETTLED: dict[str, dict[str, Any]] = {
    "indexer_forward": {"precision": "bf16", "return_lse": False},
    "indexer_top_k": {"next_n": 1, "return_val": True, "deterministic": False},
    "dense_indexer_score_recompute": {"precision": "bf16"},
    "dense_attn_score_recompute": {"precision": "bf16"},
    "indexer_backward": {"block_I": 128, "backend": "default", "deterministic": False},
    "dense_indexer_backward": {"block_I": 128},
    "sparse_attention_backward": {"deterministic": False, "q_cluster_mode": "off"},
    "sparse_attention_forward": {"indexer_topk": 0},
}


class Caller:
    """Calls of one release on one architecture.

    Args:
        namespace: the wrappers and their contract.
        steps: the guarantees; a mutant gives others.
    """

    def __init__(self, namespace: Namespace, steps: Steps | None = None) -> None:
        self.namespace, self.steps = namespace, steps or Steps()

    def wrapper(self, name: str) -> Wrapper:
        """What the release does in a wrapper."""
        return self.namespace.contract.wrapper(name)

    def has(self, defect: str) -> bool:
        """Whether the release has a defect here."""
        return self.namespace.contract.defect(defect) is not None

    def run(self, name: str, **arguments: Any) -> Any:
        """Calls a wrapper on the current stream.

        Raises:
            ContractDrift: the wrapper is gone, or refuses a call that its contract takes.
        """
        wrapper = self.namespace.get(name)
        release = f"cuDNN frontend {self.namespace.version} on {self.namespace.arch}: {name}"
        if wrapper is None:
            raise ContractDrift(release, given="no such wrapper", needed="one, as its contract says")
        settled = {key: value for key, value in SETTLED.get(name, {}).items() if self.namespace.accepts(name, key)}
        try:
            return self.steps.invoke(name, wrapper, {**settled, **arguments, "stream": None})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise ContractDrift(release, given=told, needed="a call that its contract takes") from error
