// Every operator on made-up numbers, with every instruction set that this processor has: the bits must be those written
// down here, on any processor and with any compiler. What the bits should be, the Python tests know.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <vector>

#include "deskfleet_ops.h"

namespace {

class Numbers {
 public:
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 16);
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint32_t>(limit)); }
  // Between -2 and 2, with eight bits, and now and then much smaller.
  float value() {
    const float plain = static_cast<float>(static_cast<int32_t>(next() % 511) - 255) / 128.0f;
    return next() % 8 == 0 ? plain / 1024.0f : plain;
  }

  std::vector<uint16_t> bf16(int64_t count) {
    std::vector<uint16_t> out(static_cast<size_t>(count));
    for (auto& v : out) {
      const float f = value();
      uint32_t bits;
      memcpy(&bits, &f, 4);
      v = static_cast<uint16_t>(bits >> 16);
    }
    return out;
  }
  std::vector<float> floats(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (auto& v : out) {
      const float coarse = value(), fine = static_cast<float>(next() % 1000) * 1e-6f;
      v = coarse + fine;
    }
    return out;
  }
  std::vector<int64_t> indices(int64_t count, int64_t least, int64_t limit) {
    std::vector<int64_t> out(static_cast<size_t>(count));
    for (auto& v : out) v = least + below(limit - least);
    return out;
  }
  std::vector<uint8_t> bytes(int64_t count, uint32_t least, uint32_t limit) {
    std::vector<uint8_t> out(static_cast<size_t>(count));
    for (auto& v : out) v = static_cast<uint8_t>(least + next() % (limit - least));
    return out;
  }

 private:
  uint64_t state_ = 0x9E3779B97F4A7C15u;
};

// FNV-1a of everything that was computed.
class Digest {
 public:
  template <typename T>
  void add(const std::vector<T>& values) {
    const auto* at = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash_ = (hash_ ^ at[i]) * 0x100000001B3u;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

template <typename T>
std::vector<T> room(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count));
}

void linears(Numbers& n, Digest& d, int64_t rows) {
  const int64_t k = 96, outs = 37, groups = 3;
  const auto x = n.bf16(rows * groups * k), w = n.bf16(groups * outs * k), odd = n.bf16(rows * 45), odd_w = n.bf16(outs * 45);
  const auto wide = n.floats(outs * k), norm = n.floats(outs);
  auto bf16 = room<uint16_t>(rows * groups * outs);
  auto f32 = room<float>(rows * outs);
  auto f64 = room<double>(rows * outs);
  for (int32_t quantize = 0; quantize < 2; ++quantize) {
    df_linear(x.data(), rows, groups, k, w.data(), DF_BF16, outs, quantize, bf16.data(), DF_BF16);
    d.add(bf16);
    df_linear(x.data(), rows, 1, k, wide.data(), DF_F32, outs, quantize, f32.data(), DF_F32);
    d.add(f32);
    df_linear(x.data(), rows, 1, k, w.data(), DF_BF16, outs, quantize, f64.data(), DF_F64);
    d.add(f64);
  }
  df_linear(odd.data(), rows, 1, 45, odd_w.data(), DF_BF16, outs, 0, f64.data(), DF_F64);
  d.add(f64);
  bf16.resize(static_cast<size_t>(rows * outs));
  df_normed_linear(x.data(), rows, k, w.data(), outs, norm.data(), 1e-6, bf16.data());
  d.add(bf16);
  auto rotated = room<uint16_t>(rows * groups * k);
  const auto cos = n.floats(rows * 8), sin = n.floats(rows * 8);
  for (int32_t inverse = 0; inverse < 2; ++inverse) {
    df_rope(x.data(), cos.data(), sin.data(), inverse, rows, groups, k, 8, rotated.data());
    d.add(rotated);
  }
}

