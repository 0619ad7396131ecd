"""Operators of the model: one contract per name, implementations beside it.

`reference.py` is the exact one: it rounds where the publisher's kernels round and sums in float64, so a
result depends neither on the batch it was computed in, nor on the chunk, nor on the number of ranks.
Model code calls `ops.<name>`; it never names an implementation.
"""

from deskfleet.engine.ops.quant import (
    dequantize_fp4_weight,
    dequantize_fp8_weight,
    fake_quant_fp4_e4m3,
    fake_quant_fp4_e8m0,
    fake_quant_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
)
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW, RecordFormat
from deskfleet.engine.ops.reference import (
    apply_rope,
    block_mask,
    candidate_scores,
    compress_pairs,
    engram_gate,
    expert_activation,
    grouped_linear,
    hc_collapse,
    hc_expand,
    hc_mixes,
    hc_split,
    index_scores,
    linear,
    linear_partial,
    quantized_linear,
    quantized_linear_partial,
    rms_norm,
    route,
    sparse_attention,
    top_positions,
)

__all__ = [
    "ENTRY",
    "INDEX_KEY",
    "WINDOW",
    "RecordFormat",
    "apply_rope",
    "block_mask",
    "candidate_scores",
    "compress_pairs",
    "dequantize_fp4_weight",
    "dequantize_fp8_weight",
    "engram_gate",
    "expert_activation",
    "fake_quant_fp4_e4m3",
    "fake_quant_fp4_e8m0",
    "fake_quant_fp8",
    "grouped_linear",
    "hc_collapse",
    "hc_expand",
    "hc_mixes",
    "hc_split",
    "index_scores",
    "linear",
    "linear_partial",
    "quantize_fp4_e4m3",
    "quantize_fp4_e8m0",
    "quantize_fp8",
    "quantized_linear",
    "quantized_linear_partial",
    "rms_norm",
    "route",
    "sparse_attention",
    "top_positions",
]
