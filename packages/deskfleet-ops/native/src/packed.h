// Weights in four bits, as doubles.
#pragma once

#include "lanes.h"

namespace df {
namespace DF_ISA {

struct CodePairs {
  double at[256][2];
};

// Both numbers of a byte, the low half first.
constexpr CodePairs code_pairs() {
  constexpr double values[16] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                 -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
  CodePairs pairs{};
  for (int code = 0; code < 256; ++code) {
    pairs.at[code][0] = values[code & 15];
    pairs.at[code][1] = values[code >> 4];
  }
  return pairs;
}

// Thirty-two numbers of sixteen bytes, times a power of two.
#if defined(DF_ISA_AVX512)
DF_INLINE void decode_e2m1(const uint8_t* codes, double scale, f64x8 (&out)[4]) {
  const __m512d factor = _mm512_set1_pd(scale);
  const __m512d positive = _mm512_mul_pd(_mm512_setr_pd(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), factor);
  const __m512d negative = _mm512_mul_pd(_mm512_setr_pd(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0), factor);
  for (int half = 0; half < 2; ++half) {
    const __m512i all = _mm512_set1_epi64(load<int64_t>(codes + 8 * half));
    const __m512i first = _mm512_srlv_epi64(all, _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28));
    const __m512i second = _mm512_srlv_epi64(all, _mm512_setr_epi64(32, 36, 40, 44, 48, 52, 56, 60));
    out[2 * half] = (f64x8)_mm512_permutex2var_pd(positive, first, negative);  // by the lowest four bits
    out[2 * half + 1] = (f64x8)_mm512_permutex2var_pd(positive, second, negative);
  }
}
#else
DF_INLINE void decode_e2m1(const uint8_t* codes, double scale, f64x8 (&out)[4]) {
  static constexpr CodePairs pairs = code_pairs();
  for (int part = 0; part < 4; ++part) {
    double values[8];
    for (int i = 0; i < 4; ++i) memcpy(values + 2 * i, pairs.at[codes[4 * part + i]], 16);
    out[part] = load<f64x8>(values) * scale;
  }
}
#endif

struct Powers {
  double at[256];
};

// 2^(code - 127) of every code; 255 is NaN.
constexpr Powers powers_of_two() {
  Powers powers{};
  powers.at[0] = 0x1p-127;
  for (int code = 1; code < 255; ++code) powers.at[code] = 2.0 * powers.at[code - 1];
  powers.at[255] = __builtin_nan("");
  return powers;
}

constexpr Powers kPowers = powers_of_two();

}  // namespace DF_ISA
}  // namespace df
