// A pool of threads that read: works everywhere, costs a wake-up per read.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "io.h"

namespace engram {
namespace {

class PoolIo final : public Io {
 public:
  ~PoolIo() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool open(const IoSetup& setup, std::string* why) {
    files_ = setup.files;
    const uint32_t wanted = std::max(1u, std::min(setup.pool_threads, setup.depth));
    queue_.reserve(setup.depth);
    taken_.reserve(setup.depth);
    done_.reserve(setup.depth);
    try {
      for (uint32_t i = 0; i < wanted; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& error) {
      if (threads_.empty()) {
        *why = std::string("no thread: ") + error.what();
        return false;
      }
    }
    return true;
  }

  const char* name() const override { return "pool"; }
  std::string detail() const override { return std::to_string(threads_.size()) + " threads"; }

  void start(const ReadOp& op) override { queue_.push_back(op); }

  size_t run(ReadDone* done, size_t capacity, size_t min_done, int64_t timeout_ns) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!queue_.empty()) {
      const size_t sleeping = idle_, wanted = queue_.size();
      taken_.erase(taken_.begin(), taken_.begin() + static_cast<std::ptrdiff_t>(next_));
      next_ = 0;
      taken_.insert(taken_.end(), queue_.begin(), queue_.end());
      queue_.clear();
      // No more threads than there is work for: a woken thread costs more than a read takes of one.
      if (wanted >= sleeping) {
        work_.notify_all();
      } else {
        for (size_t i = 0; i < wanted; ++i) work_.notify_one();
      }
    }
    const auto ready = [&] { return woken_ || done_.size() >= min_done; };
    if (min_done && timeout_ns != 0) {
      least_ = min_done;
      if (timeout_ns < 0) {
        answered_.wait(lock, ready);
      } else {
        answered_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
      }
    }
    woken_ = false;
    const size_t count = std::min(capacity, done_.size());
    std::copy_n(done_.begin(), count, done);
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  void wake() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    answered_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      work_.wait(lock, [this] { return stopping_ || next_ < taken_.size(); });
      --idle_;
      if (stopping_) return;
      const ReadOp op = taken_[next_++];
      if (next_ == taken_.size()) {
        taken_.clear();
        next_ = 0;
      }
      lock.unlock();
      ssize_t got;
      do {
        got = pread(files_[op.file], op.buffer, op.num_bytes, static_cast<off_t>(op.offset));
      } while (got < 0 && errno == EINTR);
      const int32_t result = got < 0 ? -errno : static_cast<int32_t>(got);
      lock.lock();
      done_.push_back({op.tag, result});
      if (done_.size() >= least_) answered_.notify_one();
    }
  }

  std::vector<int> files_;
  std::vector<ReadOp> queue_;  // of the owner; not yet handed over
  std::mutex mutex_;
  std::condition_variable work_, answered_;
  std::vector<ReadOp> taken_;
  size_t next_ = 0, idle_ = 0, least_ = 1;
  std::vector<ReadDone> done_;
  bool woken_ = false, stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Io> make_pool(const IoSetup& setup, std::string* why) {
  auto io = std::make_unique<PoolIo>();
  if (!io->open(setup, why)) return nullptr;
  return io;
}

}  // namespace engram
