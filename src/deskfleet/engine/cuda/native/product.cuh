// Up to 16 rows times an FP8 or bf16 weight. Owns the products of one warp.
//
// A warp takes tiles of 16 weight rows (tiles.cuh) as the first operand, 16x16, and 8 rows of x at a time as the second,
// 16x8. FP8 codes of both become f16, which holds them exactly; those of a weight once for all rows. A group of 32 columns has
// its own scales, so its sums are scaled into a float32 accumulator. Fewer than 8 rows leave columns of the second operand free:
// with ROWS of them, 8 / ROWS groups are kept apart there, each in columns that are zero in the others, and are scaled at
// once. Sums of bf16 products need no scaling.
#pragma once
#include "tiles.cuh"

constexpr int STEP = 256;  // columns that a warp loads at a time: 8 groups

// A step of 16 weight rows, as a lane holds it. WORDS: scale words of the groups whose sums the lane gets.
template <int FORM, int WORDS>
struct Fragment;

template <int WORDS>
struct Fragment<FP8, WORDS> {
    words2 rows[8][2];  // of each 32 columns: row g, row g + 8
    u32 scales[WORDS];
};

template <int WORDS>
struct Fragment<WIDE, WORDS> {
    words4 rows[4][2];  // of each 64 columns
    u32 scales[WORDS];
};

template <int WORDS>
struct Fragment<BF16, WORDS> {
    words4 rows[8][2];  // of each 32 columns
};

// Loads step `step` of the 16 rows that are `row` rows further in the same tile as those of `lane`. What does not exist is
// zero. `word`: the lane's first scale word.
template <int FORM, int COLUMNS, int WORDS>
DEVICE void load_fragment(Fragment<FORM, WORDS>& to, const Weight& lane, int row, int step, int word) {
    constexpr int NUM_WORDS = (COLUMNS + 127) / 128;
    constexpr int PARTS = FORM == WIDE ? 4 : 8;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if (COLUMNS % STEP != 0 && step * STEP + part * (STEP / PARTS) >= COLUMNS) {
            to.rows[part][0] = to.rows[part][1] = {};
            continue;
        }
        if constexpr (FORM == FP8) {
            const u8* at = lane.codes + (step * PARTS + part) * 4096 + row * 32;
            to.rows[part][0] = load_stream2(at);
            to.rows[part][1] = load_stream2(at + 256);
        } else if constexpr (FORM == WIDE) {
            const u8* at = lane.codes + (step * PARTS + part) * 8192 + row * 64;
            to.rows[part][0] = load_stream4(at);
            to.rows[part][1] = load_stream4(at + 512);
        } else {
            const u8* at = lane.codes + (step * 4 + part / 2) * 8192 + (part % 2) * 64 + row * 128;
            to.rows[part][0] = load_stream4(at);
            to.rows[part][1] = load_stream4(at + 1024);
        }
    }
    if constexpr (FORM != BF16) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int block = step * 2 + word + i;
            const bool exists = COLUMNS % STEP == 0 || block < NUM_WORDS;
            to.scales[i] = exists ? load_scale(lane.scales + row / 32 * NUM_WORDS + block) : 0;
        }
    }
}

// Second operands of ROWS rows: one, or one for every 8.
template <int ROWS>
constexpr int EIGHTS = ROWS > 8 ? ROWS / 8 : 1;

// The rows of x that a lane needs: those that it feeds, and those whose sums it gets.
template <int ROWS>
struct Sources {
    u64 own[EIGHTS<ROWS>];
    int even[EIGHTS<ROWS>], odd[EIGHTS<ROWS>];
};

// Of `num_rows` rows from `first` on, padded to ROWS; a row that does not exist is another.
template <int ROWS>
DEVICE Sources<ROWS> sources_of(int first, int num_rows, int lane) {
    constexpr int EACH = ROWS < 8 ? ROWS : 8;
    const int g = lane >> 2, t = lane & 3, last = num_rows - 1;
    Sources<ROWS> from;
#pragma unroll
    for (int eight = 0; eight < EIGHTS<ROWS>; eight++) {
        const int row = first + eight * 8;
        from.own[eight] = (u64)min(row + g % EACH, last);
        from.even[eight] = min(row + 2 * t % EACH, last), from.odd[eight] = min(row + (2 * t + 1) % EACH, last);
    }
    return from;
}

