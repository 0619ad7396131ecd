// Sparse attention as in attention.cu, for blocks that take several chunks of a row's list.
//
// A block takes 16 heads and chunks of 32 places; each of its warps has 128 elements of the records, for the scores, which
// the warps then add up, and for the outputs. The block reads its part of the list at once. Records come into a ring of
// chunks in shared memory by copies that run on their own, each byte once and some chunks ahead, and are read there twice: in
// the order of scores and in the order of values. Pitches that are odd multiples of 16 bytes keep both free of bank conflicts.
//
// Numbers are held 2**-60 times as large, so that one product makes them of codes in place and a scale: exact for window
// scales of 2**-57 to 2**67, and for every scale of an entry. Sums are rescaled only where a greater score would make a
// weight too large: 2**11 against the score that weights are relative to.
//
// Given by the compiler's command line: HEADS, D (elements of a head), SPLITS and NUM_WINDOW, NUM_PICKS
// (places of a row), WINDOW_BYTES, ENTRY_BYTES (of a record: multiples of 16), TURNS (chunks of a block), STAGES
// (chunks of the ring), RESIDENT (blocks of a processor), PICKS_ARE_NEW.
#include "attention.cuh"

constexpr int WARPS = D / SHARE, THREADS = WARPS * 32;
constexpr int PLACES = 32;  // of a chunk
constexpr int SLOTS = TURNS < STAGES ? TURNS : STAGES;
static_assert(STAGES >= 3);
constexpr int WINDOW_CHUNKS = (NUM_WINDOW + PLACES - 1) / PLACES, ENTRY_CHUNKS = (NUM_PICKS + PLACES - 1) / PLACES;
constexpr int LOWERED = 60;
constexpr float RAISE = (float)(1ull << LOWERED);
// Of raw scores: what no score is below, and what an absent place has.
constexpr float LEAST = -1e20f, ABSENT = -1e30f;
constexpr float PATIENCE = 11.0f;  // binary orders that a weight may have above 1

template <Kind KIND>
struct Layout {
    static constexpr int RECORD = KIND == WINDOW ? WINDOW_BYTES : ENTRY_BYTES;
    static constexpr int PITCH = (RECORD / 16 | 1) * 16;
    static constexpr int CODES = KIND == WINDOW ? D : D / 2;  // bytes of a record's codes
    static constexpr int OWN = CODES / WARPS;                 // of them a warp's
    static constexpr int GROUPS = KIND == WINDOW ? 4 : 8;     // scales of a warp
};

constexpr int SLOT_BYTES =
    PLACES * (NUM_PICKS > 0 && Layout<ENTRY>::PITCH > Layout<WINDOW>::PITCH ? Layout<ENTRY>::PITCH : Layout<WINDOW>::PITCH);

// Shared memory: the ring, then these.
struct Shared {
    float sums[2][WARPS][4][32][4];  // scores of a warp's elements: of eight places, as a lane has them
    u32 scales[WARPS][PLACES][4];    // two bf16 each
    int list[TURNS * PLACES];        // records, -1 absent
};

// Numbers `place` of the four E2M1 codes in each half of a word, times 2**-126 times `factor`, two bf16.
DEVICE u32 scaled_fp4(u32 word, int place, u32 factor) {
    const u32 code = (place < 2 ? word : word >> 8) & (place % 2 ? 0x00f000f0 : 0x000f000f);
    // One shift for the sign and one for the rest, as one product.
    return bf16x2_mul((code * (place % 2 ? 0x0104 : 0x1040)) & 0x81c081c0, factor);
}

// Numbers of two codes in place, times their scales: of a word's halves the numbers `place`, of two E4M3 or four E2M1 each.
template <Kind KIND>
DEVICE u32 scaled(u32 word, int place, u32 scales) {
    if constexpr (KIND == WINDOW) return scaled_pair(word, place, scales);
    return scaled_fp4(word, place, scales);
}

