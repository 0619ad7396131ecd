#include "table.h"

#include "kernels.h"

#define DF_STRING(x) #x
#define DF_NAME(x) DF_STRING(x)

namespace df {
namespace DF_ISA {

const Table table = {
    DF_NAME(DF_ISA), linear,      normed_linear, rms_norm,         rope,           pack,
    unpack,          pick_entries, decode_fp8,   sparse_attention, hc_mixes,       hc_split,
    hc_weights,      hc_collapse, hc_collapse_norm, hc_expand,     compress_pairs, index_scores,
    route,           expert_activation, routed_experts, shared_expert, add_round,  engram_gate,
};

}  // namespace DF_ISA
}  // namespace df
