#include "decode.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace engram {
namespace {

// The nearest bf16, ties to even, of magnitude * 2^exponent, where magnitude has at most four bits.
uint16_t bf16_of(uint32_t magnitude, int exponent) {
  if (magnitude == 0) return 0;
  const int top = 31 - __builtin_clz(magnitude);
  const int unbiased = exponent + top;
  if (unbiased > 127) return 0x7F80;
  if (unbiased >= -126) return static_cast<uint16_t>((unbiased + 127) << 7 | ((magnitude << (7 - top)) & 0x7F));
  const int shift = -133 - exponent;  // 2^-133 is the smallest bf16
  if (shift <= 0) return static_cast<uint16_t>(magnitude << -shift);
  if (shift > 8) return 0;
  const uint32_t half = 1u << (shift - 1), kept = magnitude >> shift, rest = magnitude & ((1u << shift) - 1);
  return static_cast<uint16_t>(kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0));
}

struct E4M3 {
  uint32_t magnitude;
  int exponent;
  bool negative, nan;
};

E4M3 e4m3(uint32_t code) {
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  return {exponent ? mantissa + 8 : mantissa, static_cast<int>(exponent ? exponent : 1) - 10, (code & 0x80) != 0,
          (code & 0x7F) == 0x7F};
}

struct Fp8Table {
  uint16_t at[256][256];
  Fp8Table() {
    for (uint32_t scale = 0; scale < 256; ++scale) {
      for (uint32_t code = 0; code < 256; ++code) {
        const E4M3 v = e4m3(code);
        const auto bits = bf16_of(v.magnitude, v.exponent + static_cast<int>(scale) - 127);
        at[scale][code] = v.nan || scale == 255 ? kBf16Nan : static_cast<uint16_t>(bits | (v.negative ? 0x8000 : 0));
      }
    }
  }
};

// Round-to-nearest and no flushing of subnormals, whatever the host program has set for this thread.
class PlainFloats {
 public:
#if defined(__x86_64__)
  PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~PlainFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  PlainFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~PlainFloats() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

uint16_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return kBf16Nan;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void fill_four_bit(RowDecoder::FourBitTable* table, float global_scale) {
  static constexpr float kE2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const PlainFloats guard;
  for (uint32_t scale = 0; scale < 256; ++scale) {
    const E4M3 s = e4m3(scale);
    volatile float factor = s.nan ? NAN : std::ldexp(static_cast<float>(s.magnitude), s.exponent);
    if (s.negative && !s.nan) factor = -factor;
    for (uint32_t code = 0; code < 16; ++code) {
      volatile float product = (code & 8 ? -kE2M1[code & 7] : kE2M1[code & 7]) * factor;  // volatile: no fusing
      product = product * global_scale;
      const uint16_t bits = round_to_bf16(product);
      table->low[scale][code] = static_cast<uint8_t>(bits);
      table->high[scale][code] = static_cast<uint8_t>(bits >> 8);
    }
  }
}

// Inside these scales every finite product is a normal number, so a scale only moves the exponent.
inline bool shifts_exponent(uint8_t scale) { return scale >= 10 && scale <= 246; }

// bf16 bits of the E4M3 magnitudes 0..15: zero, the seven subnormals, and the first normals.
constexpr uint16_t kSmall[16] = {0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60,
                                 0x3C80, 0x3C90, 0x3CA0, 0x3CB0, 0x3CC0, 0x3CD0, 0x3CE0, 0x3CF0};
constexpr uint16_t kNormalBias = 0x3C00;  // magnitude << 4, plus this, is bf16 for every normal E4M3

inline void fp8_group_by_table(const uint8_t* codes, uint8_t scale, uint32_t count, uint16_t* out) {
  const uint16_t* values = fp8_table()[scale];
  for (uint32_t i = 0; i < count; ++i) out[i] = values[codes[i]];
}

void fp8_scalar(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const uint32_t group = self.weight_bytes() / self.scale_bytes();
  for (uint32_t g = 0; g < self.scale_bytes(); ++g)
    fp8_group_by_table(weights + g * group, scales[g], group, out + g * group);
}

void fp4_scalar(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const auto& table = *self.four_bit();
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    const uint8_t *low = table.low[scales[g]], *high = table.high[scales[g]];
    for (uint32_t i = 0; i < 8; ++i) {
      const uint8_t pair = weights[g * 8 + i];
      *out++ = static_cast<uint16_t>(low[pair & 15] | high[pair & 15] << 8);
      *out++ = static_cast<uint16_t>(low[pair >> 4] | high[pair >> 4] << 8);
    }
  }
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

AVX2 void fp8_avx2(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const uint32_t group = self.weight_bytes() / self.scale_bytes();
  alignas(16) uint8_t low_bytes[16], high_bytes[16];
  for (int i = 0; i < 16; ++i) {
    low_bytes[i] = static_cast<uint8_t>(kSmall[i]);
    high_bytes[i] = static_cast<uint8_t>(kSmall[i] >> 8);
  }
  const __m128i small_low = _mm_load_si128(reinterpret_cast<const __m128i*>(low_bytes));
  const __m128i small_high = _mm_load_si128(reinterpret_cast<const __m128i*>(high_bytes));
  const __m256i low7 = _mm256_set1_epi16(0x7F), bias = _mm256_set1_epi16(kNormalBias);
  const __m256i seven = _mm256_set1_epi16(7), nan = _mm256_set1_epi16(kBf16Nan), zero = _mm256_setzero_si256();
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    if (!shifts_exponent(scales[g])) {
      fp8_group_by_table(weights + g * group, scales[g], group, out + g * group);
      continue;
    }
    const __m256i shift = _mm256_set1_epi16(static_cast<int16_t>((scales[g] - 127) * 128));
    for (uint32_t i = g * group; i < (g + 1) * group; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + i));
      const __m256i code = _mm256_cvtepu8_epi16(bytes);
      const __m256i magnitude = _mm256_and_si256(code, low7);
      const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(low7, code), 8);
      const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), bias);
      const __m128i index = _mm_and_si128(bytes, _mm_set1_epi8(15));
      const __m256i tiny =
          _mm256_or_si256(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(small_low, index)),
                          _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(small_high, index)), 8));
      __m256i value = _mm256_blendv_epi8(tiny, normal, _mm256_cmpgt_epi16(magnitude, seven));
      value = _mm256_add_epi16(value, _mm256_and_si256(shift, _mm256_cmpgt_epi16(magnitude, zero)));
      value = _mm256_or_si256(value, sign);
      value = _mm256_blendv_epi8(value, nan, _mm256_cmpeq_epi16(magnitude, low7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), value);
    }
  }
}

