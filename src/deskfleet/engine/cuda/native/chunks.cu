// Residual streams of many rows between two sub-layers (spec 5.1, 5.2; hyper.py says what each of its two kernels does). Owns
// how few bytes move, where hyper.cu owns how few waits there are: a block keeps its rows over many slices of 64 columns, so
// that the mix weights of a slice are read for all its rows at once, and of the mixes only a few parts are left for `finish`.
//
// Given by the compiler's command line: M (model width), and
//   MIX     as hyper.cu's, but for SLICES and TURNS
//   FINISH  what split.cuh wants, SLICES being the parts that `mix_rows` has left, and ROWS_EACH (rows of a warp)
#include "rows.cuh"

#ifdef FINISH
#include "split.cuh"
#else
constexpr int COPIES = 4, NUM_MIXES = 24;
#endif

constexpr int WARPS = 8;

struct alignas(16) Words {
    u32 word[4];
};

#ifdef MIX
// Blocks of one gridDim.x take its slices in turns: those that run at the same time read neighbouring columns. A warp has eight
// rows, a lane eight neighbouring columns of all copies of one: what it expands is, as it is, an operand of the tensor cores.
constexpr int ROWS = 8 * WARPS, COLUMN_SLICES = M / 64, WEIGHT_BYTES = COPIES * 48 * 128;
constexpr int AHEAD = NUM_PARTS > 1 || FLOATS ? 1 : 2;   // halves of a slice, that are under way at a time
constexpr int WIDTH = FLOATS ? 4 : 2;                    // bytes of a number of the output
constexpr int PITCH = 7;                                 // pieces of 16 bytes: rows lie in different banks
constexpr int LOADS = FLOATS ? 2 * SUMS : NUM_PARTS;     // of 16 bytes of the output, of eight columns

// What a lane reads of eight columns.
struct Inputs {
    words4 x[COPIES], parts[EXPANDS ? LOADS : 1], shared;

    // From where these columns of a row lie.
    DEVICE void load(const u8* stream, const u8* output, u64 sum_stride, const u8* shared_output) {
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++) x[copy] = load_fresh4(stream + copy * (2 * M));
        if constexpr (EXPANDS) {
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                parts[i] = load_fresh4(output + (FLOATS ? i / 2 * sum_stride + i % 2 * 16 : i * (2 * M)));
            if constexpr (HAS_SHARED) shared = load_fresh4(shared_output);
        }
    }

    // Column `i` of the sub-layer's output.
    DEVICE float output(int i) const {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < (FLOATS ? SUMS : NUM_PARTS); part++) {
            if constexpr (FLOATS) {
                sum += as_float(number(parts[2 * part + i / 4], i % 4));
            } else {
                sum += half(parts[part], i);
            }
        }
        if constexpr (FLOATS && SUMS > 1) sum = bf16_rounded(sum);
        if constexpr (HAS_SHARED) sum += half(shared, i);
        return HAS_SHARED || NUM_PARTS > 1 ? bf16_rounded(sum) : sum;
    }

    static DEVICE u32 number(const words4& from, int i) { return i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w; }
    static DEVICE float half(const words4& from, int i) {
        return i % 2 ? high_of(number(from, i / 2)) : low_of(number(from, i / 2));
    }
};

// The mix weights of a slice.
DEVICE void copy_weights(Words* to, const u8* weight, int slice) {
    const u8* from = weight + unknown(slice * WEIGHT_BYTES);
#pragma unroll
    for (int i = 0; i < WEIGHT_BYTES / 16 / (WARPS * 32); i++) {
        const int piece = i * WARPS * 32 + threadIdx.x;
        copy_later(to + piece, from + piece * 16, true);
    }
    end_copies();
}

