// Faults for tests: wraps a backend and spoils some of its answers, by probability and seed.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unordered_map>

#include "io.h"

namespace engram {
namespace {

uint64_t scramble(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class FaultyIo final : public Io {
 public:
  FaultyIo(std::unique_ptr<Io> inner, const FaultPlan& plan) : inner_(std::move(inner)), plan_(plan) {
    name_ = std::string(inner_->name()) + "+faults";
  }

  const char* name() const override { return name_.c_str(); }
  std::string detail() const override { return inner_->detail() + ", faults injected"; }
  void wake() override { inner_->wake(); }

  void start(const ReadOp& op) override {
    out_[op.tag] = op;
    inner_->start(op);
  }

  size_t run(ReadDone* done, size_t capacity, size_t min_done, int64_t timeout_ns) override {
    size_t count = release_due(done, capacity);
    if (count) min_done = 0;
    for (const Held& held : held_) {
      if (held.due < 0) continue;
      const int64_t left = std::max<int64_t>(held.due - now_ns(), 1);
      if (timeout_ns < 0 || left < timeout_ns) timeout_ns = left;
    }
    if (min_done > 1) min_done = 1;  // held answers never count
    scratch_.resize(std::max<size_t>(1, capacity - count));
    if (capacity == count) return count;
    const size_t got = inner_->run(scratch_.data(), capacity - count, min_done, timeout_ns);
    for (size_t i = 0; i < got; ++i) {
      if (spoil(&scratch_[i])) done[count++] = scratch_[i];
    }
    return count + release_due(done + count, capacity - count);
  }

 private:
  struct Held {
    ReadDone answer;
    int64_t due;  // -1: never
  };

  bool chance(double probability) {
    state_ = scramble(state_ ^ plan_.seed);
    return static_cast<double>(state_ >> 11) * 0x1p-53 < probability;
  }

  // False: the answer is held back.
  bool spoil(ReadDone* answer) {
    const ReadOp op = out_[answer->tag];
    if (answer->result > 0) {
      if (chance(plan_.eio)) answer->result = -EIO;
      if (answer->result > 0 && chance(plan_.short_read))
        answer->result = static_cast<int32_t>(scramble(state_) % static_cast<uint64_t>(answer->result));
      if (answer->result > 0 && chance(plan_.flip)) {
        const uint64_t bit = scramble(state_) % (static_cast<uint64_t>(answer->result) * 8);
        op.buffer[bit / 8] = static_cast<uint8_t>(op.buffer[bit / 8] ^ 1u << bit % 8);
      }
    }
    if (chance(plan_.hang)) {
      held_.push_back({*answer, -1});
      return false;
    }
    if (chance(plan_.delay)) {
      held_.push_back({*answer, now_ns() + static_cast<int64_t>(plan_.delay_us) * 1000});
      return false;
    }
    return true;
  }

  size_t release_due(ReadDone* done, size_t capacity) {
    size_t count = 0;
    const int64_t now = held_.empty() ? 0 : now_ns();
    for (size_t i = 0; i < held_.size() && count < capacity;) {
      if (held_[i].due < 0 || held_[i].due > now) {
        ++i;
        continue;
      }
      done[count++] = held_[i].answer;
      held_[i] = held_.back();
      held_.pop_back();
    }
    return count;
  }

  std::unique_ptr<Io> inner_;
  FaultPlan plan_;
  std::string name_;
  uint64_t state_ = 0;
  std::unordered_map<uint32_t, ReadOp> out_;
  std::vector<Held> held_;
  std::vector<ReadDone> scratch_;
};

}  // namespace

bool parse_faults(const char* text, FaultPlan* plan, std::string* why) {
  const std::string all = text;
  for (size_t begin = 0; begin < all.size();) {
    size_t end = all.find(',', begin);
    if (end == std::string::npos) end = all.size();
    const std::string part = all.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    if (equals == std::string::npos) {
      *why = "fault \"" + part + "\" has no value";
      return false;
    }
    char* rest = nullptr;
    const double value = std::strtod(part.c_str() + equals + 1, &rest);
    if (key == "delay" && *rest == ':') plan->delay_us = static_cast<uint32_t>(std::strtoul(rest + 1, &rest, 10));
    if (key == "seed") {
      plan->seed = std::strtoull(part.c_str() + equals + 1, &rest, 10);
      if (*rest == 0) continue;
    }
    if (*rest || !(value >= 0 && value <= 1)) {
      *why = "fault \"" + part + "\" is no probability";
      return false;
    }
    if (key == "eio") {
      plan->eio = value;
    } else if (key == "short") {
      plan->short_read = value;
    } else if (key == "flip") {
      plan->flip = value;
    } else if (key == "delay") {
      plan->delay = value;
    } else if (key == "hang") {
      plan->hang = value;
    } else {
      *why = "unknown fault \"" + key + "\"";
      return false;
    }
  }
  return true;
}

std::unique_ptr<Io> make_faulty(std::unique_ptr<Io> inner, const FaultPlan& plan) {
  return std::make_unique<FaultyIo>(std::move(inner), plan);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
}

}  // namespace engram
