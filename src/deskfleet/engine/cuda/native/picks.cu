// Which entries the rows of a chunk attend to (oracle: reference.top_positions). Owns the choice among any number of scores:
// a block a row reads them three times, the last two from the L2. indexer.cu's `pick` keeps a row's scores in registers.
//
// Given by the compiler's command line: RATIO (positions of an entry), UNIT (entries of what is chosen), NUM_PICKS.
#include "rows.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32, EACH = 8, CHUNK = THREADS * EACH;
constexpr int UPPER = 2048, LOWER = 65536 / UPPER, BINS = UPPER / THREADS;  // of the histograms, of a thread

// Neighbouring scores as numbers 0 .. 65535 that compare alike, -1 where not visible.
DEVICE void load_keys(int (&keys)[EACH], const u8* scores, int first, int visible) {
    words4 all = {};
    if (first < visible) all = load_fresh4(scores + first * 2);
    const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int bits = (int)(words[i / 2] >> (16 * (i % 2))) & 0xffff;
        keys[i] = first + i >= visible ? -1 : bits >= 0x8000 ? 0xffff - bits : bits + 0x8000;
    }
}

struct Scan {
    int before, total;  // of the threads before this one, of all
};

// `totals`: [WARPS], which nobody has looked at since the last but one barrier.
DEVICE Scan scan_of_block(int own, int* totals) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int upto = own;
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
        const int more = __shfl_up_sync(ALL_LANES, upto, other);
        if (lane >= other) upto += more;
    }
    if (lane == 31) totals[warp] = upto;
    __syncthreads();
    const int of_warp = lane < WARPS ? totals[lane] : 0;
    const int total = __reduce_add_sync(ALL_LANES, of_warp);
    return {upto - own + __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0), total};
}

KERNEL(THREADS, 6)
pick_rows(const u8* scores, const int* positions, int* picks, int max_entries) {
    SHARED_BYTES(shared);
    int* upper = (int*)shared;      // [UPPER]
    int* lower = upper + UPPER;     // [LOWER]
    int* totals = lower + LOWER;    // [2, WARPS]
    int* found = totals + 2 * WARPS;  // a bin, and how many of it are wanted; a threshold, and how many on it
    const int thread = threadIdx.x, row = blockIdx.x;
    wait_for_predecessor();
    const int visible = (((int)load_fresh(positions + row) + 1) / RATIO + UNIT - 1) / UNIT;
    scores += (u64)row * max_entries * 2;
    picks += (u64)row * NUM_PICKS;
    if (visible <= NUM_PICKS) {
        for (int place = thread; place < NUM_PICKS; place += THREADS) picks[place] = place < visible ? place : -1;
        return;
    }
    for (int i = thread; i < UPPER + LOWER; i += THREADS) upper[i] = 0;
    __syncthreads();
    int keys[EACH];
    for (int start = 0; start < visible; start += CHUNK) {
        load_keys(keys, scores, start + thread * EACH, visible);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (keys[i] >= 0) atomicAdd(upper + keys[i] / LOWER, 1);
    }
    __syncthreads();
    int own[BINS], sum = 0;  // of bins from the highest down
#pragma unroll
    for (int i = 0; i < BINS; i++) own[i] = upper[UPPER - 1 - thread * BINS - i], sum += own[i];
    int above = scan_of_block(sum, totals).before;
#pragma unroll
    for (int i = 0; i < BINS; i++) {
        if (above < NUM_PICKS && above + own[i] >= NUM_PICKS)
            found[0] = UPPER - 1 - thread * BINS - i, found[1] = NUM_PICKS - above;
        above += own[i];
    }
    __syncthreads();
    const int bin = found[0];
    for (int start = 0; start < visible; start += CHUNK) {
        load_keys(keys, scores, start + thread * EACH, visible);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (keys[i] / LOWER == bin && keys[i] >= 0) atomicAdd(lower + keys[i] % LOWER, 1);
    }
    __syncthreads();
    if (thread < LOWER) {  // a warp
        const int count = lower[LOWER - 1 - thread], of_bin = found[1];
        int upto = count;
#pragma unroll
        for (int other = 1; other < LOWER; other *= 2) {
            const int more = __shfl_up_sync(ALL_LANES, upto, other);
            if (thread >= other) upto += more;
        }
        if (upto >= of_bin && upto - count < of_bin)
            found[2] = bin * LOWER + LOWER - 1 - thread, found[3] = of_bin - (upto - count);
    }
    __syncthreads();
    const int threshold = found[2], wanted = found[3];
    int taken = 0, seen = 0, turn = 1;  // scores above the threshold, and on it, before this chunk
    for (int start = 0; start < visible; start += CHUNK) {
        const int first = start + thread * EACH;
        load_keys(keys, scores, first, visible);
        int counts = 0;  // above the threshold, and 16 bits further on it
#pragma unroll
        for (int i = 0; i < EACH; i++) counts += (keys[i] > threshold) + (keys[i] == threshold) * 65536;
        const Scan scan = scan_of_block(counts, totals + turn * WARPS);
        int higher = taken + (scan.before & 0xffff), equal = seen + (scan.before >> 16);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (keys[i] > threshold || (keys[i] == threshold && equal < wanted)) picks[higher + min(equal, wanted)] = first + i;
            higher += keys[i] > threshold;
            equal += keys[i] == threshold;
        }
        taken += scan.total & 0xffff, seen += scan.total >> 16, turn ^= 1;
    }
}
