// Routed and shared experts of a few rows (spec 6.2, 6.3; oracles: reference.expert_activation, shared_expert). An item is
// one expert and up to MEMBERS of its (row, choice) pairs (experts.py); the shared expert has items of SHARED_MEMBERS rows.
//
// An item has UNITS units, strips of its outputs. Blocks are as many as run at a time and take equal shares of all units,
// one after another: x of an item is made once for all of its units that a block has, and the weights of a unit are asked
// for while the one before is multiplied, so that memory is never idle. Where every unit has a block of its own (ALONE), a
// block's weights, if it knows which, are on their way before the kernel before this one has ended.
//
// Given by the compiler's command line: UP or DOWN, EXACT (exact.cuh, otherwise codes.cuh), K (model width), F (expert width), NUM_CHOSEN, MEMBERS and SHARED_MEMBERS
// (8 or 16), WARPGROUPS, BLOCKS (up: of 128 columns, a warpgroup), STAGES and SHARED_STAGES (blocks of weights under way),
// ALONE, PER_PROCESSOR (blocks).
#include "items.cuh"
#ifdef EXACT
#include "exact.cuh"
#else
#include "codes.cuh"
#endif

constexpr int THREADS = WARPGROUPS * 128;
constexpr int MOST_MEMBERS = MEMBERS > SHARED_MEMBERS ? MEMBERS : SHARED_MEMBERS;
#ifdef UP
constexpr int UNITS = F / 32, COLUMNS = K;
#else
constexpr int STRIP = WARPGROUPS * 64, UNITS = (K + STRIP - 1) / STRIP, COLUMNS = F;
#endif

template <int FORM>
constexpr int members_of = FORM == FP4 ? MEMBERS : SHARED_MEMBERS;

// Whether rows of an item are taken apart, as most are: with few rows an expert has one or two of them.
DEVICE bool is_apart(int count) { return MEMBERS == 8 && count <= APART; }

template <int FORM>
using X = Columns<COLUMNS, members_of<FORM>>;

constexpr int X_BYTES = X<FP4>::BYTES > X<FP8>::BYTES ? X<FP4>::BYTES : X<FP8>::BYTES;

// Sums of a warp: of an item's rows, apart or not.
template <int FORM, int NUM_BLOCKS, bool WHOLE>
struct Product : GroupProduct<FORM, COLUMNS, members_of<FORM>, NUM_BLOCKS, FORM == FP4 ? STAGES : SHARED_STAGES, WHOLE> {
    DEVICE void multiply(const u8* x, int count, bool goes_on, const Weight& next) {
        if constexpr (FORM == FP4 && MEMBERS == 8 && APART > 0) {
            if (is_apart(count)) {
                this->template run<true>(x, goes_on, next);
                this->join();
                return;
            }
        }
        this->run(x, goes_on, next);
    }
};

// The number of this warp, which the compiler sees to be one number.
DEVICE int warp_of() { return __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 5), 0); }

// Units of a block: of the shared expert, then routed ones, counted over all items.
struct Share {
    int shared_begin, shared_end, begin, end;
};

constexpr int COST = ALONE ? 1 : 2;  // of a unit of the shared expert, whose weights have twice the bytes

DEVICE Share share_of(int num_shared, int num_routed) {
    const int total = COST * num_shared + num_routed, blocks = gridDim.x, block = blockIdx.x;
    const int begin = ALONE ? block : (int)((u64)total * block / blocks);
    const int end = ALONE ? block + 1 : (int)((u64)total * (block + 1) / blocks);
    const int before = COST * num_shared;  // a unit belongs to whoever has its first place
    return {min((begin + COST - 1) / COST, num_shared), min((end + COST - 1) / COST, num_shared), max(begin - before, 0),
            min(max(end - before, 0), num_routed)};
}

// The rows of an item in shared memory: pairs or rows, and what they are weighted with.
struct Rows {
    int places[2][MOST_MEMBERS];
    float routes[2][MOST_MEMBERS];
};

#ifdef UP
// A unit: 32 gates and their 32 up values, clamped SwiGLU, route weight, FP8 codes of a group. The warpgroups share the
// columns. A warpgroup's warps have 16 gates, 16 more, and their up values.
template <int FORM>
struct Work : Product<FORM, BLOCKS, WARPGROUPS * BLOCKS * 128 == K> {
    static DEVICE int row_of(int unit) {
        const int warp = warp_of();
        return (unit >> 1) * 128 + (warp >> 1 & 1) * 64 + (unit & 1) * 32 + (warp & 1) * 16;
    }

    DEVICE void begin_with(const Weight& weight, int unit) {
        this->start(weight, row_of(unit), (warp_of() >> 2) * BLOCKS, threadIdx.x & 31);
    }
};

