"""FP8 and FP4 quantisers and weight decoding, bit for bit as the publisher's kernels do them.

Owns the arithmetic of spec §N.3 and §2.1. Knows nothing of layers or files. "Fake quant" means quantise,
dequantise, and store as bf16, which is exact for every format here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
# The publisher multiplies by a pre-rounded float32 reciprocal instead of dividing (spec §N.3.1).
_INV_FP8_MAX = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32).item()
_INV_FP4_MAX = torch.tensor(1.0 / FP4_MAX, dtype=torch.float32).item()
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pow2_ceil(value: Tensor) -> Tensor:
    """Smallest power of two >= value, from the float32 bit pattern (spec §N.3.1). value > 0, float32."""
    # Adding the whole mantissa carries into the exponent exactly when the mantissa is not zero.
    return ((value.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _groups(x: Tensor, block: int) -> Tensor:
    grouped: Tensor = x.to(torch.float32).unflatten(-1, (-1, block))
    return grouped


def _fp8_scale(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    return pow2_ceil(amax * _INV_FP8_MAX)


def quantize_fp8(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Activation quantiser (spec §N.3.2): x [..., K] -> codes float8_e4m3fn [..., K], scales float8_e8m0fnu
    [..., K/block], a power of two per group."""
    groups = _groups(x, block)
    scale = _fp8_scale(groups)
    codes = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale.squeeze(-1).to(torch.float8_e8m0fnu)


def fake_quant_fp8(x: Tensor, block: int = 32) -> Tensor:
    """quantize_fp8 and back: x [..., K] -> bf16 [..., K]."""
    groups = _groups(x, block)
    scale = _fp8_scale(groups)
    codes = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return (codes * scale).flatten(-2).to(torch.bfloat16)


def e2m1_codes(x: Tensor) -> Tensor:
    """Magnitude codes 0..7 of |x|, nearest with ties to the even code (spec §N.3.3). Returns uint8."""
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # An exact tie goes to the even neighbour, hence the alternation of > and >=.
    for boundary, tie_rounds_up in (
        (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
    ):  # fmt: skip
        code += (magnitude >= boundary) if tie_rounds_up else (magnitude > boundary)
    return code


def _pack_fp4(values: Tensor) -> Tensor:
    """Pack [..., K] values already on the scale grid into uint8 [..., K/2], even element in the low nibble."""
    nibble = e2m1_codes(values) | (torch.signbit(values).to(torch.uint8) << 3)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4)


def _fp4_values(scaled: Tensor) -> Tensor:
    table = torch.tensor(FP4_MAGNITUDES, dtype=torch.float32, device=scaled.device)
    return torch.copysign(table[e2m1_codes(scaled).long()], scaled)


def _fp4_e8m0_scale(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0**-126)
    return pow2_ceil(amax * _INV_FP4_MAX)


def _fp4_e4m3_scale(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0**-9)
    return (amax / FP4_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def quantize_fp4_e8m0(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Index queries and keys: x [..., K] -> packed uint8 [..., K/2], scales float8_e8m0fnu [..., K/block]."""
    groups = _groups(x, block)
    scale = _fp4_e8m0_scale(groups)
    packed = _pack_fp4((groups / scale).clamp(-FP4_MAX, FP4_MAX).flatten(-2))
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)


def fake_quant_fp4_e8m0(x: Tensor, block: int = 32) -> Tensor:
    """quantize_fp4_e8m0 and back: [..., K] -> bf16 [..., K]."""
    groups = _groups(x, block)
    scale = _fp4_e8m0_scale(groups)
    return (_fp4_values((groups / scale).clamp(-FP4_MAX, FP4_MAX)) * scale).flatten(-2).to(torch.bfloat16)


def quantize_fp4_e4m3(x: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """Compressed KV: x [..., K] -> packed uint8 [..., K/2], scales float8_e4m3fn [..., K/block].

    The scale rounds to nearest and may fall below amax/6, so the clamp acts; there is no second level.
    """
    groups = _groups(x, block)
    scale = _fp4_e4m3_scale(groups)
    packed = _pack_fp4((groups / scale).clamp(-FP4_MAX, FP4_MAX).flatten(-2))
    return packed, scale.squeeze(-1).to(torch.float8_e4m3fn)


def fake_quant_fp4_e4m3(x: Tensor, block: int = 16) -> Tensor:
    """quantize_fp4_e4m3 and back: [..., K] -> bf16 [..., K]."""
    groups = _groups(x, block)
    scale = _fp4_e4m3_scale(groups)
    return (_fp4_values((groups / scale).clamp(-FP4_MAX, FP4_MAX)) * scale).flatten(-2).to(torch.bfloat16)


def e8m0_to_float(scale_bytes: Tensor) -> Tensor:
    """E8M0 bytes (uint8) as float64 multipliers 2**(byte-127)."""
    return torch.exp2(scale_bytes.to(torch.float64) - 127.0)


def dequantize_fp8_weight(weight_bytes: Tensor, scale_bytes: Tensor, block: int = 32) -> Tensor:
    """FP8 tile-scaled weight: bytes uint8 [out, in], scale bytes uint8 [out/block, in/block] -> float64 [out, in]."""
    values = weight_bytes.view(torch.float8_e4m3fn).to(torch.float64)
    scale = e8m0_to_float(scale_bytes)
    return values * scale.repeat_interleave(block, -2).repeat_interleave(block, -1)


def dequantize_fp4_weight(packed: Tensor, scale_bytes: Tensor, block: int = 32) -> Tensor:
    """MXFP4 weight: packed uint8 [out, in/2], scale bytes uint8 [out, in/block] -> float64 [out, in] (spec §2.1)."""
    table = torch.tensor(FP4_MAGNITUDES + tuple(-m for m in FP4_MAGNITUDES), dtype=torch.float64)
    low, high = table[(packed & 0xF).long()], table[(packed >> 4).long()]
    values = torch.stack((low, high), -1).flatten(-2)
    return values * e8m0_to_float(scale_bytes).repeat_interleave(block, -1)


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """MXFP4 matrices as they are stored: codes uint8 [..., out, in/2], E8M0 scales uint8 [..., out, in/32]."""

    codes: Tensor
    scales: Tensor

    def __getitem__(self, index: int | slice) -> Fp4Matrix:
        """One matrix of a stack, or some."""
        return Fp4Matrix(self.codes[index], self.scales[index])

    def __len__(self) -> int:
        return len(self.codes)

    def decode(self) -> Tensor:
        """float64 [..., out, in]."""
        return dequantize_fp4_weight(self.codes, self.scales)


__all__ = [
    "FP4_MAGNITUDES",
    "Fp4Matrix",
    "dequantize_fp4_weight",
    "dequantize_fp8_weight",
    "e2m1_codes",
    "e8m0_to_float",
    "fake_quant_fp4_e4m3",
    "fake_quant_fp4_e8m0",
    "fake_quant_fp8",
    "pow2_ceil",
    "quantize_fp4_e4m3",
    "quantize_fp4_e8m0",
    "quantize_fp8",
]
