// Reads at the device: one interface, three ways (io_uring, Linux AIO, a pool of threads). An Io belongs to the
// thread that made it; only wake() may be called by others. Knows nothing of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace engram {

struct IoSetup {
  uint32_t depth = 0;        // never more reads than this are started and unanswered
  std::vector<int> files;    // reads name them by position
  uint8_t* arena = nullptr;  // every read's buffer lies in here
  size_t arena_bytes = 0;
  bool all_direct = false;  // all files were opened with O_DIRECT
  bool may_register = true;
  uint32_t pool_threads = 32;
};

struct ReadOp {
  uint32_t file = 0;
  uint32_t num_bytes = 0;
  uint64_t offset = 0;
  uint8_t* buffer = nullptr;
  uint32_t tag = 0;
};

struct ReadDone {
  uint32_t tag = 0;
  int32_t result = 0;  // bytes read, or -errno
};

class Io {
 public:
  virtual ~Io() = default;
  virtual const char* name() const = 0;
  virtual std::string detail() const = 0;
  // Queue a read; it goes out with the next run().
  virtual void start(const ReadOp& op) = 0;
  // Send what is queued, then wait until min_done reads are answered (0: only look), wake() was called, or timeout_ns
  // passed (< 0: never). Returns the number of entries written to `done`, at most `capacity`.
  virtual size_t run(ReadDone* done, size_t capacity, size_t min_done, int64_t timeout_ns) = 0;
  // End a waiting run() soon, or the next one at once.
  virtual void wake() = 0;
};

// Null when this machine or sandbox does not offer it; `why` then says so.
std::unique_ptr<Io> make_uring(const IoSetup& setup, std::string* why);
std::unique_ptr<Io> make_aio(const IoSetup& setup, std::string* why);
std::unique_ptr<Io> make_pool(const IoSetup& setup, std::string* why);

// Faults by probability, the same for the same seed and order of reads. For tests.
struct FaultPlan {
  uint64_t seed = 1;
  double eio = 0, short_read = 0, flip = 0, delay = 0, hang = 0;
  uint32_t delay_us = 1000;
};
bool parse_faults(const char* text, FaultPlan* plan, std::string* why);
std::unique_ptr<Io> make_faulty(std::unique_ptr<Io> inner, const FaultPlan& plan);

int64_t now_ns();

}  // namespace engram
