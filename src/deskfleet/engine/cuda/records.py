"""Cached records in registers: device functions that load and decode them (formats: engine/ops/records.py).

The even and odd elements of a record lie in the low and high half of its bytes or words; they are kept apart, because
no sum over them cares. Loading and decoding are two functions, so that a kernel can do something else in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWO_120 = tl.constexpr(1.329227995784916e36)
_TWO_126 = tl.constexpr(8.507059173023462e37)


def _fp8(out: str, sign: str, value: str) -> str:
    """PTX: codes whose bytes lie where `sign` and `value` say, as bf16 times the scales $2."""
    return (
        f"{sign} {value} lop3.b32 sign, sign, value, 0x80008000, 0xe4; and.b32 sign, sign, 0x87f087f0;"
        f" mul.rn.bf16x2 sign, sign, unit; mul.rn.bf16x2 {out}, sign, $2;"
    )


FP8_ELEMENTS = (
    "{ .reg .b32 sign, value, unit; mov.b32 unit, 0x7b807b80; "
    + _fp8("$0", "shl.b32 sign, $3, 8;", "shl.b32 value, $3, 4;")
    + _fp8("$1", "mov.b32 sign, $3;", "shr.b32 value, $3, 4;")
    + " }"
)
"""Two words of two E4M3 codes ($3) times their scales ($2): the low codes ($0) and the high ones ($1). The bits in
place are the value times 2**-120, and every product is exact but where its result has no bf16."""


def _fp4(out: str, scales: str, value: int, sign: int) -> str:
    """PTX: codes of `pair` that lie so many bits below their place, as bf16."""
    return (
        f" shl.b32 value, pair, {value}; shl.b32 sign, pair, {sign}; and.b32 value, value, 0x01c001c0;"
        " lop3.b32 value, sign, 0x80008000, value, 0xea;"
        f" mul.rn.bf16x2 value, value, unit; mul.rn.bf16x2 {out}, value, {scales};"
    )


FP4_ELEMENTS = (
    "{ .reg .b32 pair, value, sign, unit; mov.b32 unit, 0x7e807e80;"
    + " prmt.b32 pair, $6, 0, 0x4140;"
    + _fp4("$0", "$4", 6, 12)
    + _fp4("$2", "$4", 2, 8)
    + " prmt.b32 pair, $6, 0, 0x4342;"
    + _fp4("$1", "$5", 6, 12)
    + _fp4("$3", "$5", 2, 8)
    + " }"
)
"""Four bytes of two E2M1 codes ($6) times their scales ($4, $5): the low codes ($0, $1) and the high ones ($2, $3).
The bits in place are the value times 2**-126."""

_FP8 = tl.constexpr(FP8_ELEMENTS)
_FP4 = tl.constexpr(FP4_ELEMENTS)


@triton.jit
def load_window(pages, records, D: tl.constexpr, BYTES: tl.constexpr):
    """Window records `records` int32 [N], zeros for -1 -> int16 [N, D/2] words of two codes, uint8 [N, D/32]."""
    column = tl.arange(0, D // 2)
    group = tl.arange(0, D // 32)
    exists = (records >= 0)[:, None]
    wide = records.to(tl.int64)[:, None]
    words = pages.to(tl.pointer_type(tl.int16)) + wide * (BYTES // 2)
    codes = tl.load(words + column[None, :], mask=exists, other=0)
    return codes, tl.load(pages + wide * BYTES + D + group[None, :], mask=exists, other=0)


@triton.jit
def load_entries(pages, records, D: tl.constexpr, BYTES: tl.constexpr):
    """The same of compressed entries -> uint8 [N, D/2] bytes of two codes, uint8 [N, D/16]."""
    column = tl.arange(0, D // 2)
    group = tl.arange(0, D // 16)
    exists = (records >= 0)[:, None]
    at = pages + records.to(tl.int64)[:, None] * BYTES
    codes = tl.load(at + column[None, :], mask=exists, other=0)
    return codes, tl.load(at + D // 2 + group[None, :], mask=exists, other=0)


@triton.jit
def e8m0_scales(scales):
    """E8M0 bytes -> float32; a zero byte gives 0."""
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_scales(scales):
    """E4M3 bytes of no sign -> float32."""
    return (scales.to(tl.int32) << 20).to(tl.float32, bitcast=True) * _TWO_120


@triton.jit
def spread(scales, N: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BIT_OPS: tl.constexpr):
    """float32 [N, GROUPS] -> [N, GROUPS * LENGTH], bf16, or float32 in the interpreter."""
    if not BIT_OPS:
        scales = scales.to(tl.bfloat16)
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (N, GROUPS, LENGTH)), (N, GROUPS * LENGTH))


@triton.jit
def fp8_elements(codes, scales, BIT_OPS: tl.constexpr):
    """int16 words of two E4M3 codes, times scales -> even and odd elements, bf16 (float32 in the interpreter)."""
    if BIT_OPS:
        wide = codes.to(tl.int32)
        low = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
        high = (((wide & 0x8000) << 16) | ((wide & 0x7F00) << 12)).to(tl.float32, bitcast=True)
        return (low * _TWO_120) * scales, (high * _TWO_120) * scales
    else:
        return tl.inline_asm_elementwise(
            _FP8, "=&r,=&r,r,r", [scales, codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def fp4_elements(codes, scales, BIT_OPS: tl.constexpr):
    """The same of uint8 of two E2M1 codes."""
    if BIT_OPS:
        wide = codes.to(tl.int32)
        low = (((wide & 0x8) << 28) | ((wide & 0x7) << 22)).to(tl.float32, bitcast=True)
        high = (((wide & 0x80) << 24) | ((wide & 0x70) << 18)).to(tl.float32, bitcast=True)
        return (low * _TWO_126) * scales, (high * _TWO_126) * scales
    else:
        return tl.inline_asm_elementwise(
            _FP4,
            "=&r,=&r,=&r,=&r,r,r,r",
            [scales, codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def half_of(words, HIGH: tl.constexpr, BIT_OPS: tl.constexpr):
    """int32 words of two bf16 -> the lower or upper one, bf16 (float32 in the interpreter)."""
    bits = (words & -65536) if HIGH else (words << 16)
    value = bits.to(tl.float32, bitcast=True)
    return value if BIT_OPS else value.to(tl.bfloat16)


__all__ = [
    "FP4_ELEMENTS",
    "FP8_ELEMENTS",
    "e4m3_scales",
    "e8m0_scales",
    "fp4_elements",
    "fp8_elements",
    "half_of",
    "load_entries",
    "load_window",
    "spread",
]
