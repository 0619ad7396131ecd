#include "format.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "crc32c.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and so must the host be");

namespace engram {
namespace {

constexpr char kSuperMagic[4] = {'E', 'G', 'P', '1'};
constexpr char kBlockMagic[4] = {'E', 'G', 'P', 'B'};

template <typename T>
T get(const uint8_t* bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof value);
  return value;
}

template <typename T>
void put(uint8_t* bytes, size_t offset, T value) {
  std::memcpy(bytes + offset, &value, sizeof value);
}

bool all_zero(const uint8_t* bytes, size_t count) {
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

// Over the header without its own checksum, then the whole checksum table.
uint32_t header_crc(const uint8_t* block, uint32_t row_bytes) {
  const uint32_t rpb = rows_per_block(row_bytes);
  uint32_t state = crc_update(crc_begin(), block + kHeaderOffset, kHeaderBytes - 4);
  state = crc_update(state, block + static_cast<size_t>(rpb) * row_bytes, size_t{4} * rpb);
  return crc_end(state);
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

int32_t decode_superblock(const uint8_t* bytes, Superblock* out, std::string* why) {
  if (all_zero(bytes, kBlockBytes)) {
    *why = "the superblock is all zeros";
    return ES_KIND_HOLE;
  }
  if (std::memcmp(bytes, kSuperMagic, 4) != 0) {
    *why = "no pack file: it does not begin with EGP1";
    return ES_KIND_SUPERBLOCK;
  }
  if (get<uint32_t>(bytes, kBlockBytes - 4) != crc_end(crc_update(crc_begin(), bytes, kBlockBytes - 4))) {
    *why = "the superblock is damaged: its checksum does not fit";
    return ES_KIND_SUPERBLOCK;
  }
  out->major = get<uint16_t>(bytes, 4);
  out->minor = get<uint16_t>(bytes, 6);
  if (out->major != kMajor) {
    *why = "format version " + std::to_string(out->major) + ", this reader knows " + std::to_string(kMajor);
    return ES_KIND_SUPERBLOCK;
  }
  out->row_format = get<uint16_t>(bytes, 8);
  out->row_bytes = get<uint16_t>(bytes, 10);
  out->rpb = get<uint32_t>(bytes, 12);
  out->pack_id = get<uint64_t>(bytes, 16);
  out->layer = get<uint32_t>(bytes, 24);
  out->column = get<uint32_t>(bytes, 28);
  out->num_rows = get<uint64_t>(bytes, 32);
  out->num_blocks = get<uint64_t>(bytes, 40);
  out->prime = get<uint64_t>(bytes, 48);
  std::memcpy(out->manifest_sha256, bytes + 56, 32);
  if (out->row_bytes == 0 || out->rpb == 0 || out->rpb != rows_per_block(out->row_bytes)) {
    *why = std::to_string(out->rpb) + " rows per block do not fit rows of " + std::to_string(out->row_bytes) + " bytes";
    return ES_KIND_SUPERBLOCK;
  }
  if (out->num_rows == 0 || out->num_rows > (uint64_t{1} << 40) ||
      out->num_blocks != (out->num_rows + out->rpb - 1) / out->rpb) {
    *why = std::to_string(out->num_rows) + " rows do not make " + std::to_string(out->num_blocks) + " blocks";
    return ES_KIND_SUPERBLOCK;
  }
  return ES_KIND_NONE;
}

void encode_superblock(const Superblock& in, uint8_t* bytes) {
  std::memset(bytes, 0, kBlockBytes);
  std::memcpy(bytes, kSuperMagic, 4);
  put(bytes, 4, in.major);
  put(bytes, 6, in.minor);
  put(bytes, 8, in.row_format);
  put(bytes, 10, in.row_bytes);
  put(bytes, 12, in.rpb);
  put(bytes, 16, in.pack_id);
  put(bytes, 24, in.layer);
  put(bytes, 28, in.column);
  put(bytes, 32, in.num_rows);
  put(bytes, 40, in.num_blocks);
  put(bytes, 48, in.prime);
  std::memcpy(bytes + 56, in.manifest_sha256, 32);
  put(bytes, kBlockBytes - 4, crc_end(crc_update(crc_begin(), bytes, kBlockBytes - 4)));
}

int32_t decode_block_header(const uint8_t* block, uint32_t row_bytes, BlockHeader* out, std::string* why) {
  if (all_zero(block, kBlockBytes)) {
    *why = "the block is all zeros";
    return ES_KIND_HOLE;
  }
  const uint8_t* header = block + kHeaderOffset;
  if (std::memcmp(header, kBlockMagic, 4) != 0 || get<uint32_t>(header, 60) != header_crc(block, row_bytes)) {
    *why = "the block's header or checksum table is damaged";
    return ES_KIND_CHECKSUM;
  }
  out->version = get<uint16_t>(header, 4);
  out->row_format = get<uint16_t>(header, 6);
  out->pack_id = get<uint64_t>(header, 8);
  out->layer = get<uint32_t>(header, 16);
  out->column = get<uint32_t>(header, 20);
  out->block_no = get<uint64_t>(header, 24);
  out->first_row = get<uint64_t>(header, 32);
  out->row_count = get<uint32_t>(header, 40);
  return ES_KIND_NONE;
}

int32_t classify_block(const es_identity& identity, uint64_t block_no, const uint8_t* block, bool* trusted,
                       std::string* why) {
  *trusted = false;
  BlockHeader header;
  const int32_t kind = decode_block_header(block, identity.row_bytes, &header, why);
  if (kind != ES_KIND_NONE) return kind;
  if (header.pack_id != identity.pack_id || header.layer != identity.layer || header.column != identity.column ||
      header.block_no != block_no || header.row_format != identity.row_format || header.version != kBlockVersion ||
      header.first_row != block_no * rows_per_block(identity.row_bytes)) {
    *why = "a sound block " + std::to_string(header.block_no) + " of layer " + std::to_string(header.layer) +
           " column " + std::to_string(header.column) + ", pack " + hex(header.pack_id) + ", lies there";
    return ES_KIND_MISPLACED;
  }
  *trusted = true;
  *why = "the row's bytes do not match its checksum";
  return ES_KIND_CHECKSUM;
}

uint32_t identity_state(uint64_t pack_id, uint32_t layer, uint32_t column) {
  const uint32_t state = crc_update_u64(crc_begin(), pack_id);
  return crc_update_u64(state, layer | static_cast<uint64_t>(column) << 32);
}

uint64_t encode_blocks(const es_identity& identity, uint64_t first_row, uint64_t num_rows, const uint8_t* weights,
                       uint32_t weight_bytes, const uint8_t* scales, uint32_t scale_bytes, uint8_t* blocks) {
  const uint32_t row_bytes = identity.row_bytes, rpb = rows_per_block(row_bytes);
  const uint32_t seed = identity_state(identity.pack_id, identity.layer, identity.column);
  uint64_t block_no = first_row / rpb, done = 0;
  std::vector<CrcJob> jobs(rpb);
  for (uint8_t* block = blocks; done < num_rows; block += kBlockBytes, ++block_no) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(rpb, num_rows - done));
    for (uint32_t slot = 0; slot < count; ++slot) {
      uint8_t* row = block + static_cast<size_t>(slot) * row_bytes;
      std::memcpy(row, weights + (done + slot) * weight_bytes, weight_bytes);
      std::memcpy(row + weight_bytes, scales + (done + slot) * scale_bytes, scale_bytes);
      jobs[slot] = {row, crc_update_u64(seed, first_row + done + slot)};
    }
    crc_update_many(jobs.data(), count, row_bytes);
    const size_t table = static_cast<size_t>(rpb) * row_bytes;
    std::memset(block + static_cast<size_t>(count) * row_bytes, 0, table - static_cast<size_t>(count) * row_bytes);
    std::memset(block + table, 0, kBlockBytes - table);
    for (uint32_t slot = 0; slot < count; ++slot) put(block, table + size_t{4} * slot, crc_end(jobs[slot].state));
    uint8_t* header = block + kHeaderOffset;
    std::memcpy(header, kBlockMagic, 4);
    put(header, 4, kBlockVersion);
    put(header, 6, static_cast<uint16_t>(identity.row_format));
    put(header, 8, identity.pack_id);
    put(header, 16, identity.layer);
    put(header, 20, identity.column);
    put(header, 24, block_no);
    put(header, 32, first_row + done);
    put(header, 40, count);
    put(header, 60, header_crc(block, row_bytes));
    done += count;
  }
  return block_no - first_row / rpb;
}

int32_t check_block(const es_identity& identity, uint64_t block_no, uint64_t num_rows, const uint8_t* block,
                    uint64_t* row) {
  *row = UINT64_MAX;
  const uint32_t row_bytes = identity.row_bytes, rpb = rows_per_block(row_bytes);
  bool trusted = false;
  std::string why;
  const int32_t kind = classify_block(identity, block_no, block, &trusted, &why);
  if (!trusted) return kind;
  const uint64_t first = block_no * rpb;
  if (first >= num_rows) return ES_KIND_MISPLACED;
  const auto count = static_cast<uint32_t>(std::min<uint64_t>(rpb, num_rows - first));
  if (get<uint32_t>(block, kHeaderOffset + 40) != count) return ES_KIND_MISPLACED;
  const uint32_t seed = identity_state(identity.pack_id, identity.layer, identity.column);
  CrcJob jobs[kBlockBytes / 5];
  for (uint32_t slot = 0; slot < count; ++slot)
    jobs[slot] = {block + static_cast<size_t>(slot) * row_bytes, crc_update_u64(seed, first + slot)};
  crc_update_many(jobs, count, row_bytes);
  for (uint32_t slot = 0; slot < count; ++slot) {
    if (crc_end(jobs[slot].state) != stored_crc(block, rpb, row_bytes, slot)) {
      *row = first + slot;
      return ES_KIND_CHECKSUM;
    }
  }
  const auto is_zero = [block](size_t begin, size_t end) {
    return begin == end || all_zero(block + begin, end - begin);
  };
  const size_t table = static_cast<size_t>(rpb) * row_bytes;
  const bool clean = is_zero(static_cast<size_t>(count) * row_bytes, table) &&
                     is_zero(table + size_t{4} * count, kHeaderOffset) &&
                     is_zero(kHeaderOffset + 44, kHeaderOffset + 60);
  return clean ? ES_KIND_NONE : ES_KIND_CHECKSUM;
}

}  // namespace engram
