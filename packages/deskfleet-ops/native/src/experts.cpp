// Routing, the experts' clamped SwiGLU, and the Engram gate.
#include "dots.h"
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

// silu(gate) * up * weight for one row, clamped; rounded as the publisher stores it.
DF_INLINE void activate(const uint16_t* gate, const uint16_t* up, int64_t width, float limit, float weight,
                        bool weighted, uint16_t* out) {
  const f32x8 most = f32x8{} + limit;
  const auto activated = [&](const uint16_t* gates, const uint16_t* ups) {
    const f32x8 g = floats_of(load<u16x8>(gates)), u = floats_of(load<u16x8>(ups));
    const f64x8 wide = doubles_of(g > most ? most : g);
    const f32x8 value = floats_of(wide * sigmoid(wide)) * (u < -most ? -most : u > most ? most : u);
    return weighted ? value * weight : value;
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store_bf16(out + i, activated(gate + i, up + i));
  if (i == width) return;
  uint16_t gates[kLanes] = {}, ups[kLanes] = {}, rounded[kLanes];
  memcpy(gates, gate + i, static_cast<size_t>(width - i) * 2);
  memcpy(ups, up + i, static_cast<size_t>(width - i) * 2);
  store_bf16(rounded, activated(gates, ups));
  memcpy(out + i, rounded, static_cast<size_t>(width - i) * 2);
}

struct Sizes {
  int64_t width, inner;
  float limit;
};

DF_INLINE void multiply(const double* const* x, int64_t rows, const uint16_t* w, int64_t outs, int64_t k, double* y) {
  dots(x, rows, w, k, outs, k, y, outs);
}
DF_INLINE void multiply(const double* const* x, int64_t rows, Fp4 w, int64_t outs, int64_t k, double* y) {
  dots(x, rows, w, outs, k, y, outs);
}

class Workspace {
 public:
  // `weights` null: none. at[i] are rows of quantised x.
  template <typename W>
  double* run(const Sizes& e, W w13, W w2, const double* const* at, const float* weights, int64_t rows) {
    const int64_t inner = e.inner, wide = padded(inner);
    double* both = both_.get(rows * 2 * inner);
    double* hidden = hidden_.get(rows * wide);
    double* sums = sums_.get(rows * e.width);
    uint16_t* rounded = rounded_.get(3 * inner);
    const double** hidden_at = hidden_at_.get(rows);
    multiply(at, rows, w13, 2 * inner, e.width, both);
    for (int64_t r = 0; r < rows; ++r) {
      round_row(both + r * 2 * inner, 2 * inner, rounded);
      uint16_t* activated = rounded + 2 * inner;
      activate(rounded, rounded + inner, inner, e.limit, weights == nullptr ? 1.0f : weights[r], weights != nullptr,
               activated);
      fake_quant_row(activated, inner, hidden + r * wide);
      hidden_at[r] = hidden + r * wide;
    }
    multiply(hidden_at, rows, w2, e.width, inner, sums);
    return sums;
  }

  // x bf16 [rows, width] quantised, as doubles.
  double* quantise(const uint16_t* x, int64_t rows, int64_t width) {
    double* values = values_.get(rows * padded(width));
    for (int64_t r = 0; r < rows; ++r) fake_quant_row(x + r * width, width, values + r * padded(width));
    return values;
  }

  Scratch<const double*> row_at;
  Scratch<float> row_weights;
  Scratch<int64_t> row_numbers;

 private:
  Scratch<double> both_, hidden_, sums_, values_;
  Scratch<uint16_t> rounded_;
  Scratch<const double*> hidden_at_;
};

// log(1 + e^x), the publisher's: x itself beyond 20.
DF_INLINE double softplus(double x) { return x > 20.0 ? x : log1p(exponential(x)); }

}  // namespace

void route(const uint16_t* x, const void* weight, int32_t w_type, const float* bias, int64_t bias_stride, int64_t rows,
           int64_t width, int64_t experts, int64_t num_chosen, double scaling, double temperature, int64_t* chosen,
           float* weights) {
  static thread_local Scratch<double> wide_memory;
  static thread_local Scratch<float> score_memory;
  static thread_local Scratch<const double*> row_memory;
  const int64_t wide = padded(width);
  double *values = wide_memory.get(rows * (wide + experts)), *all_logits = values + rows * wide;
  float *scores = score_memory.get(2 * experts), *ranked = scores + experts;
  const double** at = row_memory.get(rows);
  const float divisor = static_cast<float>(temperature);
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(x + r * width, width, values + r * wide);
    at[r] = values + r * wide;
  }
  if (w_type == DF_BF16) {
    dots(at, rows, static_cast<const uint16_t*>(weight), width, experts, width, all_logits, experts);
  } else {
    dots(at, rows, static_cast<const float*>(weight), width, experts, width, all_logits, experts);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const double* logits = all_logits + r * experts;
    for (int64_t e = 0; e < experts; ++e) {
      const float logit = static_cast<float>(logits[e]) / divisor;
      scores[e] = static_cast<float>(__builtin_sqrt(softplus(static_cast<double>(logit))));
      ranked[e] = scores[e] + bias[r * bias_stride + e];
    }
    double total = 0;
    for (int64_t k = 0; k < num_chosen; ++k) {
      int64_t best = 0;
      for (int64_t e = 1; e < experts; ++e) best = ranked[e] > ranked[best] ? e : best;
      chosen[r * num_chosen + k] = best;
      total += static_cast<double>(scores[best]);
      ranked[best] = -__builtin_inff();
    }
    for (int64_t k = 0; k < num_chosen; ++k) {
      const double raw = static_cast<double>(scores[chosen[r * num_chosen + k]]);
      weights[r * num_chosen + k] = static_cast<float>(raw / (total + 1e-20) * scaling);
    }
  }
}