void records(Numbers& n, Digest& d, int64_t rows) {
  const int64_t width = 64, pool = 40;
  const auto x = n.bf16(pool * width);
  const auto index = n.indices(rows, 0, pool), picks = n.indices(rows * 9, -2, 16), slots = n.indices(rows, 0, 2);
  const std::vector<int32_t> blocks = {1, 3, 0, 2, 4, 3, 2, 1};
  for (int32_t kind : {DF_WINDOW, DF_ENTRY, DF_INDEX_KEY}) {
    const int64_t bytes = kind == DF_WINDOW ? 66 : kind == DF_ENTRY ? 36 : 34;
    auto packed = room<uint8_t>(pool * bytes);
    auto back = room<uint16_t>(pool * width), some = room<uint16_t>(rows * width), picked = room<uint16_t>(rows * 9 * width);
    auto places = room<int64_t>(rows * 9);
    df_pack(kind, x.data(), pool, width, packed.data());
    df_unpack(kind, packed.data(), nullptr, pool, width, back.data());
    df_unpack(kind, packed.data(), index.data(), rows, width, some.data());
    df_pick_entries(kind, packed.data(), picks.data(), slots.data(), rows, 9, blocks.data(), 4, 4, width, picked.data(),
                    places.data());
    d.add(packed), d.add(back), d.add(some), d.add(picked), d.add(places);
  }
  const auto codes = n.bytes(rows * width, 0, 127), scales = n.bytes(rows * 2, 110, 130);
  auto decoded = room<uint16_t>(rows * width);
  df_decode_fp8(codes.data(), scales.data(), rows * width, decoded.data());
  d.add(decoded);
}

void attention(Numbers& n, Digest& d, int64_t rows, int64_t width) {
  const int64_t heads = 7, pool = 90;
  const auto query = n.bf16(rows * heads * width), a = n.bf16(pool * width), b = n.bf16(pool * width);
  const auto index_a = n.indices(rows * 64, -8, pool), index_b = n.indices(rows * 41, -40, pool);
  const auto sink = n.floats(heads);
  auto out = room<uint16_t>(rows * heads * width);
  df_sparse_attention(query.data(), rows, heads, width, a.data(), index_a.data(), 64, b.data(), index_b.data(), 41,
                      sink.data(), 0.2f, out.data());
  d.add(out);
}

void streams(Numbers& n, Digest& d, int64_t rows, int64_t copies) {
  const int64_t width = 72, outs = (2 + copies) * copies;
  const auto stream = n.bf16(rows * copies * width), output = n.bf16(rows * width);
  const auto weight = n.floats(outs * copies * width), base = n.floats(outs), norm = n.floats(width);
  const std::vector<float> scale = {0.5f, 0.75f, 0.25f};
  auto mixes = room<float>(rows * outs), pre = room<float>(rows * copies), post = pre, comb = room<float>(rows * copies * copies);
  df_hc_mixes(stream.data(), weight.data(), 1e-6, rows, copies, width, mixes.data());
  df_hc_split(mixes.data(), scale.data(), base.data(), rows, copies, 20, 1e-6, pre.data(), post.data(), comb.data());
  d.add(mixes), d.add(pre), d.add(post), d.add(comb);
  df_hc_weights(stream.data(), weight.data(), 1e-6, scale.data(), base.data(), rows, copies, width, 5, 1e-6, pre.data(),
                post.data(), comb.data());
  auto flat = room<uint16_t>(rows * width), expanded = room<uint16_t>(rows * copies * width);
  df_hc_collapse(stream.data(), pre.data(), rows, copies, width, flat.data());
  d.add(flat);
  df_hc_collapse_norm(stream.data(), pre.data(), norm.data(), 1e-6, rows, copies, width, flat.data());
  d.add(flat);
  df_hc_expand(output.data(), stream.data(), post.data(), comb.data(), rows, copies, width, expanded.data());
  d.add(expanded);
  const auto alive = n.bytes(rows, 0, 2);
  const auto key = n.bf16(rows * copies * width);
  const auto gate = n.floats(copies * width);
  df_engram_gate(stream.data(), key.data(), copies * width, output.data(), width, gate.data(), alive.data(), 1e-6, rows,
                 copies, width, expanded.data());
  d.add(expanded);
}