// What the warpgroups have added up (sums [WARPGROUPS, 64, MEMBERS + 1]) becomes activations of one group; a warp has a row.
template <int FORM>
DEVICE void activate(const float* sums, const Rows& rows, int half, int unit, int count, u8* out, u8* out_scales, float limit) {
    constexpr int PITCH = members_of<FORM> + 1;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int n = warp; n < count; n += THREADS / 32) {
        float gate = 0.0f, value = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPGROUPS; part++) {
            gate += sums[(part * 64 + lane) * PITCH + n];
            value += sums[(part * 64 + 32 + lane) * PITCH + n];
        }
        store_activation<F>(gate, value, rows.routes[half][n], limit, (u64)rows.places[half][n], unit, lane, out, out_scales);
    }
}

KERNEL(THREADS, PER_PROCESSOR)
up(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, const u8* shared_codes, const u32* shared_scales,
   const int* items, const int* num_items, const int* item_pairs, const float* route_weights, u8* out, u8* out_scales,
   u8* shared_out, u8* shared_out_scales, int num_rows, float limit) {
    SHARED_BYTES(shared);
    constexpr int SUMS = WARPGROUPS * 64 * (MOST_MEMBERS + 1);
    float* sums = (float*)(shared + X_BYTES);  // of two units: one is read while the next is written
    Rows& rows = *(Rows*)(sums + 2 * SUMS);
    const int num_shared = (num_rows + SHARED_MEMBERS - 1) / SHARED_MEMBERS * UNITS;
    const Weight shared_weight = {shared_codes, shared_scales};
    const int warpgroup = threadIdx.x >> 7, strip = (threadIdx.x >> 5 & 3) * 16;
    Share share;
    {
        Work<FP8> work;
        const bool is_known = ALONE && (int)blockIdx.x < num_shared;
        if (is_known) work.begin_with(shared_weight, blockIdx.x % UNITS);
        wait_for_predecessor();
        let_successor_start();
        share = share_of(num_shared, (int)load_fresh(num_items) * UNITS);
#pragma unroll 1
        for (int number = share.shared_begin; number < share.shared_end; number++) {
            const int item = number / UNITS, unit = number % UNITS, first = item * SHARED_MEMBERS;
            const int count = min(num_rows - first, SHARED_MEMBERS);
            if (!is_known) work.begin_with(shared_weight, unit);
            if (number == share.shared_begin || unit == 0) {
                if (threadIdx.x < SHARED_MEMBERS)
                    rows.places[item & 1][threadIdx.x] = first + threadIdx.x, rows.routes[item & 1][threadIdx.x] = 1.0f;
                X<FP8>::build(shared, {x, x_scales}, count, THREADS, false, [&](int n) { return (u64)(first + n); });
            }
            work.run(shared);
            float* own = sums + (number & 1) * SUMS;
            work.store(own + warpgroup * (64 * (SHARED_MEMBERS + 1)), strip);
            __syncthreads();
            activate<FP8>(own, rows, item & 1, unit, count, shared_out, shared_out_scales, limit);
            if (ALONE) return;
        }
    }
    if (share.begin >= share.end) return;

    auto weight_of = [&](int expert) {
        return Weight{codes + (u64)expert * (F * (u64)K), scales + (u64)expert * (2 * F * ((K + 127) / 128))};
    };
    Work<FP4> work;
    int item = share.begin / UNITS, unit = share.begin % UNITS;
    Item now = read_item(items, item), after = now;
    work.begin_with(weight_of(now.expert), unit);
    __syncthreads();  // whoever is in the shared expert's last unit still reads
    bool is_new = true;
#pragma unroll 1
    for (int left = ALONE ? 1 : share.end - share.begin; left > 0; left--) {
        if (is_new) {
            if (left > UNITS - unit) after = read_item(items, item + 1);
            const int* pairs = item_pairs + item * MEMBERS;
            if ((int)threadIdx.x < now.count) {
                const int place = (int)load_fresh(pairs + threadIdx.x);
                rows.places[item & 1][threadIdx.x] = place;
                rows.routes[item & 1][threadIdx.x] = load_fresh_f(route_weights + place);
            }
            X<FP4>::build(shared, {x, x_scales}, now.count, THREADS, is_apart(now.count),
                          [&](int n) { return (u64)((int)load_fresh(pairs + n) / NUM_CHOSEN); });
        }
        is_new = unit == UNITS - 1;
        const Weight next = work.at(weight_of(is_new ? after.expert : now.expert), Work<FP4>::row_of(is_new ? 0 : unit + 1));
        work.multiply(shared, now.count, !ALONE && left > 1, next);
        work.weight = next;
        float* own = sums + (left & 1) * SUMS;
        work.store(own + warpgroup * (64 * (MEMBERS + 1)), strip);
        __syncthreads();
        activate<FP4>(own, rows, item & 1, unit, now.count, out, out_scales, limit);
        unit++;
        if (is_new) item++, unit = 0, now = after;
    }
}
#endif

#ifdef DOWN
// A unit: 64 outputs of each warpgroup, which has all F columns. Each pair's output is rounded to bf16.
constexpr int ALL_BLOCKS = (F + 127) / 128;