AVX512 void fp8_avx512(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const uint32_t group = self.weight_bytes() / self.scale_bytes();
  const __m512i small = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSmall)));
  const __m512i low7 = _mm512_set1_epi16(0x7F), bias = _mm512_set1_epi16(kNormalBias);
  const __m512i eight = _mm512_set1_epi16(8), nan = _mm512_set1_epi16(kBf16Nan);
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    if (!shifts_exponent(scales[g])) {
      fp8_group_by_table(weights + g * group, scales[g], group, out + g * group);
      continue;
    }
    const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>((scales[g] - 127) * 128));
    for (uint32_t i = g * group; i < (g + 1) * group; i += 32) {
      const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + i)));
      const __m512i magnitude = _mm512_and_si512(code, low7);
      const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
      __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
      const __mmask32 tiny = _mm512_cmplt_epu16_mask(magnitude, eight);
      value = _mm512_mask_permutexvar_epi16(value, tiny, magnitude, small);
      value = _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(magnitude, magnitude), value, shift);
      value = _mm512_or_si512(value, sign);
      value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, low7), nan);
      _mm512_storeu_si512(out + i, value);
    }
  }
}

AVX2 void fp4_avx2(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const auto& table = *self.four_bit();
  const __m128i low4 = _mm_set1_epi8(15);
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(weights + g * 8));
    const __m128i index = _mm_unpacklo_epi8(_mm_and_si128(pairs, low4), _mm_and_si128(_mm_srli_epi16(pairs, 4), low4));
    const __m128i low = _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table.low[scales[g]])), index);
    const __m128i high =
        _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table.high[scales[g]])), index);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + g * 16), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + g * 16 + 8), _mm_unpackhi_epi8(low, high));
  }
}

#elif defined(__aarch64__)

