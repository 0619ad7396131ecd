// Hyper-connections: the mixes of a sub-layer, and the stream that collapses and expands by them.
#include "dots.h"
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

// comb divided by its sums over the first index (columns) or the second (rows), guarded by eps.
template <bool kColumns>
DF_INLINE void normalise(double* comb, int64_t copies, double eps) {
  for (int64_t a = 0; a < copies; ++a) {
    double total = eps;
    for (int64_t b = 0; b < copies; ++b) total += kColumns ? comb[b * copies + a] : comb[a * copies + b];
    for (int64_t b = 0; b < copies; ++b) {
      double& value = kColumns ? comb[b * copies + a] : comb[a * copies + b];
      value /= total;
    }
  }
}

// The same for four copies, eight rows of a batch side by side in the lanes.
DF_INLINE void sinkhorn_of_four(f64x8* comb, int64_t iterations, double eps) {
  for (int64_t i = 0; i < iterations; ++i) {
    if (i > 0) {
      for (int a = 0; a < 4; ++a) {
        f64x8* row = comb + 4 * a;
        const f64x8 total = ((eps + row[0]) + row[1]) + row[2] + row[3];
        for (int b = 0; b < 4; ++b) row[b] /= total;
      }
    }
    for (int a = 0; a < 4; ++a) {
      const f64x8 total = ((eps + comb[a]) + comb[4 + a]) + comb[8 + a] + comb[12 + a];
      for (int b = 0; b < 4; ++b) comb[4 * b + a] /= total;
    }
  }
}

DF_INLINE void softmax(const double* from, int64_t count, double* to) {
  double most = from[0], total = 0;
  for (int64_t i = 1; i < count; ++i) most = from[i] > most ? from[i] : most;
  for (int64_t i = 0; i < count; ++i) to[i] = exponential(from[i] - most);
  for (int64_t i = 0; i < count; ++i) total += to[i];
  for (int64_t i = 0; i < count; ++i) to[i] /= total;
}

// own * added (unless it is null) plus the weighted copies, copies in order; kCopies 0: as many as `copies` says.
template <int kCopies>
DF_INLINE void sum_copies(const uint16_t* __restrict from, const float* weights, int64_t stride, int64_t width,
                          const uint16_t* __restrict added, float own, int64_t copies, uint16_t* __restrict to) {
  const auto total_at = [&](int64_t i) {
    float total = weights[0] * widen_bf16(from[i]);
    for (int64_t c = 1; c < (kCopies ? kCopies : copies); ++c) {
      total = total + weights[c * stride] * widen_bf16(from[c * width + i]);
    }
    return total;
  };
  if (added == nullptr) {
    for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(total_at(i));
  } else {
    for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(own * widen_bf16(added[i]) + total_at(i));
  }
}

}  // namespace

void hc_mixes(const uint16_t* stream, const float* weight, double eps, int64_t rows, int64_t copies, int64_t width,
              float* out) {
  static thread_local Scratch<double> wide_memory, sum_memory;
  static thread_local Scratch<const double*> row_memory;
  const int64_t k = copies * width, wide = padded(k), outs = (2 + copies) * copies;
  double *values = wide_memory.get(rows * wide), *sums = sum_memory.get(rows * outs);
  const double** at = row_memory.get(rows);
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(stream + r * k, k, values + r * wide);
    at[r] = values + r * wide;
  }
  dots(at, rows, weight, k, outs, k, sums, outs);
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = static_cast<float>(inverse_root(mean_square(values + r * wide, k) + eps));
    for (int64_t o = 0; o < outs; ++o) out[r * outs + o] = static_cast<float>(sums[r * outs + o]) * factor;
  }
}

