// Collectives of processes of one machine, through memory that they share. The only state of this library that lives
// longer than a call.
//
// Every process counts the rounds it has entered. In a round it copies what it has into its slot of that round, of which
// it has two, publishes the round's number, and waits until those it needs have published theirs. Who publishes round n
// has read all it needed of round n - 1, so that a slot may be written again as soon as everyone has entered the round
// after it. Whoever comes last wakes all others with one call: each sleeps, as a rule, once in a round.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "deskfleet_ops.h"

namespace df {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kSlot = DF_GROUP_SLOT_BYTES;
constexpr int64_t kSpin_ns = 20'000;  // some times what it takes to sleep and be woken
constexpr int64_t kShortSpin_ns = 2'000;
constexpr uint32_t kTrySpinningEvery = 16;  // waits, once it has not been worth it
constexpr int64_t kLook_ns = 100'000'000;   // how often who waits looks whether the others live
constexpr int64_t kLost = -1, kOutOfStep = -1001;  // less the process's number

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "atomics that are locks are not shared between processes");

// What all wait at.
struct alignas(64) Gate {
  std::atomic<uint32_t> turns;     // the futex: how often everyone was woken
  std::atomic<uint32_t> sleepers;  // how many are asleep, or about to be
};

// What one process says of itself.
struct alignas(64) Place {
  std::atomic<uint64_t> posted;    // rounds entered
  std::atomic<uint32_t> present;   // it has come, and holds its lock until it ends
  uint64_t tags[2];                // of each slot, what the round was
};

enum class Kind : uint64_t { reduce = 1, gather = 2, broadcast = 3 };

// A round's kind and how many bytes were left when it began: what all must agree on.
uint64_t tag_of(Kind kind, int64_t bytes) { return static_cast<uint64_t>(kind) << 60 | static_cast<uint64_t>(bytes); }

int64_t area_bytes(int64_t size) {
  const int64_t head = static_cast<int64_t>(sizeof(Gate)) + size * static_cast<int64_t>(sizeof(Place));
  return (head + kPage - 1) / kPage * kPage + size * 2 * kSlot;
}

// Room for everyone and for one division of them. Never touched, it takes no memory.
int64_t file_bytes(int64_t size) { return 2 * area_bytes(size) + size * kPage; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

struct flock lock_of(int64_t process) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = process;
  lock.l_len = 1;
  return lock;
}

class Group {
 public:
  Group(char* base, int64_t bytes, int64_t offset, int file, int64_t rank, int64_t size, int64_t first, bool may_spin)
      : base_(base),
        bytes_(bytes),
        gate_(reinterpret_cast<Gate*>(base + offset)),
        places_(reinterpret_cast<Place*>(base + offset + static_cast<int64_t>(sizeof(Gate)))),
        slots_(base + offset + area_bytes(size) - size * 2 * kSlot),
        file_(file),
        rank_(rank),
        size_(size),
        first_(first),
        may_spin_(may_spin) {
    places_[rank_].present.store(1);
  }