// The second operand of one group: four columns of a row of x, and four more.
struct Operand {
    u32 a, b, c, d;
};

// The first operand of one group of a step: rows g and g + 8, four columns and four more.
template <int FORM, int WORDS>
DEVICE void weights_of(u32 (&a)[4], u32 (&b)[4], const Fragment<FORM, WORDS>& held, int group) {
    if constexpr (FORM == BF16) {
        const words4 &low = held.rows[group][0], &high = held.rows[group][1];
        a[0] = low.x, a[1] = low.y, a[2] = low.z, a[3] = low.w;
        b[0] = high.x, b[1] = high.y, b[2] = high.z, b[3] = high.w;
    } else if constexpr (FORM == WIDE) {
        const words4 &low = held.rows[group >> 1][0], &high = held.rows[group >> 1][1];
        const bool odd = group & 1;
        a[0] = bf16x2_of_paired(low.x, odd), a[1] = bf16x2_of_paired(low.y, odd);
        a[2] = bf16x2_of_paired(low.z, odd), a[3] = bf16x2_of_paired(low.w, odd);
        b[0] = bf16x2_of_paired(high.x, odd), b[1] = bf16x2_of_paired(high.y, odd);
        b[2] = bf16x2_of_paired(high.z, odd), b[3] = bf16x2_of_paired(high.w, odd);
    } else {
        const words2 &low = held.rows[group][0], &high = held.rows[group][1];
        a[0] = f16x2_of_low_e4m3x2(low.x), a[1] = f16x2_of_high_e4m3x2(low.x);
        a[2] = f16x2_of_low_e4m3x2(low.y), a[3] = f16x2_of_high_e4m3x2(low.y);
        b[0] = f16x2_of_low_e4m3x2(high.x), b[1] = f16x2_of_high_e4m3x2(high.x);
        b[2] = f16x2_of_low_e4m3x2(high.y), b[3] = f16x2_of_high_e4m3x2(high.y);
    }
}

template <int FORM>
DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4], const Operand& x) {
    if constexpr (FORM == FP8) {
        mma_f16(sums, a[0], b[0], a[1], b[1], x.a, x.b);
        mma_f16(sums, a[2], b[2], a[3], b[3], x.c, x.d);
    } else {
        mma_bf16(sums, a[0], b[0], a[1], b[1], x.a, x.b);
        mma_bf16(sums, a[2], b[2], a[3], b[3], x.c, x.d);
    }
}

// Sums of NUM_TILES tiles of 16 weight rows, which follow each other in one tile of packing.py, times ROWS rows of x (1, 2, 4,
// 8 or 16), over steps begin .. begin + NUM_STEPS - 1 (those that there are). NUM_STAGES steps of weights are under way; the
// first of them are asked for by `start`, which needs no x.
template <int FORM, int COLUMNS, int NUM_TILES, int ROWS, int NUM_STEPS, int NUM_STAGES>
struct Product {
    static constexpr bool SCALED = FORM != BF16;
    static constexpr int KEPT = !SCALED ? 8 : ROWS < 8 ? 8 / ROWS : 1;  // groups whose sums are scaled at once
    static constexpr bool APART = SCALED && KEPT > 1;
    static constexpr int WORDS = KEPT == 8 ? 1 : 2;  // scale words of a step that a lane needs
    static constexpr int NUM_WORDS = (COLUMNS + 127) / 128;
    static constexpr int ALL = (COLUMNS + STEP - 1) / STEP;
    static constexpr int DEPTH = NUM_STAGES < NUM_STEPS ? NUM_STAGES : NUM_STEPS;
    static constexpr int COUNT = EIGHTS<ROWS>;
    Fragment<FORM, WORDS> held[DEPTH][NUM_TILES];
    float acc[NUM_TILES][COUNT][4];
    Weight weight;
    int begin, lane, first_word;

