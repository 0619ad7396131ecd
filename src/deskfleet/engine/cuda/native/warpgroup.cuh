// A few rows of FP8 codes times a weight on the tensor cores' FP8 instructions, for experts. Owns x in shared memory and the
// loop over a warpgroup's blocks of the weight.
//
// Four warps take 64 weight rows, 16 each, as the first operand: lane 4g + t loads columns 8t .. 8t + 7 of every group of 32
// of rows g and g + 8 (tiles.cuh), and FP4 becomes E4M3 by a mask or two shifts. x is the second operand, read from
// shared memory by all. A product covers the 32 columns that share a scale and is scaled into a float32 accumulator.
#pragma once
#include "tiles.cuh"

// A block of 128 columns of 16 weight rows, as a lane holds it.
template <int FORM>
struct Block;

template <>
struct Block<FP4> {
    words2 rows[2][2];  // of each 64 columns: row g, row g + 8
    u32 scales[2];
};

template <>
struct Block<FP8> {
    words2 rows[4][2];  // of each 32 columns
    u32 scales[1];
};

// Loads block `block` of what `lane` of lane_of points to; codes of columns that do not exist are zero.
template <int FORM, int COLUMNS>
DEVICE void load_block(Block<FORM>& to, const Weight& lane, int block) {
    constexpr int PARTS = FORM == FP8 ? 4 : 2;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if (COLUMNS % 128 != 0 && block * 128 + part * (128 / PARTS) >= COLUMNS) {
            to.rows[part][0] = to.rows[part][1] = {};
            continue;
        }
        const u8* at = lane.codes + (block * PARTS + part) * 4096;
        to.rows[part][0] = load_stream2(at);
        to.rows[part][1] = load_stream2(at + 256);
    }
    if constexpr (FORM == FP4) {
        to.scales[0] = load_scale(lane.scales + block * 128);
        to.scales[1] = load_scale(lane.scales + block * 128 + 8);
    } else {
        to.scales[0] = load_scale(lane.scales + block);
    }
}

// Rows of x that a product takes apart: two of each of four groups, in eight columns of which each group fills its own two.
constexpr int APART = 2;

// NUM rows of x of COLUMNS columns in shared memory: of each group of 32 the codes [2, NUM, 16] with a pitch that spares
// the banks, then the scales float32 [groups, NUM]. Columns are in the order in which lanes hold those of a weight; groups
// are a multiple of four, of which those that do not exist are zero.
template <int COLUMNS, int NUM>
struct Columns {
    static constexpr int NUM_GROUPS = (COLUMNS + 127) / 128 * 4;
    static constexpr int PITCH_BYTES = NUM * 32 + 16;
    static constexpr int CODE_BYTES = NUM_GROUPS * PITCH_BYTES;
    static constexpr int BYTES = CODE_BYTES + NUM_GROUPS * NUM * 4;

    static DEVICE const float* scales(const u8* at, int group) { return (const float*)(at + CODE_BYTES) + group * NUM; }

    // Rows row(n) of x, n below `count`, by all threads of the block, which meet afterwards. `apart`: no more than APART
    // rows, row n of group g in column 2 (g % 4) + n of eight, the others zero.
    template <class Row>
    static DEVICE void build(u8* to, const Input& x, int count, int num_threads, bool apart, Row row) {
        fill(to, x, count, num_threads, apart, row);
        let_tensor_cores_read();
        __syncthreads();
    }

    template <class Row>
    static DEVICE void fill(u8* to, const Input& x, int count, int num_threads, bool apart, Row row) {
        constexpr int WORDS = (COLUMNS + 127) / 128;
        const int places = apart ? 8 : count;
        for (int i = threadIdx.x; i < NUM_GROUPS * places; i += num_threads) {
            const int group = i % NUM_GROUPS, column = i / NUM_GROUPS;
            const int n = apart ? (column >> 1 == (group & 3) ? column & 1 : count) : column;
            words4 first = {}, second = {};
            float scale = 0.0f;
            if (n < count && (COLUMNS % 128 == 0 || group * 32 < COLUMNS)) {
                const u64 from = row(n);
                const u8* at = x.values + from * COLUMNS + group * 32;
                first = load_row4(at), second = load_row4(at + 16);
                scale = scale_of(load_fresh(x.scales + from * WORDS + group / 4), group % 4 * 8);
            }
            words4* out = (words4*)(to + group * PITCH_BYTES) + column;
            out[0] = {first.x, first.z, second.x, second.z};
            out[NUM] = {first.y, first.w, second.y, second.w};
            ((float*)(to + CODE_BYTES))[group * NUM + column] = scale;
        }
    }
};

