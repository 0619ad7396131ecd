#include "cache.h"

#include <algorithm>
#include <cstring>

namespace engram {
namespace {

uint64_t mix(uint64_t key) {
  key ^= key >> 32;
  key *= 0xD6E8FEB86659FD93u;
  key ^= key >> 32;
  key *= 0xD6E8FEB86659FD93u;
  return key ^ key >> 32;
}

uint32_t scaled(uint64_t hash, uint32_t size) { return static_cast<uint32_t>((hash >> 32) * size >> 32); }

uint32_t index_size(uint64_t rows) { return static_cast<uint32_t>(rows + rows / 2 + 1); }
uint32_t ghost_buckets(uint64_t rows) { return static_cast<uint32_t>(rows / 4 + 1); }

}  // namespace

RowCache::RowCache(uint64_t bytes, uint32_t row_bytes) : row_bytes_(row_bytes), stride_((row_bytes + 7) / 8 * 8) {
  const uint64_t per_row = stride_ + sizeof(uint64_t) + 1 + 2 * sizeof(uint32_t);
  const auto total = [&](uint64_t rows) {
    return rows * per_row + index_size(rows) * sizeof(uint32_t) + ghost_buckets(rows) * kGhostWays * sizeof(Ghost);
  };
  uint64_t rows = std::min<uint64_t>(bytes / per_row, UINT32_MAX / 2);
  while (rows && total(rows) > bytes) rows -= std::max<uint64_t>(1, (total(rows) - bytes) / (2 * per_row));
  if (rows < 16) return;
  capacity_ = static_cast<uint32_t>(rows);
  small_target_ = std::max(1u, capacity_ / 10);
  index_size_ = index_size(rows);
  ghost_buckets_ = ghost_buckets(rows);
  memory_bytes_ = total(rows);
  // Left uninitialised on purpose: memory is used only as rows arrive.
  rows_.reset(new uint8_t[static_cast<size_t>(capacity_) * stride_]);
  keys_.reset(new uint64_t[capacity_]);
  uses_.reset(new uint8_t[capacity_]);
  small_.slots.reset(new uint32_t[capacity_]);
  main_.slots.reset(new uint32_t[capacity_]);
  index_.reset(new uint32_t[index_size_]);
  ghosts_.reset(new Ghost[static_cast<size_t>(ghost_buckets_) * kGhostWays]);
  clear();
}

void RowCache::clear() {
  if (!capacity_) return;
  std::fill_n(index_.get(), index_size_, kEmpty);
  std::fill_n(ghosts_.get(), static_cast<size_t>(ghost_buckets_) * kGhostWays, Ghost{0, 0});
  small_.head = small_.size = main_.head = main_.size = num_rows_ = 0;
  ghost_time_ = capacity_ + 1;  // so that zeroed entries count as long forgotten
}

uint32_t RowCache::table_number(const Identity* identity) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!identity) return next_table_++;
  const auto [entry, is_new] = tables_.try_emplace(*identity, next_table_);
  if (is_new) ++next_table_;
  return entry->second;
}

uint32_t RowCache::home(uint64_t hash) const { return scaled(hash, index_size_); }

uint32_t RowCache::lookup(uint64_t key) const {
  for (uint32_t at = home(mix(key));; at = at + 1 == index_size_ ? 0 : at + 1) {
    const uint32_t slot = index_[at];
    if (slot == kEmpty) return kEmpty;
    if (keys_[slot] == key) return at;
  }
}

const uint8_t* RowCache::find(uint64_t key, bool promote) {
  if (!capacity_) return nullptr;
  const uint32_t at = lookup(key);
  if (at == kEmpty) {
    ++misses_;
    return nullptr;
  }
  ++hits_;
  const uint32_t slot = index_[at];
  if (promote && uses_[slot] < kMaxUses) ++uses_[slot];
  return rows_.get() + static_cast<size_t>(slot) * stride_;
}

