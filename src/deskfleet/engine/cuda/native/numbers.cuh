// Numbers as the models round them: scales, bf16, FP8. Owns what a value becomes, not where it comes from.
#pragma once
#include "device.cuh"

// An E8M0 scale, which lies in a word from bit `shift` on, as float32; a zero byte gives 0.
DEVICE float scale_of(u32 word, int shift) { return as_float(((word >> shift) & 0xff) << 23); }

// float32 rounded to bf16 and back.
DEVICE float bf16_rounded(float value) { return as_float(bf16x2_of_floats(0.0f, value) << 16); }

DEVICE u16 bf16_of(float value) { return (u16)bf16x2_of_floats(0.0f, value); }

// Bits of the power of two that a group of this greatest magnitude is divided by (spec N.3.2).
DEVICE u32 fp8_scale_bits(float greatest) {
    return (as_u32(fmaxf(greatest, 1e-4f) * 0.002232142857142857f) + 0x7fffff) & 0x7f800000;
}

DEVICE u8 fp8_code(float value, u32 scale_bits) {
    const float scaled = value * as_float(0x7f000000 - scale_bits);
    return (u8)e4m3x2_of_floats(0.0f, fminf(fmaxf(scaled, -448.0f), 448.0f));
}

DEVICE float greatest_of_warp(float value) {
#pragma unroll
    for (int other = 16; other > 0; other >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, other));
    return value;
}
