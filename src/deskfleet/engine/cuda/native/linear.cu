// Projections of a few rows (oracles: reference.quantized_linear, grouped_linear, linear_f32). One block: OUTPUTS outputs of
// a few rows; its warps share the columns (COLUMN_WARPS) and the outputs (OUTPUT_WARPS) out among them.
//
// Given by the compiler's command line: FORM_ (product.cuh), K, N, STRIDE (elements from row to row of x), GROUP_OUTPUTS
// (outputs that share columns of x: the group's K of them; N where all do), TILES, PADDED (rows: 1, 2, 4, 8 or 16),
// COLUMN_WARPS, OUTPUT_WARPS, STEPS (a warp), STAGES, OUTPUT (0 bf16, 1 FP8 with scales, 2 float32), HEAD and ROPE (of every
// HEAD outputs the last ROPE are rotated in pairs; 0: none), PER_PROCESSOR (blocks).
#include "product.cuh"

constexpr int OUTPUTS = TILES * 16 * OUTPUT_WARPS;
constexpr int WARPS = COLUMN_WARPS * OUTPUT_WARPS;
constexpr int PITCH = PADDED | 1;
constexpr int GROUPS = (OUTPUTS + 31) / 32;  // of FP8 outputs
constexpr int TURN = HEAD > 0 ? HEAD : 1;

KERNEL(WARPS * 32, PER_PROCESSOR)
linear(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, u8* out, u8* out_scales, const float* cosines,
       const float* sines, int num_rows) {
    SHARED_BYTES(shared);
    float* sums = (float*)shared;  // [COLUMN_WARPS, OUTPUTS, PITCH]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int part = warp % COLUMN_WARPS, strip = warp / COLUMN_WARPS;
    const int first_output = blockIdx.x * OUTPUTS, first = blockIdx.y * PADDED;

    Product<FORM_, K, TILES, PADDED, STEPS, STAGES> product;
    product.start(Weight{codes, scales}, first_output + strip * TILES * 16, part * STEPS, lane);
    wait_for_predecessor();
    let_successor_start();
    constexpr int ELEMENT = FORM_ == WIDE || FORM_ == BF16 ? 2 : 1;
    product.run(Input{x + (u64)(first_output / GROUP_OUTPUTS) * K * ELEMENT, x_scales},
                sources_of<PADDED>(first, num_rows, lane), STRIDE);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        product.store(sums + part * OUTPUTS * PITCH, tile, (strip * TILES + tile) * 16);
    __syncthreads();

    if constexpr (OUTPUT == 1) {
        for (int unit = warp; unit < GROUPS * PADDED; unit += WARPS) {
            const int group = unit % GROUPS, n = unit / GROUPS, row = first + n, output = first_output + group * 32;
            if (row >= num_rows || output >= N) continue;
            float value = 0.0f;
            for (int other = 0; other < COLUMN_WARPS; other++)
                value += sums[(other * OUTPUTS + group * 32 + lane) * PITCH + n];
            value = bf16_rounded(value);
            const u32 bits = fp8_scale_bits(greatest_of_warp(fabsf(value)));
            out[(u64)row * N + output + lane] = fp8_code(value, bits);
            if (lane == 0) out_scales[(u64)row * (4 * ((N + 127) / 128)) + output / 32] = (u8)(bits >> 23);
        }
    } else {
        // A whole number of warps takes part: pairs of outputs meet in neighbouring lanes.
        for (int element = threadIdx.x; element < (OUTPUTS * PADDED + 31) / 32 * 32; element += WARPS * 32) {
            const int inside = element % OUTPUTS, n = element / OUTPUTS, row = first + n, output = first_output + inside;
            const bool live = n < PADDED && row < num_rows && output < N;
            float value = 0.0f;
            if (live)
                for (int other = 0; other < COLUMN_WARPS; other++) value += sums[(other * OUTPUTS + inside) * PITCH + n];
            if constexpr (OUTPUT == 2) {
                if (live) ((float*)out)[(u64)row * N + output] = value;
            } else {
                value = bf16_rounded(value);
                const float neighbour = __shfl_xor_sync(ALL_LANES, value, 1);
                float even_value = value, odd_value = neighbour;
                if constexpr (HEAD > 0) {
                    const int pair = (output % TURN - (HEAD - ROPE)) / 2;
                    if (live && output % TURN >= HEAD - ROPE && !(inside & 1)) {
                        const float c = cosines[row * (ROPE / 2) + pair], s = sines[row * (ROPE / 2) + pair];
                        even_value = value * c - neighbour * s;
                        odd_value = value * s + neighbour * c;
                    }
                }
                if (live && !(inside & 1)) ((u32*)out)[((u64)row * N + output) >> 1] = bf16x2_of_floats(odd_value, even_value);
            }
        }
    }
}
