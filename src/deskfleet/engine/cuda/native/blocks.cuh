// A warp's 16 weight rows over blocks of 128 columns, for experts. Owns which blocks are under way in its registers, and the sums;
// what a product is belongs to codes.cuh and exact.cuh.
//
// Lane 4g + t loads columns 8t .. 8t + 7 of every group of 32 of rows g and g + 8 (tiles.cuh).
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

// Blocks begin .. begin + NUM_BLOCKS - 1 (those that there are; all are, where WHOLE) of one weight, DEPTH of them under way, and
// sums of NUM rows of x. Of FP4 they are 2**-6 times what they should be.
template <int FORM, int COLUMNS, int NUM, int NUM_BLOCKS, int DEPTH, bool WHOLE>
struct Walk {
    static constexpr int ALL = (COLUMNS + 127) / 128;
    Block<FORM> held[DEPTH];
    float acc[NUM / 8][4];
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

    // What `each` takes as the next rows: those from `row` on.
    DEVICE Weight at(const Weight& whole, int row) const { return lane_of<FORM, COLUMNS>(whole, row, lane); }

    DEVICE void start(const Weight& whole, int row, int first_block, int own_lane) {
        begin = first_block;
        lane = own_lane;
        weight = at(whole, row);
#pragma unroll
        for (int stage = 0; stage < DEPTH; stage++) load(stage, stage);
    }

    // add(block held, its number) of all blocks. Where `goes_on`, blocks of the rows `next` (of `at`) are asked for as the
    // registers of these become free.
    template <class Add>
    DEVICE void each(bool goes_on, const Weight& next, Add add) {
#pragma unroll 1
        for (int first = 0; first < NUM_BLOCKS; first += DEPTH) {
#pragma unroll
            for (int stage = 0; stage < DEPTH; stage++) {
                const int turn = first + stage;
                if ((NUM_BLOCKS % DEPTH == 0 || turn < NUM_BLOCKS) && (WHOLE || begin + turn < ALL)) add(held[stage], begin + turn);
                load(stage, turn + DEPTH);
                if constexpr (NUM_BLOCKS % DEPTH == 0)
                    if (goes_on) load_next(next, stage, turn + DEPTH);
            }
        }
    }

    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < NUM / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
    }

    // acc into shared memory [rows, NUM + 1] from row `row` on.
    DEVICE void store(float* sums, int row) const {
        const int g = lane >> 2, t = lane & 3;
        constexpr float FACTOR = FORM == FP4 ? 64.0f : 1.0f;
#pragma unroll
        for (int n = 0; n < NUM / 8; n++) {
            float* at = sums + (row + g) * (NUM + 1) + n * 8 + 2 * t;
            at[0] = acc[n][0] * FACTOR, at[1] = acc[n][1] * FACTOR;
            at[8 * (NUM + 1)] = acc[n][2] * FACTOR, at[8 * (NUM + 1) + 1] = acc[n][3] * FACTOR;
        }
    }
};