KERNEL(WARPS * 32, 2)
mix_rows(const u8* output, const u8* shared_output, u8* stream, const float* post, const float* comb, const float* pre,
         const u8* weight, u8* collapsed, float* collapsed_squares, float* stream_squares, float* mixes, u8* taps,
         int tap_stride, int num_rows) {
    SHARED_BYTES(shared);
    Words* weights = (Words*)shared;                                 // [2, COPIES, 12, 32]
    Words* factors = weights + (MIXES ? 2 * WEIGHT_BYTES / 16 : 0);  // [ROWS, PITCH]: comb, post, pre
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, own = blockIdx.y * ROWS + (threadIdx.x >> 5) * 8;
    const bool live = own + g < num_rows;
    const int row = min(own + g, num_rows - 1);  // rows that do not exist read the last one's, and leave nothing
    if constexpr (MIXES) copy_weights(weights, weight, blockIdx.x);
    wait_for_predecessor();
    // Where the first eight columns of this lane lie; half a slice further on is 64 bytes further on, or 128 of floats.
    stream += (u64)row * (COPIES * 2 * M) + t * 16;
    output += (u64)row * (NUM_PARTS * WIDTH * M) + t * (8 * WIDTH);
    shared_output += (u64)row * (2 * M) + t * 16;
    collapsed += (u64)row * (2 * M) + t * 16;
    taps += (u64)row * tap_stride * 2 + t * 16;
    const u64 sum_stride = (u64)num_rows * (4 * M);
    Inputs inputs[AHEAD];
#pragma unroll
    for (int half = 0; half < AHEAD; half++) {
        const u32 at = blockIdx.x * 128 + half * 64;
        inputs[half].load(stream + at, output + at * (WIDTH / 2), sum_stride, shared_output + at);
    }
    factors += ((threadIdx.x >> 5) * 8 + g) * PITCH;
    if constexpr (EXPANDS) {
        const words4 all = load_fresh4(comb + (row * COPIES + t) * COPIES);
        factors[t] = {all.x, all.y, all.z, all.w};
        factors[4].word[t] = load_fresh(post + row * COPIES + t);
    }
    if constexpr (MIXES) factors[5].word[t] = load_fresh(pre + row * COPIES + t);
    __syncwarp();
    float into_squares = 0.0f, squares = 0.0f, acc[3][4] = {};
    u32 place = 0;  // of this slice's weights
#pragma unroll 1
    for (int slice = blockIdx.x; slice < COLUMN_SLICES; slice += gridDim.x) {
        const int next = slice + gridDim.x;
        if constexpr (MIXES) {
            wait_for_copies<0>();
            __syncthreads();  // all have the weights of this slice, and are done with those of the last
            if (next < COLUMN_SLICES) copy_weights(weights + (WEIGHT_BYTES / 16 - place), weight, next);
        }
        const Words* own_weights = weights + unknown(place + lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Inputs& own_inputs = inputs[half % AHEAD];
            Words x[COPIES], into, mean;
            {
                float c[COPIES][COPIES], q[COPIES], p[COPIES];
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const Words all = factors[i];
#pragma unroll
                    for (int j = 0; j < COPIES; j++) c[i][j] = as_float(all.word[j]);
                    q[i] = as_float(factors[4].word[i]), p[i] = as_float(factors[5].word[i]);
                }
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    float lows[COPIES], highs[COPIES];
#pragma unroll
                    for (int copy = 0; copy < COPIES; copy++) {
                        x[copy].word[pair] = Inputs::number(own_inputs.x[copy], pair);
                        lows[copy] = low_of(x[copy].word[pair]), highs[copy] = high_of(x[copy].word[pair]);
                    }
                    if constexpr (EXPANDS) {
                        const float low = own_inputs.output(2 * pair), high = own_inputs.output(2 * pair + 1);
#pragma unroll
                        for (int to = 0; to < COPIES; to++) {
                            const float a = c[0][to] * lows[0] + c[1][to] * lows[1] + c[2][to] * lows[2] + c[3][to] * lows[3];
                            const float b = c[0][to] * highs[0] + c[1][to] * highs[1] + c[2][to] * highs[2] + c[3][to] * highs[3];
                            x[to].word[pair] = bf16x2_of_floats(q[to] * high + b, q[to] * low + a);
                        }
#pragma unroll
                        for (int copy = 0; copy < COPIES; copy++)
                            lows[copy] = low_of(x[copy].word[pair]), highs[copy] = high_of(x[copy].word[pair]);
                    }
                    if constexpr (HAS_TAP)
                        mean.word[pair] = bf16x2_of_floats((highs[0] + highs[1] + highs[2] + highs[3]) * 0.25f,
                                                           (lows[0] + lows[1] + lows[2] + lows[3]) * 0.25f);
                    if constexpr (MIXES) {
                        const float a = p[0] * lows[0] + p[1] * lows[1] + p[2] * lows[2] + p[3] * lows[3];
                        const float b = p[0] * highs[0] + p[1] * highs[1] + p[2] * highs[2] + p[3] * highs[3];
                        const u32 both = bf16x2_of_floats(b, a);
                        into.word[pair] = both;
                        into_squares += low_of(both) * low_of(both) + high_of(both) * high_of(both);
#pragma unroll
                        for (int copy = 0; copy < COPIES; copy++)
                            squares += lows[copy] * lows[copy] + highs[copy] * highs[copy];
                    }
                }
            }
            const u32 at = unknown(slice * 128 + half * 64);
            if (live) {
                if constexpr (EXPANDS) {
#pragma unroll
                    for (int copy = 0; copy < COPIES; copy++) *(Words*)(stream + at + copy * (2 * M)) = x[copy];
                }
                if constexpr (HAS_TAP) *(Words*)(taps + at) = mean;
                if constexpr (MIXES) *(Words*)(collapsed + at) = into;
            }
            const int of = half + AHEAD < 2 ? slice : next;
            if (of < COLUMN_SLICES) {  // under way while these are mixed
                const u32 further = unknown(of * 128 + (half + AHEAD) % 2 * 64);
                own_inputs.load(stream + further, output + further * (WIDTH / 2), sum_stride, shared_output + further);
            }
            if constexpr (MIXES) {
#pragma unroll
                for (int copy = 0; copy < COPIES; copy++) {
                    const u32(&b)[4] = x[copy].word;
#pragma unroll
                    for (int tile = 0; tile < 3; tile++) {
                        const Words* from = own_weights + ((copy * 3 + tile) * 2 + half) * 64;
                        const Words a0 = from[0], a1 = from[32];
                        mma_bf16(acc[tile], a0.word[0], a0.word[1], a0.word[2], a0.word[3], b[0], b[1]);
                        mma_bf16(acc[tile], a1.word[0], a1.word[1], a1.word[2], a1.word[3], b[2], b[3]);
                    }
                }
            }
        }
        place = WEIGHT_BYTES / 16 - place;
    }
    if constexpr (MIXES) {
        // Rows 24 to 47 are the lower parts of the weights.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (own + 2 * t + i >= num_rows) continue;
            float* at = mixes + ((u64)blockIdx.x * num_rows + own + 2 * t + i) * NUM_MIXES + g;
            at[0] = acc[0][i] + acc[1][i + 2];
            at[8] = acc[0][i + 2] + acc[2][i];
            at[16] = acc[1][i] + acc[2][i + 2];
        }
