// Which entries a row attends to, of a few rows (spec 4.5; oracles: reference.index_scores, top_positions).
//
// Given by the compiler's command line: RATIO (positions of an entry), PER_BLOCK (entries of a block of the table), and
//   SCORE   BYTES (of a key's record), RESTRICTS, UNIT (entries of a candidate block), TOP_BLOCKS
//   SELECT  NUM_PICKS, UNIT (entries of what is chosen), PER_THREAD (scores: 2, 4 or 8), THREADS, LOCATES
#include "rows.cuh"

#ifdef SCORE
// One block: every gridDim.x-th 64 visible entries of a row, a warp sixteen of them. The query is quantised by all warps, a
// group of 32 columns each. Keys and weights are older than the kernel before this one, which made the query.
constexpr int HEADS = 32, D = 128, GROUPS = 4, WARPS = 4, KEYS = 16;

// To the nearest of E2M1, ties to the even code: 0.5, 1 and 2 apart.
DEVICE float fp4_rounded(float value) {
    const float size = fabsf(value), apart = size < 2.0f ? 0.5f : size < 4.0f ? 1.0f : 2.0f, shift = apart * 12582912.0f;
    return (value + shift) - shift;
}

struct Keys {
    u32 codes[2][GROUPS], scales[2];  // of places g and 8 + g: of each group eight neighbours

    DEVICE void load(const u8* pages, const int* table, int first, int visible, int lane) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int number = first + n * 8 + (lane >> 2);
            scales[n] = 0;
#pragma unroll
            for (int i = 0; i < GROUPS; i++) codes[n][i] = 0;
            if (number >= visible) continue;
            const u8* at = pages + ((u64)load_fresh(table + number / PER_BLOCK) * PER_BLOCK + number % PER_BLOCK) * BYTES;
            scales[n] = load_fresh(at + D / 2);
#pragma unroll
            for (int i = 0; i < GROUPS; i++) codes[n][i] = load_fresh(at + i * 16 + (lane & 3) * 4);
        }
    }
};

KERNEL(WARPS * 32, 2)
score(const u8* query, const float* weights, int weight_stride, const u8* pages, const int* slots, const int* positions,
      const int* table, int table_width, u16* scores, const u8* allowed, int max_entries, int max_blocks, int num_picks,
      float weight_scale) {
    SHARED_BYTES(shared);
    struct alignas(16) Unit {
        u32 words[4];
    };
    Unit* units = (Unit*)shared;  // [GROUPS, 4 eights of heads, 32 lanes]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, row = blockIdx.y;
    const int visible = ((int)load_fresh(positions + row) + 1) / RATIO;
    int first = blockIdx.x * (WARPS * KEYS) + warp * KEYS;
    if (visible <= num_picks || blockIdx.x * (WARPS * KEYS) >= visible) {  // all of them are taken anyway
        wait_for_predecessor();
        let_successor_start();
        return;
    }
    table += (u64)load_fresh(slots + row) * table_width;
    Keys keys;
    keys.load(pages, table, first, visible, lane);
    float by[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        by[i] = bf16_rounded(bf16_rounded(load_fresh_f(weights + row * weight_stride + i * 8 + g)) * weight_scale);
    wait_for_predecessor();
    let_successor_start();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const words4 all = load_fresh4(query + (((u64)row * HEADS + i * 8 + g) * D + warp * 32 + t * 8) * 2);
        const u32 words[4] = {all.x, all.y, all.z, all.w};
        float greatest = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) greatest = fmaxf(greatest, fmaxf(fabsf(low_of(words[j])), fabsf(high_of(words[j]))));
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 2));
        const u32 bits = (as_u32(fmaxf(greatest, 7.052966104933725e-38f) * 0.1666666716337204f) + 0x7fffff) & 0x7f800000;
        const float scale = as_float(bits), inverse = as_float(0x7f000000 - bits);
        float values[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            values[2 * j] = fp4_rounded(low_of(words[j]) * inverse) * scale;
            values[2 * j + 1] = fp4_rounded(high_of(words[j]) * inverse) * scale;
        }
        Unit unit;  // halves of a word of codes are four columns apart
#pragma unroll
        for (int j = 0; j < 4; j++) unit.words[j] = bf16x2_of_floats(values[j + 4], values[j]);
        units[(warp * 4 + i) * 32 + lane] = unit;
    }
    __syncthreads();
    while (true) {
        float sums[2][2][4] = {};  // of heads 16m + g and 16m + 8 + g, of places 8n + 2t and 8n + 2t + 1
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            u32 b[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u32 byte = (keys.scales[n] >> (8 * group)) & 0xff, scales = byte << 7 | byte << 23;
#pragma unroll
                for (int j = 0; j < 4; j++) b[n][j] = bf16x2_mul(bf16x2_of_fp4(keys.codes[n][group], j), scales);
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const Unit low = units[(group * 4 + 2 * m) * 32 + lane], high = units[(group * 4 + 2 * m + 1) * 32 + lane];
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int j = 0; j < 4; j += 2)
                        mma_bf16(sums[m][n], low.words[j], high.words[j], low.words[j + 1], high.words[j + 1], b[n][j],
                                 b[n][j + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float total = 0.0f;
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        total += bf16_rounded(fmaxf(bf16_rounded(sums[m][n][2 * i + j]), 0.0f) * by[2 * m + i]);
                total += __shfl_xor_sync(ALL_LANES, total, 4);
                total += __shfl_xor_sync(ALL_LANES, total, 8);
                total += __shfl_xor_sync(ALL_LANES, total, 16);
                const int number = first + n * 8 + 2 * t + j;
                if (g != 0 || number >= visible) continue;
                u16 out = bf16_of(total);
                if constexpr (RESTRICTS) {
                    if (visible > UNIT * TOP_BLOCKS && allowed[(u64)row * max_blocks + number / UNIT] == 0) out = 0xff80;
                }
                scores[(u64)row * max_entries + number] = out;
            }
        first += gridDim.x * (WARPS * KEYS);
        if (first - warp * KEYS >= visible) break;
        keys.load(pages, table, first, visible, lane);
    }
}
#endif