  ~Group() { munmap(base_, static_cast<size_t>(bytes_)); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  template <class T>
  int64_t all_reduce(T* data, int64_t count) {
    int64_t left = count * static_cast<int64_t>(sizeof(T));
    do {
      const int64_t bytes = std::min(left, kSlot);
      if (const int64_t error = exchange(Kind::reduce, data, left)) return error;
      const int64_t some = bytes / static_cast<int64_t>(sizeof(T));
      // In the order of ranks: the same bits in every process, whoever came first.
      const T* one = reinterpret_cast<const T*>(slot(0));
      const T* two = reinterpret_cast<const T*>(slot(1));
      for (int64_t i = 0; i < some; ++i) data[i] = one[i] + two[i];
      for (int64_t p = 2; p < size_; ++p) {
        const T* more = reinterpret_cast<const T*>(slot(p));
        for (int64_t i = 0; i < some; ++i) data[i] += more[i];
      }
      data += some;
      left -= bytes;
    } while (left > 0);
    return 0;
  }

  int64_t all_gather(const char* data, int64_t bytes, char* out) {
    int64_t done = 0;
    do {
      const int64_t some = std::min(bytes - done, kSlot);
      if (const int64_t error = exchange(Kind::gather, data + done, bytes - done)) return error;
      for (int64_t p = 0; p < size_; ++p) copy(out + p * bytes + done, slot(p), some);
      done += some;
    } while (done < bytes);
    return 0;
  }

  int64_t broadcast(char* data, int64_t bytes) {
    int64_t done = 0;
    do {
      const int64_t left = bytes - done, some = std::min(left, kSlot);
      if (rank_ == 0) {
        if (const int64_t error = post(tag_of(Kind::broadcast, left), data + done, some, true)) return error;
      } else {
        if (const int64_t error = listen()) return error;
        if (tag(0) != tag_of(Kind::broadcast, left)) return kOutOfStep - first_;
        copy(data + done, slot(0), some);
      }
      done += some;
    } while (done < bytes);
    return 0;
  }

  // The first slot of a broadcast of any length; how much it is in all.
  int64_t receive(char* out) {
    if (const int64_t error = listen()) return error;
    const int64_t bytes = static_cast<int64_t>(tag(0) - tag_of(Kind::broadcast, 0));
    if (tag(0) >> 60 != static_cast<uint64_t>(Kind::broadcast)) return kOutOfStep - first_;
    copy(out, slot(0), std::min(bytes, kSlot));
    return bytes;
  }

 private:
  char* slot(int64_t process) const { return slots_ + (process * 2 + static_cast<int64_t>(round_ & 1)) * kSlot; }
  uint64_t& tag(int64_t process) const { return places_[process].tags[round_ & 1]; }

  static void copy(char* to, const char* from, int64_t bytes) {
    if (bytes > 0) memcpy(to, from, static_cast<size_t>(bytes));  // an empty tensor may have no address
  }

  bool all_have_entered(uint64_t round) const {
    for (int64_t p = 0; p < size_; ++p)
      if (places_[p].posted.load() < round) return false;
    return true;
  }

  // A round in which everyone gives and takes: what all gave lies in their slots when this returns 0.
  int64_t exchange(Kind kind, const void* data, int64_t left) {
    const uint64_t own = tag_of(kind, left);
    if (const int64_t error = post(own, data, std::min(left, kSlot), false)) return error;
    if (const int64_t error = wait([this] { return all_have_entered(round_); })) return error;
    for (int64_t p = 0; p < size_; ++p)
      if (tag(p) != own) return kOutOfStep - first_ - p;
    return 0;
  }

  // A round in which only process 0 gives.
  int64_t listen() {
    if (const int64_t error = post(0, nullptr, 0, false)) return error;
    return wait([this] { return places_[0].posted.load() >= round_; });
  }

  // Enters the next round.
  int64_t post(uint64_t own, const void* data, int64_t bytes, bool wakes) {
    ++round_;
    if (const int64_t error = wait([this] { return all_have_entered(round_ - 1); })) return error;
    copy(slot(rank_), static_cast<const char*>(data), bytes);
    tag(rank_) = own;
    places_[rank_].posted.store(round_);
    if (wakes || all_have_entered(round_)) {
      gate_->turns.fetch_add(1);
      if (gate_->sleepers.load() > 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
    }
    return 0;
  }

  // Returns 0 once `is_done`, which whoever makes it so follows with a turn of the gate.
  template <class Condition>
  int64_t wait(Condition is_done) {
    if (is_done() || (may_spin_ && spin(is_done))) return 0;
    int64_t now = now_ns();
    int64_t look = now + kLook_ns;
    while (true) {
      const uint32_t turns = gate_->turns.load();
      if (is_done()) return 0;
      if (now >= look) {
        const int64_t lost = find_lost();
        if (lost >= 0 && !is_done()) return kLost - first_ - lost;  // what it said before its end counts
        look = now + kLook_ns;
      }
      const timespec until{look / 1'000'000'000, look % 1'000'000'000};
      gate_->sleepers.fetch_add(1);
      futex(FUTEX_WAIT_BITSET, static_cast<int>(turns), &until);  // returns at once when the gate has turned
      gate_->sleepers.fetch_sub(1);
      now = now_ns();
    }
  }

  // Waits awake, for less and less time while that does not help: the processor may be needed by whoever is waited for.
  template <class Condition>
  bool spin(Condition is_done) {
    if (spin_ns_ == 0 && ++num_waits_ % kTrySpinningEvery != 0) return false;
    const int64_t begin = now_ns();
    do {
      for (int i = 0; i < 16; ++i) {
        if (is_done()) {
          spin_ns_ = kSpin_ns;
          return true;
        }
        relax();
      }
    } while (now_ns() - begin < std::max(spin_ns_, kShortSpin_ns));
    spin_ns_ = spin_ns_ / 2 < kShortSpin_ns ? 0 : spin_ns_ / 2;
    return false;
  }

  void futex(int operation, int value, const timespec* until) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&gate_->turns), operation, value, until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
  }

