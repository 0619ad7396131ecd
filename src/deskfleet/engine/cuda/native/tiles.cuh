// Where a lane finds its weights in the tiles of packing.py and of linear.pack_bf16.
//
// Tensor cores take 16 weight rows as their first operand. Every lane loads from memory the very bytes that it feeds to them:
// columns may go in any order as long as both operands agree, so lane 4g + t takes columns 8t .. 8t + 7 of every group of 32,
// of weight rows g and g + 8. Nothing passes through shared memory, and loads do not wait for x: a kernel may issue them
// before the kernel ahead of it has ended.
#pragma once
#include "numbers.cuh"

enum Form { FP4, FP8, WIDE, BF16 };  // WIDE: FP8 weights (paired tiles) and bf16 x

// One matrix, or what a lane has of it.
struct Weight {
    const u8* codes;
    const u32* scales;
};

// x of a step: FP8 codes with scale words, or bf16 without.
struct Input {
    const u8* values;
    const u32* scales;
};

// Where a lane finds the first columns of the 16 rows from `row` on (a multiple of 16).
template <int FORM, int COLUMNS>
DEVICE Weight lane_of(const Weight& w, int row, int lane) {
    constexpr int NUM_WORDS = (COLUMNS + 127) / 128;
    const int g = lane >> 2, t = lane & 3;
    if constexpr (FORM == BF16)
        return {w.codes + ((u64)((row >> 6) * (COLUMNS / 64)) * 64 + (row & 63) + g) * 128 + 16 * t, w.scales};
    const u64 tile = row >> 7, inside = (row & 127) + g;
    if constexpr (FORM == FP4)
        return {w.codes + (tile * (COLUMNS / 64) * 128 + inside) * 32 + 8 * t, w.scales + tile * NUM_WORDS * 128 + inside};
    const u32* scales = w.scales + (u64)(row >> 5) * NUM_WORDS;
    if constexpr (FORM == FP8) return {w.codes + (tile * (COLUMNS / 32) * 128 + inside) * 32 + 8 * t, scales};
    return {w.codes + (tile * (COLUMNS / 64) * 128 + inside) * 64 + 16 * t, scales};
}

// E4M3 codes (value times 2**-6) of the first or the second numbers of four bytes of FP4 tiles.
DEVICE u32 e4m3_of_fp4(u32 bytes, bool second) {
    return second ? ((bytes << 2) & 0x8c8c8c8c) | ((bytes >> 2) & 0x10101010) : bytes & 0x9c9c9c9c;
}

// E4M3 codes in the low or high bytes of a word's halves as bf16, times 2**-120 times `factor`, two bf16.
DEVICE u32 scaled_pair(u32 word, bool high, u32 factor) {
    const u32 bits = high ? (word & 0x80008000) | ((word >> 4) & 0x07f007f0)
                          : ((word << 8) & 0x80008000) | ((word << 4) & 0x07f007f0);
    return bf16x2_mul(bits, factor);
}

DEVICE u32 bf16x2_of_paired(u32 word, bool high) { return scaled_pair(word, high, 0x7b807b80); }
