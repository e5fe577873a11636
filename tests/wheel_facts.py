"""What contracts.toml says of a release beyond its signatures, as far as one can see it in the release's source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from wheels import Sources

from dsattn.backends.cudnn.contracts import ARCHS, Contract, Gate, Limits

# (file, pattern, when the pattern must be there), asked with the contracts of sm90 and sm100.
Seen = Callable[[Contract, Contract], object]
SCORES90, SCORES100 = "score_recompute/_interface_sm90.py", "score_recompute/_interface_sm100.py"
SLOTS100 = "score_recompute/sparse_score_recompute_sm100.py"
BACKWARD90, BACKWARD100 = "indexer_backward/indexer_backward_sm90.py", "indexer_backward/indexer_backward_sm100.py"
DENSE90, DENSE100 = (f"indexer_backward/dense_indexer_backward_{arch}.py" for arch in ARCHS)
TOP_K = "indexer_top_k/indexer_top_k_decode_varlen.py"


def at(name: str, fact: str, value: object, arch: str = "sm100") -> Seen:
    """The fact of the wrapper is `value`."""

    def seen(sm90: Contract, sm100: Contract) -> bool:
        return getattr((sm90 if arch == "sm90" else sm100).wrapper(name), fact) == value

    return seen


def without(defect: str) -> Seen:
    """Neither architecture has the defect."""
    return lambda sm90, sm100: not sm90.defect(defect) and not sm100.defect(defect)


def with_(defect: str) -> Seen:
    """One of them has it."""
    return lambda sm90, sm100: sm90.defect(defect) or sm100.defect(defect)


SEEN: list[tuple[str, str, Seen]] = [
    ("indexer_forward/_interface.py", r"bottom-right aligned", at("indexer_forward", "alignment", "bottom-right")),
    ("utils/runtime.py", r"def validate_q_causal_offsets", at("indexer_forward", "alignment", "top-left")),
    (
        "indexer_forward/_interface_sm90.py",
        r"if seqlen_q_dim > seqlen_k_dim \* ratio:",
        at("indexer_forward", "gate", Gate(("bshd",)), "sm90"),
    ),
    (
        "indexer_forward/_interface.py",
        r"if seqlen_q_dim > seqlen_k_dim \* ratio:",
        # 1.24 has the check in a path that its wrapper takes in THD only, where it is skipped.
        lambda _, sm100: (
            sm100.wrapper("indexer_forward").gate == Gate(("bshd",)) or sm100.version.release[:2] == (1, 24)
        ),
    ),
    ("indexer_forward/api.py", r"obj = IndexerForward\(", lambda _, sm100: sm100.version.release[:2] == (1, 24)),
    (
        "indexer_forward/_support.py",
        r"seqlen_q > seqlen_k \* ratio \+ \(ratio - 1\)",
        at("indexer_forward", "gate", Gate(("bshd",), tail=True)),
    ),
    (
        "indexer_backward/api.py",
        r"self\.max_seqlen_q > self\.max_seqlen_k \* self\.ratio",
        at("dense_indexer_backward", "gate", Gate(("bshd", "thd"))),
    ),
    (
        "indexer_forward/_interface.py",
        r"w must be bfloat16 or float32",
        lambda _, sm100: "float32" in sm100.wrapper("indexer_forward").dtypes_of("w"),
    ),
    ("indexer_forward/_interface.py", r"return out\.contiguous\(\)", at("indexer_forward", "view", False)),
    ("indexer_top_k/api.py", r"major < 10,", at("indexer_top_k", "runs", False, "sm90")),
    ("indexer_top_k/api.py", r"self\.top_k > 2048", at("indexer_top_k", "top_k", Limits(min=1, max=2048))),
    ("indexer_top_k/api.py", r"torch_stream_context", at("indexer_top_k", "stream", "caller")),
    ("indexer_top_k/api.py", r"INPUT_ALIGN", at("indexer_top_k", "aligned", ())),
    ("indexer_top_k/api.py", r"cache_key = \(\s+input_values\.device", without("cache-ignores-device")),
    (
        "indexer_top_k/indexer_top_k_varlen_util.py",
        r"2 if self\.top_k % 2 == 0 else 1",
        without("top-k-odd"),
    ),
    (TOP_K, r"int32_max = ", without("top-k-scratch-overflow")),
    (TOP_K, r"int32_max // elems_per_row \+ 1", with_("top-k-chunk-off-by-one")),
    (
        SCORES90,
        r"out = torch\.zeros\(\(batch_size, seqlen_q, seqlen_k\)",
        at("dense_attn_score_recompute", "masked", "0", "sm90"),
    ),
    (SCORES90, r"out\.(zero_\(\)|fill_)|fill_inf", at("dense_attn_score_recompute", "clears_out", True, "sm90")),
    (
        "score_recompute/dense_score_recompute_sm90.py",
        r'mOut_cur\[pos\] = Float32\(float\("-inf"\)\)',
        at("dense_indexer_score_recompute", "masked", "-inf", "sm90"),
    ),
    (SCORES100, r'out\.fill_\(float\("-inf"\)\)', at("dense_indexer_score_recompute", "masked", "-inf")),
    (
        SCORES90,
        r"out = torch\.zeros\(\(batch_size, seqlen_q, topk_max\)",
        at("sparse_attn_score_recompute", "tail", "zero", "sm90"),
    ),
    (
        SCORES90,
        r"qhead_per_kvhead == 96",
        at("sparse_attn_score_recompute", "heads", Limits(min=2, block=64, also=(96,)), "sm90"),
    ),
    (
        SCORES90,
        r"cu_seqlens_q(\.detach\(\)\.cpu\(\))?\.tolist\(\)",
        lambda sm90, _: "cu_seqlens_q" in sm90.wrapper("dense_attn_score_recompute").host_reads,
    ),
    (SLOTS100, r"NUM_SLOTS_MASK", with_("sm100-score-slots")),
    (
        "score_recompute/dense_score_recompute_sm100.py",
        r"NUM_SLOTS_MASK",
        with_("sm100-dense-score-slots"),
    ),
    (SLOTS100, r"metadata_mbar_ptr", without("sm100-score-race")),
    (SLOTS100, r"should_copy_tmem", with_("sm100-attn-score-topk-length")),
    # With topk_length the ids say nothing about which slots are used.
    (
        SLOTS100,
        r"if pos >= topK_epi:\s+rScores\[ei\] = -Float32\.inf\s+else:",
        at("sparse_indexer_score_recompute", "hole", "stale key"),
    ),
    (
        SCORES100,
        r"Indexer score requires head_dim=128",
        at("dense_indexer_score_recompute", "widths", Limits(one_of=(128,))),
    ),
    (
        "score_recompute/indexer_score_unified_sm100.py",
        r"max_q_tokens_per_tile = 8",
        at("dense_indexer_score_recompute", "heads", Limits(one_of=(16, 32, 64))),
    ),
    (SCORES100, r"228 \* 1024", with_("sm100-score-shared-memory")),
    (BACKWARD90, r"assert heads >= 64", at("indexer_backward", "heads", Limits(one_of=(64,)), "sm90")),
    (BACKWARD100, r"heads == 32 or heads >= 64", at("indexer_backward", "heads", Limits(min=64, also=(32,)))),
    (
        "indexer_backward/api.py",
        r"single-element float32",
        at("indexer_backward", "grad_loss", "one-element float32 tensor"),
    ),
    (BACKWARD90, r"DK_STAGING_BARRIER_WG0", without("sm90-dk-race")),
    (BACKWARD90, r"dIndexK\.zero_\(\)|memset_zero_async", at("indexer_backward", "accumulates", (), "sm90")),
    (BACKWARD90, r"grid=\(batch_size, seqlen, 1\)", at("indexer_backward", "max_rows", 65535, "sm90")),
    (BACKWARD90, r"grid=\(seqlen, batch_size, 1\)", at("indexer_backward", "max_batch", 65535, "sm90")),
    (BACKWARD100, r"mbarrier_init\(mbar \+ MBAR_W_LOADED, 1\)", with_("sm100-weights-race")),
    (
        BACKWARD100,
        r"key = \(batch, seqlen, seqlen_k,|compile_key_base = \(\s+batch,",
        at("indexer_backward", "recompiles", ("index_q", "index_k")),
    ),
    (DENSE90, r"_score_grad_dense_slice_inplace", at("dense_indexer_backward", "normaliser", "own", "sm90")),
    (
        DENSE90,
        r"cu_seqlens_q(\.detach\(\)\.cpu\(\))?\.tolist\(\)",
        lambda sm90, _: "cu_seqlens_q" in sm90.wrapper("dense_indexer_backward").host_reads,
    ),
    (
        "indexer_backward/api.py",
        r"grad_loss_value = float\(",
        lambda _, sm100: sm100.wrapper("dense_indexer_backward").host_reads == ("grad_loss",),
    ),
    (DENSE90, r"CLIP_LOG_MIN", at("dense_indexer_backward", "clip", "log-probability", "sm90")),
    (DENSE100, r"score_minus_lse >= ", at("dense_indexer_backward", "clip", "log-probability")),
    (DENSE100, r"grid=\(batch_size, (self\.)?max_seqlen_q, 1\)", at("dense_indexer_backward", "max_rows", 65535)),
    (DENSE100, r"MBAR_2Q_DK_FULL, final_dk_full_phase", without("sm100-dense-dq-race")),
    (
        "indexer_backward/api.py",
        r"backend_stream = None if major == 9",
        at("dense_indexer_backward", "stream", "current", "sm90"),
    ),
    (
        "sparse_attention_backward/*.py",
        r"lse must be 8-byte aligned",
        lambda _, sm100: sm100.wrapper("sparse_attention_backward").alignment_of("lse") == 8,
    ),
    (
        "sparse_attention_backward/api.py",
        r"deterministic DSA backward requires SM100",
        at("sparse_attention_backward", "deterministic", True),
    ),
    (
        "sparse_attention_backward/_interface_sm100.py",
        r"\n {12}assert dq\.is_contiguous",
        at("sparse_attention_backward", "contiguous", ("dq", "dkv")),
    ),
    (
        "sparse_attention_backward/api.py",
        r"device_capability\(q\.device\)|torch\.cuda\.device\(q\.device\)",
        without("attn-bwd-current-device"),
    ),
    (
        "sparse_attention_backward/dsa_bwd_sm100.py",
        r"if cutlass\.const_expr\(self\.same_hdim_kv\):\s+attn_sink_bh",
        with_("sm100-attn-bwd-576-sink"),
    ),
    ("sparse_attention_backward/dsa_bwd_sm90.py", r"sValid", without("sm90-attn-bwd-tail")),
    ("sparse_attention_backward/dsa_bwd_sm100.py", r"t2r_dKV23_done_barrier", without("sm100-attn-bwd-dkv-race")),
]


def seen_wrong(sources: Sources, sm90: Contract, sm100: Contract) -> Iterator[str]:
    """The entries of SEEN that a release's source contradicts."""
    for path, pattern, expected in SEEN:
        start, _, end = path.partition("*")
        names = [name.removeprefix(f"{sources.folder}/") for name in sources.texts]
        read = [path] if "*" not in path else [name for name in names if name.startswith(start) and name.endswith(end)]
        if any(re.search(pattern, sources.text(name)) for name in read) != bool(expected(sm90, sm100)):
            yield f"{path}: {pattern}"
