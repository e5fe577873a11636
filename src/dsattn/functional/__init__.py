"""The operators: each validates its call once, chooses a backend and calls it.

Every operator takes packed tensors ([t, ...] and [s, ...]) or BSHD tensors ([b, sq, ...] and [b, sk, ...]) with any
layout of the right row counts; results have the form of the inputs. Ids are always rows of the flat key buffer.
"""

from dsattn.functional.attach import attach_loss
from dsattn.functional.attention import dense_attention, sparse_attention
from dsattn.functional.audit import audit
from dsattn.functional.capture import capture
from dsattn.functional.dsa import DSAOutput, dsa_attention
from dsattn.functional.explain import explain
from dsattn.functional.indexer import indexer_scores, indexer_topk
from dsattn.functional.loss import indexer_loss
from dsattn.functional.prepare import prepare

__all__ = [
    "DSAOutput",
    "attach_loss",
    "audit",
    "capture",
    "dense_attention",
    "dsa_attention",
    "explain",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "prepare",
    "sparse_attention",
]