#pragma unroll
        for (int other = 1; other < 4; other *= 2) {
            into_squares += __shfl_xor_sync(ALL_LANES, into_squares, other);
            squares += __shfl_xor_sync(ALL_LANES, squares, other);
        }
        if (t == 0 && live) {
            collapsed_squares[blockIdx.x * num_rows + row] = into_squares;
            stream_squares[blockIdx.x * num_rows + row] = squares;
        }
    }
}
#endif

#ifdef FINISH
// A warp norms and quantises ROWS_EACH rows, a lane eight columns of 256 at a time. The last warp splits the mixes of all rows of
// the block, a row a lane: a chain of short steps, which takes as long for one row as for 32.
constexpr int BATCH = 5;  // of 256 columns that are under way

DEVICE void split_row(const float* mixes, const float* stream_squares, const float* scale, const float* base, float* pre,
                      float* post, float* all, int row, int num_rows) {
    float raw[NUM_MIXES] = {}, squares = 0.0f;
#pragma unroll 2
    for (int part = 0; part < SLICES; part++) {
        const float* at = mixes + ((u64)part * num_rows + row) * NUM_MIXES;
#pragma unroll
        for (int i = 0; i < NUM_MIXES; i += 4) {
            const words4 four = load_fresh4(at + i);
            raw[i] += as_float(four.x), raw[i + 1] += as_float(four.y);
            raw[i + 2] += as_float(four.z), raw[i + 3] += as_float(four.w);
        }
        squares += load_fresh_f(stream_squares + part * num_rows + row);
    }
    const float factor = fast_rsqrt(squares * (1.0f / (COPIES * M)) + NORM_EPS);
#pragma unroll
    for (int i = 0; i < NUM_MIXES; i++)
        raw[i] = raw[i] * factor * load_fresh_f(scale + (i < 4 ? 0 : i < 8 ? 1 : 2)) + load_fresh_f(base + i);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        pre[row * COPIES + i] = fast_inverse(1.0f + fast_exp(-raw[i])) + MIX_EPS;
        post[row * COPIES + i] = 2.0f * fast_inverse(1.0f + fast_exp(-raw[COPIES + i]));
    }
    float comb[4][4], by[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float* own = raw + 8 + 4 * i;
        const float highest = fmaxf(fmaxf(own[0], own[1]), fmaxf(own[2], own[3]));
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) comb[i][j] = fast_exp(own[j] - highest), total += comb[i][j];
        total = fast_inverse(total);
