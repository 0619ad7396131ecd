// Residual streams of a few rows between two sub-layers (spec 5.1, 5.2; hyper.py says what each of its two kernels does).
//
// Given by the compiler's command line: M (model width), SLICES (of 64 columns), and
//   MIX     NUM_PARTS (rows of the output that are a row's), SUMS (parts of a split sum), FLOATS (the output is float32, not
//           bf16), HAS_SHARED, EXPANDS, MIXES, HAS_TAP, TURNS (rows of a warp: 1, 2 or 4)
//   FINISH  what split.cuh wants
#include "rows.cuh"

#ifdef FINISH
#include "split.cuh"
#else
constexpr int COPIES = 4, NUM_MIXES = 24;
#endif

constexpr int WARPS = 4;

#ifdef MIX
// One block: 64 columns of all copies of up to WARPS * TURNS rows. A warp expands rows, a lane two columns of all copies of
// each; then a warp multiplies one copy of all rows by its mix weights, which it has held since before the wait.
//
// Where the stream is expanded, it and the last mixes are older than the kernel before this one, which made the output.
constexpr int EIGHTS = TURNS == 4 ? 2 : 1;
constexpr int ROWS = 8 * EIGHTS;
constexpr int PITCH = 48;  // words of a row in shared memory: rows of a quarter of a warp lie in different banks

