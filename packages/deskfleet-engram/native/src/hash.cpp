#include "hash.h"

#include <vector>

namespace engram {
namespace {

// Division by an invariant: multiplying by floor((2^64 - 1) / prime) gives the quotient or one less.
struct Column {
  uint64_t prime, reciprocal;
  int64_t offset;
};

inline int64_t row_of(uint64_t mixed, const Column& column) {
  const auto quotient = static_cast<uint64_t>(static_cast<unsigned __int128>(mixed) * column.reciprocal >> 64);
  uint64_t rest = mixed - quotient * column.prime;
  if (rest >= column.prime) rest -= column.prime;
  return static_cast<int64_t>(rest) + column.offset;
}

template <typename Id>
void hash_range(const es_hash_plan& plan, const std::vector<Column>& columns, const int64_t* ids, uint64_t total,
                uint64_t start, Id* out) {
  const uint32_t sizes = plan.max_ngram_size, heads = plan.num_heads;
  std::vector<int64_t> slots(sizes);
  for (uint64_t i = start; i < total; ++i) {
    bool blocked = false;
    for (uint32_t back = 0; back < sizes; ++back) {
      blocked = blocked || i < back || ids[i - back] == -1;
      slots[back] = blocked ? plan.pad_id : ids[i - back];
    }
    const Column* column = columns.data();
    for (uint32_t layer = 0; layer < plan.num_layers; ++layer) {
      const int64_t* factor = plan.multipliers + static_cast<size_t>(layer) * sizes;
      uint64_t mixed = static_cast<uint64_t>(slots[0]) * static_cast<uint64_t>(factor[0]);
      for (uint32_t back = 1; back < sizes; ++back) {
        mixed ^= static_cast<uint64_t>(slots[back]) * static_cast<uint64_t>(factor[back]);
        for (uint32_t head = 0; head < heads; ++head) *out++ = static_cast<Id>(row_of(mixed, *column++));
      }
    }
  }
}

}  // namespace

int32_t hash_prompt(const es_hash_plan& plan, const int64_t* ids, uint64_t total, uint64_t start, void* out,
                    uint64_t* bad_index) {
  for (uint64_t i = 0; i < total; ++i) {
    if (ids[i] < -1 || ids[i] >= plan.vocab_size) {
      *bad_index = i;
      return ES_E_RANGE;
    }
  }
  const size_t per_layer = size_t{plan.max_ngram_size - 1} * plan.num_heads;
  std::vector<Column> columns(plan.num_layers * per_layer);
  for (size_t c = 0; c < columns.size(); ++c) {
    const auto prime = static_cast<uint64_t>(plan.primes[c]);
    columns[c] = {prime, UINT64_MAX / prime, plan.offsets[c]};
  }
  if (plan.id_bytes == 4) {
    hash_range(plan, columns, ids, total, start, static_cast<int32_t*>(out));
  } else {
    hash_range(plan, columns, ids, total, start, static_cast<int64_t*>(out));
  }
  return ES_OK;
}

}  // namespace engram