// The block's part of one row's list, and the ring.
struct Source {
    const u8* pages[2];
    u8* ring;
    const int* list;
    int begin, count;

    template <Kind KIND>
    DEVICE void copy(u8* to, int record) const {
        using F = Layout<KIND>;
        constexpr int PIECES = F::RECORD / 16;
        const int place = threadIdx.x / WARPS, column = threadIdx.x % WARPS;
        const u8* from = pages[KIND] + (u64)max(record, 0) * F::RECORD + column * 16;
        to += place * F::PITCH + column * 16;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += WARPS)
            if (piece + WARPS <= PIECES || piece + column < PIECES) copy_later(to + piece * 16, from + piece * 16, record >= 0);
    }

    // Asks for chunk `index` of the block, if there is one; a group of copies in either case.
    template <bool ANY>
    DEVICE void request(int index) const {
        if (index < count) {
            u8* to = slot(index);
            const int record = list[index * PLACES + threadIdx.x / WARPS];
            if (ANY && begin + index < WINDOW_CHUNKS)
                copy<WINDOW>(to, record);
            else if constexpr (NUM_PICKS > 0)
                copy<ENTRY>(to, record);
        }
        end_copies();
    }

    DEVICE u8* slot(int index) const { return ring + index % STAGES * SLOT_BYTES; }
};

// Scales of a warp's share of a chunk, raised by what codes in place lack, to `to` [PLACES, 4].
template <Kind KIND>
DEVICE void spread_scales(u32 (*to)[4], const u8* chunk, int warp, int lane) {
    const u8* at = chunk + lane * Layout<KIND>::PITCH + Layout<KIND>::CODES + warp * Layout<KIND>::GROUPS;
    if constexpr (KIND == WINDOW) {
        const u32 all = *(const u32*)at;
        constexpr u32 RAISED = (120 - LOWERED) * 0x00800080;
        *(words2*)to[lane] = {__byte_perm(all, 0, 0x4140) * 128 + RAISED, __byte_perm(all, 0, 0x4342) * 128 + RAISED};
    } else {
        const words2 all = *(const words2*)at;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 codes = __byte_perm(i < 2 ? all.x : all.y, 0, i & 1 ? 0x4342 : 0x4140) * 16;  // 2**-120 times the scale
            words[i] = bf16x2_mul(bf16x2_mul(codes, 0x7b807b80), (127 + 126 - LOWERED) * 0x00800080);
        }
        *(words4*)to[lane] = {words[0], words[1], words[2], words[3]};
    }
}

DEVICE u32 word_of(const words4& all, int index) {
    return index == 0 ? all.x : index == 1 ? all.y : index == 2 ? all.z : all.w;
}

// Queries of heads g and g + 8, as steps of 16 elements take them: of 16 neighbours four a lane, or of 32 eight.
template <Kind KIND>
DEVICE void load_query(u32 (&to)[8][4], const u8* query, int head, int warp, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool exists = HEADS % 16 == 0 || head + 8 * i < HEADS;
        const u8* at = query + ((head + 8 * i) * D + warp * SHARE) * 2;
#pragma unroll
        for (int step = 0; step < 8; step += KIND == WINDOW ? 1 : 2) {
            if constexpr (KIND == WINDOW) {
                words2 all = {};
                if (exists) all = load_row2(at + (step * 16 + t * 4) * 2);
                to[step][i] = __byte_perm(all.x, all.y, LOW_HALVES);
                to[step][2 + i] = __byte_perm(all.x, all.y, HIGH_HALVES);
            } else {
                words4 all = {};
                if (exists) all = load_row4(at + (step * 16 + t * 8) * 2);
                to[step][i] = __byte_perm(all.x, all.z, LOW_HALVES);
                to[step][2 + i] = __byte_perm(all.x, all.z, HIGH_HALVES);
                to[step + 1][i] = __byte_perm(all.y, all.w, LOW_HALVES);
                to[step + 1][2 + i] = __byte_perm(all.y, all.w, HIGH_HALVES);
            }
        }
    }
}

