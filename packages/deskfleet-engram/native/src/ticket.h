// One request from ids to filled buffers: which rows it needs, which reads bring them, and where each row goes. The
// planning part runs in the caller's thread; then a ticket belongs to the I/O thread until it is finished. Starts no
// reads itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "cache.h"
#include "deskfleet_engram.h"
#include "table.h"

namespace engram {

struct Ticket;
struct Read;

enum class Part : uint8_t { kPacked, kWeights, kScales };

// Rows of one ticket that one read brings: misses [first, first + count), neighbours on disk.
struct Piece {
  Piece* next = nullptr;  // the next waiter for the same read
  Ticket* ticket = nullptr;
  Read* read = nullptr;  // while it waits for one
  uint64_t offset = 0;
  uint32_t file = 0, first = 0, count = 0, num_bytes = 0;
  Part part = Part::kPacked;
  bool second = false;  // from the second source
  bool shared = false;  // waits for a read that another request started
};

// A row that the first source would not give.
struct Salvage {
  std::vector<uint8_t> bytes;
  uint8_t parts = 0;     // Ticket::kHasWeights, kHasScales
  bool has_crc = false;  // the first source's checksum of the row is known
  uint32_t crc = 0;
  es_error first_failure = {};
};

class Ticket {
 public:
  // Finished or not, and whether somebody sleeps on it.
  static constexpr uint32_t kPending = 1, kDone = 2, kFailed = 3, kStateMask = 3, kWaited = 4;
  std::atomic<uint32_t> word{kDone};

  // What was asked.
  const Table* table = nullptr;
  uint32_t io_class = 0, format = 0;
  int64_t deadline_ns = 0, submitted_ns = 0;

  // Room for requests of so many ids without allocating.
  void reserve(const Table& of, uint64_t num_ids);
  // Give back memory of an unusually large request.
  void trim();

  // Is this a request that the table can answer? Ids are not looked at.
  static int32_t check(const Table& of, const es_request& request, es_error* error);
  // Check the request and sort its ids. On anything but ES_OK no output was touched.
  int32_t begin_plan(const Table& of, const es_request& request, es_error* error);
  struct Found {
    uint64_t num_rows, num_unique, num_hits;
  };
  // Answer -1, rows of other ranks, and what the cache holds; note the rest as misses and their reads as pieces.
  Found finish_plan(RowCache* cache);

  // Fill the outputs of a unique row. `row`: weight bytes, then scale bytes.
  void deliver(uint32_t unique, const uint8_t* row) const;
  void poison(uint32_t unique) const;
  static void poison_all(const Table& table, const es_request& request, uint64_t num_ids);

  uint64_t row_of(uint32_t unique) const { return order_[begin_[unique]] >> kPositionBits; }
  uint32_t unique_of(uint32_t miss) const { return misses_[miss]; }
  uint64_t missed_row(uint32_t miss) const { return row_of(misses_[miss]); }
  uint64_t num_ids() const { return num_ids_; }

  // Of the I/O thread.
  static constexpr uint8_t kHasWeights = 1, kHasScales = 2, kSalvaged = 0x40, kResolved = 0x80;
  std::vector<uint8_t> state;  // of each miss
  std::vector<Piece> pieces;
  size_t next_piece = 0;
  uint32_t misses_left = 0, pieces_waiting = 0;
  std::deque<Piece> salvage_pieces;
  std::unordered_map<uint32_t, Salvage> salvage;  // by miss; filled only after failures
  uint8_t* staged(uint32_t miss) { return staging_.data() + static_cast<size_t>(miss) * table->row_bytes; }
  bool probe_again = false;  // it queued behind others, so the cache may know more by now
  bool listed = false, touched = false;
  es_error failure = {};

  // Links of the store's lists.
  Ticket *arrival_next = nullptr, *cancel_next = nullptr, *previous = nullptr, *next = nullptr;

  // A ticket must not be used again while the I/O thread has its cancellation still to take.
  static constexpr uint32_t kNotCancelled = 0, kCancelAsked = 1, kCancelTaken = 2;
  std::atomic<uint32_t> cancel_word{kNotCancelled};

  static constexpr uint32_t kPositionBits = 24;
  static constexpr uint64_t kMaxIds = uint64_t{1} << kPositionBits;

 private:
  void sort_ids();
  void neutral(uint64_t position) const;
  void add_piece(uint32_t miss, uint64_t row, const Column* column);
  void add_part(uint32_t miss, uint64_t begin, uint32_t width, int file, Part part, size_t from);

  std::vector<uint64_t> order_, scratch_;  // id << kPositionBits | position, ascending
  std::vector<uint32_t> begin_;            // of each unique row in order_, and the end
  std::vector<uint32_t> misses_;
  std::vector<uint8_t> staging_;  // rows whose parts come apart
  uint64_t num_ids_ = 0;
  uint8_t *out_ = nullptr, *out_scales_ = nullptr;
  uint64_t out_stride_ = 0, scales_stride_ = 0;
};

// Does this miss still want what the piece's read brings?
bool wants(const Piece& piece, uint32_t miss);
uint8_t part_bit(Part part);

// The aligned read of bytes [begin, begin + width) of a file.
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kMaxReadBytes = 2 * kPageBytes;
inline uint64_t page_floor(uint64_t offset) { return offset & ~(kPageBytes - 1); }
inline uint64_t page_ceil(uint64_t offset) { return page_floor(offset + kPageBytes - 1); }

}  // namespace engram
