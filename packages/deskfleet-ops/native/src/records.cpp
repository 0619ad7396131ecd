// Cached rows: codes, then scales, in one run of bytes.
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

DF_INLINE void pack_fp8(const uint16_t* x, int64_t width, uint8_t* codes, uint8_t* scales) {
  for (int64_t i = 0; i < width; i += 32) {
    float values[32];
    for (int j = 0; j < 32; ++j) values[j] = widen_bf16(x[i + j]);
    const float scale = fp8_scale(largest(values, 32)), inverse = 1.0f / scale;
    for (int j = 0; j < 32; ++j) codes[i + j] = e4m3_code(round_e4m3(clamp(values[j] * inverse, 448.0f)));
    scales[i / 32] = e8m0_code(scale);
  }
}

// kBlock is 32 with a power of two for a scale, 16 with an E4M3 number.
template <int kBlock>
DF_INLINE void pack_fp4(const uint16_t* x, int64_t width, uint8_t* codes, uint8_t* scales) {
  for (int64_t i = 0; i < width; i += kBlock) {
    float values[kBlock];
    for (int j = 0; j < kBlock; ++j) values[j] = widen_bf16(x[i + j]);
    const float amax = largest(values, kBlock);
    float scale;
    if constexpr (kBlock == 32) {
      scale = pow2_ceil(at_least(amax, 6.0f * 0x1p-126f) * kInvFp4Max);
      scales[i / kBlock] = e8m0_code(scale);
    } else {
      const uint8_t code = e4m3_code(round_e4m3(at_least(amax, 6.0f * 0x1p-9f) / 6.0f));
      scale = e4m3_value(code);
      scales[i / kBlock] = code;
    }
    uint8_t nibbles[kBlock];
    for (int j = 0; j < kBlock; ++j) {
      const float value = clamp(values[j] / scale, 6.0f);
      nibbles[j] = static_cast<uint8_t>(e2m1_code(value) | (bits_of(value) >> 28 & 8u));
    }
    for (int j = 0; j < kBlock; j += 2) {
      codes[(i + j) / 2] = static_cast<uint8_t>(nibbles[j] | nibbles[j + 1] << 4);
    }
  }
}

// Values have at most four significant bits and their scales four, so that their product is a bf16.
DF_INLINE uint16_t top_half(float value) { return static_cast<uint16_t>(bits_of(value) >> 16); }

DF_INLINE void unpack_fp8(const uint8_t* codes, const uint8_t* scales, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += 32) {
    const float scale = e8m0_value(scales[i / 32]);
    for (int j = 0; j < 32; j += 8) store_bf16(out + i + j, e4m3_values(codes + i + j) * scale);
  }
}

template <int kBlock>
DF_INLINE void unpack_fp4(const uint8_t* codes, const uint8_t* scales, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += kBlock) {
    const uint8_t code = scales[i / kBlock];
    const float scale = kBlock == 32 ? e8m0_value(code) : e4m3_value(code);
    uint16_t values[16];
    for (int j = 0; j < 16; ++j) values[j] = top_half(kE2m1[j] * scale);
    for (int j = 0; j < kBlock / 2; ++j) {
      const uint8_t pair = codes[i / 2 + j];
      out[i + 2 * j] = values[pair & 15];
      out[i + 2 * j + 1] = values[pair >> 4];
    }
  }
}

DF_INLINE int64_t code_bytes(int32_t record, int64_t width) { return record == DF_WINDOW ? width : width / 2; }
DF_INLINE int64_t row_bytes(int32_t record, int64_t width) {
  return code_bytes(record, width) + width / (record == DF_ENTRY ? 16 : 32);
}

}  // namespace

void pack(int32_t record, const uint16_t* x, int64_t rows, int64_t width, uint8_t* out) {
  const int64_t bytes = row_bytes(record, width), skip = code_bytes(record, width);
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = out + r * bytes;
    if (record == DF_WINDOW) pack_fp8(x + r * width, width, to, to + skip);
    if (record == DF_ENTRY) pack_fp4<16>(x + r * width, width, to, to + skip);
    if (record == DF_INDEX_KEY) pack_fp4<32>(x + r * width, width, to, to + skip);
  }
}

void unpack(int32_t record, const uint8_t* records, const int64_t* index, int64_t rows, int64_t width,
            uint16_t* out) {
  const int64_t bytes = row_bytes(record, width), skip = code_bytes(record, width);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = records + (index == nullptr ? r : index[r]) * bytes;
    if (record == DF_WINDOW) unpack_fp8(from, from + skip, width, out + r * width);
    if (record == DF_ENTRY) unpack_fp4<16>(from, from + skip, width, out + r * width);
    if (record == DF_INDEX_KEY) unpack_fp4<32>(from, from + skip, width, out + r * width);
  }
}

int64_t pick_entries(int32_t record, const uint8_t* records, const int64_t* picks, const int64_t* slots, int64_t rows,
                     int64_t length, const int32_t* blocks, int64_t blocks_stride, int64_t per_block, int64_t width,
                     uint16_t* out, int64_t* places) {
  static thread_local Scratch<int64_t> memory;
  const int64_t total = rows * length;
  int64_t buckets = 16;
  while (buckets < 2 * total) buckets *= 2;
  int64_t *keys = memory.get(2 * buckets), *found_at = keys + buckets, found = 0;
  for (int64_t i = 0; i < buckets; ++i) keys[i] = -1;
  for (int64_t i = 0; i < total; ++i) {
    const int64_t number = picks[i];
    places[i] = -1;
    if (number < 0) continue;
    const int64_t block = blocks[slots[i / length] * blocks_stride + number / per_block];
    const int64_t at = block * per_block + number % per_block;
    int64_t bucket = static_cast<int64_t>((static_cast<uint64_t>(at) * 0x9E3779B97F4A7C15u) >> 20) & (buckets - 1);
    while (keys[bucket] >= 0 && keys[bucket] != at) bucket = (bucket + 1) & (buckets - 1);
    if (keys[bucket] < 0) {
      keys[bucket] = at;
      found_at[bucket] = found;
      unpack(record, records, &at, 1, width, out + found * width);
      ++found;
    }
    places[i] = found_at[bucket];
  }
  return found;
}

void decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t count, uint16_t* out) {
  unpack_fp8(codes, scales, count, out);
}

}  // namespace DF_ISA
}  // namespace df
