// Gates and up values of experts of more than a few rows (spec 6.2, 6.3): what experts.cu does, by as many blocks as processors.
//
// Items and units are experts.cu's, but a unit is a whole tile of 128 weight rows, and both kinds of items have MEMBERS rows. One
// warp of a block asks for the weights of all of the block's units, one stage after another, as far ahead as a ring in
// shared memory goes, and knows nothing of what is done with them: memory never waits for products. Four warpgroups take them
// out of the ring; two share a tile's rows, and two such pairs its columns.
//
// Given by the compiler's command line: EXACT (exact.cuh, otherwise codes.cuh), K (model width), F (expert width), NUM_CHOSEN, MEMBERS (8), STAGES (of the ring, a power
// of two).
#include "items.cuh"
#ifdef EXACT
#include "exact.cuh"
#else
#include "codes.cuh"
#endif

constexpr int PAIRS = 2, WARPS = PAIRS * 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int UNITS = 2 * F / 128, BLOCKS = (K + 127) / 128, PITCH = MEMBERS + 1;
constexpr int TILE_CODES = 8192, TILE_SCALES = 512;  // bytes of a block of 128 columns of a tile of FP4
constexpr int STAGE_BYTES = 2 * (TILE_CODES + TILE_SCALES);

// Blocks of columns of a stage: two of FP4; of FP8 one, whose scales do not pass through the ring.
template <int FORM>
constexpr int SPAN = FORM == FP4 ? 2 : 1;

template <int FORM>
constexpr int STEPS = (BLOCKS + SPAN<FORM> - 1) / SPAN<FORM>;

typedef Columns<K, MEMBERS> X;

// Units of a block: of the shared expert, whose weights have twice the bytes, then routed ones, counted over all items.
struct Share {
    int shared_begin, shared_end, begin, end;

    DEVICE Share(int num_rows, int num_items) {
        const int shared = (num_rows + MEMBERS - 1) / MEMBERS * UNITS, routed = num_items * UNITS;
        const u64 total = 2 * shared + routed;
        const int first = (int)(total * blockIdx.x / gridDim.x), after = (int)(total * (blockIdx.x + 1) / gridDim.x);
        shared_begin = min((first + 1) / 2, shared), shared_end = min((after + 1) / 2, shared);
        begin = min(max(first - 2 * shared, 0), routed), end = min(max(after - 2 * shared, 0), routed);
    }
};

struct Ring {
    u64 full[STAGES], empty[STAGES], meeting;
    int places[2][MEMBERS];
    float routes[2][MEMBERS];
};

struct Weights {
    Weight routed, shared;

    DEVICE Weight of(int expert) const {
        constexpr u64 ROWS = UNITS * 128;
        return {routed.codes + expert * (ROWS * K / 2), routed.scales + expert * (ROWS * BLOCKS)};
    }
};

// Asks for the stages of one unit; `number` counts stages.
template <int FORM>
DEVICE void ask(Ring& ring, u8* stages, const Weight& weight, int unit, u32& number) {
    constexpr int CHUNK = FORM == FP4 ? 64 : 32, CHUNKS = K / CHUNK;  // columns of 4096 bytes
#pragma unroll 1
    for (int step = 0; step < STEPS<FORM>; step++, number++) {
        const u32 slot = number % STAGES;
        u8* to = stages + slot * STAGE_BYTES;
        const int chunk = step * (SPAN<FORM> * 128 / CHUNK), block = step * SPAN<FORM>;
        const u32 codes = min(SPAN<FORM> * 128 / CHUNK, CHUNKS - chunk) * 4096;
        const u32 scales = FORM == FP4 ? min(SPAN<FORM>, BLOCKS - block) * TILE_SCALES : 0;
        pass_gate(&ring.empty[slot], (number / STAGES & 1) ^ 1);
        expect_at_gate(&ring.full[slot], codes + scales);
        copy_through_gate(to, weight.codes + ((u64)unit * CHUNKS + chunk) * 4096, codes, &ring.full[slot]);
        if (FORM == FP4)
            copy_through_gate(to + 2 * TILE_CODES, weight.scales + ((u64)unit * BLOCKS + block) * 128, scales, &ring.full[slot]);
    }
}

