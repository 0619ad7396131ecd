// Linux native AIO by system call. Container sandboxes that refuse io_uring usually let these calls pass; of the
// waiting calls only io_getevents, not io_pgetevents.
#include "io.h"

#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#ifndef IOCB_CMD_POLL
#define IOCB_CMD_POLL 5
#endif

namespace engram {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;

long sys_submit(aio_context_t context, long count, iocb** list) {
  return syscall(__NR_io_submit, context, count, list);
}

class AioIo final : public Io {
 public:
  ~AioIo() override {
    if (context_) syscall(__NR_io_destroy, context_);  // waits for reads that are still out
    if (event_ >= 0) close(event_);
  }

  bool open(const IoSetup& setup, std::string* why) {
    if (!setup.all_direct) note_ = "files are buffered, so reads are not asynchronous";
    files_ = setup.files;
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) return fail(why, "eventfd");
    if (syscall(__NR_io_setup, setup.depth + 1, &context_) < 0) return fail(why, "io_setup");
    control_.resize(setup.depth);
    queue_.reserve(setup.depth);
    events_.resize(setup.depth + 1);
    if (!arm_wake()) return fail(why, "polling through io_submit");
    return true;
  }

  const char* name() const override { return "aio"; }
  std::string detail() const override { return note_; }

  void start(const ReadOp& op) override {
    // Tags are slots of the caller below the depth it gave, so each has one control block.
    iocb& block = control_[op.tag % control_.size()];
    std::memset(&block, 0, sizeof block);
    block.aio_data = op.tag;
    block.aio_lio_opcode = IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(files_[op.file]);
    block.aio_buf = reinterpret_cast<uint64_t>(op.buffer);
    block.aio_nbytes = op.num_bytes;
    block.aio_offset = static_cast<int64_t>(op.offset);
    queue_.push_back(&block);
  }

  size_t run(ReadDone* done, size_t capacity, size_t min_done, int64_t timeout_ns) override {
    size_t count = send(done, capacity);
    bool look_only = count != 0 || woken_ || min_done == 0;
    const int64_t until = timeout_ns < 0 ? -1 : now_ns() + timeout_ns;
    for (;;) {
      const int64_t left = look_only ? 0 : until < 0 ? -1 : until - now_ns();
      timespec time = {left / 1000000000, left % 1000000000};
      if (left < 0) time = {0, 0};
      const bool forever = !look_only && until < 0;
      const size_t room = capacity - count < events_.size() ? capacity - count : events_.size();
      if (room == 0) break;
      const size_t least = look_only ? 0 : min_done < room ? min_done : room;
      const long got = syscall(__NR_io_getevents, context_, static_cast<long>(least), static_cast<long>(room),
                               events_.data(), forever ? nullptr : &time);
      for (long i = 0; i < got; ++i) {
        const io_event& event = events_[static_cast<size_t>(i)];
        if (event.data == kWakeTag) {
          take_wake();
        } else {
          done[count++] = {static_cast<uint32_t>(event.data), static_cast<int32_t>(event.res)};
        }
      }
      if (count || woken_ || look_only || (until >= 0 && now_ns() >= until)) break;
    }
    woken_ = false;
    return count;
  }

  void wake() override {
    const uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
  }

 private:
  static bool fail(std::string* why, const char* what) {
    *why = std::string(what) + ": " + std::strerror(errno);
    return false;
  }

  bool arm_wake() {
    std::memset(&wake_block_, 0, sizeof wake_block_);
    wake_block_.aio_data = kWakeTag;
    wake_block_.aio_lio_opcode = IOCB_CMD_POLL;
    wake_block_.aio_fildes = static_cast<uint32_t>(event_);
    wake_block_.aio_buf = POLLIN;
    iocb* list = &wake_block_;
    return sys_submit(context_, 1, &list) == 1;
  }

  void take_wake() {
    uint64_t value;
    (void)!read(event_, &value, sizeof value);
    woken_ = true;
    arm_wake();
  }

  // Hand the queue to the kernel. A read it refuses is answered here.
  size_t send(ReadDone* done, size_t capacity) {
    size_t sent = 0, refused = 0;
    while (sent < queue_.size()) {
      const long count = sys_submit(context_, static_cast<long>(queue_.size() - sent), queue_.data() + sent);
      if (count > 0) {
        sent += static_cast<size_t>(count);
      } else if (count < 0 && errno == EINTR) {
        continue;
      } else if (count < 0 && errno != EAGAIN && refused < capacity) {
        done[refused++] = {static_cast<uint32_t>(queue_[sent++]->aio_data), -errno};
      } else {
        break;  // EAGAIN: sent by the next run, after some reads are answered
      }
    }
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(sent));
    return refused;
  }

  aio_context_t context_ = 0;
  int event_ = -1;
  std::string note_ = "direct";
  std::vector<int> files_;
  std::vector<iocb> control_;
  std::vector<iocb*> queue_;
  std::vector<io_event> events_;
  iocb wake_block_ = {};
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Io> make_aio(const IoSetup& setup, std::string* why) {
  auto io = std::make_unique<AioIo>();
  if (!io->open(setup, why)) return nullptr;
  return io;
}

}  // namespace engram