void RowCache::insert(uint64_t key, const uint8_t* row, uint32_t num_bytes, bool bulk) {
  if (!capacity_ || num_bytes > row_bytes_ || lookup(key) != kEmpty) return;
  const uint32_t slot = num_rows_ < capacity_ ? num_rows_++ : evict();
  std::memcpy(rows_.get() + static_cast<size_t>(slot) * stride_, row, num_bytes);
  keys_[slot] = key;
  uses_[slot] = 0;
  push(remembers(key) && !bulk ? &main_ : &small_, slot);
  uint32_t at = home(mix(key));
  while (index_[at] != kEmpty) at = at + 1 == index_size_ ? 0 : at + 1;
  index_[at] = slot;
  ++inserts_;
}

void RowCache::unlink(uint64_t key) {
  uint32_t hole = lookup(key);
  // Close the gap: move back every later entry of the run that may lie there.
  for (uint32_t at = hole;;) {
    at = at + 1 == index_size_ ? 0 : at + 1;
    const uint32_t slot = index_[at];
    if (slot == kEmpty) break;
    const uint32_t wanted = home(mix(keys_[slot]));
    const bool stays = hole <= at ? (hole < wanted && wanted <= at) : (hole < wanted || wanted <= at);
    if (stays) continue;
    index_[hole] = slot;
    hole = at;
  }
  index_[hole] = kEmpty;
}

void RowCache::push(Queue* queue, uint32_t slot) {
  const uint64_t at = static_cast<uint64_t>(queue->head) + queue->size++;
  queue->slots[at >= capacity_ ? at - capacity_ : at] = slot;
}

uint32_t RowCache::pop(Queue* queue) {
  const uint32_t slot = queue->slots[queue->head];
  queue->head = queue->head + 1 == capacity_ ? 0 : queue->head + 1;
  --queue->size;
  return slot;
}

uint32_t RowCache::evict() {
  ++evictions_;
  for (;;) {
    const uint32_t slot = small_.size >= small_target_ || main_.size == 0 ? evict_small() : evict_main();
    if (slot == kEmpty) continue;
    unlink(keys_[slot]);
    return slot;
  }
}

uint32_t RowCache::evict_small() {
  while (small_.size) {
    const uint32_t slot = pop(&small_);
    if (uses_[slot] == 0) {
      remember(keys_[slot]);
      return slot;
    }
    uses_[slot] = 0;
    push(&main_, slot);
  }
  return kEmpty;
}

uint32_t RowCache::evict_main() {
  while (main_.size) {
    const uint32_t slot = pop(&main_);
    if (uses_[slot] == 0) return slot;
    --uses_[slot];
    push(&main_, slot);
  }
  return kEmpty;
}

void RowCache::remember(uint64_t key) {
  const uint64_t hash = mix(key);
  Ghost* bucket = ghosts_.get() + static_cast<size_t>(scaled(hash, ghost_buckets_)) * kGhostWays;
  Ghost* oldest = bucket;
  for (uint32_t way = 1; way < kGhostWays; ++way)
    if (ghost_time_ - bucket[way].time > ghost_time_ - oldest->time) oldest = bucket + way;
  *oldest = {static_cast<uint32_t>(hash), ghost_time_++};
}

bool RowCache::remembers(uint64_t key) {
  const uint64_t hash = mix(key);
  const Ghost* bucket = ghosts_.get() + static_cast<size_t>(scaled(hash, ghost_buckets_)) * kGhostWays;
  for (uint32_t way = 0; way < kGhostWays; ++way)
    if (bucket[way].fingerprint == static_cast<uint32_t>(hash) && ghost_time_ - bucket[way].time <= capacity_)
      return true;
  return false;
}

void RowCache::counters(es_cache_counters* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  out->row_bytes = row_bytes_;
  out->capacity_rows = capacity_;
  out->num_rows = num_rows_;
  out->small_rows = small_.size;
  out->main_rows = main_.size;
  out->memory_bytes = memory_bytes_;
  out->hits = hits_;
  out->misses = misses_;
  out->inserts = inserts_;
  out->evictions = evictions_;
}

}  // namespace engram
