"""What an operator or a kernel is for. Owns the rules: the first pattern that its name holds, in this order."""

from __future__ import annotations

import re
from functools import cache

IDLE = "idle"
OTHER = "other"
COLLECTIVE = "collectives"
ENGRAM = "Engram rows"

_RULES: tuple[tuple[str, str], ...] = (
    # Kernels of this engine (engine/cuda), by their whole names: these are words that others use as well.
    (ENGRAM, r"^gate(_kernel)?$"),
    (
        "attention",
        r"^(latents?|attend|merge|score|pick|pool|keys?|select|block|allow|rope|window|upper|lower|count|take|score_rows"
        r"|pick_rows|attend_rows|unpack_windows|unpack_entries|unpack_picks|turn|codes)(_kernel)?$",
    ),
    ("experts", r"^(choose|list_items|up|down|sort|grouped_up|grouped_down|swiglu)(_kernel)?$"),
    ("hyper-connections", r"^(start|mix|finish|sum)(_kernel|_rows)?$"),
    ("matrix products", r"^(linear|(fp8|wide|bf16|plain|rows|weights)_kernel)$"),
    (
        "sampling",
        r"^(anchor|markov|best|token|digit|narrow|weigh|draw|confidence|quantize|norm|context)_kernel$",
    ),
    (ENGRAM, r"engram|row_store|rowstore"),
    (
        COLLECTIVE,
        r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|roce|symm_mem",
    ),
    ("attention", r"attention|attn|flash|mla|paged|softmax|indexer|top_?k|sparse"),
    ("experts", r"moe|expert|fused_moe|grouped_gemm|group_gemm|humming|marlin|router|gate_"),
    ("hyper-connections", r"mhc|hyper|sinkhorn|\bhc_"),
    ("quantisation", r"quant|dequant|fp8|mxfp|nvfp4|e8m0|float8"),
    (
        "matrix products",
        r"gemm|gemv|matmul|::mm\b|::bmm|addmm|baddbmm|::linear|cutlass|cublas|einsum|nvjet|xmma|wgmma",
    ),
    ("sampling", r"sampl|multinomial|argmax|logits|verify|draft|spec"),
    (
        "copies",
        r"memcpy|memset|copy_|_to_copy|aten::to\b|clone|contiguous|::cat\b|stack|gather_k|::index|fill_|zero_",
    ),
    (
        "norms and elementwise",
        r"norm|rsqrt|silu|gelu|sigmoid|rope|rotary|elementwise|vectorized|reduce|aten::|triton_",
    ),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _RULES)

CATEGORIES: tuple[str, ...] = (*dict.fromkeys(name for name, _ in _RULES), OTHER, IDLE)
"""In the order in which tables show them."""


@cache
def category_of(name: str) -> str:
    """Return what an operator or kernel of this name is for."""
    return next((category for category, pattern in _PATTERNS if pattern.search(name)), OTHER)


@cache
def is_collective(name: str) -> bool:
    """Whether it is one collective, once: of the layers of names that torch records for it, the innermost."""
    return category_of(name) == COLLECTIVE and not name.startswith(("c10d::", "record_param_comms"))


__all__ = ["CATEGORIES", "COLLECTIVE", "ENGRAM", "IDLE", "OTHER", "category_of", "is_collective"]
