// Sparse attention of a few rows over packed records (spec 4.3, 4.9, N.5; oracle: reference.sparse_attention, apply_rope).
//
// A block takes 16 heads and chunks of 16 places of a row's list; each of its warps has 128 elements of the records, for the
// scores, which the warps then add up, and for the outputs. Every lane loads the very bytes that it feeds to the tensor
// core, for the scores and once more for the values: elements go in any order as long as both operands agree, so of the
// 128 a lane takes 16 or 32 neighbours. Nothing but scores passes through shared memory, and no load of a record waits for
// the query: windows, entries and the lists are older than the kernel before this one, but where PICKS_ARE_NEW.
//
// Given by the compiler's command line: ATTEND or MERGE, HEADS, D (elements of a head, a multiple of 128), ROPE, SPLITS and
// NUM_WINDOW, NUM_PICKS (places of a row), WINDOW_BYTES, ENTRY_BYTES (of a record: multiples of 16), TURNS (chunks of a
// block), PICKS_ARE_NEW.
#include "attention.cuh"

constexpr int KEYS = 16;  // places of a chunk

#ifdef ATTEND
constexpr int WARPS = D / SHARE;
constexpr float LEAST = -1e30f;

// bf16 bits in both halves.
DEVICE u32 twice(u32 bits) { return bits | bits << 16; }

// A chunk of records as a lane holds it. Scores: of places g and 8 + g, its share of elements t. Values: of places 2t,
// 2t + 1, 2t + 8 and 2t + 9, sixteen elements from 16g on.
template <Kind KIND>
struct Chunk {
    static constexpr int RECORD = KIND == WINDOW ? WINDOW_BYTES : ENTRY_BYTES;
    static constexpr int NUM_PLACES = KIND == WINDOW ? NUM_WINDOW : NUM_PICKS;
    static constexpr int CODES = KIND == WINDOW ? D : D / 2;         // bytes of a record's codes
    static constexpr int LOADS = KIND == WINDOW ? 2 : 1;             // of 16 bytes, for the scores
    static constexpr int WORDS_ = KIND == WINDOW ? 4 : 2;            // of a record, for the values
    words4 keys[2][LOADS];
    u32 key_scales[2][LOADS == 2 ? 1 : 2];
    u32 values[4][WORDS_];
    u32 value_scales[4];
    u32 exists;  // a bit for each of the four

    DEVICE void load(const u8* pages, const int* records, int chunk, int warp, int lane) {
        const int g = lane >> 2, t = lane & 3;
        int named[6];
#pragma unroll
        for (int i = 0; i < 6; i++) {
            const int place = chunk * KEYS + (i < 2 ? g + 8 * i : 2 * t + (i & 1) + (i >= 4 ? 8 : 0));
            named[i] = place < NUM_PLACES ? (int)load_fresh(records + place) : -1;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u8* at = pages + (u64)max(named[i], 0) * RECORD;
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                keys[i][j] = {};
                if (named[i] >= 0) keys[i][j] = load_fresh4(at + warp * (SHARE * CODES / D) + j * 64 + t * 16);
            }
            key_scales[i][0] = 0;
            if constexpr (KIND == WINDOW) {
                if (named[i] >= 0) key_scales[i][0] = load_fresh(at + CODES + warp * 4);
            } else {
                key_scales[i][1] = 0;
                if (named[i] >= 0) {
                    const words2 both = load_fresh2(at + CODES + warp * 8);
                    key_scales[i][0] = both.x, key_scales[i][1] = both.y;
                }
            }
        }
        exists = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int record = named[2 + i];
            const u8* at = pages + (u64)max(record, 0) * RECORD;
            value_scales[i] = 0;
#pragma unroll
            for (int j = 0; j < WORDS_; j++) values[i][j] = 0;
            if (record < 0) continue;
            exists |= 1u << i;
            if constexpr (KIND == WINDOW) {
                const words4 all = load_fresh4(at + warp * SHARE + g * 16);
                values[i][0] = all.x, values[i][1] = all.y, values[i][2] = all.z, values[i][3] = all.w;
                value_scales[i] = load_fresh(at + CODES + warp * 4);
            } else {
                const words2 all = load_fresh2(at + warp * (SHARE / 2) + g * 8);
                values[i][0] = all.x, values[i][1] = all.y;
                value_scales[i] = load_fresh(at + CODES + warp * 8 + (g & 4));
            }
        }
    }
};

