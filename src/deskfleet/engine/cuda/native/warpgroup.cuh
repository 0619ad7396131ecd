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

// NUM rows of x of COLUMNS columns in shared memory: of each group of 32 the codes [2, NUM, 16] with a pitch that spares
// the banks, then the scales float32 [groups, NUM]. Columns are in the order in which lanes hold those of a weight.
template <int COLUMNS, int NUM>
struct Columns {
    static constexpr int NUM_GROUPS = COLUMNS / 32;
    static constexpr int PITCH_BYTES = NUM * 32 + 16;
    static constexpr int CODE_BYTES = NUM_GROUPS * PITCH_BYTES;
    static constexpr int BYTES = CODE_BYTES + NUM_GROUPS * NUM * 4;

    static DEVICE const u8* codes(const u8* at, int group) { return at + group * PITCH_BYTES; }
    static DEVICE const float* scales(const u8* at, int group) { return (const float*)(at + CODE_BYTES) + group * NUM; }

    // Rows row(n) of x, n below `count`, by all threads of the block, which meet afterwards.
    template <class Row>
    static DEVICE void build(u8* to, const Input& x, int count, int num_threads, Row row) {
        constexpr int WORDS = (COLUMNS + 127) / 128;
        for (int i = threadIdx.x; i < NUM_GROUPS * count; i += num_threads) {
            const int group = i % NUM_GROUPS, n = i / NUM_GROUPS;
            const u64 from = row(n);
            const u8* at = x.values + from * COLUMNS + group * 32;
            const words4 first = load_row4(at), second = load_row4(at + 16);
            const u32 word = load_fresh(x.scales + from * WORDS + group / 4);
            words4* out = (words4*)(to + group * PITCH_BYTES) + n;
            out[0] = {first.x, first.z, second.x, second.z};
            out[NUM] = {first.y, first.w, second.y, second.w};
            ((float*)(to + CODE_BYTES))[group * NUM + n] = scale_of(word, group % 4 * 8);
        }
        let_tensor_cores_read();
        __syncthreads();
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
        if (turn >= NUM_BLOCKS) load_block<FORM, COLUMNS>(held[stage], next, turn - NUM_BLOCKS);
    }

    DEVICE void start(const Weight& whole, int row, int first_block, int own_lane) {
        weight = lane_of<FORM, COLUMNS>(whole, row, own_lane);
        begin = first_block;
        lane = own_lane;
#pragma unroll
        for (int stage = 0; stage < DEPTH; stage++) load(stage, stage);
    }

    // `next`: rows whose blocks are asked for as the registers of these become free, with all columns; null for none.
    DEVICE void run(const u8* x, const Weight* next = nullptr) {
#pragma unroll
        for (int i = 0; i < NUM / 2; i++) acc[i] = 0.0f;
#pragma unroll 1
        for (int first = 0; first < NUM_BLOCKS; first += DEPTH) {
#pragma unroll
            for (int stage = 0; stage < DEPTH; stage++) {
                const int turn = first + stage;
                if ((NUM_BLOCKS % DEPTH == 0 || turn < NUM_BLOCKS) && (WHOLE || begin + turn < ALL)) add(held[stage], x, begin + turn);
                load(stage, turn + DEPTH);
                if constexpr (NUM_BLOCKS % DEPTH == 0)
                    if (next != nullptr) load_next(*next, stage, turn + DEPTH);
            }
        }
    }

    DEVICE void add(const Block<FORM>& own, const u8* x, int block) {
        u32 a[4][4];
        float sums[4][NUM / 2];
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
        start_products(a);
#pragma unroll
        for (int group = 0; group < 4; group++)
            if (COLUMNS % 128 == 0 || block * 128 + group * 32 < COLUMNS)
                multiply_codes(sums[group], a[group], X::codes(x, block * 4 + group));
        end_products(sums);
        const int t = lane & 3;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            if (COLUMNS % 128 != 0 && block * 128 + group * 32 >= COLUMNS) continue;
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