#pragma unroll
        for (int j = 0; j < 4; j++) comb[i][j] = comb[i][j] * total + MIX_EPS;
    }
    divide<true>(comb, by);
#pragma unroll 1
    for (int i = 1; i < ITERATIONS; i++) {
        divide<false>(comb, by);
        divide<true>(comb, by);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Words out;
#pragma unroll
        for (int j = 0; j < 4; j++) out.word[j] = as_u32(comb[i][j] * by[j]);
        *(Words*)(all + row * 16 + i * 4) = out;
    }
}

DEVICE void norm_row(const u8* collapsed, const float* collapsed_squares, const float* norm, u8* x, u8* codes, u8* code_scales,
                     int row, int num_rows, int lane) {
    Squares squares;
    squares.load(collapsed_squares, row, num_rows, lane);
    const u64 own = (u64)row * M;
    float factor = 0.0f;
#pragma unroll 1
    for (int first = lane * 8; first - lane * 8 < M; first += 256 * BATCH) {
        words4 packed[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) packed[i] = load_fresh4(collapsed + (own + min(first + i * 256, M - 8)) * 2);
        if (first == lane * 8) factor = squares.norm_factor<M>();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int column = first + i * 256, from = min(column, M - 8);
            const words4 weights[2] = {load_row4(norm + from), load_row4(norm + from + 4)};
            const u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
            const u32 wide[8] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                                 weights[1].x, weights[1].y, weights[1].z, weights[1].w};
            u32 out[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                out[j] = bf16x2_of_floats(as_float(wide[2 * j + 1]) * (high_of(words[j]) * factor),
                                          as_float(wide[2 * j]) * (low_of(words[j]) * factor));
            const u32 bits = scale_bits_of_group(out);
            if (column >= M) continue;
            *(Words*)(x + (own + column) * 2) = {out[0], out[1], out[2], out[3]};
            *(u64*)(codes + own + column) = fp8_codes_of(out, bits);
            if ((lane & 3) == 0) code_scales[(own + column) / 32] = (u8)(bits >> 23);
        }
    }
}

KERNEL((WARPS + 1) * 32, 3)
finish_rows(const u8* collapsed, const float* collapsed_squares, const float* stream_squares, const float* mixes,
            const float* norm, const float* scale, const float* base, u8* x, u8* codes, u8* code_scales, float* pre, float* post,
            float* comb, int num_rows) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_row = blockIdx.x * (WARPS * ROWS_EACH);
    wait_for_predecessor();
    if (warp == WARPS) {
        const int row = first_row + lane;
        if (lane < WARPS * ROWS_EACH && row < num_rows)
            split_row(mixes, stream_squares, scale, base, pre, post, comb, row, num_rows);
        return;
    }
    for (int row = first_row + warp; row < min(first_row + WARPS * ROWS_EACH, num_rows); row += WARPS)
        norm_row(collapsed, collapsed_squares, norm, x, codes, code_scales, row, num_rows, lane);
}
#endif