// Sums of a warp's 16 weight rows times NUM rows of x over blocks begin .. begin + NUM_BLOCKS - 1 (those that there are; all
// are, where WHOLE), with DEPTH blocks of weights under way. Of FP4 they are 2**-6 times what they should be.
template <int FORM, int COLUMNS, int NUM, int NUM_BLOCKS, int DEPTH, bool WHOLE>
struct GroupProduct {
    typedef Columns<COLUMNS, NUM> X;
    static constexpr int ALL = (COLUMNS + 127) / 128;
    Block<FORM> held[DEPTH];
    float acc[NUM / 2];
    Weight weight;
    int begin, lane;

    DEVICE void load(int stage, int turn) {
        if (turn < NUM_BLOCKS && (WHOLE || begin + turn < ALL)) load_block<FORM, COLUMNS>(held[stage], weight, begin + turn);
    }

    // The blocks of other rows, which follow those of these in the same registers.
    DEVICE void load_next(const Weight& next, int stage, int turn) {
        static_assert(NUM_BLOCKS % DEPTH == 0, "a block of the next rows takes the place of the same stage");
        const int block = begin + turn - NUM_BLOCKS;
        if (turn >= NUM_BLOCKS && (WHOLE || block < ALL)) load_block<FORM, COLUMNS>(held[stage], next, block);
    }

    // What `run` takes as the next rows: those from `row` on.
    DEVICE Weight at(const Weight& whole, int row) const { return lane_of<FORM, COLUMNS>(whole, row, lane); }

    DEVICE void start(const Weight& whole, int row, int first_block, int own_lane) {
        begin = first_block;
        lane = own_lane;
        weight = at(whole, row);
#pragma unroll
        for (int stage = 0; stage < DEPTH; stage++) load(stage, stage);
    }

    // Where `goes_on`, blocks of the rows `next` (of `at`) are asked for as the registers of these become free. Of rows that
    // are APART_, `acc` has a part of the sums of two.
    template <bool APART_ = false>
    DEVICE void run(const u8* x, bool goes_on = false, const Weight& next = {}) {
#pragma unroll
        for (int i = 0; i < NUM / 2; i++) acc[i] = 0.0f;
        const CodesAt codes = codes_at(x, NUM);
#pragma unroll 1
        for (int first = 0; first < NUM_BLOCKS; first += DEPTH) {
#pragma unroll
            for (int stage = 0; stage < DEPTH; stage++) {
                const int turn = first + stage;
                if ((NUM_BLOCKS % DEPTH == 0 || turn < NUM_BLOCKS) && (WHOLE || begin + turn < ALL)) {
                    if constexpr (APART_)
                        add_apart<1>(reinterpret_cast<const Block<FORM>(&)[1]>(held[stage]), x, codes, begin + turn);
                    else
                        add(held[stage], x, codes, begin + turn);
                }
                load(stage, turn + DEPTH);
                if constexpr (NUM_BLOCKS % DEPTH == 0)
                    if (goes_on) load_next(next, stage, turn + DEPTH);
            }
        }
    }

    // The first operand of a block's groups.
    static DEVICE void decode(u32 (&a)[4][4], const Block<FORM>& own) {
#pragma unroll
        for (int group = 0; group < 4; group++) {
            words2 low, high;
            if constexpr (FORM == FP4) {
                const bool odd = group & 1;
                low = own.rows[group >> 1][0], high = own.rows[group >> 1][1];
                low = {e4m3_of_fp4(low.x, odd), e4m3_of_fp4(low.y, odd)};
                high = {e4m3_of_fp4(high.x, odd), e4m3_of_fp4(high.y, odd)};
            } else {
                low = own.rows[group][0], high = own.rows[group][1];
            }
            a[group][0] = low.x, a[group][1] = high.x, a[group][2] = low.y, a[group][3] = high.y;
        }
    }

