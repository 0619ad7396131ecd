// Linear layers, the norm before them and the rotation after them.
#include "dots.h"
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

template <typename T>
DF_INLINE void put(const double* from, int64_t count, T* to) {
  if constexpr (sizeof(T) == 2) {
    round_row(from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
  }
}

}  // namespace

void linear(const uint16_t* x, int64_t rows, int64_t groups, int64_t k, const void* w, int32_t w_type, int64_t outs,
            int32_t quantize, void* out, int32_t out_type) {
  static thread_local Scratch<double> wide_memory, sum_memory;
  static thread_local Scratch<const double*> row_memory;
  const int64_t wide = padded(k);
  double* values = wide_memory.get(rows * wide);
  const double** at = row_memory.get(rows);
  double* sums = out_type == DF_F64 && groups == 1 ? static_cast<double*>(out) : sum_memory.get(rows * outs);
  for (int64_t r = 0; r < rows; ++r) at[r] = values + r * wide;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* from = x + (r * groups + g) * k;
      if (quantize) {
        fake_quant_row(from, k, values + r * wide);
      } else {
        widen_row(from, k, values + r * wide);
      }
    }
    if (w_type == DF_BF16) {
      dots(at, rows, static_cast<const uint16_t*>(w) + g * outs * k, k, outs, k, sums, outs);
    } else {
      dots(at, rows, static_cast<const float*>(w) + g * outs * k, k, outs, k, sums, outs);
    }
    if (sums == out) continue;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t to = (r * groups + g) * outs;
      if (out_type == DF_BF16) put(sums + r * outs, outs, static_cast<uint16_t*>(out) + to);
      if (out_type == DF_F32) put(sums + r * outs, outs, static_cast<float*>(out) + to);
      if (out_type == DF_F64) put(sums + r * outs, outs, static_cast<double*>(out) + to);
    }
  }
}

void normed_linear(const uint16_t* x, int64_t rows, int64_t k, const uint16_t* w, int64_t outs, const float* norm,
                   double eps, uint16_t* out) {
  linear(x, rows, 1, k, w, DF_BF16, outs, 1, out, DF_BF16);
  rms_norm(out, norm, eps, rows, outs, out);
}

void rms_norm(const uint16_t* x, const float* weight, double eps, int64_t rows, int64_t width, uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* from = x + r * width;
    uint16_t* to = out + r * width;
    const float factor = static_cast<float>(inverse_root(mean_square(from, width) + eps));
    for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(weight[i] * (widen_bf16(from[i]) * factor));
  }
}

void rope(const uint16_t* x, const float* cos, const float* sin, int32_t inverse, int64_t rows, int64_t heads,
          int64_t width, int64_t pairs, uint16_t* out) {
  const int64_t still = width - 2 * pairs;
  for (int64_t r = 0; r < rows; ++r) {
    const float *c = cos + r * pairs, *s = sin + r * pairs;
    for (int64_t h = 0; h < heads; ++h) {
      const uint16_t* from = x + (r * heads + h) * width;
      uint16_t* to = out + (r * heads + h) * width;
      memcpy(to, from, static_cast<size_t>(still) * 2);
      for (int64_t p = 0; p < pairs; ++p) {
        const float even = widen_bf16(from[still + 2 * p]), odd = widen_bf16(from[still + 2 * p + 1]);
        const float sine = inverse ? -s[p] : s[p];
        to[still + 2 * p] = to_bf16(even * c[p] - odd * sine);
        to[still + 2 * p + 1] = to_bf16(even * sine + odd * c[p]);
      }
    }
  }
}

}  // namespace DF_ISA
}  // namespace df
