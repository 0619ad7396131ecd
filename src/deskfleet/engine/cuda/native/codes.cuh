// A few rows of FP8 codes times a weight on the tensor cores' FP8 instructions, for experts, whose sums keep some 13 bits. Owns x
// in shared memory and the product of a block.
//
// Four warps take 64 weight rows, 16 each, as the first operand, and FP4 becomes E4M3 by a mask or two shifts. x is the
// second operand, read from shared memory by all. A product covers the 32 columns that share a scale and is scaled into a
// float32 accumulator.
#pragma once
#include "blocks.cuh"

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

// Products of a warp's 16 weight rows and NUM rows of x.
template <int FORM, int COLUMNS, int NUM, int NUM_BLOCKS, int DEPTH, bool WHOLE>
struct GroupProduct : Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE> {
    typedef Columns<COLUMNS, NUM> X;
    using Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE>::acc;
    using Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE>::lane;

    // What add_some wants to know of x.
    static DEVICE CodesAt place(const u8* x) { return codes_at(x, NUM); }

    // `both`: of FP4, the second of two blocks is one, too. Rows that are `apart` are so as X says.
    template <int COUNT_>
    DEVICE void add_some(const Block<FORM> (&held)[COUNT_], const u8* x, CodesAt codes, int block, bool both, bool apart) {
        if constexpr (FORM == FP4) {
            if (apart && both) {
                add_apart(held, x, codes, block);
            } else if (apart) {
                const Block<FP4> last[1] = {held[0]};
                add_apart(last, x, codes, block);
            } else {
                add(held[0], x, codes, block);
                if (both) add(held[COUNT_ - 1], x, codes, block + 1);
            }
        } else {
            add(held[0], x, codes, block);
        }
    }

    // Of rows that are APART_, `acc` has a part of the sums of two. `goes_on` and `next` as of Walk::each.
    template <bool APART_ = false>
    DEVICE void run(const u8* x, bool goes_on = false, const Weight& next = {}) {
        this->clear();
        const CodesAt codes = codes_at(x, NUM);
        this->each(goes_on, next, [&](const Block<FORM>& own, int block) {
            if constexpr (APART_)
                add_apart<1>(reinterpret_cast<const Block<FORM>(&)[1]>(own), x, codes, block);
            else
                add(own, x, codes, block);
        });
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
                acc[n][0] += sums[group][4 * n] * (low * even);
                acc[n][1] += sums[group][4 * n + 1] * (low * odd);
                acc[n][2] += sums[group][4 * n + 2] * (high * even);
                acc[n][3] += sums[group][4 * n + 3] * (high * odd);
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
        for (int i = 0; i < 4; i++) acc[0][i] += sums[i] * factors[i];
    }

    // The sums of rows that are APART from their parts: lanes of t = 0 get those of columns 0 and 1.
    DEVICE void join() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            acc[0][i] += __shfl_xor_sync(ALL_LANES, acc[0][i], 1);
            acc[0][i] += __shfl_xor_sync(ALL_LANES, acc[0][i], 2);
        }
    }
};
