// Compressed entries and index keys of a few rows (spec 4.4, 4.5, N.3.3; oracles: compress_pairs, rms_norm, apply_rope,
// ENTRY.pack, INDEX_KEY.pack). compress.py says what is kept and where.
//
// Given by the compiler's command line: POOL or KEYS, D (channels), ROPE, BYTES (of a record), RATIO (1 or 2), EPS; of POOL
// NUM_OPEN and KEEPS.
#include "rows.cuh"

// float32 within 6 of zero -> its E2M1 code with the sign in bit 3; ties to the even code.
DEVICE u32 fp4_code(float value) {
    const float size = fabsf(value);
    const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) +
                     (size > 5.0f);
    return code | ((as_u32(value) >> 28) & 8);
}

DEVICE float within_six(float value) { return fminf(fmaxf(value, -6.0f), 6.0f); }

// How pairs of channels from `channel` on turn.
template <int NUM_PAIRS>
struct Turn {
    float cosines[NUM_PAIRS], sines[NUM_PAIRS];

    DEVICE Turn(const float* from_cosines, const float* from_sines, int row, int channel) {
#pragma unroll
        for (int i = 0; i < NUM_PAIRS; i++) {
            const int pair = (channel - (D - ROPE)) / 2 + i;
            const bool turns = channel + 2 * i >= D - ROPE;
            cosines[i] = turns ? load_fresh_f(from_cosines + row * (ROPE / 2) + pair) : 1.0f;
            sines[i] = turns ? load_fresh_f(from_sines + row * (ROPE / 2) + pair) : 0.0f;
        }
    }

    // Pair i, a word of two bf16.
    DEVICE u32 of(u32 normed, int i) const {
        const float even = low_of(normed), odd = high_of(normed), c = cosines[i], s = sines[i];
        return bf16x2_of_floats(even * s + odd * c, even * c - odd * s);
    }
};

// The record of entry `position / RATIO`, or null where there is no place for it.
DEVICE u8* record_of(u8* pages, const int* table, int slot, int position, int table_width, int per_block) {
    const int number = position / RATIO, block = (int)load_fresh(table + slot * table_width + number / per_block);
    return block > 0 ? pages + ((u64)block * per_block + number % per_block) * BYTES : nullptr;
}

#ifdef POOL
// One block a row, eight channels a thread.
constexpr int EACH = 8, THREADS = (D / EACH + 31) / 32 * 32;

DEVICE void load(float (&to)[EACH], const float* from) {
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const words4 all = load_fresh4(from + i);
        to[i] = as_float(all.x), to[i + 1] = as_float(all.y), to[i + 2] = as_float(all.z), to[i + 3] = as_float(all.w);
    }
}

