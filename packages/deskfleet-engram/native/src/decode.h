// Decoding of packed rows to bf16, vectorised, with results that depend neither on the instruction set nor on the
// floating-point mode of the calling thread: all arithmetic that could round happens once, in tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace engram {

enum class Isa : uint32_t { kBest = 0, kScalar = 1, kAvx2 = 2, kAvx512 = 3, kNeon = 4 };

constexpr uint16_t kBf16Nan = 0x7FC0;
constexpr uint8_t kPoisonByte = 0x7F;  // NaN as an E4M3 code, and as an E4M3 scale

// Scale byte of a row that another rank holds: the one that stands for 1.
constexpr uint8_t neutral_scale(uint32_t row_format) { return row_format == 1 ? 127 : 0x38; }

bool isa_available(Isa isa);
Isa best_isa();
const char* isa_name(Isa isa);

class RowDecoder {
 public:
  // FP8: weight_bytes E4M3 codes, an E8M0 scale for each weight_bytes / scale_bytes of them.
  // NVFP4: two E2M1 codes a byte, the first in the low half, an E4M3 scale for each 16, times global_scale:
  // bf16(float32(float32(e2m1 * e4m3) * global_scale)).
  RowDecoder(uint32_t row_format, uint32_t weight_bytes, uint32_t scale_bytes, float global_scale, Isa isa);
  ~RowDecoder();
  RowDecoder(RowDecoder&&) noexcept;

  uint32_t num_values() const { return num_values_; }
  void decode(const uint8_t* weights, const uint8_t* scales, uint16_t* out) const { run_(*this, weights, scales, out); }

  // The sixteen values of every scale, their low and high bytes apart so that a byte shuffle looks them up.
  struct FourBitTable {
    alignas(64) uint8_t low[256][16];
    alignas(64) uint8_t high[256][16];
  };
  const FourBitTable* four_bit() const { return four_bit_.get(); }
  uint32_t weight_bytes() const { return weight_bytes_; }
  uint32_t scale_bytes() const { return scale_bytes_; }

 private:
  using Run = void (*)(const RowDecoder&, const uint8_t*, const uint8_t*, uint16_t*);
  uint32_t weight_bytes_, scale_bytes_, num_values_;
  Run run_;
  std::unique_ptr<FourBitTable> four_bit_;
};

// uint16 [256 scales][256 codes]: the FP8 oracle inside the library.
const uint16_t (&fp8_table())[256][256];

}  // namespace engram