KERNEL(WARPS * 32, 2)
mix(const u8* output, const u32* shared_output, u32* stream, const float* post, const float* comb, const float* pre,
    const u8* weight, u32* collapsed, float* collapsed_squares, float* stream_squares, float* mixes, u8* taps, int tap_stride,
    int num_rows) {
    SHARED_BYTES(shared);
    u32* copies = (u32*)shared;                           // [COPIES, ROWS, PITCH]
    float* sums = (float*)(copies + COPIES * ROWS * PITCH);  // [COPIES, ROWS, NUM_MIXES + 1]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int slice = blockIdx.x, first = blockIdx.y * ROWS, word = slice * 32 + lane;

    words4 weights[3][2][2];  // of 16 mixes, of 32 columns: operands of two products
    if constexpr (MIXES) {
        const u8* at = weight + (slice * COPIES + warp) * 48 * 128 + 16 * lane;
#pragma unroll
        for (int tile = 0; tile < 3; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                weights[tile][half][0] = load_stream4(at + tile * 2048 + half * 1024);
                weights[tile][half][1] = load_stream4(at + tile * 2048 + half * 1024 + 512);
            }
    }
    if constexpr (!EXPANDS) {
        wait_for_predecessor();
        let_successor_start();
    }
    u32 x[TURNS][COPIES];
    words4 factors[TURNS][6];  // pre, post, comb
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int row = first + turn * WARPS + warp;
        if (row >= num_rows) continue;
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) x[turn][copy] = load_fresh(stream + (row * COPIES + copy) * (M / 2) + word);
        if constexpr (MIXES) factors[turn][0] = load_fresh4(pre + row * 4);
        if constexpr (EXPANDS) {
            factors[turn][1] = load_fresh4(post + row * 4);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) factors[turn][2 + copy] = load_fresh4(comb + row * 16 + copy * 4);
        }
    }
    float low[TURNS], high[TURNS];  // of the output
    if constexpr (EXPANDS) {
        wait_for_predecessor();
        let_successor_start();
        u32 parts[TURNS][NUM_PARTS + 1];
        float exact[TURNS][NUM_PARTS * SUMS][2];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int row = first + turn * WARPS + warp;
            if (row >= num_rows) continue;
#pragma unroll
            for (int part = 0; part < NUM_PARTS; part++) {
                const u64 at = (u64)(row * NUM_PARTS + part) * (M / 2) + word;
                if constexpr (FLOATS) {
#pragma unroll
                    for (int i = 0; i < SUMS; i++) {
                        const words2 both = load_fresh2(output + (at + (u64)i * num_rows * (M / 2)) * 8);
                        exact[turn][part * SUMS + i][0] = as_float(both.x);
                        exact[turn][part * SUMS + i][1] = as_float(both.y);
                    }
                } else {
                    parts[turn][part] = load_fresh(output + at * 4);
                }
            }
            if constexpr (HAS_SHARED) parts[turn][NUM_PARTS] = load_fresh(shared_output + row * (M / 2) + word);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            low[turn] = high[turn] = 0.0f;
#pragma unroll
            for (int part = 0; part < NUM_PARTS; part++) {
                if constexpr (FLOATS) {
                    float a = exact[turn][part * SUMS][0], b = exact[turn][part * SUMS][1];
#pragma unroll
                    for (int i = 1; i < SUMS; i++) a += exact[turn][part * SUMS + i][0], b += exact[turn][part * SUMS + i][1];
                    low[turn] += SUMS > 1 ? bf16_rounded(a) : a;
                    high[turn] += SUMS > 1 ? bf16_rounded(b) : b;
                } else {
                    low[turn] += low_of(parts[turn][part]);
                    high[turn] += high_of(parts[turn][part]);
                }
            }
            if constexpr (HAS_SHARED) low[turn] += low_of(parts[turn][NUM_PARTS]), high[turn] += high_of(parts[turn][NUM_PARTS]);
            if constexpr (HAS_SHARED || NUM_PARTS > 1) low[turn] = bf16_rounded(low[turn]), high[turn] = bf16_rounded(high[turn]);
        }
    }
    float into_squares[TURNS], squares[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int place = turn * WARPS + warp, row = first + place;
        into_squares[turn] = squares[turn] = 0.0f;
        if (row >= num_rows) continue;
        float lows[COPIES], highs[COPIES];
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) lows[copy] = low_of(x[turn][copy]), highs[copy] = high_of(x[turn][copy]);
        if constexpr (EXPANDS) {
            u32 expanded[COPIES];
#pragma unroll
            for (int to = 0; to < COPIES; to++) {
                float c[COPIES];
#pragma unroll
                for (int from = 0; from < COPIES; from++) {
                    const words4& all = factors[turn][2 + from];
                    c[from] = as_float(to == 0 ? all.x : to == 1 ? all.y : to == 2 ? all.z : all.w);
                }
                const words4& posts = factors[turn][1];
                const float p = as_float(to == 0 ? posts.x : to == 1 ? posts.y : to == 2 ? posts.z : posts.w);
                const float a = c[0] * lows[0] + c[1] * lows[1] + c[2] * lows[2] + c[3] * lows[3];
                const float b = c[0] * highs[0] + c[1] * highs[1] + c[2] * highs[2] + c[3] * highs[3];
                expanded[to] = bf16x2_of_floats(p * high[turn] + b, p * low[turn] + a);
            }
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) {
                x[turn][copy] = expanded[copy];
                lows[copy] = low_of(expanded[copy]), highs[copy] = high_of(expanded[copy]);
            }
        }
        if constexpr (MIXES) {
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) copies[(copy * ROWS + place) * PITCH + lane] = x[turn][copy];
        }
        if constexpr (EXPANDS) {
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) stream[(row * COPIES + copy) * (M / 2) + word] = x[turn][copy];
        }
        if constexpr (HAS_TAP) {
            const float a = (lows[0] + lows[1] + lows[2] + lows[3]) * 0.25f;
            const float b = (highs[0] + highs[1] + highs[2] + highs[3]) * 0.25f;
            ((u32*)(taps + (u64)row * tap_stride * 2))[word] = bf16x2_of_floats(b, a);
        }
        if constexpr (MIXES) {
            const words4& p = factors[turn][0];
            const float p0 = as_float(p.x), p1 = as_float(p.y), p2 = as_float(p.z), p3 = as_float(p.w);
            const float a = p0 * lows[0] + p1 * lows[1] + p2 * lows[2] + p3 * lows[3];
            const float b = p0 * highs[0] + p1 * highs[1] + p2 * highs[2] + p3 * highs[3];
            const u32 into = bf16x2_of_floats(b, a);
            collapsed[row * (M / 2) + word] = into;
            into_squares[turn] = low_of(into) * low_of(into) + high_of(into) * high_of(into);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) squares[turn] += lows[copy] * lows[copy] + highs[copy] * highs[copy];
        }
    }
    if constexpr (MIXES) {
        __syncthreads();
        float acc[3][EIGHTS][4];
#pragma unroll
        for (int tile = 0; tile < 3; tile++)
#pragma unroll
            for (int n = 0; n < EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[tile][n][i] = 0.0f;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Rows that do not exist are columns that nobody looks at.
                const u32* at = copies + (warp * ROWS + n * 8 + g) * PITCH + half * 16 + 4 * t;
                const u32 b0 = at[0], b1 = at[1], b2 = at[2], b3 = at[3];
#pragma unroll
                for (int tile = 0; tile < 3; tile++) {
                    const words4 &a = weights[tile][half][0], &b = weights[tile][half][1];
                    mma_bf16(acc[tile][n], a.x, a.y, a.z, a.w, b0, b1);
                    mma_bf16(acc[tile][n], b.x, b.y, b.z, b.w, b2, b3);
                }
            }
        // Rows 24 to 47 are the lower parts of the weights.
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* at = sums + (warp * ROWS + n * 8 + 2 * t + i) * (NUM_MIXES + 1) + g;
                at[0] = acc[0][n][i] + acc[1][n][i + 2];
                at[8] = acc[0][n][i + 2] + acc[2][n][i];
                at[16] = acc[1][n][i] + acc[2][n][i + 2];
            }
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int row = first + turn * WARPS + warp;
            const float into = sum_of_warp(into_squares[turn]), all = sum_of_warp(squares[turn]);
            if (lane == 0 && row < num_rows)
                collapsed_squares[slice * num_rows + row] = into, stream_squares[slice * num_rows + row] = all;
        }
        __syncthreads();
        const int live = min(num_rows - first, ROWS);
        for (int element = threadIdx.x; element < live * NUM_MIXES; element += WARPS * 32) {
            const int n = element / NUM_MIXES, number = element % NUM_MIXES;
            float total = 0.0f;
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) total += sums[(copy * ROWS + n) * (NUM_MIXES + 1) + number];
            mixes[(slice * num_rows + first + n) * NUM_MIXES + number] = total;
        }
    }
}
#endif

