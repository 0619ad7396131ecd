#include "dots.h"

#include "lanes.h"
#include "packed.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

// How many rows and outputs go together, so that their sums stay in registers: they hide the latency of additions and
// share what is loaded. None of it changes a result.
#if defined(DF_ISA_AVX512)
constexpr int kMaxRows = 6;
constexpr int outs_for(int rows) { return rows == 1 ? 8 : 4; }
constexpr int kMixRows = 4, kMixVectors = 4;
#elif defined(DF_ISA_AVX2)
constexpr int kMaxRows = 3;
constexpr int outs_for(int rows) { return rows == 1 ? 4 : 2; }
constexpr int kMixRows = 2, kMixVectors = 2;
#elif defined(DF_ISA_NEON)
constexpr int kMaxRows = 2;
constexpr int outs_for(int rows) { return rows == 1 ? 4 : 2; }
constexpr int kMixRows = 2, kMixVectors = 2;
#else
constexpr int kMaxRows = 2;
constexpr int outs_for(int rows) { return rows == 1 ? 2 : 1; }
constexpr int kMixRows = 1, kMixVectors = 2;
#endif

// What is needed soon: a tile is short, so that the processor does not see it coming.
DF_INLINE void fetch(const void* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(at) + i);
}

// Weights as an array of numbers, `stride` apart from one output to the next.
template <typename T>
struct Dense {
  const T* at;
  int64_t stride;

  Dense from(int64_t out) const { return {at + out * stride, stride}; }

  // sums[o] of the first O outputs, of R rows.
  template <int R, int O>
  static inline __attribute__((always_inline)) void multiply(const Dense& w, const double* const* x, int64_t k, f64x8 (&total)[R][O]) {
    int64_t i = 0;
    const T* next = w.at + O * w.stride;
    for (; i + kLanes <= k; i += kLanes) {
      f64x8 weights[O];
      fetch(next + i * O, O * kLanes * static_cast<int64_t>(sizeof(T)));
      for (int o = 0; o < O; ++o) weights[o] = widen(w.at + o * w.stride + i);
      for (int r = 0; r < R; ++r) {
        const f64x8 v = load<f64x8>(x[r] + i);
        for (int o = 0; o < O; ++o) total[r][o] += v * weights[o];
      }
    }
    if (i == k) return;
    for (int o = 0; o < O; ++o) {
      const f64x8 weights = widen_tail(w.at + o * w.stride + i, k - i);
      for (int r = 0; r < R; ++r) total[r][o] += load<f64x8>(x[r] + i) * weights;
    }
  }

  // One output's weights as doubles, zeros up to the next multiple of eight.
  void spread(int64_t k, double* to) const { widen_row(at, k, to); }
};

// Weights as doubles, each output's wherever it is; k is a multiple of eight.
struct Listed {
  const double* const* at;

  Listed from(int64_t out) const { return {at + out}; }

  template <int R, int O>
  static inline __attribute__((always_inline)) void multiply(const Listed& w, const double* const* x, int64_t k,
                                                             f64x8 (&total)[R][O]) {
    for (int64_t i = 0; i < k; i += kLanes) {
      f64x8 weights[O];
      for (int o = 0; o < O; ++o) weights[o] = load<f64x8>(w.at[o] + i);
      for (int r = 0; r < R; ++r) {
        const f64x8 v = load<f64x8>(x[r] + i);
        for (int o = 0; o < O; ++o) total[r][o] += v * weights[o];
      }
    }
  }

  void spread(int64_t k, double* to) const { memcpy(to, at[0], static_cast<size_t>(k) * sizeof(double)); }
};

// Weights as MXFP4 of rows of k.
struct Packed {
  Fp4 at;
  int64_t k;

  Packed from(int64_t out) const { return {{at.codes + out * (k / 2), at.scales + out * (k / 32)}, k}; }

  template <int R, int O>
  static inline __attribute__((always_inline)) void multiply(const Packed& w, const double* const* x, int64_t k, f64x8 (&total)[R][O]) {
    for (int64_t i = 0; i < k; i += 32) {
      fetch(w.at.codes + (O * k + i * O) / 2, O * 16);
      for (int o = 0; o < O; ++o) {
        f64x8 weights[4];
        decode_e2m1(w.at.codes + (o * k + i) / 2, kPowers.at[w.at.scales[(o * k + i) / 32]], weights);
        for (int part = 0; part < 4; ++part) {
          for (int r = 0; r < R; ++r) total[r][o] += load<f64x8>(x[r] + i + part * kLanes) * weights[part];
        }
      }
    }
  }

  void spread(int64_t, double* to) const {
    for (int64_t i = 0; i < k; i += 32) {
      f64x8 weights[4];
      decode_e2m1(at.codes + i / 2, kPowers.at[at.scales[i / 32]], weights);
      for (int part = 0; part < 4; ++part) store(to + i + part * kLanes, weights[part]);
    }
  }
};

template <int R, int O, typename W>
DF_INLINE void tile(const double* const* x, const W& w, int64_t k, double* y, int64_t ldy) {
  f64x8 total[R][O] = {};
  W::template multiply<R, O>(w, x, k, total);
  for (int r = 0; r < R; ++r) {
    int o = 0;
    if constexpr (O % 4 == 0) {
      for (; o < O; o += 4) {
        store(y + r * ldy + o, sums(total[r][o], total[r][o + 1], total[r][o + 2], total[r][o + 3]));
      }
    }
    for (; o < O; ++o) y[r * ldy + o] = sum(total[r][o]);
  }
}