void experts(Numbers& n, Digest& d, int64_t rows) {
  const int64_t width = 64, inner = 96, count = 5;
  const auto x = n.bf16(rows * width), gate = n.bf16(count * width);
  const auto bias = n.floats(count);
  auto chosen = room<int64_t>(rows * 2);
  auto weights = room<float>(rows * 2);
  df_route(x.data(), gate.data(), DF_BF16, bias.data(), 0, rows, width, count, 2, 1.5, 0.9, chosen.data(), weights.data());
  d.add(chosen), d.add(weights);
  const auto w13 = n.bytes(count * inner * width, 0, 256), w2 = n.bytes(count * inner * width / 2, 0, 256);
  const auto s13 = n.bytes(count * 2 * inner * width / 32, 118, 124), s2 = n.bytes(count * inner * width / 32, 118, 124);
  auto total = room<double>(rows * width);
  df_routed_experts(x.data(), chosen.data(), weights.data(), w13.data(), s13.data(), w2.data(), s2.data(), rows, width,
                    inner, 2, 0, count, 7.0f, total.data());
  d.add(total);
  const auto shared13 = n.bf16(2 * inner * width), shared2 = n.bf16(width * inner);
  auto out = room<uint16_t>(rows * width), activated = room<uint16_t>(rows * 30);
  df_shared_expert(x.data(), shared13.data(), shared2.data(), rows, width, inner, 7.0f, out.data());
  d.add(out);
  df_add_round(total.data(), x.data(), rows * width, out.data());
  d.add(out);
  df_expert_activation(x.data(), width, x.data() + 30, width, 1.5f, weights.data(), rows, 30, activated.data());
  d.add(activated);
}

void indexer(Numbers& n, Digest& d, int64_t rows) {
  const int64_t heads = 4, width = 32, keys = 300;
  const auto query = n.bf16(rows * heads * width), weights = n.bf16(rows * heads), key = n.bf16(keys * width);
  std::vector<int64_t> numbers(keys);
  for (int64_t i = 0; i < keys; ++i) numbers[static_cast<size_t>(i)] = i;
  const auto visible = n.indices(rows, 1, keys + 1), blocks = n.indices(rows * 6, -1, 38);
  auto scores = room<uint16_t>(rows * keys);
  auto best = room<int64_t>(rows * 20);
  auto block_scores = room<float>(rows * 38);
  for (const int64_t* among : {static_cast<const int64_t*>(nullptr), blocks.data()}) {
    df_index_scores(query.data(), weights.data(), key.data(), numbers.data(), visible.data(), among, 6, 8, rows, heads,
                    width, keys, scores.data());
    df_top_positions(scores.data(), DF_BF16, rows, keys, 20, best.data());
    df_candidate_scores(scores.data(), DF_BF16, rows, keys, 8, numbers.data(), 38, visible.data(), block_scores.data());
    d.add(scores), d.add(best), d.add(block_scores);
  }
  const auto values = n.floats(rows * 2 * 44), gates = n.floats(rows * 2 * 44);
  auto pooled = room<uint16_t>(rows * 44);
  df_compress_pairs(values.data(), gates.data(), rows, 2, 44, pooled.data());
  d.add(pooled);
}

uint64_t everything() {
  Numbers n;
  Digest d;
  for (int64_t rows : {1, 2, 3, 6, 7, 29}) {
    linears(n, d, rows);
    records(n, d, rows);
    attention(n, d, rows, 64);
    attention(n, d, rows, 20);
    streams(n, d, rows, 4);
    streams(n, d, rows, 3);
    experts(n, d, rows);
    indexer(n, d, rows);
  }
  return d.value();
}

constexpr uint64_t kExpected = 0xce82374fa6b2c122;

}  // namespace

int main() {
  int wrong = 0;
  for (const char* name : {"avx512", "avx2", "sse2", "neon"}) {
    if (!df_use_instruction_set(name)) continue;
    const uint64_t found = everything();
    const bool right = found == kExpected;
    printf("%s: %016llx%s\n", name, static_cast<unsigned long long>(found), right ? "" : " is not what was written down");
    wrong += !right;
  }
  return wrong != 0;
}