void expert_activation(const uint16_t* gate, int64_t gate_stride, const uint16_t* up, int64_t up_stride, float limit,
                       const float* route_weight, int64_t rows, int64_t width, uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const bool weighted = route_weight != nullptr;
    activate(gate + r * gate_stride, up + r * up_stride, width, limit, weighted ? route_weight[r] : 1.0f, weighted,
             out + r * width);
  }
}

void routed_experts(const uint16_t* x, const int64_t* chosen, const float* weights, const uint8_t* w13,
                    const uint8_t* w13_scales, const uint8_t* w2, const uint8_t* w2_scales, int64_t rows, int64_t width,
                    int64_t inner, int64_t num_chosen, int64_t first_expert, int64_t experts, float limit,
                    double* total) {
  static thread_local Workspace work;
  const double* values = work.quantise(x, rows, width);
  for (int64_t i = 0; i < rows * width; ++i) total[i] = 0;
  const double** at = work.row_at.get(rows);
  float* own_weights = work.row_weights.get(rows);
  int64_t* own_rows = work.row_numbers.get(rows);
  for (int64_t e = 0; e < experts; ++e) {
    int64_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < num_chosen; ++k) {
        if (chosen[r * num_chosen + k] != first_expert + e) continue;
        at[count] = values + r * padded(width);
        own_weights[count] = weights[r * num_chosen + k];
        own_rows[count++] = r;
      }
    }
    if (count == 0) continue;
    const int64_t numbers = e * width * inner;  // of w2, half as many as of w13
    const Fp4 both = {w13 + numbers, w13_scales + numbers / 16}, down = {w2 + numbers / 2, w2_scales + numbers / 32};
    const double* sums = work.run({width, inner, limit}, both, down, at, own_weights, count);
    for (int64_t i = 0; i < count; ++i) {
      double* to = total + own_rows[i] * width;
      for (int64_t m = 0; m < width; ++m) to[m] += static_cast<double>(widen_bf16(to_bf16(sums[i * width + m])));
    }
  }
}

void shared_expert(const uint16_t* x, const uint16_t* w13, const uint16_t* w2, int64_t rows, int64_t width,
                   int64_t inner, float limit, uint16_t* out) {
  static thread_local Workspace work;
  const double* values = work.quantise(x, rows, width);
  const double** at = work.row_at.get(rows);
  for (int64_t r = 0; r < rows; ++r) at[r] = values + r * padded(width);
  const double* sums = work.run({width, inner, limit}, w13, w2, at, nullptr, rows);
  round_row(sums, rows * width, out);
}

void add_round(const double* total, const uint16_t* added, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(total[i] + static_cast<double>(widen_bf16(added[i])));
}

void engram_gate(const uint16_t* stream, const uint16_t* key, int64_t key_stride, const uint16_t* value,
                 int64_t value_stride, const float* weight, const uint8_t* alive, double eps, int64_t rows,
                 int64_t copies, int64_t width, uint16_t* out) {
  const double root = 1.0 / __builtin_sqrt(static_cast<double>(width));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < copies; ++c) {
      const uint16_t *s = stream + (r * copies + c) * width, *k = key + r * key_stride + c * width;
      const float* w = weight + c * width;
      const double rstd = inverse_root(mean_square(s, width) + eps) * inverse_root(mean_square(k, width) + eps);
      f64x8 lanes = {};
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) lanes += widen(s + i) * widen(w + i) * widen(k + i);
      const int64_t rest = width - i;
      if (rest > 0) lanes += widen_tail(s + i, rest) * widen_tail(w + i, rest) * widen_tail(k + i, rest);
      const double dot = sum(lanes) * rstd * root;
      const double magnitude = __builtin_fabs(dot) < 1e-6 ? 1e-6 : __builtin_fabs(dot);
      const double opened = sigmoid(__builtin_copysign(__builtin_sqrt(magnitude), dot));
      const float gate = static_cast<float>(opened * (alive[r] ? 1.0 : 0.0));
      const uint16_t* v = value + r * value_stride;
      uint16_t* to = out + (r * copies + c) * width;
      for (int64_t j = 0; j < width; ++j) to[j] = to_bf16(widen_bf16(s[j]) + gate * widen_bf16(v[j]));
    }
  }
}

}  // namespace DF_ISA
}  // namespace df
