// A few rows of FP8 codes times a weight with float32 sums, for experts. Owns x in shared memory and the product of a block.
//
// Codes with their power-of-two scales in them are exact in bf16: a weight's are made so in registers, those of x once for an item.
// So the tensor cores add up all columns without an end between two groups. A scale of a weight may be as great as 2**7.
#pragma once
#include "blocks.cuh"

// Rows that a product takes apart (codes.cuh): none.
constexpr int APART = 0;

// NUM rows of x of COLUMNS columns in shared memory, bf16 [groups of 32, NUM, 4, 8]: eight columns a lane, in the order in which it has
// those of a weight: 0, 2, 1, 3, 4, 6, 5, 7. Groups are a multiple of four, of which those that do not exist are zero.
template <int COLUMNS, int NUM>
struct Columns {
    static constexpr int NUM_GROUPS = (COLUMNS + 127) / 128 * 4;
    static constexpr int PITCH = NUM * 4 + 1;  // of a group, in 16 bytes, which spares the banks
    static constexpr int BYTES = NUM_GROUPS * PITCH * 16;

    // Two of four codes, of bytes 0 and 2 or 1 and 3, times a power of two, two bf16 of it.
    static DEVICE u32 wide(u32 codes, bool high, u32 scale) { return bf16x2_mul(bf16x2_of_paired(codes, high), scale); }

    // Rows row(n) of x, n below `count`, by all threads of the block, which meet afterwards.
    template <class Row>
    static DEVICE void build(u8* to, const Input& x, int count, int num_threads, bool, Row row) {
        fill(to, x, count, num_threads, false, row);
        __syncthreads();
    }

    template <class Row>
    static DEVICE void fill(u8* to, const Input& x, int count, int num_threads, bool, Row row) {
        constexpr int WORDS = (COLUMNS + 127) / 128;
        for (int i = threadIdx.x; i < NUM_GROUPS * count * 4; i += num_threads) {
            const int eight = i & 3, group = (i >> 2) % NUM_GROUPS, n = (i >> 2) / NUM_GROUPS;
            words2 codes = {};
            u32 scale = 0;
            if (COLUMNS % 128 == 0 || group * 32 < COLUMNS) {
                const u64 from = row(n);
                codes = load_row2(x.values + from * COLUMNS + group * 32 + eight * 8);
                scale = (load_fresh(x.scales + from * WORDS + group / 4) >> group % 4 * 8 & 0xff) * 0x00800080;
            }
            ((words4*)to)[group * PITCH + n * 4 + eight] = {wide(codes.x, false, scale), wide(codes.x, true, scale),
                                                            wide(codes.y, false, scale), wide(codes.y, true, scale)};
        }
    }
};

// Four FP4 numbers, the first or the second of each byte, as bf16 times `factor` times 2**-126: bytes 0 and 2, or 1 and 3.
template <bool SECOND, bool HIGH>
DEVICE u32 bf16x2_of_fp4(u32 word, u32 factor) {
    u32 bits;
    if constexpr (SECOND)
        bits = HIGH ? ((word << 2) & 0x80008000) | ((word >> 6) & 0x01000100) | ((word >> 2) & 0x00c000c0)
                    : ((word << 10) & 0x80008000) | ((word << 2) & 0x01000100) | ((word << 6) & 0x00c000c0);
    else
        bits = HIGH ? (word & 0x80008000) | ((word >> 4) & 0x01c001c0) : ((word << 8) & 0x80008000) | ((word << 4) & 0x01c001c0);
    return bf16x2_mul(bits, factor);
}

// Products of a warp's 16 weight rows and NUM rows of x.
template <int FORM, int COLUMNS, int NUM, int NUM_BLOCKS, int DEPTH, bool WHOLE>
struct GroupProduct : Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE> {
    typedef Columns<COLUMNS, NUM> X;
    using Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE>::acc;
    using Walk<FORM, COLUMNS, NUM, NUM_BLOCKS, DEPTH, WHOLE>::lane;

    // `goes_on` and `next` as of Walk::each.
    template <bool APART_ = false>
    DEVICE void run(const u8* x, bool goes_on = false, const Weight& next = {}) {
        this->clear();
        const words4* columns = place(x);
        this->each(goes_on, next, [&](const Block<FORM>& own, int block) { add(own, columns, block); });
    }

    // Scale GROUP_ of a word times 2**120, two bf16. FP8 codes in bf16's places are 2**-120 times their values, FP4 codes 2**-126.
    template <int GROUP_>
    static DEVICE u32 factor_of(u32 scales) {
        return __byte_perm(scales, 0, 0x4040 | GROUP_ << 8 | GROUP_) * 128 + 0x3c003c00;
    }

    // The first operand of a group of a row: eight columns as four words.
    template <int GROUP_>
    static DEVICE void decode(u32 (&a)[4], const words2& codes, u32 factor) {
        if constexpr (FORM == FP4) {
            constexpr bool SECOND = GROUP_ & 1;
            a[0] = bf16x2_of_fp4<SECOND, false>(codes.x, factor), a[1] = bf16x2_of_fp4<SECOND, true>(codes.x, factor);
            a[2] = bf16x2_of_fp4<SECOND, false>(codes.y, factor), a[3] = bf16x2_of_fp4<SECOND, true>(codes.y, factor);
        } else {
            a[0] = scaled_pair(codes.x, false, factor), a[1] = scaled_pair(codes.x, true, factor);
            a[2] = scaled_pair(codes.y, false, factor), a[3] = scaled_pair(codes.y, true, factor);
        }
    }

    // `columns`: the lane's first of the block.
    template <int GROUP_>
    DEVICE void add_group(const Block<FORM>& own, const words4* columns) {
        constexpr int PART = FORM == FP4 ? GROUP_ / 2 : GROUP_;
        u32 a[4], b[4];
        decode<GROUP_>(a, own.rows[PART][0], factor_of<GROUP_>(own.scales[0]));
        decode<GROUP_>(b, own.rows[PART][1], factor_of<GROUP_>(own.scales[FORM == FP4 ? 1 : 0]));
#pragma unroll
        for (int n = 0; n < NUM / 8; n++) {
            const words4 fed = columns[GROUP_ * X::PITCH + n * 32];
            mma_bf16(acc[n], a[0], b[0], a[1], b[1], fed.x, fed.y);
            mma_bf16(acc[n], a[2], b[2], a[3], b[3], fed.z, fed.w);
        }
    }

    // What add_some wants to know of x: its lane's columns.
    DEVICE const words4* place(const u8* x) const { return (const words4*)x + lane; }

    // `both`: the second of two blocks is one, too.
    template <int COUNT_>
    DEVICE void add_some(const Block<FORM> (&held)[COUNT_], const u8*, const words4* columns, int block, bool both, bool) {
        add(held[0], columns, block);
        if (both) add(held[COUNT_ - 1], columns, block + 1);
    }

    DEVICE void join() {}  // of rows apart, which these never are

    DEVICE void add(const Block<FORM>& own, const words4* columns, int block) {
        columns += block * (4 * X::PITCH);
        add_group<0>(own, columns);
        add_group<1>(own, columns);
        add_group<2>(own, columns);
        add_group<3>(own, columns);
    }
};
