"""DeepSeek sparse attention whose numbers are right on whatever kernels are installed."""

from dsattn.backends import backends
from dsattn.errors import BackendMissing, BadInput, ContractDrift, DsattnError, UnsupportedProblem
from dsattn.functional import (
    DSAOutput,
    attach_loss,
    audit,
    capture,
    dense_attention,
    dsa_attention,
    explain,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    prepare,
    sparse_attention,
)
from dsattn.layouts import CausalLayout, Segment, TopK, context_parallel_positions, gather_order

__version__ = "0.1.0"

__all__ = [
    "BackendMissing",
    "BadInput",
    "CausalLayout",
    "ContractDrift",
    "DSAOutput",
    "DsattnError",
    "Segment",
    "TopK",
    "UnsupportedProblem",
    "attach_loss",
    "audit",
    "backends",
    "capture",
    "context_parallel_positions",
    "dense_attention",
    "dsa_attention",
    "explain",
    "gather_order",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "prepare",
    "sparse_attention",
]
