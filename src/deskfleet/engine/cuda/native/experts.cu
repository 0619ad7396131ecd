// Routed and shared experts of a few rows (spec 6.2, 6.3; oracles: reference.expert_activation, shared_expert). An item is
// one expert and up to MEMBERS of its (row, choice) pairs (experts.py); items from `most_items` on are the shared expert's, of as
// many rows. Of the routed, blocks beyond the last item end at once.
//
// Given by the compiler's command line: UP or DOWN, K (model width), F (expert width), NUM_CHOSEN, MEMBERS (8 or 16),
// WARPGROUPS, STAGES (blocks of weights under way), BLOCKS (up: of 128 columns, a warpgroup), TILES (down: of 64
// outputs, a warpgroup), PER_PROCESSOR (blocks).
#include "warpgroup.cuh"

constexpr int THREADS = WARPGROUPS * 128;
constexpr int PITCH = MEMBERS + 1;

struct Item {
    int expert, count;
};

DEVICE Item read_item(const int* items, int number) {
    const words2 both = load_fresh2(items + number * 2);
    return {(int)both.x, (int)both.y};
}

// The number of this warp, which the compiler sees to be one number.
DEVICE int warp_of() { return __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 5), 0); }

#ifdef UP
// One block: 32 gates and their 32 up values, clamped SwiGLU, route weight, FP8 codes of a group. The warpgroups share the
// columns. A warpgroup's warps have 16 gates, 16 more, and their up values.
typedef Columns<K, MEMBERS> X;

template <int FORM>
struct Work : GroupProduct<FORM, K, MEMBERS, BLOCKS, FORM == FP4 ? STAGES : (STAGES + 1) / 2, WARPGROUPS * BLOCKS * 128 == K> {
    DEVICE void begin_with(const Weight& weight) {
        const int warp = warp_of(), unit = blockIdx.x;
        const int row = (unit >> 1) * 128 + (warp >> 1 & 1) * 64 + (unit & 1) * 32 + (warp & 1) * 16;
        this->start(weight, row, (warp >> 2) * BLOCKS, threadIdx.x & 31);
    }

    // Leaves sums [WARPGROUPS, 64, PITCH], and the block meets.
    DEVICE void finish(const u8* x, float* sums) {
        this->run(x);
        this->store(sums + (threadIdx.x >> 7) * (64 * PITCH), (threadIdx.x >> 5 & 3) * 16);
        __syncthreads();
    }
};

KERNEL(THREADS, PER_PROCESSOR)
up(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, const u8* shared_codes, const u32* shared_scales,
   const int* items, const int* num_items, const int* item_pairs, const float* route_weights, u8* out, u8* out_scales,
   u8* shared_out, u8* shared_out_scales, int num_rows, int most_items, float limit) {
    SHARED_BYTES(shared);
    float* sums = (float*)(shared + X::BYTES);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, unit = blockIdx.x, number = blockIdx.y;
    const int* pairs = item_pairs + number * MEMBERS;
    const int first = (number - most_items) * MEMBERS;
    const bool routed = number < most_items;
    int count;
    if (routed) {
        wait_for_predecessor();
        let_successor_start();
        const int listed = (int)load_fresh(num_items);
        const Item item = read_item(items, number);
        if (number >= listed) return;
        count = item.count;
        Work<FP4> work;
        work.begin_with({codes + (u64)item.expert * (F * (u64)K), scales + (u64)item.expert * (2 * F * ((K + 127) / 128))});
        X::build(shared, {x, x_scales}, count, THREADS, [&](int n) { return (u64)((int)load_fresh(pairs + n) / NUM_CHOSEN); });
        work.finish(shared, sums);
    } else {
        count = min(num_rows - first, MEMBERS);
        Work<FP8> work;
        work.begin_with({shared_codes, shared_scales});
        wait_for_predecessor();
        let_successor_start();
        X::build(shared, {x, x_scales}, count, THREADS, [&](int n) { return (u64)(first + n); });
        work.finish(shared, sums);
    }
    for (int n = warp; n < count; n += THREADS / 32) {
        float gate = 0.0f, value = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPGROUPS; part++) {
            gate += sums[(part * 64 + lane) * PITCH + n];
            value += sums[(part * 64 + 32 + lane) * PITCH + n];
        }
        gate = fminf(bf16_rounded(gate), limit);
        value = fminf(fmaxf(bf16_rounded(value), -limit), limit);
        int place = first + n;
        float route = 1.0f;
        if (routed) {
            place = (int)load_fresh(pairs + n);
            route = load_fresh_f(route_weights + place);
        }
        value = bf16_rounded(gate / (1.0f + fast_exp(-gate)) * value * route);
        const u32 bits = fp8_scale_bits(greatest_of_warp(fabsf(value)));
        (routed ? out : shared_out)[(u64)place * F + unit * 32 + lane] = fp8_code(value, bits);
        if (lane == 0) (routed ? out_scales : shared_out_scales)[(u64)place * (4 * ((F + 127) / 128)) + unit] = (u8)(bits >> 23);
    }
}
#endif

