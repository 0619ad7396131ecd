// The pack format's fixed structures: superblock and block of a column file (FORMAT.md). Bytes only: opens no file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "deskfleet_engram.h"

namespace engram {

constexpr size_t kBlockBytes = 4096;
constexpr size_t kHeaderOffset = 4032;
constexpr size_t kHeaderBytes = 64;
constexpr uint16_t kMajor = 1;
constexpr uint16_t kBlockVersion = 1;

constexpr uint32_t rows_per_block(uint32_t row_bytes) {
  return static_cast<uint32_t>((kBlockBytes - kHeaderBytes) / (row_bytes + 4));
}

struct Superblock {
  uint16_t major = kMajor, minor = 0;
  uint16_t row_format = 0, row_bytes = 0;
  uint32_t rpb = 0;
  uint64_t pack_id = 0;
  uint32_t layer = 0, column = 0;
  uint64_t num_rows = 0, num_blocks = 0, prime = 0;
  uint8_t manifest_sha256[32] = {};
};

struct BlockHeader {
  uint16_t version = kBlockVersion, row_format = 0;
  uint64_t pack_id = 0;
  uint32_t layer = 0, column = 0;
  uint64_t block_no = 0, first_row = 0;
  uint32_t row_count = 0;
};

// Both decoders take any 4096 bytes. They answer ES_KIND_NONE, or the kind with `why` set; `header` may be partly set.
int32_t decode_superblock(const uint8_t* bytes, Superblock* superblock, std::string* why);
int32_t decode_block_header(const uint8_t* block, uint32_t row_bytes, BlockHeader* header, std::string* why);

void encode_superblock(const Superblock& superblock, uint8_t* bytes);

// CRC register after the seed's constant part; the row number follows, then the row's bytes.
uint32_t identity_state(uint64_t pack_id, uint32_t layer, uint32_t column);

uint64_t encode_blocks(const es_identity& identity, uint64_t first_row, uint64_t num_rows, const uint8_t* weights,
                       uint32_t weight_bytes, const uint8_t* scales, uint32_t scale_bytes, uint8_t* blocks);

// ES_KIND_NONE when the block, every row of it and its unused bytes are as they should be; else the kind, and in
// `row` the first bad row of the column or UINT64_MAX.
int32_t check_block(const es_identity& identity, uint64_t block_no, uint64_t num_rows, const uint8_t* block,
                    uint64_t* row);

// What the header of a block says, one of whose rows failed its checksum. ES_KIND_CHECKSUM with `trusted` set: header
// and checksum table are sound, so it is the row's bytes that are damaged.
int32_t classify_block(const es_identity& identity, uint64_t block_no, const uint8_t* block, bool* trusted,
                       std::string* why);

inline uint32_t stored_crc(const uint8_t* block, uint32_t rpb, uint32_t row_bytes, uint32_t slot) {
  uint32_t value;
  __builtin_memcpy(&value, block + static_cast<size_t>(rpb) * row_bytes + 4u * slot, 4);
  return value;
}

}  // namespace engram
