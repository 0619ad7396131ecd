// The gated Engram value of a few rows (spec 7.5; oracle: reference.engram_gate).
//
// Given by the compiler's command line: M (model width), WARPS (of 256 columns), EPS.
#include "rows.cuh"

constexpr int COPIES = 4;

// One block: a copy of a row, eight columns a lane. The stream is older than the kernel before this one, which made keys and
// value.
KERNEL(WARPS * 32, 1)
gate(u8* stream, const u8* projected, const float* weight, const int* alive) {
    SHARED_BYTES(shared);
    float* parts = (float*)shared;  // [3, 32]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, copy = blockIdx.x, row = blockIdx.y;
    const int column = threadIdx.x * 8, from = min(column, M - 8);
    u8* at = stream + ((u64)(row * COPIES + copy) * M + from) * 2;
    const words4 xs = load_fresh4(at);
    const words4 factors[2] = {load_fresh4(weight + copy * M + from), load_fresh4(weight + copy * M + from + 4)};
    const bool is_alive = load_fresh(alive + row) != 0;
    wait_for_predecessor();
    let_successor_start();
    const words4 keys = load_fresh4(projected + ((u64)row * (COPIES + 1) * M + copy * M + from) * 2);
    const words4 values = load_fresh4(projected + ((u64)row * (COPIES + 1) * M + COPIES * M + from) * 2);
    const u32 x[4] = {xs.x, xs.y, xs.z, xs.w}, key[4] = {keys.x, keys.y, keys.z, keys.w};
    const u32 value[4] = {values.x, values.y, values.z, values.w};
    const u32 wide[8] = {factors[0].x, factors[0].y, factors[0].z, factors[0].w,
                         factors[1].x, factors[1].y, factors[1].z, factors[1].w};
    float sums[3] = {};  // squares, squares of the key, products
    if (column < M) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = low_of(x[i]), b = high_of(x[i]), c = low_of(key[i]), d = high_of(key[i]);
            sums[0] += a * a + b * b;
            sums[1] += c * c + d * d;
            sums[2] += a * as_float(wide[2 * i]) * c + b * as_float(wide[2 * i + 1]) * d;
        }
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        sums[i] = sum_of_warp(sums[i]);
        if (lane == 0) parts[i * 32 + warp] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; i++) sums[i] = sum_of_warp(lane < WARPS ? parts[i * 32 + lane] : 0.0f);
    const float factor = fast_rsqrt(sums[0] * (1.0f / M) + EPS) * fast_rsqrt(sums[1] * (1.0f / M) + EPS);
    const float dot = sums[2] * factor * fast_rsqrt((float)M), root = sqrtf(fmaxf(fabsf(dot), 1e-6f));
    const float opened = fast_inverse(1.0f + fast_exp(dot < 0.0f ? root : -root));
    if (!is_alive || column >= M) return;
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = bf16x2_of_floats(high_of(x[i]) + opened * high_of(value[i]), low_of(x[i]) + opened * low_of(value[i]));
    ((u64*)at)[0] = both_of(out[0], out[1]);
    ((u64*)at)[1] = both_of(out[2], out[3]);
}
