// Routed experts of many rows (spec 6.2; oracle: reference.expert_activation, quantized_linear). One block a processor goes
// through the work list: an item is one expert and up to ITEM of its (row, choice) pairs, a work one item and WARPGROUPS tiles
// of its expert's matrix, 128 weight rows each.
//
// FP4 codes with their scales, and x with its own, are exact in bf16, and sums are float32 over all of K. The last warpgroup
// copies x, whose rows are gathered, codes and scales into a ring of stages of 64 columns. Each of the others has a tile: its
// lanes decode codes in registers, the first operand of the tensor cores, which read x from the stage. The ring does not end with
// a work: while one warpgroup rounds its sums and stores them, others multiply, and the next work's stages come in.
//
// A word of a row holds the codes of columns 4w .. 4w + 3 and of those 32 behind them. x lies as prefill_experts.py says: of 32
// columns first the even ones, then the odd ones. So lane 4g + t takes words t and t + 4, and a product the parts of x that have
// the even and the odd columns of four words. Halves of rows trade places where rows g and g + 4 would share banks.
//
// Given by the compiler's command line: UP or DOWN, K and ROWS (columns and rows of an expert's matrix), NUM_CHOSEN, ITEM (one of
// COLUMNS), WARPGROUPS (of those that multiply, 2 or 3), STAGES.
#include "pipeline.cuh"
#include "tiles.cuh"

constexpr int UNITS = K / 64, WORDS = (K + 127) / 128, TILES = ROWS / 128;
constexpr int GROUPS = (TILES + WARPGROUPS - 1) / WARPGROUPS;  // works of an item
constexpr int THREADS = (WARPGROUPS + 1) * WARPGROUP;
constexpr int AHEAD = STAGES - 2;  // stages that the copies run ahead of what has been signalled

// A stage: x [8, ITEM, 8] in parts of 8 columns, with a pitch that spares the banks; codes [WARPGROUPS, 128, 32] and scale words
// [WARPGROUPS, 128].
constexpr int PART_BYTES = ITEM * 16 + 16, CODE_BYTES = 4096, SCALE_BYTES = 512;
constexpr int CODES_AT = 8 * PART_BYTES, SCALES_AT = CODES_AT + WARPGROUPS * CODE_BYTES;
constexpr int STAGE_BYTES = SCALES_AT + WARPGROUPS * SCALE_BYTES;
// Of each warpgroup, behind the stages: 128 results of each pair, bf16, then the pairs.
constexpr int PITCH = 272, LIST_AT = (ITEM + 15) / 16 * 16 * PITCH, RESULT_BYTES = LIST_AT + ITEM * 4;
constexpr int SIGNALS_AT = STAGES * STAGE_BYTES + WARPGROUPS * RESULT_BYTES;
static_assert(STAGES > 2 && (WARPGROUPS == 2 || ITEM <= 96), "of a processor's memory");

struct Experts {
    const u8* x;  // bf16 [.., K]: a row for each row of the step (UP) or for each pair (DOWN)
    const u8* codes;
    const u32* scales;
    const int* items;
    const int* pairs;
    const float* route_weights;
    u8* out;
    float limit;
};