// One of the warps that multiply.
struct Consumer {
    Ring& ring;
    const u8* stages;
    int warp, lane, pair, half, row;  // of two pairs of warpgroups; which half of a tile; its first row in it
    u32 number = 0, num_meetings = 0;

    DEVICE Consumer(Ring& own, const u8* at) : ring(own), stages(at) {
        warp = __shfl_sync(ALL_LANES, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
        pair = warp >> 3, half = warp >> 2 & 1;
        row = (warp >> 1 & 1) * 64 + half * 32 + (warp & 1) * 16;  // 32 gates and their 32 up values are a warpgroup's
    }

    // All of them meet.
    DEVICE void meet() {
        __syncwarp();
        if (lane == 0) arrive_at_gate(&ring.meeting);
        pass_gate(&ring.meeting, num_meetings++ & 1);
    }

    // x of an item, and where its rows go.
    template <class Place, class Route, class Row>
    DEVICE void build(u8* x, int which, const Input& from, int count, bool apart, Place place, Route route, Row source) {
        if ((int)threadIdx.x < count) {
            const int own = place(threadIdx.x);
            ring.places[which][threadIdx.x] = own, ring.routes[which][threadIdx.x] = route(own);
        }
        X::fill(x, from, count, CONSUMERS, apart, source);
        let_tensor_cores_read();
        meet();
    }

    // Leaves in `product` the sums of a unit over every second step, from that of its pair on; `apart` as X says.
    template <int FORM, class Product>
    DEVICE void multiply(Product& product, const u8* x, const Weight& weight, int unit, bool apart) {
        const int g = lane >> 2, t = lane & 3;
        product.lane = lane;
        product.clear();
        const auto at = product.place(x);
        const u32* scales = weight.scales + (u64)(unit * 4 + (row >> 5)) * BLOCKS;  // of FP8
        u32 upcoming = 0;
        if constexpr (FORM == FP8) upcoming = load_scale(scales + min(pair, BLOCKS - 1));
#pragma unroll 1
        for (int step = pair; step < STEPS<FORM>; step += PAIRS) {
            const u32 slot = (number + step) % STAGES;
            const u8* stage = stages + slot * STAGE_BYTES + (row + g) * 32 + 8 * t;
            const u32* of_stage = (const u32*)(stages + slot * STAGE_BYTES + 2 * TILE_CODES) + row + g;
            Block<FORM> held[SPAN<FORM>];
            pass_gate(&ring.full[slot], (number + step) / STAGES & 1);
#pragma unroll
            for (int i = 0; i < SPAN<FORM>; i++) {
                constexpr int PARTS = FORM == FP4 ? 2 : 4;
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const u8* at = stage + (i * PARTS + part) * 4096;
                    held[i].rows[part][0] = *(const words2*)at, held[i].rows[part][1] = *(const words2*)(at + 256);
                    if (FORM == FP8 && K % 128 != 0 && step * 128 + part * 32 >= K)  // what the ring had before
                        held[i].rows[part][0] = held[i].rows[part][1] = {};
                }
                if constexpr (FORM == FP4)
                    held[i].scales[0] = of_stage[i * 128], held[i].scales[1] = of_stage[i * 128 + 8];
            }
            if constexpr (FORM == FP8) {
                held[0].scales[0] = upcoming;
                upcoming = load_scale(scales + min(step + PAIRS, BLOCKS - 1));
            }
            const bool both = FORM == FP4 && (BLOCKS % 2 == 0 || 2 * step + 1 < BLOCKS);
            product.add_some(held, x, at, SPAN<FORM> * step, both, apart);
            __syncwarp();
            if (lane == 0) arrive_at_gate(&ring.empty[slot]);
        }
        number += STEPS<FORM>;
        if (FORM == FP4 && apart) product.join();
    }
};

DEVICE bool is_apart(int count) { return count <= APART; }

// What all warps begin with: the ring. The last warp asks for weights and ends.
DEVICE void make_ring(Ring& ring) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) make_gate(&ring.full[i], 1), make_gate(&ring.empty[i], WARPS / 2);
        make_gate(&ring.meeting, WARPS);
    }
    __syncthreads();
}

