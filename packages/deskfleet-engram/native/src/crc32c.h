// CRC32C (Castagnoli), chosen once for this processor. States are the raw register: begin() .. update .. end().
// Rows of many blocks are checked side by side, for one chain is bound by the latency of the instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engram {

constexpr uint32_t crc_begin() { return 0xFFFFFFFFu; }
constexpr uint32_t crc_end(uint32_t state) { return ~state; }

uint32_t crc_update(uint32_t state, const void* data, size_t num_bytes);
uint32_t crc_update_u64(uint32_t state, uint64_t little_endian_value);

struct CrcJob {
  const uint8_t* data;
  uint32_t state;  // before, then after
};

// Advance all jobs over num_bytes of their data.
void crc_update_many(CrcJob* jobs, size_t count, size_t num_bytes);

const char* crc_name();

// For tests: every implementation that this machine runs. Index 0 is the portable one; null ends the list.
struct CrcImplementation {
  const char* name;
  uint32_t (*update)(uint32_t, const uint8_t*, size_t);
  void (*update_many)(CrcJob*, size_t, size_t);
};
const CrcImplementation* const* crc_implementations();

}  // namespace engram
