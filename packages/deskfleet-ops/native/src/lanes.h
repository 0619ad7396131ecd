// Vectors of eight lanes, whatever the processor's registers are, and the one order in which lanes are summed.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(DF_ISA_AVX512) || defined(DF_ISA_AVX2)
#include <immintrin.h>
#endif

#define DF_INLINE static inline __attribute__((always_inline))

namespace df {
namespace DF_ISA {

typedef double f64x8 __attribute__((vector_size(64)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int64_t i64x8 __attribute__((vector_size(64)));

constexpr int64_t kLanes = 8;

DF_INLINE int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <typename V, typename T>
DF_INLINE V load(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <typename V, typename T>
DF_INLINE void store(T* to, V v) {
  memcpy(to, &v, sizeof v);
}

// Compilers lay out these three conversions badly when left alone with vectors wider than a register.
#if defined(DF_ISA_AVX512)
DF_INLINE f32x8 floats_of(u16x8 bf16) {
  return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bf16), 16);
}
DF_INLINE f64x8 doubles_of(f32x8 v) { return (f64x8)_mm512_cvtps_pd((__m256)v); }
DF_INLINE f32x8 floats_of(f64x8 v) { return (f32x8)_mm512_cvtpd_ps((__m512d)v); }
#elif defined(DF_ISA_AVX2)
DF_INLINE f32x8 floats_of(u16x8 bf16) {
  return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bf16), 16);
}
DF_INLINE f64x8 doubles_of(f32x8 v) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
  return __builtin_shufflevector((f64x4)low, (f64x4)high, 0, 1, 2, 3, 4, 5, 6, 7);
}
DF_INLINE f32x8 floats_of(f64x8 v) { return __builtin_convertvector(v, f32x8); }
#else
DF_INLINE f32x8 floats_of(u16x8 bf16) { return (f32x8)(__builtin_convertvector(bf16, u32x8) << 16); }
DF_INLINE f64x8 doubles_of(f32x8 v) { return __builtin_convertvector(v, f64x8); }
DF_INLINE f32x8 floats_of(f64x8 v) { return __builtin_convertvector(v, f32x8); }
#endif

// Eight numbers of an array as doubles; exact.
DF_INLINE f64x8 widen(const uint16_t* bf16) { return doubles_of(floats_of(load<u16x8>(bf16))); }
DF_INLINE f64x8 widen(const float* values) { return doubles_of(load<f32x8>(values)); }
DF_INLINE f64x8 widen(const double* values) { return load<f64x8>(values); }

// The same of the last `count` < 8, zeros after them.
template <typename T>
DF_INLINE f64x8 widen_tail(const T* from, int64_t count) {
  T rest[kLanes] = {};
  memcpy(rest, from, static_cast<size_t>(count) * sizeof(T));
  return widen(rest);
}

// count numbers as doubles, zeros up to the next multiple of eight.
template <typename T>
DF_INLINE void widen_row(const T* from, int64_t count, double* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, widen(from + i));
  if (i < count) store(to + i, widen_tail(from + i, count - i));
}

DF_INLINE double sum(f64x8 v) {
  const f64x4 a = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const f64x2 b = __builtin_shufflevector(a, a, 0, 1) + __builtin_shufflevector(a, a, 2, 3);
  return b[0] + b[1];
}

DF_INLINE double largest(f64x8 v) {
  double most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// The sums of four, each in the same order.
DF_INLINE f64x4 sums(f64x8 a, f64x8 b, f64x8 c, f64x8 d) {
  const f64x8 ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                   __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  const f64x8 cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
                   __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
  const f64x8 all = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) +
                    __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
  return __builtin_shufflevector(all, all, 0, 2, 4, 6) + __builtin_shufflevector(all, all, 1, 3, 5, 7);
}

}  // namespace DF_ISA
}  // namespace df
