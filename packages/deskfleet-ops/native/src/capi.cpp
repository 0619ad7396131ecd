// The C interface: the choice of an instruction set, and what does not depend on it.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "table.h"

namespace df {
namespace {

// From the most to the least able; only those that this processor has.
std::vector<const Table*> available() {
  std::vector<const Table*> found;
#if defined(DF_HAS_SSE2)
  __builtin_cpu_init();
  // The levels x86-64-v4 and -v3 by what the kernels use of them: not every compiler knows the levels' names here.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) found.push_back(&avx512::table);
  if (v3) found.push_back(&avx2::table);
  found.push_back(&sse2::table);
#endif
#if defined(DF_HAS_NEON)
  found.push_back(&neon::table);
#endif
  return found;
}

const std::vector<const Table*>& tables() {
  static const std::vector<const Table*> found = available();
  return found;
}

std::atomic<const Table*> in_use{tables().front()};

const Table& now() { return *in_use.load(std::memory_order_relaxed); }

float score_at(const void* scores, int32_t type, int64_t at) {
  if (type == DF_F32) return static_cast<const float*>(scores)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(scores)[at]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// A key that falls as a score rises, and rises with the position: the best is the smallest. NaN counts as the best,
// as in torch, so that what is broken shows; -0 and 0 are equal.
uint64_t rank_of(float score, int64_t position) {
  uint32_t bits;
  score += 0.0f;
  memcpy(&bits, &score, 4);
  const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  const uint32_t falling = score != score ? 0 : ~rising;
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint32_t>(position);
}

constexpr uint32_t kAbsent = 0xFF800000u;  // the high half of the rank of -inf, that is ~~bits(-inf)

}  // namespace
}  // namespace df

using df::now;

extern "C" {

uint32_t df_abi_version(void) { return DF_ABI_VERSION; }

const char* df_instruction_set(void) { return now().name; }

int32_t df_use_instruction_set(const char* name) {
  for (const df::Table* table : df::tables()) {
    if (strcmp(table->name, name) != 0) continue;
    df::in_use.store(table);
    return 1;
  }
  return 0;
}

void df_linear(const uint16_t* x, int64_t rows, int64_t groups, int64_t k, const void* w, int32_t w_type, int64_t outs,
               int32_t quantize, void* out, int32_t out_type) {
  now().linear(x, rows, groups, k, w, w_type, outs, quantize, out, out_type);
}

void df_normed_linear(const uint16_t* x, int64_t rows, int64_t k, const uint16_t* w, int64_t outs, const float* norm,
                      double eps, uint16_t* out) {
  now().normed_linear(x, rows, k, w, outs, norm, eps, out);
}

void df_rms_norm(const uint16_t* x, const float* weight, double eps, int64_t rows, int64_t width, uint16_t* out) {
  now().rms_norm(x, weight, eps, rows, width, out);
}

void df_rope(const uint16_t* x, const float* cos, const float* sin, int32_t inverse, int64_t rows, int64_t heads,
             int64_t width, int64_t pairs, uint16_t* out) {
  now().rope(x, cos, sin, inverse, rows, heads, width, pairs, out);
}

void df_pack(int32_t record, const uint16_t* x, int64_t rows, int64_t width, uint8_t* out) {
  now().pack(record, x, rows, width, out);
}

void df_unpack(int32_t record, const uint8_t* records, const int64_t* index, int64_t rows, int64_t width,
               uint16_t* out) {
  now().unpack(record, records, index, rows, width, out);
}

int64_t df_pick_entries(int32_t record, const uint8_t* records, const int64_t* picks, const int64_t* slots, int64_t rows,
                        int64_t length, const int32_t* table, int64_t table_stride, int64_t per_block, int64_t width,
                        uint16_t* out, int64_t* places) {
  return now().pick_entries(record, records, picks, slots, rows, length, table, table_stride, per_block, width, out,
                            places);
}

void df_decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t count, uint16_t* out) {
  now().decode_fp8(codes, scales, count, out);
}

void df_scatter(uint8_t* target, const int64_t* target_index, const uint8_t* source, const int64_t* source_index,
                int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = source_index == nullptr ? i : source_index[i];
    memcpy(target + target_index[i] * bytes, source + from * bytes, static_cast<size_t>(bytes));
  }
}

void df_sparse_attention(const uint16_t* query, int64_t rows, int64_t heads, int64_t width, const uint16_t* pool_a,
                         const int64_t* index_a, int64_t length_a, const uint16_t* pool_b, const int64_t* index_b,
                         int64_t length_b, const float* sink, float scale, uint16_t* out) {
  now().sparse_attention(query, rows, heads, width, pool_a, index_a, length_a, pool_b, index_b, length_b, sink, scale,
                         out);
}

void df_hc_mixes(const uint16_t* stream, const float* weight, double eps, int64_t rows, int64_t copies, int64_t width,
                 float* out) {
  now().hc_mixes(stream, weight, eps, rows, copies, width, out);
}

void df_hc_split(const float* mixes, const float* scale, const float* base, int64_t rows, int64_t copies,
                 int64_t iterations, double eps, float* pre, float* post, float* comb) {
  now().hc_split(mixes, scale, base, rows, copies, iterations, eps, pre, post, comb);
}

