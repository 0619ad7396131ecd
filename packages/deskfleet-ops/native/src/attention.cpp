// Attention of each row over its own index list, in blocks of 64 of the list.
#include "dots.h"
#include "kernels.h"
#include "numbers.h"
#include "scratch.h"

namespace df {
namespace DF_ISA {
namespace {

constexpr int64_t kBlock = 64;

// Pools up to this size are widened whole, once for all rows; a list of a larger one is widened row by row.
constexpr int64_t kWidePool = 8192;

struct Pool {
  const uint16_t* rows;
  const int64_t* index;
  int64_t length;
  const double* wide;  // or null
};

int64_t size_of(const Pool& pool, int64_t rows) {
  int64_t last = -1;
  for (int64_t i = 0; i < rows * pool.length; ++i) last = pool.index[i] > last ? pool.index[i] : last;
  return last + 1;
}

// Where the rows that places start..stop of a list name lie as doubles; nothing for those that are absent: adding zeros
// changes no sum. `own` has room for those of pools that are not wide.
int64_t gather(const Pool* pools, int64_t row, int64_t start, int64_t stop, int64_t width, double* own,
               const double** at) {
  const int64_t wide = padded(width);
  int64_t count = 0;
  for (int64_t place = start; place < stop; ++place) {
    const Pool& pool = place < pools[0].length ? pools[0] : pools[1];
    const int64_t within = place < pools[0].length ? place : place - pools[0].length;
    const int64_t entry = pool.index[row * pool.length + within];
    if (entry < 0) continue;
    if (pool.wide != nullptr) {
      at[count] = pool.wide + entry * wide;
    } else {
      widen_row(pool.rows + entry * width, width, own + count * wide);
      at[count] = own + count * wide;
    }
    ++count;
  }
  return count;
}

// One head's block: scores become weights; returns how much what came before them shrinks.
double weigh(double* scores, int64_t count, float scale, double* maximum, double* denominator, double* weights) {
  f64x8 most = f64x8{} + *maximum;
  for (int64_t j = count; j < padded(count); ++j) scores[j] = -__builtin_inf();
  for (int64_t j = 0; j < count; j += kLanes) {
    const f64x8 scaled = doubles_of(floats_of(load<f64x8>(scores + j)) * scale);
    most = scaled > most ? scaled : most;
    store(scores + j, scaled);
  }
  const double new_maximum = largest(most);
  f64x8 sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const f32x8 single = floats_of(exponential(load<f64x8>(scores + j) - new_maximum));
    sums += doubles_of(single);
    store(weights + j, doubles_of(rounded_to_bf16(single)));
  }
  const double rescale = exponential(*maximum - new_maximum);
  *denominator = *denominator * rescale + sum(sums);
  *maximum = new_maximum;
  return rescale;
}

}  // namespace

void sparse_attention(const uint16_t* query, int64_t rows, int64_t heads, int64_t width, const uint16_t* pool_a,
                      const int64_t* index_a, int64_t length_a, const uint16_t* pool_b, const int64_t* index_b,
                      int64_t length_b, const float* sink, float scale, uint16_t* out) {
  static thread_local Scratch<double> memory, pool_memory;
  static thread_local Scratch<const double*> row_memory;
  Pool pools[2] = {{pool_a, index_a, length_a, nullptr}, {pool_b, index_b, length_b, nullptr}};
  const int64_t wide = padded(width), length = length_a + length_b;
  double* wide_query = memory.get(3 * heads * wide + kBlock * wide + 2 * heads * kBlock + 3 * heads);
  double* values = wide_query + heads * wide;
  double* scores = values + kBlock * wide;
  double* weights = scores + heads * kBlock;
  double* mixed = weights + heads * kBlock;
  double* total = mixed + heads * wide;
  double *maximum = total + heads * wide, *denominator = maximum + heads, *rescale = denominator + heads;
  const double **at = row_memory.get(heads + kBlock), **keys = at + heads;
  for (int64_t h = 0; h < heads; ++h) at[h] = wide_query + h * wide;
  const int64_t sizes[2] = {size_of(pools[0], rows), size_of(pools[1], rows)};
  if (sizes[0] + sizes[1] <= kWidePool) {
    double* to = pool_memory.get((sizes[0] + sizes[1]) * wide);
    for (int p = 0; p < 2; ++p) {
      for (int64_t i = 0; i < sizes[p]; ++i) widen_row(pools[p].rows + i * width, width, to + i * wide);
      pools[p].wide = to;
      to += sizes[p] * wide;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      widen_row(query + (r * heads + h) * width, width, wide_query + h * wide);
      maximum[h] = -1e30;
      denominator[h] = 0;
    }
    for (int64_t i = 0; i < heads * wide; ++i) total[i] = 0;
    for (int64_t start = 0; start < length; start += kBlock) {
      const int64_t stop = start + kBlock < length ? start + kBlock : length;
      const int64_t count = gather(pools, r, start, stop, width, values, keys);
      if (count == 0) continue;
      dots(at, heads, keys, count, wide, scores, kBlock);
      for (int64_t h = 0; h < heads; ++h) {
        rescale[h] =
            weigh(scores + h * kBlock, count, scale, maximum + h, denominator + h, weights + h * kBlock);
      }
      mix(weights, kBlock, heads, keys, count, wide, mixed, wide);
      for (int64_t h = 0; h < heads; ++h) {
        const double factor = rescale[h];
        double *to = total + h * wide, *from = mixed + h * wide;
        for (int64_t i = 0; i < wide; ++i) to[i] = to[i] * factor + from[i];
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const double divisor = denominator[h] + exponential(static_cast<double>(sink[h]) - maximum[h]);
      const double* from = total + h * wide;
      uint16_t* to = out + (r * heads + h) * width;
      for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(from[i] / divisor);
    }
  }
}

}  // namespace DF_ISA
}  // namespace df