    DEVICE void load(int stage, int turn) {
        if (begin + turn < ALL) {
#pragma unroll
            for (int tile = 0; tile < NUM_TILES; tile++)
                load_fragment<FORM, COLUMNS, WORDS>(held[stage][tile], weight, tile * 16, begin + turn, first_word);
        }
    }

    DEVICE void start(const Weight& whole, int first_row, int first_step, int own_lane) {
        lane = own_lane;
        first_word = WORDS == 1 ? (lane & 3) >> 1 : 0;
        weight = lane_of<FORM, COLUMNS>(whole, first_row, lane);
        begin = first_step;
#pragma unroll
        for (int turn = 0; turn < DEPTH; turn++) load(turn, turn);
#pragma unroll
        for (int tile = 0; tile < NUM_TILES; tile++) clear(acc[tile]);
    }

    static DEVICE void clear(float (&sums)[COUNT][4]) {
#pragma unroll
        for (int eight = 0; eight < COUNT; eight++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[eight][i] = 0.0f;
    }

    // `stride`: elements from row to row of x.
    DEVICE void run(const Input& x, const Sources<ROWS>& from, int stride) {
        if constexpr (DEPTH == 1) {
#pragma unroll 1
            for (int turn = 0; turn < NUM_STEPS; turn++) {
                if (turn > 0) load(0, turn);
                if (begin + turn < ALL) add(held[0], x, from, begin + turn, stride);
            }
        } else {
#pragma unroll
            for (int turn = 0; turn < NUM_STEPS; turn++) {
                if (begin + turn < ALL) add(held[turn % DEPTH], x, from, begin + turn, stride);
                if (turn + DEPTH < NUM_STEPS) load(turn % DEPTH, turn + DEPTH);
            }
        }
    }

    // What this lane feeds of group `group` of its row, if that exists.
    DEVICE Operand operand(const Input& x, u64 row, int step, int group, int stride) const {
        const int column = step * STEP + group * 32;
        if (COLUMNS % STEP != 0 && column >= COLUMNS) return {};
        const u64 at = row * stride + column + 8 * (lane & 3);
        if constexpr (FORM == FP8) {
            const words2 codes = load_row2(x.values + at);
            return {f16x2_of_low_e4m3x2(codes.x), f16x2_of_high_e4m3x2(codes.x), f16x2_of_low_e4m3x2(codes.y),
                    f16x2_of_high_e4m3x2(codes.y)};
        }
        const words4 values = load_row4(x.values + at * 2);
        return {values.x, values.y, values.z, values.w};
    }

    DEVICE void add(const Fragment<FORM, WORDS> (&weights)[NUM_TILES], const Input& x, const Sources<ROWS>& from,
                    int step, int stride) {
        const int t = lane & 3, mine = (lane >> 2) / ROWS;  // the slot that this lane feeds
        u32 x_words[COUNT][2][WORDS];
        if constexpr (FORM == FP8) {
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const int block = step * 2 + first_word + i;
                const bool exists = COLUMNS % STEP == 0 || block < NUM_WORDS;
#pragma unroll
                for (int eight = 0; eight < COUNT; eight++) {
                    x_words[eight][0][i] = exists ? load_fresh(x.scales + (u64)from.even[eight] * NUM_WORDS + block) : 0;
                    x_words[eight][1][i] = exists ? load_fresh(x.scales + (u64)from.odd[eight] * NUM_WORDS + block) : 0;
                }
            }
        }
#pragma unroll
        for (int period = 0; period < 8 / KEPT; period++) {
            if (COLUMNS % STEP != 0 && step * STEP + period * KEPT * 32 >= COLUMNS) continue;
            float sums[NUM_TILES][COUNT][4];
            Operand own[COUNT];
#pragma unroll
            for (int tile = 0; tile < NUM_TILES; tile++) clear(sums[tile]);
            if constexpr (SCALED)
#pragma unroll
                for (int eight = 0; eight < COUNT; eight++)
                    own[eight] = operand(x, from.own[eight], step, period * KEPT + (APART ? mine : 0), stride);
#pragma unroll
            for (int place = 0; place < KEPT; place++) {
                const int group = period * KEPT + place;
                if (COLUMNS % STEP != 0 && step * STEP + group * 32 >= COLUMNS) continue;
                Operand fed[COUNT] = {};
#pragma unroll
                for (int eight = 0; eight < COUNT; eight++)
                    if constexpr (!SCALED)
                        fed[eight] = operand(x, from.own[eight], step, group, stride);
                    else if (!APART || mine == place)
                        fed[eight] = own[eight];
#pragma unroll
                for (int tile = 0; tile < NUM_TILES; tile++) {
                    u32 a[4], b[4];
                    weights_of<FORM, WORDS>(a, b, weights[tile], group);
#pragma unroll
                    for (int eight = 0; eight < COUNT; eight++)
                        multiply<FORM>(SCALED ? sums[tile][eight] : acc[tile][eight], a, b, fed[eight]);
                }
            }
            if constexpr (SCALED) {
                // Of the groups of this period, those of the two columns whose sums this lane has.
                const int even = period * KEPT + 2 * t / ROWS, odd = period * KEPT + (2 * t + 1) / ROWS;
                const int word = WORDS == 1 ? 0 : period * KEPT / 4;
                const int even_shift = 8 * (even & 3), odd_shift = 8 * (odd & 3);
#pragma unroll
                for (int eight = 0; eight < COUNT; eight++) {
                    float even_x = 1.0f, odd_x = 1.0f;
                    if constexpr (FORM == FP8) {
                        even_x = scale_of(x_words[eight][0][word], even_shift);
                        odd_x = scale_of(x_words[eight][1][word], odd_shift);
                    }
#pragma unroll
                    for (int tile = 0; tile < NUM_TILES; tile++) {
                        const float even_factor = scale_of(weights[tile].scales[word], even_shift) * even_x;
                        const float odd_factor = scale_of(weights[tile].scales[word], odd_shift) * odd_x;
                        acc[tile][eight][0] += sums[tile][eight][0] * even_factor;
                        acc[tile][eight][1] += sums[tile][eight][1] * odd_factor;
                        acc[tile][eight][2] += sums[tile][eight][2] * even_factor;
                        acc[tile][eight][3] += sums[tile][eight][3] * odd_factor;
                    }
                }
            }
        }
    }

