// Random and mutated bytes into everything that reads a file's bytes. With libFuzzer as a fuzz target, else a program
// that runs for the rounds given as argument.
#include <cstring>
#include <string>

#include "check.h"
#include "deskfleet_engram.h"
#include "format.h"
#include "io.h"

using namespace engram;

namespace {

void feed(const uint8_t* bytes) {  // 4096
  Superblock superblock;
  std::string why;
  const int32_t kind = decode_superblock(bytes, &superblock, &why);
  if (kind == ES_KIND_NONE) {
    CHECK(superblock.rpb == rows_per_block(superblock.row_bytes) && superblock.num_blocks > 0);
    uint8_t again[kBlockBytes];
    encode_superblock(superblock, again);
  } else {
    CHECK(!why.empty());
  }
  for (const uint32_t row_bytes : {264u, 144u, 1u, 4028u}) {
    const es_identity identity = {7, 1, 3, 1, row_bytes};
    BlockHeader header;
    decode_block_header(bytes, row_bytes, &header, &why);
    bool trusted;
    classify_block(identity, 9, bytes, &trusted, &why);
    uint64_t row;
    int32_t block_kind;
    es_check_blocks(&identity, 9, 1, 100000, bytes, &block_kind, &row);
  }
}

}  // namespace

#if defined(ENGRAM_LIBFUZZER)
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint8_t bytes[kBlockBytes] = {};
  std::memcpy(bytes, data, size < sizeof bytes ? size : sizeof bytes);
  feed(bytes);
  FaultPlan plan;
  std::string why;
  parse_faults(std::string(reinterpret_cast<const char*>(data), size < 64 ? size : 64).c_str(), &plan, &why);
  return 0;
}
#else
int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 100000;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atol(argv[2])) : 1);
  Superblock superblock;
  superblock.row_format = 1, superblock.row_bytes = 264, superblock.rpb = 15;
  superblock.num_rows = superblock.prime = 1009, superblock.num_blocks = 68;
  uint8_t good[2][kBlockBytes], bytes[kBlockBytes], weights[15 * 256], scales[15 * 8];
  encode_superblock(superblock, good[0]);
  const es_identity identity = {7, 1, 3, 1, 264};
  random.fill(weights, sizeof weights);
  random.fill(scales, sizeof scales);
  es_encode_blocks(&identity, 9 * 15, 15, weights, 256, scales, 8, good[1]);
  for (long round = 0; round < rounds; ++round) {
    const uint64_t kind = random.below(3);
    if (kind == 2) {
      random.fill(bytes, sizeof bytes);
    } else {
      std::memcpy(bytes, good[kind], sizeof bytes);
    }
    for (uint64_t i = random.below(4); i; --i)
      bytes[random.below(random.below(2) ? kBlockBytes : 100)] = static_cast<uint8_t>(random.next());
    feed(bytes);
    // A repaired checksum lets strange fields through to the checks behind it.
    const uint32_t crc = es_crc32c(0, bytes, kBlockBytes - 4);
    std::memcpy(bytes + kBlockBytes - 4, &crc, 4);
    feed(bytes);
  }
  for (const char* text : {"", "eio=", "eio=2", "eio=0.5,,short=1", "delay=0.1:99", "delay=x", "bogus=1", "seed=99"}) {
    FaultPlan plan;
    std::string why;
    parse_faults(text, &plan, &why);
  }
  std::printf("fuzz: %ld rounds ok\n", rounds);
}
#endif
