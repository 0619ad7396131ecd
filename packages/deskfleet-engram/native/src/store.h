// A store: tables, one I/O thread, and the queues between callers and that thread.
//
// Callers plan their tickets themselves and push them onto a lock-free stack; the I/O thread takes the stack, starts
// reads in order of class, checks what arrives, and hands each row to all who wait for it. Everything below the line
// "of the I/O thread" is touched by no other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cache.h"
#include "crc32c.h"
#include "deskfleet_engram.h"
#include "io.h"
#include "table.h"
#include "ticket.h"

namespace engram {

struct Options {
  uint32_t backend = ES_BACKEND_AUTO, direct = ES_DIRECT_AUTO, depth = 256, prefetch_depth = 16;
  uint32_t decode_hold_ms = 200, deadline_ms = 2000, retries = 2, pool_threads = 32, flags = 0;
  uint64_t cache_bytes = 0;         // of a cache of its own
  std::shared_ptr<RowCache> cache;  // or a shared one
  FaultPlan faults;
  bool inject_faults = false;
};

struct Counters {
  std::atomic<uint64_t> num_tickets{0}, num_rows{0}, num_unique{0}, num_cache_hits{0}, num_read_rows{0};
  std::atomic<uint64_t> num_shared_rows{0}, num_fallback_rows{0}, num_failed_rows{0}, num_reads{0}, read_bytes{0};
  std::atomic<uint64_t> num_retries{0}, num_decode_reads{0}, max_prefetch_depth{0};
  std::array<std::atomic<uint64_t>, ES_NUM_KINDS> errors{};
  std::array<std::atomic<uint64_t>, 32> wait_us{};
  std::atomic<uint64_t> num_decode_tickets{0}, decode_us{0};
};

// A read at the device, or waiting to be tried again. One per buffer.
struct Read {
  Piece* waiters = nullptr;
  uint8_t* buffer = nullptr;
  uint64_t offset = 0;
  uint32_t file = 0, num_bytes = 0, attempts = 0;
  uint32_t io_class = 0;
  int64_t sent_ns = 0;
  bool at_device = false, listed = false;
  Read* chain = nullptr;
};

class Store {
 public:
  explicit Store(Options options);
  ~Store();

  int32_t add_table(const es_table& table, const es_table* second, es_error* error);
  int32_t start(es_error* error);
  std::string report() const;
  void get_counters(es_counters* out) const;

  const Table* find_table(uint32_t layer) const;
  bool started() const { return started_; }

  // Plan a ticket and hand it over. On anything but ES_OK the ticket was not used and no output touched.
  int32_t submit(Ticket* ticket, const es_request& request, es_error* error);
  // ES_OK, ES_FAILED, or ES_PENDING when timeout_us (< 0: none) passed first.
  static int32_t wait(Ticket* ticket, int64_t timeout_us);
  static int32_t poll(const Ticket* ticket);
  // Return once no thread will touch the ticket or its buffers any more, without waiting for the device.
  void retire(Ticket* ticket);

 private:
  struct TicketList {
    Ticket *head = nullptr, *tail = nullptr;
    void append(Ticket* ticket);
    void remove(Ticket* ticket);
  };
  // A row to check and hand on: where it lies, and for whom.
  struct Arrived {
    const uint8_t* bytes;
    Piece* piece;
    uint32_t miss;
    uint32_t stored_crc, seed_state;
    bool checked, good;
  };
  struct Answer {
    Read* read;
    int32_t kind;
    int sys_errno;
  };
  struct Problem {
    int32_t kind;
    int sys_errno;
    bool trusted;  // the block's checksum table is sound
    std::string why;
  };

  void wake();
  void record_finish(const Ticket& ticket);

  // ---- of the I/O thread ----
  void serve();
  bool choose_backend();
  void take_arrivals();
  void take_cancelled();
  void issue();
  void issue_next(TicketList* list);
  void issue_piece(Piece* piece);
  bool probe_again(Piece* piece);
  void send(Read* read);
  size_t most_prefetch() const;
  size_t least_done() const;

  void complete(size_t count);
  void examine(int32_t result, Answer* answer) const;
  void collect(Read* read);
  void check_arrived();
  void hand_out();
  void resolve(Ticket* ticket, uint32_t miss, const uint8_t* bytes);
  void after_read(const Answer& answer);

  Problem classify(const Read& read) const;
  void describe(const Read& read, const Piece& piece, uint32_t miss, const Problem& problem, es_error* out) const;
  void lose_row(const Read& read, Piece* piece, uint32_t miss, const Problem& problem);
  bool start_salvage(Ticket* ticket, uint32_t miss);
  void fail_row(Ticket* ticket, uint32_t miss, const es_error& error);

  void scan_deadlines();
  void expire_waiters(Read* read);
  void abandon(Ticket* ticket, int32_t kind, const char* why);
  void abandon_all();
  void touch(Ticket* ticket);
  void settle();
  void finish(Ticket* ticket);

  size_t bucket_of(uint32_t file, uint64_t offset) const;
  Read* find_read(uint32_t file, uint64_t offset, uint32_t num_bytes);
  void list_read(Read* read);
  void unlist_read(Read* read);
  static void attach(Read* read, Piece* piece);
  static void detach(Piece* piece);
  void let_go(Piece* piece);
  void move_read(Read* from, Read* to);
  void free_read(Read* read);

  Options options_;
  Files files_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::shared_ptr<RowCache> cache_;
  bool started_ = false;
  std::thread thread_;
  Counters counters_;

  std::atomic<Ticket*> arrivals_{nullptr}, cancellations_{nullptr};
  std::atomic<bool> sleeping_{false}, stopping_{false};
  std::atomic<int64_t> last_decode_ns_;

  // Written by the I/O thread before start() returns.
  std::string backend_name_, backend_detail_, backend_reason_;
  int32_t start_result_ = ES_OK;
  std::string start_why_;
  std::atomic<uint32_t> start_word_{0};

  // ---- of the I/O thread ----
  std::unique_ptr<Io> io_;
  uint8_t* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  std::vector<Read> reads_;
  std::vector<Read*> buckets_;
  std::deque<Read*> free_;  // first in, first out: a retry gets another buffer
  std::deque<Read*> retries_;
  std::deque<Piece*> salvages_;
  TicketList decode_, prefetch_;
  size_t decode_tickets_ = 0;
  bool decode_is_live_ = false;
  size_t at_device_ = 0, prefetch_at_device_ = 0;
  std::vector<ReadDone> done_;
  std::vector<Answer> batch_;
  std::vector<Arrived> arrived_;
  std::vector<CrcJob> crc_jobs_;
  std::vector<Ticket*> touched_;
  int64_t now_ = 0, last_scan_ns_ = 0, last_answer_ns_ = 0;
};

}  // namespace engram