    // acc of a tile into shared memory [rows of the weight, ROWS | 1] from row `row` on. Columns that kept groups of one row
    // of x apart are added up.
    DEVICE void store(float* sums, int tile, int row) const {
        constexpr int PITCH = ROWS | 1;
        const int g = lane >> 2, t = lane & 3;
        float* at = sums + (row + g) * PITCH + 2 * t;
        if constexpr (ROWS > 8) {
#pragma unroll
            for (int eight = 0; eight < COUNT; eight++, at += 8) {
                const float(&values)[4] = acc[tile][eight];
                at[0] = values[0], at[1] = values[1], at[8 * PITCH] = values[2], at[8 * PITCH + 1] = values[3];
            }
            return;
        }
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = acc[tile][0][i];
        if constexpr (SCALED && ROWS < 8) {
            if constexpr (ROWS == 1) values[0] += values[1], values[2] += values[3];
#pragma unroll
            for (int i = 0; i < 4; i += ROWS == 1 ? 2 : 1) {
                if constexpr (ROWS < 4) values[i] += __shfl_xor_sync(ALL_LANES, values[i], 1);
                values[i] += __shfl_xor_sync(ALL_LANES, values[i], 2);
            }
        }
        if (2 * t < ROWS) at[0] = values[0], at[8 * PITCH] = values[2];
        if (2 * t + 1 < ROWS) at[1] = values[1], at[8 * PITCH + 1] = values[3];
    }
};
