// Rounding and small formats, bit for bit as torch and the publisher's kernels do them.
#pragma once

#include <math.h>

#include "lanes.h"

namespace df {
namespace DF_ISA {

DF_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

DF_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

DF_INLINE float widen_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

// Nearest, ties to even; any NaN becomes one.
DF_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

// By way of float, as torch goes and as a float accumulator is stored.
DF_INLINE uint16_t to_bf16(double value) { return to_bf16(static_cast<float>(value)); }

// Eight at once, as floats that bfloat16 has.
DF_INLINE f32x8 rounded_to_bf16(f32x8 value) {
  const u32x8 bits = (u32x8)value;
  const u32x8 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  return value == value ? (f32x8)rounded : value;
}

DF_INLINE void store_bf16(uint16_t* to, f32x8 value) {
  store(to, __builtin_convertvector((u32x8)rounded_to_bf16(value) >> 16, u16x8));
}

// Smallest power of two >= value > 0.
DF_INLINE float pow2_ceil(float value) { return float_of((bits_of(value) + 0x7FFFFFu) & 0x7F800000u); }

// The nearest number that FP8 E4M3 has, for |value| <= 448; ties to even. NaN stays NaN.
DF_INLINE float round_e4m3(float value) {
  const uint32_t bits = bits_of(value), sign = bits & 0x80000000u;
  const float magnitude = float_of(bits & 0x7FFFFFFFu);
  uint32_t binade = bits & 0x7F800000u;
  binade = binade < (121u << 23) ? (121u << 23) : binade;  // below 2^-6 the spacing no longer shrinks
  const float shift = float_of(binade + (20u << 23));  // its spacing is that of E4M3 in this binade
  const float rounded = (magnitude + shift) - shift;
  return float_of(bits_of(rounded) | sign);
}

// The code of a value that round_e4m3 gave. From 480 on, and of NaN, the code of NaN.
DF_INLINE uint8_t e4m3_code(float rounded) {
  const uint32_t bits = bits_of(rounded), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 24) & 0x80u;
  if (magnitude >= (135u << 23 | 7u << 20)) return static_cast<uint8_t>(sign | 0x7Fu);
  if (magnitude < (121u << 23)) return static_cast<uint8_t>(sign | static_cast<uint32_t>(float_of(magnitude) * 512.0f));
  return static_cast<uint8_t>(sign | ((magnitude >> 20) - (120u << 3)));
}

DF_INLINE float e4m3_value(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const float small = static_cast<float>(magnitude) * 0x1p-9f;
  const uint32_t bits = magnitude < 8 ? bits_of(small) : magnitude == 0x7Fu ? 0x7FC00000u : normal;
  return float_of(bits | sign);
}

// Eight at once.
DF_INLINE f32x8 e4m3_values(const uint8_t* codes) {
  const u32x8 code = __builtin_convertvector(load<u8x8>(codes), u32x8);
  const u32x8 magnitude = code & 0x7Fu;
  const u32x8 normal = (magnitude << 20) + (120u << 23), nan = u32x8{} + 0x7FC00000u;
  const f32x8 small = __builtin_convertvector((i32x8)magnitude, f32x8) * 0x1p-9f;
  const u32x8 finite = magnitude < 8u ? (u32x8)small : normal;
  return (f32x8)((magnitude == 0x7Fu ? nan : finite) | (code & 0x80u) << 24);
}

DF_INLINE float e8m0_value(uint8_t code) {
  if (code == 0) return 0x1p-127f;
  return float_of(code == 255 ? 0x7FC00000u : static_cast<uint32_t>(code) << 23);
}

// Of a power of two, of infinity or NaN.
DF_INLINE uint8_t e8m0_code(float power) { return static_cast<uint8_t>((bits_of(power) >> 23) & 0xFFu); }

// Magnitude code 0..7 of |value|, nearest with ties to the even code.
DF_INLINE uint8_t e2m1_code(float value) {
  const float m = float_of(bits_of(value) & 0x7FFFFFFFu);
  return static_cast<uint8_t>((m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) +
                              (m > 5.0f));
}

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The largest magnitude of 16 or 32 bf16 as floats; NaN when there is one.
DF_INLINE float largest(const float* values, int count) {
  uint32_t most = 0;  // among magnitudes the order of the bits is that of the numbers, and NaN comes last
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(values[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  return float_of(most);
}

// max(value, least), NaN if value is.
DF_INLINE float at_least(float value, float least) { return value < least ? least : value; }
DF_INLINE float clamp(float value, float limit) {
  value = value < -limit ? -limit : value;
  return value > limit ? limit : value;
}

// The publisher multiplies by rounded reciprocals instead of dividing.
constexpr float kInvFp8Max = static_cast<float>(1.0 / 448.0), kInvFp4Max = static_cast<float>(1.0 / 6.0);

DF_INLINE float fp8_scale(float amax) { return pow2_ceil(at_least(amax, 1e-4f) * kInvFp8Max); }

// 32 bf16 -> floats, quantised to FP8 and back; returns the scale.
DF_INLINE float fake_quant_fp8(const uint16_t* x, float* out) {
  float values[32];
  for (int i = 0; i < 32; ++i) values[i] = widen_bf16(x[i]);
  const float scale = fp8_scale(largest(values, 32)), inverse = 1.0f / scale;
  for (int i = 0; i < 32; ++i) out[i] = round_e4m3(clamp(values[i] * inverse, 448.0f)) * scale;
  return scale;
}

// k (a multiple of 32) bf16, quantised to FP8 and back, as doubles.
DF_INLINE void fake_quant_row(const uint16_t* x, int64_t k, double* out) {
  for (int64_t i = 0; i < k; i += 32) {
    float group[32];
    fake_quant_fp8(x + i, group);
    for (int j = 0; j < 32; ++j) out[i + j] = static_cast<double>(group[j]);
  }
}

DF_INLINE void round_row(const double* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

template <typename T>
DF_INLINE double mean_square(const T* x, int64_t count) {
  f64x8 total = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const f64x8 v = widen(x + i);
    total += v * v;
  }
  if (i < count) {
    const f64x8 v = widen_tail(x + i, count - i);
    total += v * v;
  }
  return sum(total) / static_cast<double>(count);
}

DF_INLINE double inverse_root(double value) { return 1.0 / __builtin_sqrt(value); }

// e^x, within one unit in the last place; below -708 zero.
DF_INLINE f64x8 exponential(f64x8 x) {
  const f64x8 low = f64x8{} - 708.0, high = f64x8{} + 709.78;
  const f64x8 within = x < low ? low : x > high ? high : x;
  const double magic = 0x1.8p52;  // adding it rounds to an integer, in the low bits
  const f64x8 shifted = within * 0x1.71547652b82fep0 + magic;
  const f64x8 n = shifted - magic;
  const f64x8 r = (within - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  // The terms from r^2 / 2! to r^13 / 13!, in pairs, so that few wait for each other.
  const f64x8 square = r * r, fourth = square * square;
  const f64x8 a = (0.5 + r * (1.0 / 6.0)) + square * (1.0 / 24.0 + r * (1.0 / 120.0));
  const f64x8 b = (1.0 / 720.0 + r * (1.0 / 5040.0)) + square * (1.0 / 40320.0 + r * (1.0 / 362880.0));
  const f64x8 c = (1.0 / 3628800.0 + r * (1.0 / 39916800.0)) + square * (1.0 / 479001600.0 + r * (1.0 / 6227020800.0));
  const f64x8 p = (square * (a + fourth * (b + fourth * c)) + r) + 1.0;
  const i64x8 scaled = (i64x8)p + ((i64x8)shifted << 52);
  const f64x8 result = x < low ? f64x8{} : x > high ? f64x8{} + __builtin_inf() : (f64x8)scaled;
  return x == x ? result : x;
}

DF_INLINE f64x8 sigmoid(f64x8 x) { return 1.0 / (1.0 + exponential(-x)); }

DF_INLINE double exponential(double x) { return exponential(f64x8{} + x)[0]; }
DF_INLINE double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

}  // namespace DF_ISA
}  // namespace df
