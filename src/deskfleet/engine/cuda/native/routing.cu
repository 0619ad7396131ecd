// Router scores of a few rows to experts and their work list (spec 6.1; oracle: reference.route after its logits).
//
// Given by the compiler's command line: E (experts), NUM_CHOSEN, NUM_HELD (experts of this rank), MEMBERS (pairs of an item
// at most), BLOCK_ROWS (of a block), ALONE (one block has all rows), SET_WORDS (of 32 rows).
#include "rows.cuh"

constexpr int WARPS = (E + 31) / 32, THREADS = WARPS * 32;
constexpr int KEPT = NUM_CHOSEN < 32 ? NUM_CHOSEN : 32;       // of a warp's experts
constexpr int CANDIDATES = (WARPS * KEPT + 3) / 4 * 4;

// float32 logits -> sqrt(softplus).
DEVICE float score_of(float logit) { return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit))); }

// Floats as integers of the same order.
DEVICE u32 ordered(float value) {
    const u32 bits = as_u32(value);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// How many of `number` keys come before key `own` at place `at`: the greater ones, and equal ones in front of it.
DEVICE int rank_among(const u32* keys, int number, u32 own, int at) {
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < number; i += 4) {
        const u32 four[4] = {keys[i], keys[i + 1], keys[i + 2], keys[i + 3]};
#pragma unroll
        for (int j = 0; j < 4; j++) rank += four[j] > own || (four[j] == own && i + j < at);
    }
    return rank;
}

// Each thread has an expert. The first experts of every warp are candidates; their ranks among each other are final.
// Every block: BLOCK_ROWS rows; then, by the block that is the last to come here, the list of all.
KERNEL(THREADS, 1)
choose(const float* logits, const float* bias, int* chosen, float* weights, int* items, int* item_pairs, int* num_items,
       int* counter, float scaling, int first_expert, int num_rows) {
    SHARED_BYTES(shared);
    const int num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    u32* keys = (u32*)shared;               // [THREADS]
    u32* candidates = keys + THREADS;       // [CANDIDATES] keys
    u32* origins = candidates + CANDIDATES;  // [CANDIDATES] experts
    u32* raw = origins + CANDIDATES;        // [CANDIDATES] scores
    u32* own = raw + CANDIDATES;            // [32] chosen experts of a row, [32] scores
    u32* takers = own + 64;                 // [NUM_HELD, SET_WORDS] a bit for each row
    u32* firsts = takers + NUM_HELD * SET_WORDS;  // [NUM_HELD] first item
    u32* total = firsts + NUM_HELD;         // [1] items, [1] blocks that have been here
    u32* picked = total + 2;                // [num_pairs] experts
    const int num_pairs = num_rows * NUM_CHOSEN;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const float own_bias = thread < E ? load_fresh_f(bias + thread) : 0.0f;
    for (int i = thread; i < NUM_HELD * SET_WORDS; i += THREADS) takers[i] = 0;
    if (thread < CANDIDATES - WARPS * KEPT) candidates[WARPS * KEPT + thread] = 0;
    if (thread == 0) total[0] = 0;
    wait_for_predecessor();
    let_successor_start();
    float loaded[BLOCK_ROWS];
#pragma unroll
    for (int n = 0; n < BLOCK_ROWS; n++) {
        const int row = blockIdx.x * BLOCK_ROWS + n;
        loaded[n] = thread < E && row < num_rows ? load_fresh_f(logits + row * E + thread) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < BLOCK_ROWS; n++) {
        const int row = blockIdx.x * BLOCK_ROWS + n;
        if (row >= num_rows) break;
        const float score = score_of(loaded[n]);
        const u32 key = thread < E ? ordered(score + own_bias) : 0;
        keys[thread] = key;
        __syncwarp();
        const int rank = rank_among(keys + warp * 32, 32, key, lane);
        if (rank < KEPT) {
            candidates[warp * KEPT + rank] = key;
            origins[warp * KEPT + rank] = thread;
            raw[warp * KEPT + rank] = as_u32(score);
        }
        __syncthreads();
        for (int i = thread; i < WARPS * KEPT; i += THREADS) {
            const int place = rank_among(candidates, CANDIDATES, candidates[i], i);
            if (place < NUM_CHOSEN) own[place] = origins[i], own[32 + place] = raw[i];
        }
        __syncthreads();
        if (warp == 0) {
            const bool kept = lane < NUM_CHOSEN;
            const float value = kept ? as_float(own[32 + lane]) : 0.0f;
            const float sum = sum_of_warp(value);
            if (kept) {
                chosen[row * NUM_CHOSEN + lane] = own[lane];
                weights[row * NUM_CHOSEN + lane] = value / (sum + 1e-20f) * scaling;
                if constexpr (ALONE) picked[row * NUM_CHOSEN + lane] = own[lane];
            }
        }
        if (n + 1 < BLOCK_ROWS) __syncthreads();
    }
    if constexpr (!ALONE) {
        if (warp == 0) {
            __threadfence();
            __syncwarp();
            if (lane == 0) total[1] = atomicAdd(counter, 1);
        }
        __syncthreads();
        if (total[1] != num_blocks - 1) return;
        __threadfence();
        for (int i = thread; i < num_pairs; i += THREADS) picked[i] = load_fresh(chosen + i);
        if (thread == 0) *counter = 0;
    }
    __syncthreads();
    // A row takes an expert once: who takes it are the bits of a set, and the rank of a pair is the number of lower bits.
    for (int pair = thread; pair < num_pairs; pair += THREADS) {
        const int row = pair / NUM_CHOSEN, expert = (int)picked[pair] - first_expert;
        if (expert >= 0 && expert < NUM_HELD) atomicOr(takers + expert * SET_WORDS + row / 32, 1u << row % 32);
    }
    __syncthreads();
    for (int expert = thread; expert < NUM_HELD; expert += THREADS) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < SET_WORDS; i++) count += __popc(takers[expert * SET_WORDS + i]);
        if (count == 0) continue;
        const int num = (count + MEMBERS - 1) / MEMBERS, begin = (int)atomicAdd(total, (u32)num);
        firsts[expert] = begin;
        for (int i = 0; i < num; i++) {
            items[(begin + i) * 2] = expert;
            items[(begin + i) * 2 + 1] = min(count - i * MEMBERS, MEMBERS);
        }
    }
    __syncthreads();
    if (thread == 0) *num_items = (int)total[0];
    for (int pair = thread; pair < num_pairs; pair += THREADS) {
        const int row = pair / NUM_CHOSEN, expert = (int)picked[pair] - first_expert;
        if (expert < 0 || expert >= NUM_HELD) continue;
        int rank = 0;
#pragma unroll
        for (int i = 0; i < SET_WORDS; i++) {
            const u32 lower = row >= 32 * (i + 1) ? ALL_LANES : row >= 32 * i ? (1u << row % 32) - 1 : 0;
            rank += __popc(takers[expert * SET_WORDS + i] & lower);
        }
        item_pairs[(firsts[expert] + rank / MEMBERS) * MEMBERS + rank % MEMBERS] = pair;
    }
}