void hc_split(const float* mixes, const float* scale, const float* base, int64_t rows, int64_t copies,
              int64_t iterations, double eps, float* pre, float* post, float* comb) {
  static thread_local Scratch<double> memory;
  const int64_t square = copies * copies, outs = 2 * copies + square;
  double* wide = memory.get(rows * square);
  const double scales[3] = {scale[0], scale[1], scale[2]};
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = mixes + r * outs;
    for (int64_t c = 0; c < copies; ++c) {
      const double a = static_cast<double>(from[c]) * scales[0] + static_cast<double>(base[c]);
      const double b = static_cast<double>(from[copies + c]) * scales[1] + static_cast<double>(base[copies + c]);
      pre[r * copies + c] = static_cast<float>(sigmoid(a) + eps);
      post[r * copies + c] = static_cast<float>(2.0 * sigmoid(b));
    }
    double* square_of = wide + r * square;
    for (int64_t i = 0; i < square; ++i) {
      const int64_t at = 2 * copies + i;
      square_of[i] = static_cast<double>(from[at]) * scales[2] + static_cast<double>(base[at]);
    }
    for (int64_t c = 0; c < copies; ++c) softmax(square_of + c * copies, copies, square_of + c * copies);
    for (int64_t i = 0; i < square; ++i) square_of[i] += eps;
  }
  if (copies == 4) {
    for (int64_t r = 0; r < rows; r += kLanes) {
      const int64_t count = rows - r < kLanes ? rows - r : kLanes;
      f64x8 lanes[16];
      for (int64_t i = 0; i < 16; ++i) {
        double column[kLanes];
        for (int64_t n = 0; n < kLanes; ++n) column[n] = wide[(r + (n < count ? n : 0)) * 16 + i];
        lanes[i] = load<f64x8>(column);
      }
      sinkhorn_of_four(lanes, iterations, eps);
      for (int64_t i = 0; i < 16; ++i) {
        double column[kLanes];
        store(column, lanes[i]);
        for (int64_t n = 0; n < count; ++n) comb[(r + n) * 16 + i] = static_cast<float>(column[n]);
      }
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    double* square_of = wide + r * square;
    for (int64_t i = 0; i < iterations; ++i) {
      if (i > 0) normalise<false>(square_of, copies, eps);
      normalise<true>(square_of, copies, eps);
    }
    for (int64_t i = 0; i < square; ++i) comb[r * square + i] = static_cast<float>(square_of[i]);
  }
}

void hc_weights(const uint16_t* stream, const float* weight, double norm_eps, const float* scale, const float* base,
                int64_t rows, int64_t copies, int64_t width, int64_t iterations, double eps, float* pre, float* post,
                float* comb) {
  static thread_local Scratch<float> memory;
  float* mixes = memory.get(rows * (2 + copies) * copies);
  hc_mixes(stream, weight, norm_eps, rows, copies, width, mixes);
  hc_split(mixes, scale, base, rows, copies, iterations, eps, pre, post, comb);
}

void hc_collapse_norm(const uint16_t* stream, const float* pre, const float* norm, double eps, int64_t rows,
                      int64_t copies, int64_t width, uint16_t* out) {
  hc_collapse(stream, pre, rows, copies, width, out);
  rms_norm(out, norm, eps, rows, width, out);
}

void hc_collapse(const uint16_t* stream, const float* pre, int64_t rows, int64_t copies, int64_t width,
                 uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* from = stream + r * copies * width;
    if (copies == 4) {
      sum_copies<4>(from, pre + r * 4, 1, width, nullptr, 0.0f, 4, out + r * width);
    } else {
      sum_copies<0>(from, pre + r * copies, 1, width, nullptr, 0.0f, copies, out + r * width);
    }
  }
}

void hc_expand(const uint16_t* output, const uint16_t* stream, const float* post, const float* comb, int64_t rows,
               int64_t copies, int64_t width, uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t *from = stream + r * copies * width, *added = output + r * width;
    for (int64_t k = 0; k < copies; ++k) {
      const float own = post[r * copies + k];
      const float* weights = comb + r * copies * copies + k;
      uint16_t* to = out + (r * copies + k) * width;
      if (copies == 4) {
        sum_copies<4>(from, weights, 4, width, added, own, 4, to);
      } else {
        sum_copies<0>(from, weights, copies, width, added, own, copies, to);
      }
    }
  }
}

}  // namespace DF_ISA
}  // namespace df