// Where in the ring a warpgroup is.
struct Place {
    int stage = 0;
    u32 parity = 0;

    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Signals {
    u64 full[STAGES], empty[STAGES];
};

// ---- the warpgroup that copies ----

DEVICE void copy_works(u8* shared, Signals& signals, const Experts& e, int num_works) {
    const int thread = threadIdx.x % WARPGROUP, part = thread & 7, first = thread >> 3;
    Place place, behind;
    int begun = 0;
    auto pass_on = [&] {
        let_tensor_cores_read();
        __syncwarp();
        if ((thread & 31) == 0) give_signal(&signals.full[behind.stage]);
        behind.advance();
    };
    // Of the next work: item, and the pairs first, first + 16, .. of its list.
    words2 both = {};
    int pairs[(ITEM + 15) / 16] = {};
    auto ask = [&](int work) {
        if (work >= num_works) return;
        const int item = work / GROUPS;
        both = load_fresh2(e.items + 2 * item);
#pragma unroll
        for (int i = 0; i < (ITEM + 15) / 16; i++)
            if (ITEM % 16 == 0 || first + 16 * i < ITEM) pairs[i] = (int)load_fresh(e.pairs + item * ITEM + first + 16 * i);
    };
    ask(blockIdx.x);
    for (int work = blockIdx.x; work < num_works; work += gridDim.x) {
        const int tile = work % GROUPS * WARPGROUPS, expert = (int)both.x, count = (int)both.y;
        u32 rows[(ITEM + 15) / 16];  // where their next columns lie, in parts of 16 bytes
#pragma unroll
        for (int i = 0; i < (ITEM + 15) / 16; i++) {
#ifdef UP
            rows[i] = (u32)pairs[i] / NUM_CHOSEN * (K / 8) + part;
#else
            rows[i] = (u32)pairs[i] * (K / 8) + part;
#endif
        }
        ask(work + gridDim.x);
        const u8* codes = e.codes + (u64)expert * (ROWS * (u64)K / 2) + (u64)tile * (UNITS * CODE_BYTES) + thread * 16;
        const u8* scales = (const u8*)(e.scales + (u64)expert * (ROWS * WORDS) + tile * (WORDS * 128)) + thread % 32 * 16;
        const int num_tiles = min(TILES - tile, WARPGROUPS);
#pragma unroll 1
        for (int unit = 0; unit < UNITS; unit++) {
            if (begun >= STAGES) await_signal(&signals.empty[place.stage], place.parity ^ 1);
            u8* stage = shared + place.stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < 2 * WARPGROUPS; i++) {
                const int row = (thread + i % 2 * WARPGROUP) >> 1, half = (thread ^ row >> 2) & 1;
                if (i / 2 < num_tiles)
                    copy_later(stage + CODES_AT + i / 2 * CODE_BYTES + row * 32 + half * 16,
                               codes + (u64)(i / 2) * (UNITS * CODE_BYTES) + i % 2 * (CODE_BYTES / 2), true);
            }
            if (thread >> 5 < num_tiles)
                copy_later(stage + SCALES_AT + thread * 16, scales + ((thread >> 5) * WORDS + unit / 2) * SCALE_BYTES, true);
#pragma unroll
            for (int i = 0; i < (ITEM + 15) / 16; i++)
                if (first + 16 * i < count)
                    copy_later(stage + part * PART_BYTES + (first + 16 * i) * 16, e.x + (u64)(rows[i] + unit * 8) * 16, true);
            end_copies();
            codes += CODE_BYTES;
            place.advance();
            if (begun++ >= AHEAD) {
                wait_for_copies<AHEAD>();
                pass_on();
            }
        }
    }
    wait_for_copies<0>();
    for (int left = min(begun, AHEAD); left > 0; left--) pass_on();
}

// ---- the warpgroups that multiply ----

// Four codes that e4m3_of_fp4 gives, two of them as bf16 times 2**-120, times `factor`: of the even bytes or of the odd ones.
DEVICE u32 even_pair(u32 codes, u32 factor) {
    return bf16x2_mul(((codes & 0x00ff00ff) * 0x110) & 0x81c081c0, factor);  // bits 7 and 4, 3, 2 to 15 and 8, 7, 6
}
DEVICE u32 odd_pair(u32 codes, u32 factor) {
    return bf16x2_mul((codes & 0x80008000) | ((codes >> 4) & 0x01c001c0), factor);
}

// Byte of an E8M0 scale, which `selector` takes out of a word twice, as 2**(byte - 7) twice: with the codes' 2**-126, a weight
// times 2**-6. A scale may be as great as 2**7.
DEVICE u32 factor_of(u32 word, u32 selector) { return __byte_perm(word, 0, selector) * 128 + 0x3c003c00; }

// What a warpgroup knows of itself.
struct Own {
    u8* shared;
    Signals* signals;
    u8* results;  // of the warpgroup
    int number, thread, warp, lane;

    DEVICE void meet() const { meet_warpgroup(number + 1); }
    DEVICE int& pair(int n) const { return ((int*)(results + LIST_AT))[n]; }

    // All products that read the stage have ended, in this warp.
    DEVICE void release(int stage) const {
        if (lane == 0) give_signal(&signals->empty[stage]);
    }
};

// Columns that a product can have: as many as the item has pairs, and some. The fewer, the less there is to multiply; below 64,
// decoding takes longer.
constexpr int COLUMNS[] = {16, 32, 48, 64, 72, 80, 88, 96, 112, 128};
constexpr int LAST = ITEM <= 64 ? ITEM / 16 - 1 : ITEM <= 96 ? ITEM / 8 - 5 : ITEM / 16 + 1;
static_assert(COLUMNS[LAST] == ITEM, "no product has so many columns");

