// The mixes of a sub-layer (spec N.6; oracle: reference.hc_weights after its products): by one warp, from what hyper.cu's mix
// left. Owns the Sinkhorn iterations, a long chain of short steps: every lane has all sixteen elements, in registers.
//
// Given by the compiler's command line: M (model width), SLICES (of 64 columns), ITERATIONS, NORM_EPS, MIX_EPS.
#pragma once
#include "rows.cuh"

constexpr int COPIES = 4, NUM_MIXES = 24;
constexpr int ADDERS = 5;  // slices that a warp adds up at a time, six lanes each

// Sums of squares of a row's slices.
struct Squares {
    static constexpr int EACH = (SLICES + 31) / 32;
    float own[EACH];

    DEVICE void load(const float* from, int row, int num_rows, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int slice = i * 32 + lane;
            own[i] = slice < SLICES ? load_fresh_f(from + slice * num_rows + row) : 0.0f;
        }
    }

    template <int WIDTH>
    DEVICE float norm_factor() const {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) total += own[i];
        return fast_rsqrt(sum_of_warp(total) * (1.0f / WIDTH) + NORM_EPS);
    }
};

// Reciprocals of four numbers; of two, one of their product: a warp's take the longest here.
DEVICE void invert(float (&numbers)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float a = numbers[i], b = numbers[i + 1], inverse = fast_inverse(a * b);
        numbers[i] = inverse * b;
        numbers[i + 1] = inverse * a;
    }
}

// Multiplies lines along one axis of comb, its rows or its columns, and gives what divides the lines along the other to a
// sum of one. The sums do not wait for the products that they are sums of.
template <bool ROWS_>
DEVICE void divide(float (&comb)[4][4], float (&by)[4]) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float a = ROWS_ ? comb[0][i] : comb[i][0], b = ROWS_ ? comb[1][i] : comb[i][1];
        const float c = ROWS_ ? comb[2][i] : comb[i][2], d = ROWS_ ? comb[3][i] : comb[i][3];
        sums[i] = fmaf(b, by[1], fmaf(a, by[0], MIX_EPS)) + fmaf(d, by[3], c * by[2]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) comb[i][j] *= by[ROWS_ ? i : j];
    invert(sums);
#pragma unroll
    for (int i = 0; i < 4; i++) by[i] = sums[i];
}

struct Split {
    float gate, comb[4][4], by[4];

    // `shared`: float [32, 4] of this warp's own.
    DEVICE void compute(float* shared, const float* mixes, const float* stream_squares, const float* scale, const float* base,
                        int row, int num_rows, int lane) {
        const int kind = lane < 4 ? 0 : lane < 8 ? 1 : 2, quad = lane % 6 * 4;
        const float own_scale = load_fresh_f(scale + kind), own_base = lane < NUM_MIXES ? load_fresh_f(base + lane) : 0.0f;
        Squares squares;
        squares.load(stream_squares, row, num_rows, lane);
        float totals[4] = {};
#pragma unroll 8
        for (int first = 0; first < SLICES; first += ADDERS) {
            const int slice = first + lane / 6;
            if (lane >= 6 * ADDERS || slice >= SLICES) continue;
            const words4 all = load_fresh4(mixes + ((u64)slice * num_rows + row) * NUM_MIXES + quad);
            totals[0] += as_float(all.x), totals[1] += as_float(all.y);
            totals[2] += as_float(all.z), totals[3] += as_float(all.w);
        }
        const float factor = squares.norm_factor<COPIES * M>();
#pragma unroll
        for (int i = 0; i < 4; i++) shared[lane * 4 + i] = totals[i];
        __syncwarp();
        float raw = 0.0f;
        if (lane < NUM_MIXES) {
#pragma unroll
            for (int i = 0; i < ADDERS; i++) raw += shared[i * NUM_MIXES + lane];
        }
        raw = raw * factor * own_scale + own_base;
        gate = fast_inverse(1.0f + fast_exp(-raw));
        // From lane 8 on a row of comb is four lanes: its softmax.
        float highest = fmaxf(raw, __shfl_xor_sync(ALL_LANES, raw, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        const float power = fast_exp(raw - highest);
        float total = power + __shfl_xor_sync(ALL_LANES, power, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        const float share = power * fast_inverse(total) + MIX_EPS;
#pragma unroll
        for (int i = 0; i < 16; i++) comb[i / 4][i % 4] = __shfl_sync(ALL_LANES, share, 8 + i);
#pragma unroll
        for (int i = 0; i < 4; i++) by[i] = 1.0f;
        divide<true>(comb, by);
#pragma unroll 1
        for (int i = 1; i < ITERATIONS; i++) {
            divide<false>(comb, by);
            divide<true>(comb, by);
        }
    }

    DEVICE void store(float* pre, float* post, float* all, int row, int lane) const {
        if (lane < 4) {
            pre[row * 4 + lane] = gate + MIX_EPS;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float value = lane == 0 ? comb[0][i] : lane == 1 ? comb[1][i] : lane == 2 ? comb[2][i] : comb[3][i];
                all[row * 16 + lane * 4 + i] = value * by[i];
            }
        } else if (lane < 8) {
            post[row * 4 + lane - 4] = 2.0f * gate;
        }
    }
};