// Scale bytes as bf16: powers of two, or E4M3 without a sign.
template <Kind KIND>
DEVICE u32 scales_of(u32 low, u32 high) {
    if constexpr (KIND == WINDOW) return low << 7 | high << 23;
    return bf16x2_mul(low << 4 | high << 20, 0x7b807b80);
}

DEVICE u32 byte_of(u32 word, int index) { return (word >> (8 * index)) & 0xff; }

// Codes as bf16, times scales: of a word's halves the numbers `place`, of two E4M3 or four E2M1 codes each.
template <Kind KIND>
DEVICE u32 decoded(u32 word, int place, u32 scales) {
    if constexpr (KIND == WINDOW) return bf16x2_mul(bf16x2_of_paired(word, place), scales);
    return bf16x2_mul(bf16x2_of_fp4(word, place), scales);
}

// Queries of heads g and g + 8, in the order of a chunk's elements: as many steps of 16 elements as a warp has.
template <Kind KIND>
DEVICE void load_query(u32 (&to)[8][4], const u8* query, int head, int warp, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 words[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Of 64 elements sixteen each, or of 128 thirty-two.
            const int element = KIND == WINDOW ? (j >> 1) * 64 + t * 16 + (j & 1) * 8 : t * 32 + j * 8;
            words4 all = {};
            if (HEADS % 16 == 0 || head + 8 * i < HEADS) all = load_fresh4(query + ((head + 8 * i) * D + warp * SHARE + element) * 2);
            words[4 * j] = all.x, words[4 * j + 1] = all.y, words[4 * j + 2] = all.z, words[4 * j + 3] = all.w;
        }
#pragma unroll
        for (int step = 0; step < 8; step++) {
            // Halves of a word of codes are two elements apart, or four.
            const int first = KIND == WINDOW ? 2 * step : (step >> 1) * 4 + (step & 1);
            const u32 a = words[first], b = words[first + (KIND == WINDOW ? 1 : 2)];
            to[step][i] = __byte_perm(a, b, LOW_HALVES);
            to[step][2 + i] = __byte_perm(a, b, HIGH_HALVES);
        }
    }
}

struct State {
    float out[16][4];  // of heads g and g + 8: elements 16 * 2t + i and 16 * (2t + 1) + i
    float maximum[2], total[2];
};