#ifdef SELECT
// One block a row; a thread has neighbouring scores. The last pick is found in two histograms, of the upper and of the lower
// byte. Where entries lie is older than the kernel before this one, which made the scores.
constexpr int WARPS = THREADS / 32, COPIES = 4, PITCH = 257;

struct Found {
    int bin, wanted;
};

// The highest bin with `wanted` or more in it and above, and how many of it are wanted: by every warp.
DEVICE Found bin_of(const int* counts, int wanted, int lane) {
    int own[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        own[i] = 0;
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) own[i] += counts[copy * PITCH + lane * 8 + i];
        sum += own[i];
    }
    int above = sum;  // in the bins of this lane and of higher ones
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
        const int more = __shfl_down_sync(ALL_LANES, above, other);
        if (lane + other < 32) above += more;
    }
    above -= sum;
    int bin = -1, left = 0;
#pragma unroll
    for (int i = 7; i >= 0; i--) {
        if (bin < 0 && above + own[i] >= wanted) bin = lane * 8 + i, left = wanted - above;
        above += own[i];
    }
    const int lane_of_it = 31 - __clz(__ballot_sync(ALL_LANES, bin >= 0));
    return {__shfl_sync(ALL_LANES, bin, lane_of_it), __shfl_sync(ALL_LANES, left, lane_of_it)};
}

KERNEL(THREADS, 1)
pick(const u8* scores, const int* slots, const int* positions, const int* table, int table_width, int* picks, int* records,
       int max_entries) {
    SHARED_BYTES(shared);
    int* counts = (int*)shared;               // [2, COPIES, PITCH]
    int* totals = counts + 2 * COPIES * PITCH;  // [WARPS]: above the threshold, and 16 bits further on it
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, row = blockIdx.x;
    const int visible = (((int)load_fresh(positions + row) + 1) / RATIO + UNIT - 1) / UNIT, first = thread * PER_THREAD;
    int page = 0;
    if constexpr (LOCATES) {
        table += (u64)load_fresh(slots + row) * table_width;
        if (first < visible) page = (int)load_fresh(table + first / PER_BLOCK);
    }
    for (int i = thread; i < 2 * COPIES * PITCH; i += THREADS) counts[i] = 0;
    picks += row * NUM_PICKS;
    records += row * NUM_PICKS;
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();
    if (visible <= NUM_PICKS) {
        for (int place = thread; place < NUM_PICKS; place += THREADS) {
            picks[place] = place < visible ? place : -1;
            if constexpr (LOCATES) {
                const int own = place < visible ? (int)load_fresh(table + place / PER_BLOCK) : 0;
                records[place] = place < visible ? own * PER_BLOCK + place % PER_BLOCK : -1;
            }
        }
        return;
    }
    u32 words[PER_THREAD / 2] = {};
    if (first < visible) {
        const u8* at = scores + ((u64)row * max_entries + first) * 2;
        if constexpr (PER_THREAD == 2) {
            words[0] = load_fresh(at);
        } else if constexpr (PER_THREAD == 4) {
            const words2 all = load_fresh2(at);
            words[0] = all.x, words[1] = all.y;
        } else {
            const words4 all = load_fresh4(at);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        }
    }
    int keys[PER_THREAD];  // 0 .. 65535, in the order of the scores
    int* upper_counts = counts + lane % COPIES * PITCH;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int bits = (int)(words[i / 2] >> (16 * (i % 2))) & 0xffff;
        keys[i] = bits >= 0x8000 ? 0xffff - bits : bits + 0x8000;
        if (first + i < visible) atomicAdd(upper_counts + (keys[i] >> 8), 1);
    }
    __syncthreads();
    const Found upper = bin_of(counts, NUM_PICKS, lane);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (first + i < visible && keys[i] >> 8 == upper.bin)
            atomicAdd(upper_counts + COPIES * PITCH + (keys[i] & 0xff), 1);
    __syncthreads();
    const Found lower = bin_of(counts + COPIES * PITCH, upper.wanted, lane);
    const int threshold = upper.bin * 256 + lower.bin, wanted = lower.wanted;
    int own = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (first + i < visible) own += (keys[i] > threshold) + (keys[i] == threshold) * 65536;
    int before = own;
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
        const int more = __shfl_up_sync(ALL_LANES, before, other);
        if (lane >= other) before += more;
    }
    if (lane == 31) totals[warp] = before;
    before -= own;
    __syncthreads();
    before += __reduce_add_sync(ALL_LANES, lane < warp ? totals[lane] : 0);
    int above = before & 0xffff, equal = before >> 16;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (first + i >= visible) continue;
        const bool takes = keys[i] > threshold || (keys[i] == threshold && equal < wanted);
        if (takes) {
            const int place = above + min(equal, wanted), number = first + i;
            picks[place] = number;
            if constexpr (LOCATES) records[place] = page * PER_BLOCK + number % PER_BLOCK;
        }
        above += keys[i] > threshold;
        equal += keys[i] == threshold;
    }
}
#endif