KERNEL(THREADS, 1)
pool(const float* projected, int stride, float* open_rows, const float* norm, const float* cosines, const float* sines,
     const int* slots, const int* positions, const int* table, int table_width, int per_block, u8* pages, u8* latents) {
    SHARED_BYTES(shared);
    float* parts = (float*)shared;  // [32]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, row = blockIdx.x;
    const bool live = thread * EACH < D;
    const int channel = live ? thread * EACH : 0;
    // Where a row belongs, and what earlier steps left, are older than the kernel before this one.
    const int slot = (int)load_fresh(slots + row), position = (int)load_fresh(positions + row);
    float* kept = open_rows + (u64)(slot * NUM_OPEN + position % NUM_OPEN) * (2 * D);
    const float* current = projected + (u64)row * stride;
    const float* previous = current;
    const bool closes = position % RATIO == RATIO - 1;
    u8* record = record_of(pages, table, slot, position, table_width, per_block);
    if (RATIO == 2 && closes) {
        const int before = max(row - 1, 0);
        const bool beside = row > 0 && (int)load_fresh(slots + before) == slot && (int)load_fresh(positions + before) == position - 1;
        previous = beside ? projected + (u64)before * stride : open_rows + (u64)(slot * NUM_OPEN + (position - 1) % NUM_OPEN) * (2 * D);
    }
    const words4 factors[2] = {load_fresh4(norm + channel), load_fresh4(norm + channel + 4)};
    const Turn<EACH / 2> turn(cosines, sines, row, channel);
    wait_for_predecessor();
    let_successor_start();
    float values[EACH], gates[EACH], old[EACH], old_gates[EACH];
    load(values, current + channel);
    if constexpr (RATIO == 2) load(gates, current + D + channel);
    if (RATIO == 2 && closes) load(old, previous + channel), load(old_gates, previous + D + channel);
    if constexpr (RATIO == 2) {
        if (KEEPS && live) {
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                *(u64*)(kept + channel + i) = both_of(as_u32(values[i]), as_u32(values[i + 1]));
                *(u64*)(kept + D + channel + i) = both_of(as_u32(gates[i]), as_u32(gates[i + 1]));
            }
        }
        if (!closes) {
            if (live) {
                u64* to = (u64*)(latents + ((u64)row * D + channel) * 2);
                to[0] = 0, to[1] = 0;
            }
            return;
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if constexpr (RATIO == 2) {
            const float weight = 1.0f / (1.0f + fast_exp(old_gates[i] - gates[i]));  // softmax of two
            values[i] = old[i] * (1.0f - weight) + values[i] * weight;
        }
        values[i] = bf16_rounded(values[i]);
        if (live) squares += values[i] * values[i];
    }
    squares = sum_of_warp(squares);
    if (lane == 0) parts[warp] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += parts[i];
    const float factor = fast_rsqrt(total * (1.0f / D) + EPS);
    const u32 wide[8] = {factors[0].x, factors[0].y, factors[0].z, factors[0].w,
                         factors[1].x, factors[1].y, factors[1].z, factors[1].w};
    u32 out[4];
    float greatest = 0.0f;
    u64* to = (u64*)(latents + ((u64)row * D + channel) * 2);
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = bf16x2_of_floats(as_float(wide[2 * i + 1]) * (values[2 * i + 1] * factor),
                                  as_float(wide[2 * i]) * (values[2 * i] * factor));
    if (live) to[0] = both_of(out[0], out[1]), to[1] = both_of(out[2], out[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = turn.of(out[i], i);
        greatest = fmaxf(greatest, fmaxf(fabsf(low_of(out[i])), fabsf(high_of(out[i]))));
    }
    // A group of sixteen is two neighbours.
    greatest = fmaxf(fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1)), 0.01171875f);
    const u32 byte = e4m3x2_of_floats(0.0f, fminf(greatest / 6.0f, 448.0f)) & 0xff;
    const float scale = as_float(byte << 20) * 1.329227995784916e36f;  // in place the bits are the value times 2**-120
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 low = fp4_code(within_six(low_of(out[i]) / scale)), high = fp4_code(within_six(high_of(out[i]) / scale));
        codes |= (low | high << 4) << (8 * i);
    }
    if (!live || record == nullptr) return;
    if constexpr (BYTES % 4 == 0) {
        *(u32*)(record + channel / 2) = codes;
    } else {
        for (int i = 0; i < 4; i++) record[channel / 2 + i] = (u8)(codes >> (8 * i));
    }
    if ((lane & 1) == 0) record[D / 2 + channel / 16] = (u8)byte;
}
#endif

#ifdef KEYS
// One warp a row, four channels a lane, of up to 128.
KERNEL(32, 1)
keys(const float* projected, const float* norm, const float* cosines, const float* sines, const int* slots, const int* positions,
     const int* table, int table_width, int per_block, u8* pages) {
    const int lane = threadIdx.x, row = blockIdx.x;
    const bool live = lane * 4 < D;
    const int channel = live ? lane * 4 : 0;
    const int position = (int)load_fresh(positions + row);
    const bool closes = position % RATIO == RATIO - 1;
    u8* record = record_of(pages, table, (int)load_fresh(slots + row), position, table_width, per_block);
    const words4 factors = load_fresh4(norm + channel);
    const Turn<2> turn(cosines, sines, row, channel);
    wait_for_predecessor();
    let_successor_start();
    if (!closes) return;
    const words4 all = load_fresh4(projected + row * D + channel);
    float values[4] = {as_float(all.x), as_float(all.y), as_float(all.z), as_float(all.w)}, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[i] = bf16_rounded(values[i]);
        if (live) squares += values[i] * values[i];
    }
    const float factor = fast_rsqrt(sum_of_warp(squares) * (1.0f / D) + EPS);
    const u32 wide[4] = {factors.x, factors.y, factors.z, factors.w};
    u32 out[2];
    float greatest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i] = bf16x2_of_floats(as_float(wide[2 * i + 1]) * (values[2 * i + 1] * factor),
                                  as_float(wide[2 * i]) * (values[2 * i] * factor));
        out[i] = turn.of(out[i], i);
        greatest = fmaxf(greatest, fmaxf(fabsf(low_of(out[i])), fabsf(high_of(out[i]))));
    }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, other));
    const u32 bits = (as_u32(fmaxf(greatest, 7.052966104933725e-38f) * 0.1666666716337204f) + 0x7fffff) & 0x7f800000;
    const float inverse = as_float(0x7f000000 - bits);
    if (!live || record == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 low = fp4_code(within_six(low_of(out[i]) * inverse)), high = fp4_code(within_six(high_of(out[i]) * inverse));
        record[channel / 2 + i] = (u8)(low | high << 4);
    }
    if ((lane & 7) == 0) record[D / 2 + channel / 32] = (u8)(bits >> 23);
}
#endif