// Adds to scores of four eights of places: of heads g and g + 8, places 2t and 2t + 1 of each.
template <Kind KIND>
DEVICE void add_scores(float (&sums)[4][4], const u32 (&asked)[8][4], const u8* chunk, const u32 (*scales)[4], int warp,
                       int lane) {
    using F = Layout<KIND>;
    const int g = lane >> 2;
    const u32 twice = KIND == ENTRY && (lane & 2) ? 0x3232 : 0x1010;
    const u8* at = chunk + (lane & 7) * F::PITCH + warp * F::OWN + (lane >> 3) * 16;
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        words4 factors[2];
#pragma unroll
        for (int i = 0; i < 2; i++) factors[i] = *(const words4*)scales[(pair + i) * 8 + g];
#pragma unroll
        for (int half = 0; half < F::OWN / 64; half++) {
            u32 words[2][4];  // of 16 bytes each of place g, four
#pragma unroll
            for (int i = 0; i < 2; i++) load_matrices(words[i], at + (pair + i) * 8 * F::PITCH + half * 64);
#pragma unroll
            for (int column = 0; column < 4; column++)
#pragma unroll
                for (int step = 0; step < (KIND == WINDOW ? 1 : 2); step++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const u32 factor = KIND == WINDOW
                            ? __byte_perm(word_of(factors[i], half), 0, column & 2 ? 0x3232 : 0x1010)
                            : __byte_perm(word_of(factors[i], column), 0, twice);
                        const u32(&a)[4] = asked[KIND == WINDOW ? half * 4 + column : column * 2 + step];
                        mma_bf16(sums[pair + i], a[0], a[1], a[2], a[3], scaled<KIND>(words[i][column], 2 * step, factor),
                                 scaled<KIND>(words[i][column], 2 * step + 1, factor));
                    }
        }
    }
}

// Values of half a chunk, as products take them: number 4c + i is of element 32c + 4g + i, of places 2t and 2t + 1, and of
// 2t + 8 and 2t + 9.
template <Kind KIND>
DEVICE void values_of(u32 (&to)[16][2], const u8* chunk, const u32 (*scales)[4], int half, int warp, int lane) {
    using F = Layout<KIND>;
    const int g = lane >> 2, t = lane & 3;
    const u32 own = g < 4 ? LOW_HALVES : HIGH_HALVES;
    words4 factors[4];
#pragma unroll
    for (int i = 0; i < 4; i++) factors[i] = *(const words4*)scales[half * 16 + 2 * t + (i & 1) + (i >> 1) * 8];
    u32 words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if constexpr (KIND == WINDOW) {
            const u8* at = chunk + (half * 16 + 2 * t) * F::PITCH + warp * F::OWN + c * 32 + g * 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 even = *(const u32*)(at + i * 8 * F::PITCH), odd = *(const u32*)(at + (i * 8 + 1) * F::PITCH);
                const u32 low = __byte_perm(even, odd, LOW_HALVES), high = __byte_perm(even, odd, HIGH_HALVES);
                const u32 factor = __byte_perm(word_of(factors[2 * i], c / 2), word_of(factors[2 * i + 1], c / 2),
                                               c & 1 ? HIGH_HALVES : LOW_HALVES);
#pragma unroll
                for (int k = 0; k < 4; k++) to[4 * c + k][i] = scaled<WINDOW>(k < 2 ? low : high, k & 1, factor);
            }
        } else {
            // Matrices: the first and the second eight places of 16 bytes, and of 16 more.
            if (c % 2 == 0)
                load_turned(words, chunk + (half * 16 + (lane & 15)) * F::PITCH + warp * F::OWN + (c + (lane >> 4)) * 16);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 factor = __byte_perm(word_of(factors[2 * i], c), word_of(factors[2 * i + 1], c), own);
#pragma unroll
                for (int k = 0; k < 4; k++) to[4 * c + k][i] = scaled<ENTRY>(words[c % 2 * 2 + i], k, factor);
            }
        }
    }
}