// Adds products of upper and lower rows. What begins them is inside of the branches, as the compiler waits for each product if it
// has to begin them itself.
template <int FROM, int TO>
DEVICE void add_products(float (&sums)[2][ITEM / 2], u32 (&a)[2][4], Parts x, int count) {
    constexpr int MIDDLE = (FROM + TO) / 2;
    if constexpr (FROM == TO) {
        start_products(a);
        Product<COLUMNS[TO]>::add(sums[0], a[0], x);
        Product<COLUMNS[TO]>::add(sums[1], a[1], x);
        commit_products();
    } else {
        if (count <= COLUMNS[MIDDLE])
            add_products<FROM, MIDDLE>(sums, a, x, count);
        else
            add_products<MIDDLE + 1, TO>(sums, a, x, count);
    }
}

// Sums of a tile's upper and lower 64 rows for `count` pairs, 2**-6 times what they should be. While the products of one step
// are made, the codes of the next are decoded.
DEVICE void multiply_units(float (&sums)[2][ITEM / 2], Place& place, const Own& own, int count) {
    const int g = own.lane >> 2, t = own.lane & 3;
    const int row = own.warp * 16 + g, swap = (g & 4) * 4;
    const int code = own.number * CODE_BYTES + row * 32 + swap + 4 * t;  // word t; t + 4 lies where bit 4 is another
    const u8* scales_at = own.shared + SCALES_AT + own.number * SCALE_BYTES + row * 4;
#pragma unroll
    for (int i = 0; i < ITEM; i++) ((float*)sums)[i] = 0.0f;
    const Parts x(own.shared, 2 * PART_BYTES);
    u32 a[2][2][4] = {};
    int before = 0;
#pragma unroll 1
    for (int unit = 0; unit < UNITS; unit++) {
        await_signal(&own.signals->full[place.stage], place.parity);
        const int stage = place.stage * STAGE_BYTES;
        const u8* at = own.shared + stage;
        u32 factors[2][4], words[4];  // of upper and lower rows, of rows g and g + 8 of each
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 scales = *(const u32*)(scales_at + stage + (i >> 1) * 256 + (i & 1) * 32);
            factors[0][i] = factor_of(scales, unit & 1 ? 0x4242 : 0x4040);
            factors[1][i] = factor_of(scales, unit & 1 ? 0x4343 : 0x4141);
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const int half = step >> 1, second = step & 1;  // words t or t + 4, the first or the second of their codes
            u32(&now)[2][4] = a[step & 1];
            if (second == 0) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = *(const u32*)(at + (code ^ 16 * half) + (CODES_AT + (i >> 1) * 2048 + (i & 1) * 256));
            }
            wait_for_products<1>(now);
            if (step == 1 && unit > 0) own.release(before);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 codes = e4m3_of_fp4(words[i], second);
                now[i >> 1][i & 1] = even_pair(codes, factors[second][i]);
                now[i >> 1][2 + (i & 1)] = odd_pair(codes, factors[second][i]);
            }
            Parts now_x = x;
            now_x.move(stage + (4 * second + half) * PART_BYTES);
            add_products<0, LAST>(sums, now, now_x, count);
        }
        before = place.stage;
        place.advance();
    }
    wait_for_products<0>(a[0]);
    take_products(sums[0]);
    take_products(sums[1]);
    own.release(before);
}

// A tile of the product into `results` [pair][128] bf16, and the list beside it; the warpgroup meets before and after. Lane
// 4g + t has rows g and g + 8 of this warp's 16 upper and lower ones, thread n pair n.
DEVICE void make_results(Place& place, const Own& own, int count, int pair) {
    float sums[2][ITEM / 2];
    multiply_units(sums, place, own, count);
    const int matrix = own.lane >> 3;
    u8* at = own.results + ((matrix >> 1) * 8 + (own.lane & 7)) * PITCH + own.warp * 32 + (matrix & 1) * 16;
    own.meet();
    if (own.thread < ITEM) own.pair(own.thread) = pair;
#pragma unroll
    for (int n = 0; n < ITEM; n += 16) {
        if (n >= count) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = n / 2 + 2 * i;
                words[i] = at < ITEM / 2 ? bf16x2_of_floats(sums[half][at + 1] * 64.0f, sums[half][at] * 64.0f) : 0;
            }
            store_turned(at + n * PITCH + half * 128, words[0], words[1], words[2], words[3]);
        }
    }
    own.meet();
}

