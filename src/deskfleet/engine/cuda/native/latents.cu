// What wq_a and wkv made of a few rows (spec 4.2, 4.7; oracles: rms_norm, quantize_fp8; rms_norm, apply_rope, WINDOW.pack).
//
// Given by the compiler's command line: Q (low rank), D (elements of a record), ROPE (of which the last so many turn in
// pairs), BYTES (of a record), EPS.
#include "rows.cuh"

constexpr int UNIT = 256;  // columns of a warp, eight a lane
constexpr int QUERY_UNITS = (Q + UNIT - 1) / UNIT, RECORD_UNITS = (D + UNIT - 1) / UNIT;

// Sum of squares of WIDTH columns from `at` on, of which the warp has its own unit; every warp takes the whole row.
template <int WIDTH>
struct Row {
    static constexpr int UNITS = (WIDTH + UNIT - 1) / UNIT;
    words4 all[UNITS], own;

    DEVICE void load(const u8* at, int unit, int lane) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int column = i * UNIT + lane * 8;
            all[i] = {};
            if (WIDTH % UNIT == 0 || column < WIDTH) all[i] = load_fresh4(at + column * 2);
        }
        own = all[0];
#pragma unroll
        for (int i = 1; i < UNITS; i++)
            if (unit == i) own = all[i];
    }

    DEVICE float factor() const {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const u32 words[4] = {all[i].x, all[i].y, all[i].z, all[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) squares += low_of(words[j]) * low_of(words[j]) + high_of(words[j]) * high_of(words[j]);
        }
        return fast_rsqrt(sum_of_warp(squares) * (1.0f / WIDTH) + EPS);
    }

    // Eight columns normed, as words of two bf16.
    DEVICE void normed(u32 (&out)[4], const words4 (&norm)[2]) const {
        const float by = factor();
        const u32 words[4] = {own.x, own.y, own.z, own.w};
        const u32 wide[8] = {norm[0].x, norm[0].y, norm[0].z, norm[0].w, norm[1].x, norm[1].y, norm[1].z, norm[1].w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = bf16x2_of_floats(as_float(wide[2 * i + 1]) * (high_of(words[i]) * by),
                                      as_float(wide[2 * i]) * (low_of(words[i]) * by));
    }
};

// One warp a block: 256 columns of the low rank of a row or of its record.
KERNEL(32, 16)
latents(const u8* qkv, const float* q_norm, const float* kv_norm, const float* cosines, const float* sines, u8* codes,
        u8* code_scales, u8* pages, const int* slots, const int* positions, const int* table, int table_width,
        int block_size) {
    const int lane = threadIdx.x, row = blockIdx.y;
    const bool is_query = blockIdx.x < QUERY_UNITS;
    const int unit = is_query ? blockIdx.x : blockIdx.x - QUERY_UNITS, column = unit * UNIT + lane * 8;
    const bool live = column < (is_query ? Q : D);
    words4 norm[2] = {};
    if (live) {
        const float* at = (is_query ? q_norm : kv_norm) + column;
        norm[0] = load_fresh4(at), norm[1] = load_fresh4(at + 4);
    }
    const u8* source = qkv + (u64)row * (Q + D) * 2;
    u32 out[4];
    if (is_query) {
        wait_for_predecessor();
        let_successor_start();
        Row<Q> own;
        own.load(source, unit, lane);
        own.normed(out, norm);
        const u32 bits = scale_bits_of_group(out);
        if (!live) return;
        *(u64*)(codes + (u64)row * Q + column) = fp8_codes_of(out, bits);
        if ((lane & 3) == 0) code_scales[row * (4 * ((Q + 127) / 128)) + column / 32] = (u8)(bits >> 23);
        return;
    }
    // Where the record goes and how it turns are older than the kernel before this one.
    const int position = (int)load_fresh(positions + row);
    const int block = (int)load_fresh(table + (int)load_fresh(slots + row) * table_width + position / block_size);
    float turn[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int pair = (column - (D - ROPE)) / 2 + i;
        turn[0][i] = 1.0f, turn[1][i] = 0.0f;
        if (live && column + 2 * i >= D - ROPE) {
            turn[0][i] = load_fresh_f(cosines + row * (ROPE / 2) + pair);
            turn[1][i] = load_fresh_f(sines + row * (ROPE / 2) + pair);
        }
    }
    wait_for_predecessor();
    let_successor_start();
    Row<D> own;
    own.load(source + Q * 2, unit, lane);
    own.normed(out, norm);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float even = low_of(out[i]), odd = high_of(out[i]), c = turn[0][i], s = turn[1][i];
        out[i] = bf16x2_of_floats(odd * c + even * s, even * c - odd * s);
    }
    const u32 bits = scale_bits_of_group(out);
    if (!live || block <= 0) return;
    u8* record = pages + ((u64)block * block_size + position % block_size) * BYTES;
    const u64 packed = fp8_codes_of(out, bits);
    // Records begin at multiples of their size.
    if constexpr (BYTES % 8 == 0) {
        *(u64*)(record + column) = packed;
    } else {
        for (int i = 0; i < 8; i++) record[column + i] = (u8)(packed >> (8 * i));
    }
    if ((lane & 3) == 0) record[D + column / 32] = (u8)(bits >> 23);
}