// Chunks begin .. end - 1 of one kind. `waits`: the query, and with NEW the list, may not be read before the wait.
template <Kind KIND, bool NEW>
DEVICE void attend_to(State& state, float* scores, int& parity, const u8* pages, const int* records, const u8* query, int begin,
                      int end, bool waits, float scale, int head, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    Chunk<KIND> chunk;
    if (NEW && waits) {
        wait_for_predecessor();
        let_successor_start();
    }
    chunk.load(pages, records, begin, warp, lane);
    if (!NEW && waits) {
        wait_for_predecessor();
        let_successor_start();
    }
    u32 asked[8][4];
    load_query<KIND>(asked, query, head, warp, lane);
#pragma unroll 1
    for (int number = begin; number < end; number++) {
        // Scores of two eights of places: of even and odd steps apart, for shorter chains.
        float sums[2][2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int step = 0; step < 8; step++) {
                u32 b0, b1;
                if constexpr (KIND == WINDOW) {
                    const words4& all = chunk.keys[n][step >> 2];
                    const u32 word = (step & 3) == 0 ? all.x : (step & 3) == 1 ? all.y : (step & 3) == 2 ? all.z : all.w;
                    const u32 byte = byte_of(chunk.key_scales[n][0], 2 * (step >> 2) + (t >> 1));
                    const u32 scales = scales_of<WINDOW>(byte, byte);
                    b0 = decoded<WINDOW>(word, 0, scales), b1 = decoded<WINDOW>(word, 1, scales);
                } else {
                    const words4& all = chunk.keys[n][0];
                    const u32 word = (step >> 1) == 0 ? all.x : (step >> 1) == 1 ? all.y : (step >> 1) == 2 ? all.z : all.w;
                    const u32 byte = byte_of(t < 2 ? chunk.key_scales[n][0] : chunk.key_scales[n][1], 2 * (t & 1) + (step >> 2));
                    const u32 scales = scales_of<ENTRY>(byte, byte);
                    b0 = decoded<ENTRY>(word, 2 * (step & 1), scales), b1 = decoded<ENTRY>(word, 2 * (step & 1) + 1, scales);
                }
                mma_bf16(sums[n][step & 1], asked[step][0], asked[step][1], asked[step][2], asked[step][3], b0, b1);
            }
        float* own = scores + parity * (WARPS * 256);  // [WARPS, 2, 32 lanes, 4]
        parity ^= 1;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            floats4 both = {sums[n][0][0] + sums[n][1][0], sums[n][0][1] + sums[n][1][1], sums[n][0][2] + sums[n][1][2],
                            sums[n][0][3] + sums[n][1][3]};
            *(floats4*)(own + ((warp * 2 + n) * 32 + lane) * 4) = both;
        }
        u32 values[16][2];  // of element 16g + i: places 2t and 2t + 1, and eight further
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 a = chunk.value_scales[2 * half], b = chunk.value_scales[2 * half + 1];
            const int index = KIND == WINDOW ? g >> 1 : g & 3;
            const u32 scales = scales_of<KIND>(byte_of(a, index), byte_of(b, index));
            constexpr int PER = KIND == WINDOW ? 2 : 4;  // elements of half a word
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int word = i / (2 * PER);
                const u32 pair = __byte_perm(chunk.values[2 * half][word], chunk.values[2 * half + 1][word],
                                             i / PER % 2 ? HIGH_HALVES : LOW_HALVES);
                values[i][half] = decoded<KIND>(pair, i % PER, scales);
            }
        }
        const u32 exists = chunk.exists;
        if (TURNS > 1 && number + 1 < end) chunk.load(pages, records, number + 1, warp, lane);
        __syncthreads();
        float score[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) score[n][i] = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; other++) {
                const floats4 part = *(const floats4*)(own + ((other * 2 + n) * 32 + lane) * 4);
                score[n][0] += part.x, score[n][1] += part.y, score[n][2] += part.z, score[n][3] += part.w;
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                score[n][i] = exists >> (2 * n + (i & 1)) & 1 ? score[n][i] * scale : NOTHING;
        }
        u32 weights[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // heads g and g + 8
            float highest = fmaxf(fmaxf(score[0][2 * i], score[0][2 * i + 1]), fmaxf(score[1][2 * i], score[1][2 * i + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
            highest = fmaxf(highest, state.maximum[i]);
            const float before = fast_exp(state.maximum[i] - highest);
            state.maximum[i] = highest;
            state.total[i] *= before;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float low = fast_exp(score[n][2 * i] - highest), high = fast_exp(score[n][2 * i + 1] - highest);
                state.total[i] += low + high;
                weights[n][i] = bf16x2_of_floats(high, low);
            }
#pragma unroll
            for (int j = 0; j < 16; j++) state.out[j][2 * i] *= before, state.out[j][2 * i + 1] *= before;
        }
#pragma unroll
        for (int i = 0; i < 16; i++)
            mma_bf16(state.out[i], weights[0][0], weights[0][1], weights[1][0], weights[1][1], values[i][0], values[i][1]);
    }
}

KERNEL(WARPS * 32, TURNS == 1 ? 1 : 2)
attend(const u8* query, const u8* window_pages, const u8* entry_pages, const int* window_records, const int* entry_records,
       float* sums, float* maxima, float* denominators, float scale) {
    SHARED_BYTES(shared);
    constexpr int WINDOW_CHUNKS = (NUM_WINDOW + KEYS - 1) / KEYS, ENTRY_CHUNKS = (NUM_PICKS + KEYS - 1) / KEYS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int split = blockIdx.x, row = blockIdx.y, head = blockIdx.z * 16 + g;
    const int begin = split * TURNS, end = min(begin + TURNS, WINDOW_CHUNKS + ENTRY_CHUNKS);
    const u8* asked = query + (u64)row * HEADS * D * 2;
    State state;
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) state.out[i][j] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) state.maximum[i] = LEAST, state.total[i] = 0.0f;
    int parity = 0;
    if (begin >= end) {  // more blocks than chunks
        wait_for_predecessor();
        let_successor_start();
    }
    if (begin < WINDOW_CHUNKS)
        attend_to<WINDOW, false>(state, (float*)shared, parity, window_pages, window_records + row * NUM_WINDOW, asked, begin,
                                 min(end, WINDOW_CHUNKS), true, scale, head, warp, lane);
    if constexpr (NUM_PICKS > 0) {
        const int first = max(begin - WINDOW_CHUNKS, 0);
        if (first < end - WINDOW_CHUNKS)
            attend_to<ENTRY, PICKS_ARE_NEW>(state, (float*)shared, parity, entry_pages, entry_records + row * NUM_PICKS, asked,
                                            first, end - WINDOW_CHUNKS, begin >= WINDOW_CHUNKS, scale, head, warp, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u64 part = part_of(row, split, head + 8 * i);
        float* to = sums + part * D + warp * SHARE + t * 32;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int k = 0; k < 16; k += 4)
                *(floats4*)(to + j * 16 + k) = {state.out[k][2 * i + j], state.out[k + 1][2 * i + j], state.out[k + 2][2 * i + j],
                                                state.out[k + 3][2 * i + j]};
        float total = state.total[i] + __shfl_xor_sync(ALL_LANES, state.total[i], 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        if (warp == 0 && t == 0) maxima[part] = state.maximum[i], denominators[part] = total;
    }
}
#endif

