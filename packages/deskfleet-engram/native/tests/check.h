// The few lines of test framework that the C++ tests need.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

#define CHECK_EQ(left, right)                                                                        \
  do {                                                                                               \
    const auto left_value = (left);                                                                  \
    const auto right_value = (right);                                                                \
    if (!(left_value == right_value)) {                                                              \
      std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left,             \
                   static_cast<long long>(left_value), #right, static_cast<long long>(right_value)); \
      std::abort();                                                                                  \
    }                                                                                                \
  } while (0)

// Deterministic numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = (state_ += 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  uint64_t below(uint64_t bound) { return next() % bound; }
  void fill(void* data, size_t count) {
    auto* bytes = static_cast<uint8_t*>(data);
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(next());
  }

 private:
  uint64_t state_;
};