template <int FORM>
struct Work : Product<FORM, ALL_BLOCKS, true> {
    // Outputs that do not exist are others, whose sums nobody stores.
    static DEVICE int row_of(int unit) {
        const int warp = warp_of();
        return min(unit * STRIP + (warp >> 2) * 64, K - 64) + (warp & 3) * 16;
    }

    DEVICE void begin_with(const Weight& weight, int unit) { this->start(weight, row_of(unit), 0, threadIdx.x & 31); }

    // Sums of a warp (its own part of shared memory) to rows of `out`: two outputs a lane, eight lanes a row.
    DEVICE void write(float* sums, const int* places, int unit, int count, u8* out) const {
        constexpr int PITCH = members_of<FORM> + 1;
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = lane & 7;
        const int first = unit * STRIP + (warp >> 2) * 64 + (warp & 3) * 16;
        this->store(sums, 0);
        __syncwarp();
        if (first < K)
            for (int n = lane >> 3; n < count; n += 4)
                ((u32*)out)[((u64)places[n] * K + first) / 2 + pair] =
                    bf16x2_of_floats(sums[(2 * pair + 1) * PITCH + n], sums[2 * pair * PITCH + n]);
        __syncwarp();
    }
};

KERNEL(THREADS, PER_PROCESSOR)
down(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, const u8* shared_x, const u32* shared_x_scales,
     const u8* shared_codes, const u32* shared_scales, const int* items, const int* num_items, const int* item_pairs, u8* out,
     u8* shared_out, int num_rows) {
    SHARED_BYTES(shared);
    float* sums = (float*)(shared + 2 * X_BYTES) + warp_of() * (16 * (MOST_MEMBERS + 1));
    Rows& rows = *(Rows*)(shared + 2 * X_BYTES + 4 * (THREADS / 32) * 16 * (MOST_MEMBERS + 1));
    const int num_shared = (num_rows + SHARED_MEMBERS - 1) / SHARED_MEMBERS * UNITS;
    const Weight shared_weight = {shared_codes, shared_scales};
    auto weight_of = [&](int expert) {
        return Weight{codes + (u64)expert * (K * (u64)F / 2), scales + (u64)expert * (K * ((F + 127) / 128))};
    };
    // The list is older than the kernel before this one, which began to let this one start when it had waited for it.
    const Share share = share_of(num_shared, (int)load_fresh(num_items) * UNITS);
    const bool is_routed = share.begin < share.end;
    int item = share.begin / UNITS, unit = share.begin % UNITS;
    Item now = {}, after = {};
    if (is_routed) now = after = read_item(items, item);
    Work<FP4> work;
    if (share.shared_begin < share.shared_end) {
        Work<FP8> own;
        own.begin_with(shared_weight, share.shared_begin % UNITS);
        wait_for_predecessor();
        let_successor_start();
#pragma unroll 1
        for (int number = share.shared_begin; number < share.shared_end; number++) {
            const int whose = number / UNITS, first = whose * SHARED_MEMBERS, half = whose & 1;
            const int count = min(num_rows - first, SHARED_MEMBERS);
            if (number > share.shared_begin) own.begin_with(shared_weight, number % UNITS);
            if (number == share.shared_begin || number % UNITS == 0) {
                if (threadIdx.x < SHARED_MEMBERS) rows.places[half][threadIdx.x] = first + threadIdx.x;
                X<FP8>::build(shared + half * X_BYTES, {shared_x, shared_x_scales}, count, THREADS, false,
                              [&](int n) { return (u64)(first + n); });
            }
            own.run(shared + half * X_BYTES);
            own.write(sums, rows.places[half], number % UNITS, count, shared_out);
        }
        if (is_routed) work.begin_with(weight_of(now.expert), unit);
        __syncthreads();  // whoever is in the last unit still reads
    } else {
        if (is_routed) work.begin_with(weight_of(now.expert), unit);
        wait_for_predecessor();
        let_successor_start();
    }
    if (!is_routed) return;
    bool is_new = true;
#pragma unroll 1
    for (int left = ALONE ? 1 : share.end - share.begin; left > 0; left--) {
        u8* own_x = shared + (item & 1) * X_BYTES;
        if (is_new) {
            if (left > UNITS - unit) after = read_item(items, item + 1);
            const int* pairs = item_pairs + item * MEMBERS;
            if ((int)threadIdx.x < now.count) rows.places[item & 1][threadIdx.x] = (int)load_fresh(pairs + threadIdx.x);
            X<FP4>::build(own_x, {x, x_scales}, now.count, THREADS, is_apart(now.count), [&](int n) { return (u64)load_fresh(pairs + n); });
        }
        is_new = unit == UNITS - 1;
        const Weight next = work.at(weight_of(is_new ? after.expert : now.expert), Work<FP4>::row_of(is_new ? 0 : unit + 1));
        work.multiply(own_x, now.count, !ALONE && left > 1, next);
        work.weight = next;
        work.write(sums, rows.places[item & 1], unit, now.count, out);
        unit++;
        if (is_new) item++, unit = 0, now = after;
    }
}
#endif