#ifdef DOWN
// One block: TILES times 64 outputs of each warpgroup, which has all F columns. Each pair's output is rounded to bf16.
typedef Columns<F, MEMBERS> X;
constexpr int ALL_BLOCKS = (F + 127) / 128;

template <int FORM, class Row, class Place>
DEVICE void outputs(u8* shared, const Weight& weight, const Input& x, int count, u8* out, Row row, Place place) {
    const int warp = warp_of(), lane = threadIdx.x & 31;
    constexpr int HELD = ALL_BLOCKS < STAGES ? ALL_BLOCKS : STAGES;
    float* sums = (float*)(shared + X::BYTES) + warp * (16 * PITCH);
    const int output = (blockIdx.x * WARPGROUPS + (warp >> 2)) * (TILES * 64) + (warp & 3) * 16;
    GroupProduct<FORM, F, MEMBERS, ALL_BLOCKS, FORM == FP4 ? HELD : (HELD + 1) / 2, true> product;
    product.start(weight, min(output, K - 64 + (warp & 3) * 16), 0, lane);
    wait_for_predecessor();
    let_successor_start();
    X::build(shared, x, count, THREADS, row);
#pragma unroll 1
    for (int tile = 0; tile < TILES; tile++) {
        const int here = output + tile * 64;
        if (here >= K) return;
        const int after = min(here + 64, K - 64 + (warp & 3) * 16);
        if constexpr (FORM == FP4 && ALL_BLOCKS % HELD == 0) {
            const Weight next = lane_of<FORM, F>(weight, after, lane);
            product.run(shared, tile + 1 < TILES ? &next : nullptr);
            product.weight = next;
            product.store(sums, 0);
        } else {
            product.run(shared);
            product.store(sums, 0);
            if (tile + 1 < TILES) product.start(weight, after, 0, lane);
        }
        __syncwarp();
        // Two outputs a lane, eight lanes a row.
        const int pair = lane & 7;
        for (int n = lane >> 3; n < count; n += 4)
            ((u32*)out)[(place(n) * K + here) / 2 + pair] =
                bf16x2_of_floats(sums[(2 * pair + 1) * PITCH + n], sums[2 * pair * PITCH + n]);
        __syncwarp();
    }
}

KERNEL(THREADS, PER_PROCESSOR)
down(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, const u8* shared_x, const u32* shared_x_scales,
     const u8* shared_codes, const u32* shared_scales, const int* items, const int* num_items, const int* item_pairs, u8* out,
     u8* shared_out, int num_rows, int most_items) {
    SHARED_BYTES(shared);
    const int number = blockIdx.y;
    const int* pairs = item_pairs + number * MEMBERS;
    if (number < most_items) {
        // The list is older than the kernel before this one, which began to let this one start when it had waited for it.
        const int listed = (int)load_fresh(num_items);
        const Item item = read_item(items, number);
        if (number >= listed) {
            wait_for_predecessor();
            return;
        }
        const Weight weight = {codes + (u64)item.expert * (K * (u64)F / 2),
                               scales + (u64)item.expert * (K * ((F + 127) / 128))};
        auto place = [&](int n) { return (u64)load_fresh(pairs + n); };
        outputs<FP4>(shared, weight, {x, x_scales}, item.count, out, place, place);
    } else {
        const int first = (number - most_items) * MEMBERS;
        auto place = [&](int n) { return (u64)(first + n); };
        outputs<FP8>(shared, {shared_codes, shared_scales}, {shared_x, shared_x_scales}, min(num_rows - first, MEMBERS),
                     shared_out, place, place);
    }
}
#endif
