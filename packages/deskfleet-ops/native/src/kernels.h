// What each instruction set implements; the contracts stand in deskfleet_ops.h.
#pragma once

#include "table.h"

namespace df {
namespace DF_ISA {

#define DF_SAME_AS(name) decltype(df_##name) name
DF_SAME_AS(linear);
DF_SAME_AS(normed_linear);
DF_SAME_AS(rms_norm);
DF_SAME_AS(rope);
DF_SAME_AS(pack);
DF_SAME_AS(unpack);
DF_SAME_AS(pick_entries);
DF_SAME_AS(decode_fp8);
DF_SAME_AS(sparse_attention);
DF_SAME_AS(hc_mixes);
DF_SAME_AS(hc_split);
DF_SAME_AS(hc_weights);
DF_SAME_AS(hc_collapse);
DF_SAME_AS(hc_collapse_norm);
DF_SAME_AS(hc_expand);
DF_SAME_AS(compress_pairs);
DF_SAME_AS(index_scores);
DF_SAME_AS(route);
DF_SAME_AS(expert_activation);
DF_SAME_AS(routed_experts);
DF_SAME_AS(shared_expert);
DF_SAME_AS(add_round);
DF_SAME_AS(engram_gate);
#undef DF_SAME_AS

}  // namespace DF_ISA
}  // namespace df