template <int R, int O, typename W>
DF_INLINE void few_rows(const double* const* x, const W& w, int64_t outs, int64_t k, double* y, int64_t ldy) {
  int64_t o = 0;
  for (; o + O <= outs; o += O) tile<R, O>(x, w.from(o), k, y + o, ldy);
  for (; o < outs; ++o) tile<R, 1>(x, w.from(o), k, y + o, ldy);
}

template <int R, typename W>
void up_to(const double* const* x, int64_t rows, const W& w, int64_t outs, int64_t k, double* y, int64_t ldy) {
  if (rows == R) {
    few_rows<R, outs_for(R)>(x, w, outs, k, y, ldy);
  } else if constexpr (R > 1) {
    up_to<R - 1>(x, rows, w, outs, k, y, ldy);
  }
}

// Many rows: a few outputs' weights are widened once and stay in the nearest cache while all rows pass.
template <typename W>
void many_rows(const double* const* x, int64_t rows, const W& w, int64_t outs, int64_t k, double* y, int64_t ldy) {
  constexpr int O = outs_for(kMaxRows);
  const int64_t wide = padded(k);
  static thread_local Scratch<double> memory;
  const Dense<double> panel = {memory.get(O * wide), wide};
  for (int64_t o = 0; o < outs; o += O) {
    const int64_t count = outs - o < O ? outs - o : O;
    for (int64_t p = 0; p < count; ++p) w.from(o + p).spread(k, memory.get(O * wide) + p * wide);
    int64_t r = 0;
    if (count == O) {
      for (; r + kMaxRows <= rows; r += kMaxRows) tile<kMaxRows, O>(x + r, panel, wide, y + r * ldy + o, ldy);
    }
    for (; r < rows; ++r) {
      for (int64_t p = 0; p < count; ++p) tile<1, 1>(x + r, panel.from(p), wide, y + r * ldy + o + p, ldy);
    }
  }
}

template <typename W>
void dots_of(const double* const* x, int64_t rows, const W& w, int64_t outs, int64_t k, double* y, int64_t ldy) {
  if (rows > 2 * kMaxRows) return many_rows(x, rows, w, outs, k, y, ldy);
  while (rows > 0) {
    const int64_t now = rows < kMaxRows ? rows : kMaxRows;
    up_to<kMaxRows>(x, now, w, outs, k, y, ldy);
    x += now;
    y += now * ldy;
    rows -= now;
  }
}

template <int R, int C>
DF_INLINE void mix_tile(const double* w, int64_t ldw, const double* const* v, int64_t first, int64_t count, double* out,
                        int64_t ldo) {
  f64x8 total[R][C] = {};
  for (int64_t j = 0; j < count; ++j) {
    f64x8 values[C];
    for (int c = 0; c < C; ++c) values[c] = load<f64x8>(v[j] + first + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const double weight = w[r * ldw + j];
      for (int c = 0; c < C; ++c) total[r][c] += weight * values[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * ldo + c * kLanes, total[r][c]);
  }
}

template <int R>
DF_INLINE void mix_rows(const double* w, int64_t ldw, const double* const* v, int64_t count, int64_t columns,
                        double* out, int64_t ldo) {
  int64_t c = 0;
  for (; c + kMixVectors * kLanes <= columns; c += kMixVectors * kLanes) {
    mix_tile<R, kMixVectors>(w, ldw, v, c, count, out + c, ldo);
  }
  for (; c < columns; c += kLanes) mix_tile<R, 1>(w, ldw, v, c, count, out + c, ldo);
}

}  // namespace

void dots(const double* const* x, int64_t rows, const uint16_t* w, int64_t ldw, int64_t outs, int64_t k, double* y,
          int64_t ldy) {
  dots_of(x, rows, Dense<uint16_t>{w, ldw}, outs, k, y, ldy);
}

void dots(const double* const* x, int64_t rows, const float* w, int64_t ldw, int64_t outs, int64_t k, double* y,
          int64_t ldy) {
  dots_of(x, rows, Dense<float>{w, ldw}, outs, k, y, ldy);
}

void dots(const double* const* x, int64_t rows, const double* const* w, int64_t outs, int64_t k, double* y,
          int64_t ldy) {
  dots_of(x, rows, Listed{w}, outs, k, y, ldy);
}

void dots(const double* const* x, int64_t rows, Fp4 w, int64_t outs, int64_t k, double* y, int64_t ldy) {
  dots_of(x, rows, Packed{w, k}, outs, k, y, ldy);
}

void mix(const double* w, int64_t ldw, int64_t rows, const double* const* v, int64_t count, int64_t columns,
         double* out, int64_t ldo) {
  int64_t r = 0;
  for (; r + kMixRows <= rows; r += kMixRows) {
    mix_rows<kMixRows>(w + r * ldw, ldw, v, count, columns, out + r * ldo, ldo);
  }
  for (; r < rows; ++r) mix_rows<1>(w + r * ldw, ldw, v, count, columns, out + r * ldo, ldo);
}

}  // namespace DF_ISA
}  // namespace df
