// Tests of the parts that do no I/O: checksums, format, decoding, hashing, cache.
#include <cmath>
#include <cstring>
#include <list>
#include <map>
#include <vector>

#include "cache.h"
#include "check.h"
#include "crc32c.h"
#include "decode.h"
#include "format.h"
#include "hash.h"

using namespace engram;

namespace {

void test_crc() {
  CHECK_EQ(crc_end(crc_update(crc_begin(), "123456789", 9)), 0xE3069283u);
  CHECK_EQ(es_crc32c(es_crc32c(0, "1234", 4), "56789", 5), 0xE3069283u);
  Random random(1);
  uint8_t data[9 * 300];
  random.fill(data, sizeof data);
  const auto* list = crc_implementations();
  for (size_t width = 0; width <= 280; ++width) {
    CrcJob expected[9], found[9];
    for (size_t i = 0; i < 9; ++i) expected[i] = {data + i * 300 + i % 3, static_cast<uint32_t>(random.next())};
    for (const auto* implementation = list; *implementation; ++implementation) {
      std::memcpy(found, expected, sizeof found);
      (*implementation)->update_many(found, 9, width);
      for (size_t i = 0; i < 9; ++i)
        CHECK_EQ(found[i].state, list[0]->update(expected[i].state, expected[i].data, width));
    }
  }
}

void test_format() {
  Random random(2);
  for (const uint32_t row_bytes : {264u, 144u, 33u, 66u, 4028u}) {
    const uint32_t rpb = rows_per_block(row_bytes), scale_bytes = row_bytes / 33 ? row_bytes / 33 : 1;
    const es_identity identity = {random.next(), 14, 7, 1, row_bytes};
    const uint64_t num_rows = 3 * rpb - 1;
    std::vector<uint8_t> weights(num_rows * (row_bytes - scale_bytes)), scales(num_rows * scale_bytes);
    random.fill(weights.data(), weights.size());
    random.fill(scales.data(), scales.size());
    std::vector<uint8_t> blocks(3 * kBlockBytes, 0xAA);
    CHECK_EQ(es_encode_blocks(&identity, 0, num_rows, weights.data(), row_bytes - scale_bytes, scales.data(),
                              scale_bytes, blocks.data()),
             num_rows ? (num_rows + rpb - 1) / rpb : 0);
    int32_t kind;
    uint64_t row;
    CHECK_EQ(es_check_blocks(&identity, 0, (num_rows + rpb - 1) / rpb, num_rows, blocks.data(), &kind, &row),
             (num_rows + rpb - 1) / rpb);
    for (int trial = 0; trial < 2000; ++trial) {  // any flipped bit of a block is found
      const size_t bit = random.below(kBlockBytes * 8);
      blocks[bit / 8] = static_cast<uint8_t>(blocks[bit / 8] ^ 1u << bit % 8);
      CHECK_EQ(es_check_blocks(&identity, 0, 1, num_rows, blocks.data(), &kind, &row), 0u);
      CHECK(kind != ES_KIND_NONE);
      blocks[bit / 8] = static_cast<uint8_t>(blocks[bit / 8] ^ 1u << bit % 8);
    }
    bool trusted;
    std::string why;
    CHECK_EQ(classify_block(identity, 1, blocks.data(), &trusted, &why), ES_KIND_MISPLACED);
    const es_identity other = {identity.pack_id ^ 1, 14, 7, 1, row_bytes};
    CHECK_EQ(classify_block(other, 0, blocks.data(), &trusted, &why), ES_KIND_MISPLACED);
    std::memset(blocks.data(), 0, kBlockBytes);
    CHECK_EQ(classify_block(identity, 0, blocks.data(), &trusted, &why), ES_KIND_HOLE);
  }
  Superblock in, out;
  in.row_format = 1, in.row_bytes = 264, in.rpb = 15, in.pack_id = 5, in.layer = 1, in.column = 23;
  in.num_rows = in.prime = 1009, in.num_blocks = 68;
  uint8_t bytes[kBlockBytes];
  encode_superblock(in, bytes);
  std::string why;
  CHECK_EQ(decode_superblock(bytes, &out, &why), ES_KIND_NONE);
  CHECK(out.num_rows == 1009 && out.column == 23 && out.pack_id == 5);
  for (int trial = 0; trial < 2000; ++trial) {
    const size_t bit = random.below(kBlockBytes * 8);
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1u << bit % 8);
    CHECK(decode_superblock(bytes, &out, &why) != ES_KIND_NONE);
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1u << bit % 8);
  }
}

