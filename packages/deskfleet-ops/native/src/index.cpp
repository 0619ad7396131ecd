// Pooling of groups and scores of the indexer.
#include "dots.h"
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

constexpr int64_t kKeys = 256;  // scored at a time, so that what they leave stays in cache

// What scoring one row needs, over all its heads.
struct Query {
  const double* const* at;
  const uint16_t* weights;
  int64_t heads, width;
};

// Scores of `count` keys that lie side by side; `sums` has room for heads * kKeys.
void score(const Query& query, const uint16_t* keys, int64_t count, double* sums, uint16_t* out) {
  dots(query.at, query.heads, keys, query.width, count, query.width, sums, kKeys);
  double totals[kKeys] = {};
  for (int64_t h = 0; h < query.heads; ++h) {
    const float weight = widen_bf16(query.weights[h]);
    for (int64_t j = 0; j < count; ++j) {
      const float dot = widen_bf16(to_bf16(sums[h * kKeys + j]));
      const float positive = dot < 0.0f ? 0.0f : dot;
      totals[j] += static_cast<double>(widen_bf16(to_bf16(positive * weight)));
    }
  }
  round_row(totals, count, out);
}

// The first of ascending numbers that is not below `least`.
int64_t first_from(const int64_t* numbers, int64_t count, int64_t least) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (numbers[low + half] < least) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

}  // namespace

void compress_pairs(const float* values, const float* gates, int64_t groups, int64_t ratio, int64_t width,
                    uint16_t* out) {
  for (int64_t g = 0; g < groups; ++g) {
    const float *v = values + g * ratio * width, *w = gates + g * ratio * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t count = width - i < kLanes ? width - i : kLanes;
      const auto lanes = [&](const float* from) {
        return count == kLanes ? widen(from + i) : widen_tail(from + i, count);
      };
      f64x8 most = lanes(w);
      for (int64_t p = 1; p < ratio; ++p) {
        const f64x8 other = lanes(w + p * width);
        most = other > most ? other : most;
      }
      f64x8 total = {}, pooled = {};
      for (int64_t p = 0; p < ratio; ++p) total += exponential(lanes(w + p * width) - most);
      for (int64_t p = 0; p < ratio; ++p) {
        pooled += exponential(lanes(w + p * width) - most) / total * lanes(v + p * width);
      }
      for (int64_t j = 0; j < count; ++j) out[g * width + i + j] = to_bf16(pooled[j]);
    }
  }
}

void index_scores(const uint16_t* query, const uint16_t* weights, const uint16_t* keys, const int64_t* numbers,
                  const int64_t* visible, const int64_t* blocks, int64_t num_blocks, int64_t block, int64_t rows,
                  int64_t heads, int64_t width, int64_t num_keys, uint16_t* out) {
  static thread_local Scratch<double> memory;
  static thread_local Scratch<const double*> row_memory;
  const int64_t wide = padded(width);
  double *wide_query = memory.get(heads * wide + heads * kKeys), *sums = wide_query + heads * wide;
  const double** at = row_memory.get(heads);
  for (int64_t h = 0; h < heads; ++h) at[h] = wide_query + h * wide;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) widen_row(query + (r * heads + h) * width, width, wide_query + h * wide);
    const Query one = {at, weights + r * heads, heads, width};
    uint16_t* to = out + r * num_keys;
    const auto score_all = [&](int64_t start, int64_t stop) {
      for (int64_t i = start; i < stop; i += kKeys) {
        score(one, keys + i * width, stop - i < kKeys ? stop - i : kKeys, sums, to + i);
      }
    };
    const int64_t last = first_from(numbers, num_keys, visible[r]);
    for (int64_t i = blocks == nullptr ? last : 0; i < num_keys; ++i) to[i] = 0xFF80;
    if (blocks == nullptr) {
      score_all(0, last);
      continue;
    }
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t number = blocks[r * num_blocks + b];
      if (number < 0) continue;
      const int64_t start = first_from(numbers, last, number * block);
      score_all(start, start + first_from(numbers + start, last - start, (number + 1) * block));
    }
  }
}

}  // namespace DF_ISA
}  // namespace df