#ifdef FINISH
// Blocks of a row but the last: a warp norms and quantises 256 columns, and takes the row's mean square itself.
// The last one splits the mixes.
KERNEL(WARPS * 32, 8)
finish(const u8* collapsed, const float* collapsed_squares, const float* stream_squares, const float* mixes, const float* norm,
       const float* scale, const float* base, u8* x, u8* codes, u8* code_scales, float* pre, float* post, float* comb,
       int num_rows) {
    SHARED_BYTES(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y;
    if (blockIdx.x < gridDim.x - 1) {
        const int column = (blockIdx.x * WARPS + warp) * 256 + lane * 8;
        const bool live = column < M;
        const int from = min(column, M - 8);  // a load without a condition stays in front of the wait
        const words4 factors[2] = {load_fresh4(norm + from), load_fresh4(norm + from + 4)};
        wait_for_predecessor();
        let_successor_start();
        const words4 packed = load_fresh4(collapsed + (row * M + from) * 2);
        Squares squares;
        squares.load(collapsed_squares, row, num_rows, lane);
        const float factor = squares.norm_factor<M>();
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        const u32 wide[8] = {factors[0].x, factors[0].y, factors[0].z, factors[0].w,
                             factors[1].x, factors[1].y, factors[1].z, factors[1].w};
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = bf16x2_of_floats(as_float(wide[2 * i + 1]) * (high_of(words[i]) * factor),
                                      as_float(wide[2 * i]) * (low_of(words[i]) * factor));
        const u32 bits = scale_bits_of_group(out);
        if (live) {
            u64* to = (u64*)(x + (row * M + column) * 2);
            to[0] = both_of(out[0], out[1]);
            to[1] = both_of(out[2], out[3]);
            *(u64*)(codes + row * M + column) = fp8_codes_of(out, bits);
            if ((lane & 3) == 0) code_scales[row * (M / 32) + column / 32] = (u8)(bits >> 23);
        }
        return;
    }
    if (warp > 0) {
        wait_for_predecessor();
        return;
    }
    wait_for_predecessor();
    let_successor_start();
    Split split;
    split.compute((float*)shared, mixes, stream_squares, scale, base, row, num_rows, lane);
    split.store(pre, post, comb, row, lane);
}
#endif