struct State {
    float out[16][4];  // of heads g and g + 8: number 4c + i of elements 32c + 8t + i and 32c + 8t + 4 + i
    float maximum[2], total[2];  // of raw scores
};

// Chunks from .. to - 1 of the block, of one kind. Each has landed once the barrier before it has been passed.
template <Kind KIND>
DEVICE void attend_to(State& state, const Source& source, Shared& shared, const u32 (&asked)[8][4], int from, int to,
                      float factor, int warp, int lane) {
    const int t = lane & 3;
#pragma unroll 1
    for (int index = from; index < to; index++) {
        const u8* chunk = source.slot(index);
        __syncwarp();
        spread_scales<KIND>(shared.scales[warp], chunk, warp, lane);
        __syncwarp();
        float score[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const words2 named = *(const words2*)(source.list + index * PLACES + n * 8 + 2 * t);
            score[n][0] = score[n][2] = warp == 0 && (int)named.x < 0 ? ABSENT : 0.0f;
            score[n][1] = score[n][3] = warp == 0 && (int)named.y < 0 ? ABSENT : 0.0f;
        }
        add_scores<KIND>(score, asked, chunk, shared.scales[warp], warp, lane);
        float(&sums)[WARPS][4][32][4] = shared.sums[index & 1];
#pragma unroll
        for (int n = 0; n < 4; n++) *(floats4*)sums[warp][n][lane] = {score[n][0], score[n][1], score[n][2], score[n][3]};
        wait_for_copies<STAGES - 3>();  // the next chunk
        __syncthreads();
        source.request<KIND == WINDOW>(index + STAGES - 1);  // where the chunk before this one was
        u32 values[16][2];
        values_of<KIND>(values, chunk, shared.scales[warp], 0, warp, lane);  // there is time while weights are found
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int other = 0; other < WARPS; other++) {
                const floats4 part = *(const floats4*)sums[other][n][lane];
                if (other == 0) score[n][0] = part.x, score[n][1] = part.y, score[n][2] = part.z, score[n][3] = part.w;
                if (other > 0) score[n][0] += part.x, score[n][1] += part.y, score[n][2] += part.z, score[n][3] += part.w;
            }
        }
        float highest[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // heads g and g + 8
            highest[i] = state.maximum[i];
#pragma unroll
            for (int n = 0; n < 4; n++) highest[i] = fmaxf(highest[i], fmaxf(score[n][2 * i], score[n][2 * i + 1]));
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL_LANES, highest[i], 1));
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL_LANES, highest[i], 2));
        }
        const bool rises = fmaxf(highest[0] - state.maximum[0], highest[1] - state.maximum[1]) * factor > PATIENCE;
        const bool rescales = __any_sync(ALL_LANES, rises);
        u32 weights[4][2];
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!rescales) highest[i] = state.maximum[i];
            by[i] = fast_exp2((state.maximum[i] - highest[i]) * factor);
            state.maximum[i] = highest[i];
            state.total[i] *= by[i];
            const float less = highest[i] * factor;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float low = fast_exp2(score[n][2 * i] * factor - less);
                const float high = fast_exp2(score[n][2 * i + 1] * factor - less);
                state.total[i] += low + high;
                weights[n][i] = bf16x2_of_floats(high, low);
            }
        }
        if (rescales) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                state.out[i][0] *= by[0], state.out[i][1] *= by[0], state.out[i][2] *= by[1], state.out[i][3] *= by[1];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half > 0) values_of<KIND>(values, chunk, shared.scales[warp], half, warp, lane);