  // The first process that had come and has ended, -1: none. The kernel drops a process's locks with it.
  int64_t find_lost() const {
    for (int64_t p = 0; p < size_; ++p) {
      if (p == rank_ || places_[p].present.load() == 0) continue;
      struct flock lock = lock_of(first_ + p);
      if (fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) return p;
    }
    return -1;
  }

  char* base_;
  int64_t bytes_;
  Gate* gate_;
  Place* places_;
  char* slots_;
  int file_;
  int64_t rank_, size_, first_;
  bool may_spin_;
  int64_t spin_ns_ = kSpin_ns;
  uint32_t num_waits_ = 0;
  uint64_t round_ = 0;
};

Group& group_at(int64_t handle) { return *reinterpret_cast<Group*>(handle); }

}  // namespace
}  // namespace df

using df::group_at;

extern "C" {

int64_t df_group_open(int32_t file, int64_t rank, int64_t size, int64_t part, int32_t may_spin) {
  const int64_t bytes = df::file_bytes(size);
  if (ftruncate(file, bytes) != 0) return -errno;
  struct flock lock = df::lock_of(rank);
  if (fcntl(file, F_SETLK, &lock) != 0) return -errno;
  void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) return -errno;
  const int64_t offset = part == size ? 0 : df::area_bytes(size) + rank / part * df::area_bytes(part);
  auto* group = new (std::nothrow) df::Group(static_cast<char*>(base), bytes, offset, file, rank % part, part,
                                             rank / part * part, may_spin != 0);
  if (group == nullptr) {
    munmap(base, static_cast<size_t>(bytes));
    return -ENOMEM;
  }
  return reinterpret_cast<int64_t>(group);
}

void df_group_close(int64_t handle) { delete &group_at(handle); }

int64_t df_group_all_reduce(int64_t handle, void* data, int64_t count, int32_t type) {
  if (type == DF_F64) return group_at(handle).all_reduce(static_cast<double*>(data), count);
  if (type == DF_F32) return group_at(handle).all_reduce(static_cast<float*>(data), count);
  return group_at(handle).all_reduce(static_cast<uint32_t*>(data), count);  // which wraps as int32 does
}

int64_t df_group_all_gather(int64_t handle, const void* data, int64_t bytes, void* out) {
  return group_at(handle).all_gather(static_cast<const char*>(data), bytes, static_cast<char*>(out));
}

int64_t df_group_broadcast(int64_t handle, void* data, int64_t bytes) {
  return group_at(handle).broadcast(static_cast<char*>(data), bytes);
}

int64_t df_group_receive(int64_t handle, void* out) { return group_at(handle).receive(static_cast<char*>(out)); }

}  // extern "C"