    DEVICE void add(const Block<FORM>& own, const u8* x, CodesAt codes, int block) {
        u32 a[4][4];
        float sums[4][NUM / 2];
        decode(a, own);
        start_products(a);
#pragma unroll
        for (int group = 0; group < 4; group++)
            multiply_codes(sums[group], a[group], further(codes, (block * 4 + group) * X::PITCH_BYTES));
        end_products(sums);
        const int t = lane & 3;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            const float low = scale_of(own.scales[0], 8 * group);
            const float high = FORM == FP4 ? scale_of(own.scales[FORM == FP4 ? 1 : 0], 8 * group) : low;
            const float* scales = X::scales(x, block * 4 + group) + 2 * t;
#pragma unroll
            for (int n = 0; n < NUM / 8; n++) {
                const float even = scales[n * 8], odd = scales[n * 8 + 1];
                acc[4 * n] += sums[group][4 * n] * (low * even);
                acc[4 * n + 1] += sums[group][4 * n + 1] * (low * odd);
                acc[4 * n + 2] += sums[group][4 * n + 2] * (high * even);
                acc[4 * n + 3] += sums[group][4 * n + 3] * (high * odd);
            }
        }
    }

    // One sum of all four groups, of which lane 4g + t has group t: it is scaled at once. Of several blocks the products of one
    // run while the next is decoded.
    template <int COUNT_>
    DEVICE void add_apart(const Block<FORM> (&own)[COUNT_], const u8* x, CodesAt codes, int block) {
        static_assert(FORM == FP4 && NUM == 8, "eight columns: two rows of each of four groups");
        u32 a[COUNT_][4][4];
        float sums[COUNT_][4];
#pragma unroll
        for (int i = 0; i < COUNT_; i++) {
            decode(a[i], own[i]);
            start_products(a[i]);
            multiply_codes(sums[i], a[i][0], further(codes, (block + i) * 4 * X::PITCH_BYTES));
#pragma unroll
            for (int group = 1; group < 4; group++)
                add_codes(sums[i], a[i][group], further(codes, ((block + i) * 4 + group) * X::PITCH_BYTES));
            commit_products();
        }
        const int t = lane & 3;
        const u32 top = 0x0444 | t << 12;  // byte t of a word above three of zero
        float factors[COUNT_][4];
#pragma unroll
        for (int i = 0; i < COUNT_; i++) {
            const float low = as_float(__byte_perm(own[i].scales[0], 0, top) >> 1);
            const float high = as_float(__byte_perm(own[i].scales[1], 0, top) >> 1);
            const float* scales = X::scales(x, (block + i) * 4 + t) + 2 * t;
            const float even = scales[0], odd = scales[1];
            factors[i][0] = low * even, factors[i][1] = low * odd, factors[i][2] = high * even, factors[i][3] = high * odd;
        }
        if constexpr (COUNT_ == 2) take<1>(a[0], sums[0], factors[0]);
        take<0>(a[COUNT_ - 1], sums[COUNT_ - 1], factors[COUNT_ - 1]);
    }

    // Adds what products have made that all but the LEFT last ones have ended.
    template <int LEFT>
    DEVICE void take(u32 (&a)[4][4], float (&sums)[4], const float (&factors)[4]) {
        wait_for_products<LEFT>(a);
        take_products(sums);
#pragma unroll
        for (int i = 0; i < 4; i++) acc[i] += sums[i] * factors[i];
    }

    // The sums of rows that are APART from their parts: lanes of t = 0 get those of columns 0 and 1.
    DEVICE void join() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            acc[i] += __shfl_xor_sync(ALL_LANES, acc[i], 1);
            acc[i] += __shfl_xor_sync(ALL_LANES, acc[i], 2);
        }
    }

    // acc into shared memory [rows, NUM + 1] from row `row` on.
    DEVICE void store(float* sums, int row) const {
        const int g = lane >> 2, t = lane & 3;
        constexpr float FACTOR = FORM == FP4 ? 64.0f : 1.0f;
#pragma unroll
        for (int n = 0; n < NUM / 8; n++) {
            float* at = sums + (row + g) * (NUM + 1) + n * 8 + 2 * t;
            at[0] = acc[4 * n] * FACTOR, at[1] = acc[4 * n + 1] * FACTOR;
            at[8 * (NUM + 1)] = acc[4 * n + 2] * FACTOR, at[8 * (NUM + 1) + 1] = acc[4 * n + 3] * FACTOR;
        }
    }
};
