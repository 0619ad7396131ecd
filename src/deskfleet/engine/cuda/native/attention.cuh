// What the kernels of attention.cu and attention_ring.cu agree on: parts of a row's attention, kinds of records.
#pragma once
#include "product.cuh"
#include "rows.cuh"

constexpr int HEAD_BLOCKS = (HEADS + 15) / 16;
constexpr int SHARE = 128;  // elements of a warp
constexpr u32 LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;

#define NOTHING as_float(0xff800000)  // minus infinity

struct alignas(16) floats4 {
    float x, y, z, w;
};

enum Kind { WINDOW, ENTRY };

// First places of the part that split `split` leaves of a head.
DEVICE u64 part_of(int row, int split, int head) { return (u64)(row * SPLITS + split) * (16 * HEAD_BLOCKS) + head; }