#ifdef UP
// 32 gates and, 128 bytes behind them, up values of one pair: clamped SwiGLU and route weight, and what the FP8 quantiser makes
// of them, in the order of columns that the next product reads.
DEVICE void store_group(const u8* results, float route, float limit, u8* out) {
    float values[32];
    float greatest = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const u32 gates = ((const u32*)results)[i / 2], ups = ((const u32*)(results + 128))[i / 2];
        const float gate = fminf(as_float(i % 2 ? gates & 0xffff0000 : gates << 16), limit);
        const float up = fminf(fmaxf(as_float(i % 2 ? ups & 0xffff0000 : ups << 16), -limit), limit);
        values[i] = bf16_rounded(fast_divide(gate, 1.0f + fast_exp(-gate)) * up * route);
        greatest = fmaxf(greatest, fabsf(values[i]));
    }
    const u32 bits = fp8_scale_bits(greatest);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const u32 code = fp8_code(values[i], bits);
        values[i] = as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f * as_float(bits);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float* from = values + i % 2 * 16 + i / 2;
        ((words4*)out)[i] = {bf16x2_of_floats(from[2], from[0]), bf16x2_of_floats(from[6], from[4]),
                             bf16x2_of_floats(from[10], from[8]), bf16x2_of_floats(from[14], from[12])};
    }
}
#endif

DEVICE void do_work(Place& place, const Own& own, const Experts& e, int item, int tile, int count) {
    int pair = 0;  // arrives while products are made
    if (own.thread < count) pair = (int)load_fresh(e.pairs + item * ITEM + own.thread);
    make_results(place, own, count, pair);
#ifdef UP
    const int group = own.thread & 1;
#pragma unroll 1
    for (int n = own.thread >> 1; n < count; n += WARPGROUP / 2)
        store_group(own.results + n * PITCH + group * 64, load_fresh_f(e.route_weights + own.pair(n)), e.limit,
                    e.out + ((u64)own.pair(n) * (ROWS / 2) + tile * 64 + group * 32) * 2);
#else
    const int part = own.thread & 15;
#pragma unroll 4
    for (int n = own.thread >> 4; n < count; n += WARPGROUP / 16)
        *(words4*)(e.out + ((u64)own.pair(n) * ROWS + tile * 128 + part * 8) * 2) =
            *(const words4*)(own.results + n * PITCH + part * 16);
#endif
}

DEVICE void do_works(const Own& own, const Experts& e, int num_works) {
    Place place;
    int count = 0;
    if ((int)blockIdx.x < num_works) count = (int)load_fresh(e.items + 2 * (blockIdx.x / GROUPS) + 1);
#pragma unroll 1
    for (int work = blockIdx.x; work < num_works; work += gridDim.x) {
        const int item = work / GROUPS, tile = work % GROUPS * WARPGROUPS + own.number, next = work + gridDim.x;
        int count_then = 0;
        if (next < num_works) count_then = (int)load_fresh(e.items + 2 * (next / GROUPS) + 1);
        if (TILES % WARPGROUPS == 0 || tile < TILES) {
            do_work(place, own, e, item, tile, count);
        } else {
#pragma unroll 1
            for (int unit = 0; unit < UNITS; unit++) {
                await_signal(&own.signals->full[place.stage], place.parity);
                own.release(place.stage);
                place.advance();
            }
        }
        count = count_then;
    }
}

KERNEL(THREADS, 1)
#ifdef UP
grouped_up(
#else
grouped_down(
#endif
    const u8* x, const u8* codes, const u32* scales, const int* items, const int* num_items, const int* item_pairs,
    const float* route_weights, u8* out, float limit) {
    SHARED_BYTES(shared);
    Signals& signals = *(Signals*)(shared + SIGNALS_AT);
    const int warp = __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 5), 0), warpgroup = warp >> 2;
    if (threadIdx.x < STAGES) {
        make_signal(&signals.full[threadIdx.x], 4);
        make_signal(&signals.empty[threadIdx.x], 4 * WARPGROUPS);
    }
    __syncthreads();
    wait_for_predecessor();
    const Experts e = {x, codes, scales, items, item_pairs, route_weights, out, limit};
    const int num_works = (int)load_fresh(num_items) * GROUPS;
    if (warpgroup == WARPGROUPS) {
        leave_registers<WARPGROUPS == 3 ? 56 : 64>();
        copy_works(shared, signals, e, num_works);
    } else {
        take_registers<WARPGROUPS == 3 ? 152 : 224>();
        const Own own = {shared, &signals, shared + STAGES * STAGE_BYTES + warpgroup * RESULT_BYTES, warpgroup,
                         (int)threadIdx.x % WARPGROUP, warp & 3, (int)threadIdx.x & 31};
        do_works(own, e, num_works);
    }
    let_successor_start();
}