void fp8_neon(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const uint32_t group = self.weight_bytes() / self.scale_bytes();
  uint8_t low_bytes[16], high_bytes[16];
  for (int i = 0; i < 16; ++i) {
    low_bytes[i] = static_cast<uint8_t>(kSmall[i]);
    high_bytes[i] = static_cast<uint8_t>(kSmall[i] >> 8);
  }
  const uint8x16_t small_low = vld1q_u8(low_bytes), small_high = vld1q_u8(high_bytes);
  const uint16x8_t bias = vdupq_n_u16(kNormalBias), nan = vdupq_n_u16(kBf16Nan), low7 = vdupq_n_u16(0x7F);
  const uint16x8_t seven = vdupq_n_u16(7);
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    if (!shifts_exponent(scales[g])) {
      fp8_group_by_table(weights + g * group, scales[g], group, out + g * group);
      continue;
    }
    const uint16x8_t shift = vdupq_n_u16(static_cast<uint16_t>((scales[g] - 127) * 128));
    for (uint32_t i = g * group; i < (g + 1) * group; i += 16) {
      const uint8x16_t code = vld1q_u8(weights + i);
      const uint8x16_t magnitude = vandq_u8(code, vdupq_n_u8(0x7F));
      const uint8x16_t sign = vandq_u8(code, vdupq_n_u8(0x80));
      const uint8x16_t low = vqtbl1q_u8(small_low, magnitude), high = vqtbl1q_u8(small_high, magnitude);
      const uint16x8_t tiny[2] = {vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                                  vreinterpretq_u16_u8(vzip2q_u8(low, high))};
      const uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(magnitude)), vmovl_u8(vget_high_u8(magnitude))};
      const uint16x8_t signs[2] = {vshll_n_u8(vget_low_u8(sign), 8), vshll_n_u8(vget_high_u8(sign), 8)};
      for (int half = 0; half < 2; ++half) {
        const uint16x8_t normal = vaddq_u16(vshlq_n_u16(wide[half], 4), bias);
        uint16x8_t value = vbslq_u16(vcgtq_u16(wide[half], seven), normal, tiny[half]);
        value = vaddq_u16(value, vandq_u16(shift, vtstq_u16(wide[half], wide[half])));
        value = vorrq_u16(value, signs[half]);
        value = vbslq_u16(vceqq_u16(wide[half], low7), nan, value);
        vst1q_u16(out + i + 8 * half, value);
      }
    }
  }
}

void fp4_neon(const RowDecoder& self, const uint8_t* weights, const uint8_t* scales, uint16_t* out) {
  const auto& table = *self.four_bit();
  for (uint32_t g = 0; g < self.scale_bytes(); ++g) {
    const uint8x8_t pairs = vld1_u8(weights + g * 8);
    const uint8x8x2_t zipped = vzip_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4));
    const uint8x16_t index = vcombine_u8(zipped.val[0], zipped.val[1]);
    const uint8x16_t low = vqtbl1q_u8(vld1q_u8(table.low[scales[g]]), index);
    const uint8x16_t high = vqtbl1q_u8(vld1q_u8(table.high[scales[g]]), index);
    vst1q_u8(reinterpret_cast<uint8_t*>(out + g * 16), vzip1q_u8(low, high));
    vst1q_u8(reinterpret_cast<uint8_t*>(out + g * 16 + 8), vzip2q_u8(low, high));
  }
}

#endif

}  // namespace

const uint16_t (&fp8_table())[256][256] {
  static const Fp8Table instance;
  return instance.at;
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::kBest:
    case Isa::kScalar:
      return true;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
    case Isa::kNeon:
      return true;
#endif
    default:
      return false;
  }
}

Isa best_isa() {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kNeon})
    if (isa_available(isa)) return isa;
  return Isa::kScalar;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
    default:
      return "scalar";
  }
}

RowDecoder::RowDecoder(uint32_t row_format, uint32_t weight_bytes, uint32_t scale_bytes, float global_scale, Isa isa)
    : weight_bytes_(weight_bytes), scale_bytes_(scale_bytes) {
  if (isa == Isa::kBest) isa = best_isa();
  if (row_format == 1) {
    num_values_ = weight_bytes;
    run_ = fp8_scalar;
    fp8_table();  // built here, not under a lookup
    [[maybe_unused]] const uint32_t group = weight_bytes / scale_bytes;
#if defined(__x86_64__)
    if (isa == Isa::kAvx2 && group % 16 == 0) run_ = fp8_avx2;
    if (isa == Isa::kAvx512) run_ = group % 32 == 0 ? fp8_avx512 : group % 16 == 0 ? fp8_avx2 : fp8_scalar;
#elif defined(__aarch64__)
    if (isa == Isa::kNeon && group % 16 == 0) run_ = fp8_neon;
#endif
    return;
  }
  num_values_ = weight_bytes * 2;
  run_ = fp4_scalar;
  four_bit_ = std::make_unique<FourBitTable>();
  fill_four_bit(four_bit_.get(), global_scale);
#if defined(__x86_64__)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) run_ = fp4_avx2;
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) run_ = fp4_neon;
#endif
}

RowDecoder::~RowDecoder() = default;
RowDecoder::RowDecoder(RowDecoder&&) noexcept = default;

}  // namespace engram