void df_hc_weights(const uint16_t* stream, const float* weight, double norm_eps, const float* scale, const float* base,
                   int64_t rows, int64_t copies, int64_t width, int64_t iterations, double eps, float* pre, float* post,
                   float* comb) {
  now().hc_weights(stream, weight, norm_eps, scale, base, rows, copies, width, iterations, eps, pre, post, comb);
}

void df_hc_collapse_norm(const uint16_t* stream, const float* pre, const float* norm, double eps, int64_t rows,
                         int64_t copies, int64_t width, uint16_t* out) {
  now().hc_collapse_norm(stream, pre, norm, eps, rows, copies, width, out);
}

void df_hc_collapse(const uint16_t* stream, const float* pre, int64_t rows, int64_t copies, int64_t width,
                    uint16_t* out) {
  now().hc_collapse(stream, pre, rows, copies, width, out);
}

void df_hc_expand(const uint16_t* output, const uint16_t* stream, const float* post, const float* comb, int64_t rows,
                  int64_t copies, int64_t width, uint16_t* out) {
  now().hc_expand(output, stream, post, comb, rows, copies, width, out);
}

void df_compress_pairs(const float* values, const float* gates, int64_t groups, int64_t ratio, int64_t width,
                       uint16_t* out) {
  now().compress_pairs(values, gates, groups, ratio, width, out);
}

void df_index_scores(const uint16_t* query, const uint16_t* weights, const uint16_t* keys, const int64_t* numbers,
                     const int64_t* visible, const int64_t* blocks, int64_t num_blocks, int64_t block, int64_t rows,
                     int64_t heads, int64_t width, int64_t num_keys, uint16_t* out) {
  now().index_scores(query, weights, keys, numbers, visible, blocks, num_blocks, block, rows, heads, width, num_keys,
                     out);
}

void df_candidate_scores(const void* scores, int32_t type, int64_t rows, int64_t num, int64_t block, const int64_t* block_numbers,
                         int64_t num_blocks, const int64_t* visible, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t newest = visible[r] > 0 ? (visible[r] - 1) / block : -1;
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t stop = std::min((b + 1) * block, num);
      float best = -INFINITY;
      for (int64_t i = b * block; i < stop; ++i) {
        const float score = df::score_at(scores, type, r * num + i);
        best = best != best || score < best ? best : score;  // NaN stays, as in torch
      }
      out[r * num_blocks + b] = block_numbers[b] == newest ? INFINITY : best;
    }
  }
}

void df_top_positions(const void* scores, int32_t type, int64_t rows, int64_t num, int64_t count, int64_t* out) {
  static thread_local std::vector<uint64_t> ranks;
  for (int64_t r = 0; r < rows; ++r) {
    ranks.clear();
    for (int64_t i = 0; i < num; ++i) {
      const uint64_t rank = df::rank_of(df::score_at(scores, type, r * num + i), i);
      if (rank >> 32 < df::kAbsent) ranks.push_back(rank);
    }
    const int64_t found = std::min<int64_t>(static_cast<int64_t>(ranks.size()), count);
    if (found < static_cast<int64_t>(ranks.size())) std::nth_element(ranks.begin(), ranks.begin() + found, ranks.end());
    int64_t* to = out + r * count;
    for (int64_t i = 0; i < found; ++i) to[i] = static_cast<int64_t>(ranks[static_cast<size_t>(i)] & 0xFFFFFFFFu);
    std::sort(to, to + found);
    std::fill(to + found, to + count, -1);
  }
}

void df_route(const uint16_t* x, const void* weight, int32_t w_type, const float* bias, int64_t bias_stride,
              int64_t rows, int64_t width, int64_t experts, int64_t num_chosen, double scaling, double temperature,
              int64_t* chosen, float* weights) {
  now().route(x, weight, w_type, bias, bias_stride, rows, width, experts, num_chosen, scaling, temperature, chosen,
              weights);
}

void df_expert_activation(const uint16_t* gate, int64_t gate_stride, const uint16_t* up, int64_t up_stride, float limit,
                          const float* route_weight, int64_t rows, int64_t width, uint16_t* out) {
  now().expert_activation(gate, gate_stride, up, up_stride, limit, route_weight, rows, width, out);
}

void df_routed_experts(const uint16_t* x, const int64_t* chosen, const float* weights, const uint8_t* w13,
                       const uint8_t* w13_scales, const uint8_t* w2, const uint8_t* w2_scales, int64_t rows,
                       int64_t width, int64_t inner, int64_t num_chosen, int64_t first_expert, int64_t experts,
                       float limit, double* total) {
  now().routed_experts(x, chosen, weights, w13, w13_scales, w2, w2_scales, rows, width, inner, num_chosen, first_expert,
                       experts, limit, total);
}

void df_shared_expert(const uint16_t* x, const uint16_t* w13, const uint16_t* w2, int64_t rows, int64_t width,
                      int64_t inner, float limit, uint16_t* out) {
  now().shared_expert(x, w13, w2, rows, width, inner, limit, out);
}

void df_add_round(const double* total, const uint16_t* added, int64_t count, uint16_t* out) {
  now().add_round(total, added, count, out);
}

void df_engram_gate(const uint16_t* stream, const uint16_t* key, int64_t key_stride, const uint16_t* value,
                    int64_t value_stride, const float* weight, const uint8_t* alive, double eps, int64_t rows,
                    int64_t copies, int64_t width, uint16_t* out) {
  now().engram_gate(stream, key, key_stride, value, value_stride, weight, alive, eps, rows, copies, width, out);
}

}  // extern "C"
