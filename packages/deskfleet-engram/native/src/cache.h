// A bounded cache of rows in memory, evicted by S3-FIFO: new rows wait in a small queue and reach the main one only
// if asked for again, so a prefill that passes once cannot drive out what decode keeps asking for. Holds only bytes
// that the caller has verified. Knows nothing of files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "deskfleet_engram.h"

namespace engram {

class RowCache {
 public:
  // `bytes` bounds all memory, index included. Too little for 16 rows makes a cache that holds nothing.
  RowCache(uint64_t bytes, uint32_t row_bytes);

  // A number for a table that no other content has: the same for the same identity, fresh for an empty one.
  using Identity = std::array<uint8_t, 64>;
  uint32_t table_number(const Identity* identity);

  static uint64_t key(uint32_t table, uint64_t row) { return static_cast<uint64_t>(table) << 40 | row; }
  uint32_t row_bytes() const { return row_bytes_; }
  bool enabled() const { return capacity_ != 0; }

  // Everything below needs the lock; a pointer is valid while it is held.
  std::mutex& mutex() { return mutex_; }
  // `promote`: count this use, so that the row is kept (decode). A prefill only looks.
  const uint8_t* find(uint64_t key, bool promote);
  // `bulk`: enter the small queue whatever the past says.
  void insert(uint64_t key, const uint8_t* row, uint32_t num_bytes, bool bulk);

  void clear();
  void counters(es_cache_counters* out);

 private:
  struct Queue {
    std::unique_ptr<uint32_t[]> slots;
    uint32_t head = 0, size = 0;
  };
  struct Ghost {
    uint32_t fingerprint, time;
  };
  static constexpr uint32_t kEmpty = UINT32_MAX;
  static constexpr uint32_t kGhostWays = 4;
  static constexpr uint8_t kMaxUses = 3;

  uint32_t home(uint64_t hash) const;
  uint32_t lookup(uint64_t key) const;  // position in the index, or kEmpty
  void unlink(uint64_t key);
  void push(Queue* queue, uint32_t slot);
  uint32_t pop(Queue* queue);
  uint32_t evict();
  uint32_t evict_small();
  uint32_t evict_main();
  void remember(uint64_t key);
  bool remembers(uint64_t key);

  std::mutex mutex_;
  uint32_t row_bytes_, stride_;
  uint32_t capacity_ = 0, small_target_ = 0, index_size_ = 0, ghost_buckets_ = 0;
  std::unique_ptr<uint8_t[]> rows_;
  std::unique_ptr<uint64_t[]> keys_;
  std::unique_ptr<uint8_t[]> uses_;
  std::unique_ptr<uint32_t[]> index_;
  std::unique_ptr<Ghost[]> ghosts_;
  Queue small_, main_;
  uint32_t num_rows_ = 0, ghost_time_ = 0;
  uint64_t memory_bytes_ = 0, hits_ = 0, misses_ = 0, inserts_ = 0, evictions_ = 0;
  std::map<Identity, uint32_t> tables_;
  uint32_t next_table_ = 1;
};

}  // namespace engram
