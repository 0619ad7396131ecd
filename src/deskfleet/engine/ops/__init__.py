"""Operators of the model: one contract per name, two implementations of it.

`reference.py` (with `quant.py` and `records.py`) is the exact one: it rounds where the publisher's kernels round and
sums in float64, so a result depends neither on the batch it was computed in, nor on the chunk, nor on the number of
ranks. `native.py` does the same, compiled; where its library cannot be loaded, the reference answers. Model code calls
`ops.<name>`; it never names an implementation. `select` chooses one for the whole process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from deskfleet.engine.ops.quant import (
    Fp4Matrix,
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
    add_round,
    apply_rope,
    block_mask,
    candidate_scores,
    compress_pairs,
    decode_fp8_rows,
    engram_gate,
    expert_activation,
    grouped_linear,
    hc_collapse,
    hc_collapse_norm,
    hc_expand,
    hc_mixes,
    hc_split,
    hc_weights,
    index_scores,
    linear,
    linear_f32,
    linear_partial,
    normed_linear,
    quantized_linear,
    quantized_linear_partial,
    rms_norm,
    route,
    routed_experts,
    shared_expert,
    sparse_attention,
    top_positions,
    write_rows,
)
from deskfleet.errors import EngineError
from deskfleet.model.limits import OperatorChoice

# Where the reference has each operator that both implement; `native` has all of them.
_SOURCES = {
    "records": ("ENTRY", "INDEX_KEY", "WINDOW"),
    "quant": ("fake_quant_fp4_e8m0",),
    "reference": (
        "add_round",
        "apply_rope",
        "candidate_scores",
        "compress_pairs",
        "decode_fp8_rows",
        "engram_gate",
        "expert_activation",
        "grouped_linear",
        "hc_collapse",
        "hc_collapse_norm",
        "hc_expand",
        "hc_mixes",
        "hc_split",
        "hc_weights",
        "index_scores",
        "linear",
        "linear_f32",
        "linear_partial",
        "normed_linear",
        "quantized_linear",
        "quantized_linear_partial",
        "rms_norm",
        "route",
        "routed_experts",
        "shared_expert",
        "sparse_attention",
        "top_positions",
        "write_rows",
    ),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """What was asked for, what answers, and with which instructions, or why not natively.

    On a GPU "cuda" is asked for, and kernels in "triton" answer (engine/backends.py).
    """

    asked: OperatorChoice | Literal["cuda"]
    got: Literal["native", "reference", "triton"]
    detail: str

    def __str__(self) -> str:
        return f"{self.got} ({self.detail}), asked for {self.asked}"


def select(asked: OperatorChoice = "auto") -> Selection:
    """Choose who computes, from now on and in the whole process.

    `auto` takes the native operators where they can be loaded. Raises EngineError when `native` cannot have them.
    """
    selection = _find(asked)
    for module, names in _SOURCES.items():
        owner = importlib.import_module(f"{__name__}.{'native' if selection.got == 'native' else module}")
        globals().update({name: getattr(owner, name) for name in names})
    return selection


def _find(asked: OperatorChoice) -> Selection:
    if asked == "reference":
        return Selection(asked, "reference", "plain torch")
    try:
        native = _load_native()
    except ImportError as error:  # no distribution deskfleet-ops, or its library cannot be loaded
        if asked == "native":
            raise EngineError(
                f"native operators: {error}",
                hint="install deskfleet-ops from a wheel, or with a C++ compiler",
            ) from error
        return Selection(asked, "reference", f"many times slower, because {error}")
    return Selection(asked, "native", native.instruction_set())


def _load_native() -> ModuleType:
    """Raises ImportError, every time, where the library is missing."""
    return importlib.import_module(f"{__name__}.native")


select()

__all__ = [
    "ENTRY",
    "INDEX_KEY",
    "WINDOW",
    "Fp4Matrix",
    "RecordFormat",
    "Selection",
    "add_round",
    "apply_rope",
    "block_mask",
    "candidate_scores",
    "compress_pairs",
    "decode_fp8_rows",
    "dequantize_fp4_weight",
    "dequantize_fp8_weight",
    "engram_gate",
    "expert_activation",
    "fake_quant_fp4_e4m3",
    "fake_quant_fp4_e8m0",
    "fake_quant_fp8",
    "grouped_linear",
    "hc_collapse",
    "hc_collapse_norm",
    "hc_expand",
    "hc_mixes",
    "hc_split",
    "hc_weights",
    "index_scores",
    "linear",
    "linear_f32",
    "linear_partial",
    "normed_linear",
    "quantize_fp4_e4m3",
    "quantize_fp4_e8m0",
    "quantize_fp8",
    "quantized_linear",
    "quantized_linear_partial",
    "rms_norm",
    "route",
    "routed_experts",
    "select",
    "shared_expert",
    "sparse_attention",
    "top_positions",
    "write_rows",
]
