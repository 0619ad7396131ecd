// Memory that a kernel needs while it runs: one growing buffer per thread and purpose, never given back.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace df {
namespace DF_ISA {

// Aligned to a cache line. Aborts when there is no memory: a kernel has no way to fail.
template <typename T>
class Scratch {
 public:
  ~Scratch() { free(at_); }

  T* get(int64_t count) {
    if (count > size_) {
      free(at_);
      const int64_t grown = count + count / 2;
      const size_t bytes = (static_cast<size_t>(grown) * sizeof(T) + 63) / 64 * 64;
      at_ = static_cast<T*>(aligned_alloc(64, bytes));
      if (at_ == nullptr) abort();
      size_ = grown;
    }
    return at_;
  }

 private:
  T* at_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace DF_ISA
}  // namespace df