DEVICE void ask_for_all(Ring& ring, u8* stages, const Weights& weights, const Share& share, const int* items) {
    if (threadIdx.x != CONSUMERS) return;
    u32 number = 0;
    for (int u = share.shared_begin; u < share.shared_end; u++) ask<FP8>(ring, stages, weights.shared, u % UNITS, number);
    int item = -1, expert = 0;
    for (int u = share.begin; u < share.end; u++) {
        if (u / UNITS != item) item = u / UNITS, expert = read_item(items, item).expert;
        ask<FP4>(ring, stages, weights.of(expert), u % UNITS, number);
    }
}

template <int FORM>
using Product = GroupProduct<FORM, K, MEMBERS, 1, 1, true>;

constexpr int SUMS = PAIRS * 2 * 64 * PITCH;  // [pairs, halves, 64, PITCH]

// Sums of both pairs become activations of two groups; a warp has a row of one.
DEVICE void activate(const Consumer& own, const float* sums, int which, int unit, int count, u8* out, u8* out_scales, float limit) {
    for (int i = own.warp; i < 2 * count; i += WARPS) {
        const int half = i & 1, n = i >> 1, group = 2 * unit + half;
        float gate = 0.0f, value = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const float* at = sums + ((pair * 2 + half) * 64 + own.lane) * PITCH + n;
            gate += at[0], value += at[32 * PITCH];
        }
        store_activation<F>(gate, value, own.ring.routes[which][n], limit, (u64)own.ring.places[which][n], group, own.lane, out,
                            out_scales);
    }
}

KERNEL(THREADS, 1)
up(const u8* x, const u32* x_scales, const u8* codes, const u32* scales, const u8* shared_codes, const u32* shared_scales,
   const int* items, const int* num_items, const int* item_pairs, const float* route_weights, u8* out, u8* out_scales,
   u8* shared_out, u8* shared_out_scales, int num_rows, float limit) {
    SHARED_BYTES(shared);
    u8* stages = shared;
    u8* own_x = stages + STAGES * STAGE_BYTES;
    float* sums = (float*)(own_x + X::BYTES);  // of two units: one is read while the next is written
    Ring& ring = *(Ring*)(sums + 2 * SUMS);
    make_ring(ring);
    wait_for_predecessor();
    let_successor_start();
    const Share share(num_rows, (int)load_fresh(num_items));
    const Weights weights = {{codes, scales}, {shared_codes, shared_scales}};
    if (threadIdx.x >= CONSUMERS) return ask_for_all(ring, stages, weights, share, items);

    Consumer own(ring, stages);
    int turn = 0, which = 0;
    for (int u = share.shared_begin; u < share.shared_end; u++) {
        const int first = u / UNITS * MEMBERS, count = min(num_rows - first, MEMBERS);
        if (u == share.shared_begin || u % UNITS == 0) {
            which ^= 1;
            own.build(own_x, which, {x, x_scales}, count, false, [&](int n) { return first + n; }, [](int) { return 1.0f; },
                      [&](int n) { return (u64)(first + n); });
        }
        Product<FP8> product;
        own.multiply<FP8>(product, own_x, weights.shared, u % UNITS, false);
        float* to = sums + (turn++ & 1) * SUMS;
        product.store(to, (own.warp >> 2) * 64 + (own.warp & 3) * 16);
        own.meet();
        activate(own, to, which, u % UNITS, count, shared_out, shared_out_scales, limit);
    }
    int item = -1;
    Item now = {};
    for (int u = share.begin; u < share.end; u++) {
        if (u / UNITS != item) {
            item = u / UNITS, which ^= 1, now = read_item(items, item);
            const int* pairs = item_pairs + item * MEMBERS;
            own.build(own_x, which, {x, x_scales}, now.count, is_apart(now.count), [&](int n) { return (int)load_fresh(pairs + n); },
                      [&](int place) { return load_fresh_f(route_weights + place); },
                      [&](int n) { return (u64)((int)load_fresh(pairs + n) / NUM_CHOSEN); });
        }
        Product<FP4> product;
        own.multiply<FP4>(product, own_x, weights.of(0), u % UNITS, is_apart(now.count));
        float* to = sums + (turn++ & 1) * SUMS;
        product.store(to, (own.warp >> 2) * 64 + (own.warp & 3) * 16);
        own.meet();
        activate(own, to, which, u % UNITS, now.count, out, out_scales, limit);
    }
}