#pragma unroll
            for (int i = 0; i < 16; i++)
                mma_bf16(state.out[i], weights[2 * half][0], weights[2 * half][1], weights[2 * half + 1][0],
                         weights[2 * half + 1][1], values[i][0], values[i][1]);
        }
    }
}

KERNEL(THREADS, RESIDENT)
attend(const u8* query, const u8* window_pages, const u8* entry_pages, const int* window_records, const int* entry_records,
       float* sums, float* maxima, float* denominators, float scale) {
    SHARED_BYTES(bytes);
    Shared& shared = *(Shared*)(bytes + SLOTS * SLOT_BYTES);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int split = blockIdx.x, row = blockIdx.y, head = blockIdx.z * 16 + g;
    const int begin = split * TURNS, count = max(min(TURNS, WINDOW_CHUNKS + ENTRY_CHUNKS - begin), 0);
    const int windows = min(max(WINDOW_CHUNKS - begin, 0), count);  // chunks of the block that are of the window
    const Source source = {{window_pages, entry_pages}, bytes, shared.list, begin, count};

    auto read_list = [&](int from, int to) {
        constexpr int EACH = (TURNS * PLACES + THREADS - 1) / THREADS;
        int found[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int number = i * THREADS + threadIdx.x;
            const int place = begin * PLACES + number, pick = place - WINDOW_CHUNKS * PLACES;
            const int* at = pick < 0 ? window_records + row * NUM_WINDOW + place : entry_records + row * NUM_PICKS + pick;
            const bool asked_for = number >= from * PLACES && number < to * PLACES;
            found[i] = -1;
            if (asked_for && (pick < 0 ? place < NUM_WINDOW : pick < NUM_PICKS)) found[i] = load_fresh(at);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int number = i * THREADS + threadIdx.x;
            if (number >= from * PLACES && number < to * PLACES) shared.list[number] = found[i];
        }
    };
    const int known = PICKS_ARE_NEW ? windows : count;  // chunks whose records may be named before the wait
    read_list(0, known);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i < known) source.request<true>(i);
    wait_for_predecessor();
    let_successor_start();
    u32 asked[8][4];
    const u8* own_query = query + (u64)row * HEADS * D * 2;
    if (windows > 0)
        load_query<WINDOW>(asked, own_query, head, warp, lane);
    else
        load_query<ENTRY>(asked, own_query, head, warp, lane);
    if (known < count) {
        read_list(known, count);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i >= known) source.request<true>(i);
    State state;
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) state.out[i][j] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) state.maximum[i] = LEAST, state.total[i] = 0.0f;
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    const float factor = scale * (1.4426950408889634f * RAISE);  // of a raw score, for powers of two
    attend_to<WINDOW>(state, source, shared, asked, 0, windows, factor, warp, lane);
    if constexpr (NUM_PICKS > 0) {
        if (windows > 0 && windows < count) load_query<ENTRY>(asked, own_query, head, warp, lane);
        attend_to<ENTRY>(state, source, shared, asked, windows, count, factor, warp, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u64 part = part_of(row, split, head + 8 * i);
        // Lanes of a pair swap fours, so that they write 32 bytes together.
        float* to = sums + part * D + warp * SHARE + (t & 2) * 8 + (t & 1) * 4;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float first[4], second[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float low = state.out[4 * c + k][2 * i] * RAISE, high = state.out[4 * c + k][2 * i + 1] * RAISE;
                const float other = __shfl_xor_sync(ALL_LANES, t & 1 ? low : high, 1);
                first[k] = t & 1 ? other : low, second[k] = t & 1 ? high : other;
            }
            *(floats4*)(to + c * 32) = {first[0], first[1], first[2], first[3]};
            *(floats4*)(to + c * 32 + 8) = {second[0], second[1], second[2], second[3]};
        }
        float total = state.total[i] + __shfl_xor_sync(ALL_LANES, state.total[i], 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        if (warp == 0 && t == 0) maxima[part] = state.maximum[i] * (scale * RAISE), denominators[part] = total;
    }
}
