// What kernels of a few rows share that multiply no weights: halves of words, sums over a warp, quantisation of eight
// neighbours a lane.
#pragma once
#include "numbers.cuh"

// Numbers of a word of two bf16, and back.
DEVICE float low_of(u32 word) { return as_float(word << 16); }
DEVICE float high_of(u32 word) { return as_float(word & 0xffff0000); }

// Numbers `place` of the four E2M1 codes in each half of a word, as bf16. In place they are the value times 2**-126.
DEVICE u32 bf16x2_of_fp4(u32 word, int place) {
    const u32 size = place == 0 ? word << 6 : place == 1 ? word << 2 : place == 2 ? word >> 2 : word >> 6;
    return bf16x2_mul((size & 0x01c001c0) | ((word << (12 - 4 * place)) & 0x80008000), 0x7e807e80);
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
    for (int other = 16; other > 0; other >>= 1) value += __shfl_xor_sync(ALL_LANES, value, other);
    return value;
}

// 1 / x but for a last place, of a number that is normal.
#ifdef DESKFLEET_EMULATED
DEVICE float fast_inverse(float x) { return 1.0f / x; }
#else
DEVICE float fast_inverse(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
#endif

// A group of 32 columns lies in four neighbouring lanes, as words of two bf16: its scale.
DEVICE u32 scale_bits_of_group(const u32 (&words)[4]) {
    float greatest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) greatest = fmaxf(greatest, fmaxf(fabsf(low_of(words[i])), fabsf(high_of(words[i]))));
    greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
    return fp8_scale_bits(fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 2)));
}

// FP8 codes of eight bf16 that are divided by this scale. No value is beyond 448 of them: the scale is rounded up.
DEVICE u64 fp8_codes_of(const u32 (&words)[4], u32 scale_bits) {
    const float inverse = as_float(0x7f000000 - scale_bits);
    u64 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        codes |= (u64)e4m3x2_of_floats(high_of(words[i]) * inverse, low_of(words[i]) * inverse) << (16 * i);
    return codes;
}

DEVICE u64 both_of(u32 low, u32 high) { return low | (u64)high << 32; }
