// io_uring by system call: no liburing, so nothing but kernel headers is needed to build.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "io.h"
#include "uring_abi.h"

namespace engram {
namespace {

using namespace uring;

constexpr uint64_t kWakeTag = UINT64_MAX;

int sys_setup(unsigned entries, Params* params) { return static_cast<int>(syscall(kSetupCall, entries, params)); }
int sys_enter(int ring, unsigned to_submit, unsigned min_complete, unsigned flags, const void* arg, size_t size) {
  return static_cast<int>(syscall(kEnterCall, ring, to_submit, min_complete, flags, arg, size));
}
int sys_register(int ring, unsigned code, const void* arg, unsigned count) {
  return static_cast<int>(syscall(kRegisterCall, ring, code, arg, count));
}

uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store_release(uint32_t* p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

class UringIo final : public Io {
 public:
  ~UringIo() override {
    if (sqes_) munmap(sqes_, sqes_bytes_);
    if (rings_) munmap(rings_, rings_bytes_);
    if (ring_ >= 0) close(ring_);
    if (event_ >= 0) close(event_);
  }

  bool open(const IoSetup& setup, std::string* why) {
    files_ = setup.files;
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return fail(why, "eventfd", errno);
    if (!set_up(setup.depth + 8, why) || !map_rings(why) || !probe(why)) return false;
    if (setup.may_register) {
      register_buffers(setup);
      register_files();
    } else {
      notes_ += ", nothing registered";
    }
    arm_wake();
    // The first entry also shows whether a sandbox lets io_uring_enter pass.
    if (flush() < 0) return fail(why, "io_uring_enter", errno);
    return true;
  }

  const char* name() const override { return "io_uring"; }
  std::string detail() const override { return mode_ + notes_; }

  void start(const ReadOp& op) override {
    Sqe* sqe = next_sqe();
    sqe->opcode = fixed_buffers_ ? kOpReadFixed : kOpRead;
    if (fixed_files_) {
      sqe->fd = static_cast<int>(op.file);
      sqe->flags = kSqeFixedFile;
    } else {
      sqe->fd = files_[op.file];
    }
    sqe->address = reinterpret_cast<uint64_t>(op.buffer);
    sqe->length = op.num_bytes;
    sqe->offset = op.offset;
    sqe->user_data = op.tag;
  }

  size_t run(ReadDone* done, size_t capacity, size_t min_done, int64_t timeout_ns) override {
    size_t count = reap(done, capacity);
    if (count || woken_ || min_done == 0 || timeout_ns == 0) {
      // Nothing to wait for; with deferred task work the kernel completes reads only when asked to.
      if (pending_ || count == 0) enter(0, 0);
      woken_ = false;
      return count + reap(done + count, capacity - count);
    }
    const int64_t until = timeout_ns < 0 ? -1 : now_ns() + timeout_ns;
    for (;;) {
      const int64_t left = until < 0 ? -1 : until - now_ns();
      if (until >= 0 && left <= 0 && !pending_) break;
      enter(static_cast<unsigned>(min_done), until < 0 ? -1 : left > 0 ? left : 0);
      count = reap(done, capacity);
      if (count || woken_) break;
    }
    woken_ = false;
    return count;
  }

  void wake() override {
    const uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
  }

 private:
  static bool fail(std::string* why, const char* what, int error) {
    *why = std::string(what) + ": " + std::strerror(error);
    return false;
  }

  bool set_up(unsigned entries, std::string* why) {
    static constexpr struct {
      unsigned flags;
      const char* name;
    } kModes[] = {{kSetupSingleIssuer | kSetupDeferTaskrun, "single issuer, deferred task work"},
                  {kSetupCoopTaskrun, "cooperative task work"},
                  {0, "plain"}};
    for (const auto& mode : kModes) {
      params_ = {};
      params_.flags = mode.flags | kSetupClamp;
      ring_ = sys_setup(entries, &params_);
      if (ring_ >= 0) {
        mode_ = mode.name;
        fcntl(ring_, F_SETFD, FD_CLOEXEC);
        break;
      }
      if (errno != EINVAL) break;  // EINVAL: flags unknown to this kernel
    }
    if (ring_ < 0) return fail(why, "io_uring_setup", errno);
    const unsigned needed = kFeatureNoDrop | kFeatureExtArg | kFeatureSingleMmap;
    if ((params_.features & needed) != needed) {
      *why = "io_uring of this kernel is too old (needs 5.11)";
      return false;
    }
    return true;
  }

  bool map_rings(std::string* why) {
    const size_t sq = params_.sq_off.array + params_.sq_entries * sizeof(uint32_t);
    const size_t cq = params_.cq_off.cqes + params_.cq_entries * sizeof(Cqe);
    rings_bytes_ = sq > cq ? sq : cq;
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, kMapRings);
    if (rings == MAP_FAILED) return fail(why, "mapping the ring", errno);
    rings_ = static_cast<uint8_t*>(rings);
    sqes_bytes_ = params_.sq_entries * sizeof(Sqe);
    void* sqes = mmap(nullptr, sqes_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, kMapEntries);
    if (sqes == MAP_FAILED) return fail(why, "mapping the entries", errno);
    sqes_ = static_cast<Sqe*>(sqes);
    const auto word = [this](uint32_t offset) { return reinterpret_cast<uint32_t*>(rings_ + offset); };
    sq_head_ = word(params_.sq_off.head), sq_tail_ = word(params_.sq_off.tail);
    sq_mask_ = *word(params_.sq_off.ring_mask);
    cq_head_ = word(params_.cq_off.head), cq_tail_ = word(params_.cq_off.tail);
    cq_mask_ = *word(params_.cq_off.ring_mask);
    cqes_ = reinterpret_cast<Cqe*>(rings_ + params_.cq_off.cqes);
    uint32_t* array = word(params_.sq_off.array);
    for (uint32_t i = 0; i < params_.sq_entries; ++i) array[i] = i;
    local_tail_ = *sq_tail_;
    return true;
  }

  bool probe(std::string* why) {
    Probe result = {};
    if (sys_register(ring_, kRegisterProbe, &result, 64) < 0) return fail(why, "probing io_uring", errno);
    for (const uint8_t op : {kOpRead, kOpReadFixed}) {
      if (op > result.last_op || !(result.ops[op].flags & kOpSupported)) {
        *why = "io_uring of this kernel cannot read";
        return false;
      }
    }
    return true;
  }

  void register_buffers(const IoSetup& setup) {
    const iovec whole = {setup.arena, setup.arena_bytes};
    fixed_buffers_ = sys_register(ring_, kRegisterBuffers, &whole, 1) == 0;
    notes_ += fixed_buffers_ ? ", registered buffers"
                             : std::string(", buffers not registered (") + std::strerror(errno) + ")";
  }

  void register_files() {
    fixed_files_ = !files_.empty() &&
                   sys_register(ring_, kRegisterFiles, files_.data(), static_cast<unsigned>(files_.size())) == 0;
    notes_ +=
        fixed_files_ ? ", registered files" : std::string(", files not registered (") + std::strerror(errno) + ")";
  }

  void arm_wake() {
    Sqe* sqe = next_sqe();
    sqe->opcode = kOpRead;
    sqe->fd = event_;
    sqe->address = reinterpret_cast<uint64_t>(&event_value_);
    sqe->length = sizeof event_value_;
    sqe->user_data = kWakeTag;
  }

  Sqe* next_sqe() {
    // The ring has more entries than reads can be unanswered, and flush() never leaves old ones behind.
    Sqe* sqe = sqes_ + (local_tail_++ & sq_mask_);
    std::memset(sqe, 0, sizeof *sqe);
    ++pending_;
    return sqe;
  }

  int flush() {
    store_release(sq_tail_, local_tail_);
    const int sent = sys_enter(ring_, pending_, 0, 0, nullptr, 0);
    if (sent > 0) pending_ -= static_cast<unsigned>(sent);
    return sent;
  }

  // Send, and wait for min_complete entries of the completion queue. timeout_ns < 0: without limit.
  void enter(unsigned min_complete, int64_t timeout_ns) {
    store_release(sq_tail_, local_tail_);
    const Timespec time = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    const GetEventsArg arg = {0, _NSIG / 8, 0, timeout_ns < 0 ? 0 : reinterpret_cast<uint64_t>(&time)};
    const int sent = sys_enter(ring_, pending_, min_complete, kEnterGetEvents | kEnterExtArg, &arg, sizeof arg);
    // A short count, EAGAIN, EBUSY (reap first) and EINTR leave entries in the queue: the next turn sends them.
    if (sent > 0) pending_ -= static_cast<unsigned>(sent);
    if (sent < 0 && errno == EAGAIN) usleep(100);  // the kernel is short of memory
  }

  size_t reap(ReadDone* done, size_t capacity) {
    uint32_t head = *cq_head_;
    const uint32_t tail = load_acquire(cq_tail_);
    size_t count = 0;
    for (; head != tail && count < capacity; ++head) {
      const Cqe& cqe = cqes_[head & cq_mask_];
      if (cqe.user_data == kWakeTag) {
        woken_ = true;
        arm_wake();
      } else {
        done[count++] = {static_cast<uint32_t>(cqe.user_data), cqe.result};
      }
    }
    store_release(cq_head_, head);
    return count;
  }

  int ring_ = -1, event_ = -1;
  Params params_ = {};
  std::string mode_, notes_;
  std::vector<int> files_;
  uint8_t* rings_ = nullptr;
  size_t rings_bytes_ = 0, sqes_bytes_ = 0;
  Sqe* sqes_ = nullptr;
  Cqe* cqes_ = nullptr;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, local_tail_ = 0;
  unsigned pending_ = 0;
  bool fixed_buffers_ = false, fixed_files_ = false, woken_ = false;
  uint64_t event_value_ = 0;
};

}  // namespace

std::unique_ptr<Io> make_uring(const IoSetup& setup, std::string* why) {
  auto io = std::make_unique<UringIo>();
  if (!io->open(setup, why)) return nullptr;
  return io;
}

}  // namespace engram