float value_of_e4m3(uint32_t code) {
  if ((code & 0x7F) == 0x7F) return NAN;
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return static_cast<float>(code & 0x80 ? -magnitude : magnitude);
}

uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return kBf16Nan;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void test_decode() {
  // All pairs, by float arithmetic, by table and by every instruction set.
  for (uint32_t scale = 0; scale < 256; ++scale)
    for (uint32_t code = 0; code < 256; ++code) {
      const float factor = scale == 255 ? NAN : std::ldexp(1.0f, static_cast<int>(scale) - 127);
      CHECK_EQ(fp8_table()[scale][code], rounded(value_of_e4m3(code) * factor));
    }
  for (const uint32_t isa : {1u, 2u, 3u, 4u}) {
    if (!isa_available(static_cast<Isa>(isa))) continue;
    for (const uint32_t group : {32u, 16u, 8u, 48u}) {
      std::vector<uint8_t> row(256 * group + 256);
      std::vector<uint16_t> out(256 * group);
      for (uint32_t shift = 0; shift < 256; shift += group) {
        for (uint32_t scale = 0; scale < 256; ++scale) {
          row[256 * group + scale] = static_cast<uint8_t>(scale);
          for (uint32_t i = 0; i < group; ++i) row[scale * group + i] = static_cast<uint8_t>(shift + i);
        }
        CHECK_EQ(es_decode_bf16(isa, ES_ROW_FP8, 256 * group, 256, 1.0f, row.data(), 1, out.data()), ES_OK);
        for (size_t i = 0; i < out.size(); ++i) CHECK_EQ(out[i], fp8_table()[i / group][row[i]]);
      }
    }
    static const float kE2M1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (const float global : {1.0f, 0.0123f, 3e-39f, 1e30f}) {
      std::vector<uint8_t> row(256 * 8 + 256);
      std::vector<uint16_t> out(256 * 16);
      for (uint32_t scale = 0; scale < 256; ++scale) {
        row[256 * 8 + scale] = static_cast<uint8_t>(scale);
        for (uint32_t i = 0; i < 8; ++i) row[scale * 8 + i] = static_cast<uint8_t>((2 * i) | (2 * i + 1) << 4);
      }
      CHECK_EQ(es_decode_bf16(isa, ES_ROW_NVFP4, 256 * 8, 256, global, row.data(), 1, out.data()), ES_OK);
      for (uint32_t i = 0; i < out.size(); ++i) {
        volatile float product = (i & 8 ? -kE2M1[i & 7] : kE2M1[i & 7]) * value_of_e4m3(i / 16);
        product = product * global;
        CHECK_EQ(out[i], rounded(product));
      }
    }
  }
  CHECK_EQ(es_decode_bf16(99, ES_ROW_FP8, 32, 1, 1.0f, "", 0, nullptr), ES_E_ARGUMENT);
}

void test_hash() {
  Random random(3);
  const std::vector<int64_t> multipliers = {76632096046245, 4839876093313,  35959672319349, 73987337458391,
                                            67716810739261, 51510806800915, 30921347202721, 82619226485591};
  std::vector<int64_t> primes, offsets;
  for (int64_t i = 0; i < 48; ++i)
    primes.push_back(i % 7 == 0 ? 2 : i % 5 == 0 ? (int64_t{1} << 40) : 16000057 + 2 * i);
  for (int64_t i = 0; i < 48; ++i) offsets.push_back(i * 1000000007);
  const es_hash_plan plan = {sizeof plan, 2, 4, 8, 8, 0, 99092, 2, multipliers.data(), primes.data(), offsets.data()};
  std::vector<int64_t> ids(300);
  for (auto& id : ids) id = random.below(20) == 0 ? -1 : static_cast<int64_t>(random.below(99092));
  std::vector<int64_t> out(300 * 48);
  uint64_t bad = 0;
  CHECK_EQ(es_hash(&plan, ids.data(), 300, 0, out.data(), &bad), ES_OK);
  for (size_t i = 0; i < 300; ++i)
    for (size_t c = 0; c < 48; ++c) {
      const size_t layer = c / 24, size = c % 24 / 8 + 2;
      bool blocked = false;
      uint64_t mixed = 0;
      for (size_t back = 0; back < size; ++back) {
        blocked = blocked || i < back || ids[i - back] == -1;
        mixed ^= static_cast<uint64_t>((blocked ? 2 : ids[i - back]) * multipliers[layer * 4 + back]);
      }
      CHECK_EQ(out[i * 48 + c], static_cast<int64_t>(mixed % static_cast<uint64_t>(primes[c])) + offsets[c]);
    }
  std::vector<int64_t> tail(100 * 48);
  CHECK_EQ(es_hash(&plan, ids.data(), 300, 200, tail.data(), &bad), ES_OK);
  CHECK(std::memcmp(tail.data(), out.data() + 200 * 48, tail.size() * 8) == 0);
  es_hash_plan narrow = plan;
  narrow.id_bytes = 4;
  std::vector<int32_t> out32(300 * 48);
  CHECK_EQ(es_hash(&narrow, ids.data(), 300, 0, out32.data(), &bad), ES_E_ARGUMENT);  // ids would not fit
  std::vector<int64_t> small_primes(48, 16000057), small_offsets(48, 1000000000);
  narrow.primes = small_primes.data(), narrow.offsets = small_offsets.data();
  CHECK_EQ(es_hash(&narrow, ids.data(), 300, 0, out32.data(), &bad), ES_OK);
  std::vector<int64_t> wide(300 * 48);
  narrow.id_bytes = 8;
  CHECK_EQ(es_hash(&narrow, ids.data(), 300, 0, wide.data(), &bad), ES_OK);
  for (size_t i = 0; i < wide.size(); ++i) CHECK_EQ(wide[i], out32[i]);
  ids[77] = 99092;
  CHECK_EQ(es_hash(&plan, ids.data(), 300, 0, out.data(), &bad), ES_E_RANGE);
  CHECK_EQ(bad, 77u);
}