#ifdef MERGE
// TOGETHER warps of a block: 128 elements of one head, of which each adds up every so many-th part; a lane has four elements.
constexpr int WARPS = 4;
constexpr int OWN = (SPLITS + TOGETHER - 1) / TOGETHER, PARTS_A_LANE = (SPLITS + 31) / 32;

KERNEL(WARPS * 32, 4)
merge(const float* sums, const float* maxima, const float* denominators, const float* sink, const float* cosines,
      const float* sines, u8* out) {
    SHARED_BYTES(shared);
    const int number = threadIdx.x >> 5, warp = number % TOGETHER, lane = threadIdx.x & 31, row = blockIdx.y;
    const int share = blockIdx.x * (WARPS / TOGETHER) + number / TOGETHER;
    const int head = share / (D / SHARE), element = share % (D / SHARE) * SHARE + lane * 4;
    const float own_sink = load_fresh_f(sink + head);
    float turn[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int pair = (element - (D - ROPE)) / 2 + i;
        const bool turns = element + 2 * i >= D - ROPE;
        turn[0][i] = turns ? load_fresh_f(cosines + row * (ROPE / 2) + pair) : 1.0f;
        turn[1][i] = turns ? load_fresh_f(sines + row * (ROPE / 2) + pair) : 0.0f;
    }
    wait_for_predecessor();
    let_successor_start();
    words4 parts[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int split = i * TOGETHER + warp;
        parts[i] = {};
        if (split < SPLITS) parts[i] = load_fresh4(sums + part_of(row, split, head) * D + element);
    }
    float factors[PARTS_A_LANE], total = 0.0f, highest = own_sink;
#pragma unroll
    for (int i = 0; i < PARTS_A_LANE; i++) {
        const int split = i * 32 + lane;
        factors[i] = split < SPLITS ? load_fresh_f(maxima + part_of(row, split, head)) : NOTHING;
    }
    float shares[PARTS_A_LANE];
#pragma unroll
    for (int i = 0; i < PARTS_A_LANE; i++) {
        const int split = i * 32 + lane;
        shares[i] = split < SPLITS ? load_fresh_f(denominators + part_of(row, split, head)) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PARTS_A_LANE; i++) highest = fmaxf(highest, factors[i]);
    highest = greatest_of_warp(highest);
#pragma unroll
    for (int i = 0; i < PARTS_A_LANE; i++) {
        factors[i] = fast_exp(factors[i] - highest);
        total += shares[i] * factors[i];
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float by = __shfl_sync(ALL_LANES, factors[i / (32 / TOGETHER)], (i * TOGETHER + warp) % 32);
        sum[0] += by * as_float(parts[i].x), sum[1] += by * as_float(parts[i].y);
        sum[2] += by * as_float(parts[i].z), sum[3] += by * as_float(parts[i].w);
    }
    if constexpr (TOGETHER > 1) {
        floats4* others = (floats4*)shared + (number - warp) * 32;  // [TOGETHER, 32]
        others[warp * 32 + lane] = {sum[0], sum[1], sum[2], sum[3]};
        __syncthreads();
        if (warp > 0) return;
#pragma unroll
        for (int i = 1; i < TOGETHER; i++) {
            const floats4 other = others[i * 32 + lane];
            sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
        }
    }
    total = sum_of_warp(total) + fast_exp(own_sink - highest);
    const float inverse = fast_inverse(total);
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float even = bf16_rounded(sum[2 * i] * inverse), odd = bf16_rounded(sum[2 * i + 1] * inverse);
        const float c = turn[0][i], s = turn[1][i];
        words[i] = bf16x2_of_floats(odd * c - even * s, even * c + odd * s);
    }
    *(u64*)(out + ((u64)(row * HEADS + head) * D + element) * 2) = both_of(words[0], words[1]);
}
#endif
