// The kernels of one instruction set. Each set has a namespace of its own, so that nothing of one is linked into another.
#pragma once

#include "deskfleet_ops.h"

namespace df {

struct Table {
  const char* name;
  decltype(&df_linear) linear;
  decltype(&df_normed_linear) normed_linear;
  decltype(&df_rms_norm) rms_norm;
  decltype(&df_rope) rope;
  decltype(&df_pack) pack;
  decltype(&df_unpack) unpack;
  decltype(&df_pick_entries) pick_entries;
  decltype(&df_decode_fp8) decode_fp8;
  decltype(&df_sparse_attention) sparse_attention;
  decltype(&df_hc_mixes) hc_mixes;
  decltype(&df_hc_split) hc_split;
  decltype(&df_hc_weights) hc_weights;
  decltype(&df_hc_collapse) hc_collapse;
  decltype(&df_hc_collapse_norm) hc_collapse_norm;
  decltype(&df_hc_expand) hc_expand;
  decltype(&df_compress_pairs) compress_pairs;
  decltype(&df_index_scores) index_scores;
  decltype(&df_route) route;
  decltype(&df_expert_activation) expert_activation;
  decltype(&df_routed_experts) routed_experts;
  decltype(&df_shared_expert) shared_expert;
  decltype(&df_add_round) add_round;
  decltype(&df_engram_gate) engram_gate;
};

namespace sse2 {
extern const Table table;
}
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}
namespace neon {
extern const Table table;
}

}  // namespace df