void row_for(uint64_t key, uint8_t* row) { Random(key).fill(row, 264); }

void test_cache() {
  // Whatever is found is what was put there, and no more rows than fit are held.
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1000}, uint64_t{8000}, uint64_t{100000}, uint64_t{3000000}}) {
    RowCache cache(bytes, 264);
    Random random(bytes);
    uint8_t row[264];
    uint64_t hits = 0;
    for (int i = 0; i < 60000; ++i) {
      const uint64_t key =
          RowCache::key(1 + static_cast<uint32_t>(random.below(2)), random.below(random.below(8) ? 200 : 20000));
      row_for(key, row);
      if (const uint8_t* found = cache.find(key, random.below(2) == 0)) {
        CHECK(std::memcmp(found, row, 264) == 0);
        ++hits;
      } else {
        cache.insert(key, row, 264, random.below(3) == 0);
      }
    }
    es_cache_counters counters = {};
    cache.counters(&counters);
    CHECK(counters.memory_bytes <= bytes && counters.num_rows <= counters.capacity_rows);
    CHECK_EQ(counters.small_rows + counters.main_rows, counters.num_rows);
    CHECK_EQ(counters.inserts - counters.evictions, counters.num_rows);
    CHECK_EQ(counters.hits, hits);
    CHECK((counters.capacity_rows == 0) == (bytes < 8000));
    if (counters.capacity_rows) CHECK(hits > 100);
    cache.clear();
    CHECK(cache.find(RowCache::key(1, 5), true) == nullptr);
  }
  // A scan does not drive out what was used twice.
  RowCache cache(1 << 20, 264);
  es_cache_counters counters = {};
  cache.counters(&counters);
  uint8_t row[264] = {};
  const uint64_t hot = counters.capacity_rows / 2;
  for (uint64_t key = 0; key < hot; ++key) cache.insert(key, row, 264, false), cache.find(key, true);
  for (uint64_t key = 0; key < 20 * counters.capacity_rows; ++key) cache.insert(1000000 + key, row, 264, true);
  uint64_t kept = 0;
  for (uint64_t key = 0; key < hot; ++key) kept += cache.find(key, false) != nullptr;
  CHECK_EQ(kept, hot);
  CHECK(RowCache(1 << 20, 8).table_number(nullptr) != 0);
  RowCache::Identity one = {}, two = {};
  two[63] = 1;
  CHECK_EQ(cache.table_number(&one), cache.table_number(&one));
  CHECK(cache.table_number(&one) != cache.table_number(&two));
  CHECK(cache.table_number(nullptr) != cache.table_number(nullptr));
  const uint8_t long_row[300] = {};
  cache.insert(RowCache::key(9, 9), long_row, 300, false);
  CHECK(cache.find(RowCache::key(9, 9), false) == nullptr);
}

}  // namespace

int main() {
  test_crc();
  test_format();
  test_decode();
  test_hash();
  test_cache();
  std::printf("parts: ok (%s)\n", es_cpu_features());
}
