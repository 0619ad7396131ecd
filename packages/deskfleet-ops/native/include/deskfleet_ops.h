/* Operators of the DeepSeek-V4.1 forward pass on a CPU, as C functions over plain arrays.
 *
 * Arithmetic: sums and transcendental functions in double, rounding to float and bfloat16 where the publisher's kernels
 * store. Every sum has one order, which depends on the row's own length alone: results do not depend on how many rows a
 * call has, nor on the instruction set that was chosen.
 *
 * bfloat16 is uint16_t, packed codes are uint8_t, indices int64_t. Arrays are dense and row-major unless a stride is
 * given. No function allocates what it returns, keeps a pointer, or fails; sizes are the caller's responsibility.
 * All functions may be called from any thread. Scratch memory is kept per thread. Groups, at the end, are the exception:
 * collectives of processes of one machine, through memory that they share.
 */
#ifndef DESKFLEET_OPS_H
#define DESKFLEET_OPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#define DF_ABI_VERSION 1

enum df_type { DF_BF16 = 0, DF_F32 = 1, DF_F64 = 2, DF_I32 = 3 };

/* Packed rows: codes, then scales. */
enum df_record {
  DF_WINDOW = 0,    /* FP8 E4M3, one E8M0 scale for 32 */
  DF_ENTRY = 1,     /* FP4 E2M1, one E4M3 scale for 16 */
  DF_INDEX_KEY = 2, /* FP4 E2M1, one E8M0 scale for 32 */
};

uint32_t df_abi_version(void);

/* The instruction set in use: "avx512", "avx2", "sse2" or "neon". */
const char* df_instruction_set(void);

/* Use another one. 0 when this build or this processor does not have it; then nothing changes. */
int32_t df_use_instruction_set(const char* name);

/* x [rows, groups, k] bf16, w [groups, outs, k] of w_type (bf16 or f32) -> out [rows, groups, outs] of out_type.
 * quantize: x takes FP8 in groups of 32 first. */
void df_linear(const uint16_t* x, int64_t rows, int64_t groups, int64_t k, const void* w, int32_t w_type, int64_t outs,
               int32_t quantize, void* out, int32_t out_type);

/* df_linear with quantize, of one group, and df_rms_norm of what it gives: w bf16 [outs, k], norm f32 [outs] -> out
 * [rows, outs]. */
void df_normed_linear(const uint16_t* x, int64_t rows, int64_t k, const uint16_t* w, int64_t outs, const float* norm,
                      double eps, uint16_t* out);

/* x [rows, width], weight f32 [width] -> out [rows, width]. */
void df_rms_norm(const uint16_t* x, const float* weight, double eps, int64_t rows, int64_t width, uint16_t* out);

/* x [rows, heads, width], cos and sin f32 [rows, pairs] -> out like x; the last 2 * pairs of each head rotate. */
void df_rope(const uint16_t* x, const float* cos, const float* sin, int32_t inverse, int64_t rows, int64_t heads,
             int64_t width, int64_t pairs, uint16_t* out);

/* x [rows, width] -> records [rows, bytes]. */
void df_pack(int32_t record, const uint16_t* x, int64_t rows, int64_t width, uint8_t* out);

/* records [*, bytes] -> out [rows, width]; row i is record index[i], or i without an index. */
void df_unpack(int32_t record, const uint8_t* records, const int64_t* index, int64_t rows, int64_t width,
               uint16_t* out);

/* The compressed entries that rows picked, each once. picks [rows, length] are entry numbers, -1 absent; entry n of row r
 * lies in record table[slots[r] * table_stride + n / per_block] * per_block + n % per_block of `records`. -> out [found,
 * width] unpacked, room for rows * length; places int64 [rows, length] of them, -1 absent. Returns found. */
int64_t df_pick_entries(int32_t record, const uint8_t* records, const int64_t* picks, const int64_t* slots, int64_t rows,
                        int64_t length, const int32_t* table, int64_t table_stride, int64_t per_block, int64_t width,
                        uint16_t* out, int64_t* places);

/* FP8 codes [count] with one E8M0 scale for 32 [count / 32] -> out [count]. */
void df_decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t count, uint16_t* out);

/* target[target_index[i]] = source[source_index[i]], rows of `bytes` bytes; no source_index: i. */
void df_scatter(uint8_t* target, const int64_t* target_index, const uint8_t* source, const int64_t* source_index,
                int64_t count, int64_t bytes);

/* query [rows, heads, width]; two pools of rows [*, width], each with an index [rows, length], -1 absent (a length may
 * be 0); sink f32 [heads] -> out like query. */
void df_sparse_attention(const uint16_t* query, int64_t rows, int64_t heads, int64_t width, const uint16_t* pool_a,
                         const int64_t* index_a, int64_t length_a, const uint16_t* pool_b, const int64_t* index_b,
                         int64_t length_b, const float* sink, float scale, uint16_t* out);

/* stream [rows, copies * width], weight f32 [(2 + copies) * copies, copies * width] -> out f32 [rows, same]. */
void df_hc_mixes(const uint16_t* stream, const float* weight, double eps, int64_t rows, int64_t copies, int64_t width,
                 float* out);

/* mixes f32 [rows, (2 + copies) * copies], scale f32 [3], base f32 [(2 + copies) * copies] -> pre and post
 * f32 [rows, copies], comb f32 [rows, copies, copies]. */
void df_hc_split(const float* mixes, const float* scale, const float* base, int64_t rows, int64_t copies,
                 int64_t iterations, double eps, float* pre, float* post, float* comb);

/* df_hc_mixes, then df_hc_split. */
void df_hc_weights(const uint16_t* stream, const float* weight, double norm_eps, const float* scale, const float* base,
                   int64_t rows, int64_t copies, int64_t width, int64_t iterations, double eps, float* pre, float* post,
                   float* comb);

/* stream [rows, copies, width], pre f32 [rows, copies] -> out [rows, width]. */
void df_hc_collapse(const uint16_t* stream, const float* pre, int64_t rows, int64_t copies, int64_t width,
                    uint16_t* out);

/* df_hc_collapse, then df_rms_norm by norm f32 [width]. */
void df_hc_collapse_norm(const uint16_t* stream, const float* pre, const float* norm, double eps, int64_t rows,
                         int64_t copies, int64_t width, uint16_t* out);

/* output [rows, width], stream [rows, copies, width], post and comb as above -> out like stream. */
void df_hc_expand(const uint16_t* output, const uint16_t* stream, const float* post, const float* comb, int64_t rows,
                  int64_t copies, int64_t width, uint16_t* out);

/* values and gates f32 [groups, ratio, width] -> out [groups, width]. */
void df_compress_pairs(const float* values, const float* gates, int64_t groups, int64_t ratio, int64_t width,
                       uint16_t* out);

/* query [rows, heads, width], weights bf16 [rows, heads], keys [num_keys, width] -> out bf16 [rows, num_keys], -inf where a
 * row may not look: at keys whose number, of numbers int64 [num_keys], ascending, is not below visible int64 [rows]; and,
 * unless blocks is null, outside of its blocks int64 [rows, num_blocks] (-1: none) of `block` numbers each. */
void df_index_scores(const uint16_t* query, const uint16_t* weights, const uint16_t* keys, const int64_t* numbers,
                     const int64_t* visible, const int64_t* blocks, int64_t num_blocks, int64_t block, int64_t rows,
                     int64_t heads, int64_t width, int64_t num_keys, uint16_t* out);

/* scores [rows, num] of type (bf16 or f32), of whole blocks of `block`, the last maybe cut -> out f32 [rows, num_blocks]:
 * the largest of each, infinite for that with the newest visible entry; block_numbers int64 [num_blocks], visible int64
 * [rows]. */
void df_candidate_scores(const void* scores, int32_t type, int64_t rows, int64_t num, int64_t block, const int64_t* block_numbers,
                         int64_t num_blocks, const int64_t* visible, float* out);

/* scores [rows, num] of type (bf16 or f32), -inf where not allowed -> out int64 [rows, count], count <= num: the best
 * finite ones, ascending, -1 for none at the end. Of equals the lower position wins. */
void df_top_positions(const void* scores, int32_t type, int64_t rows, int64_t num, int64_t count, int64_t* out);

/* x [rows, width], weight [experts, width] of w_type, bias f32 [experts] (bias_stride 0) or [rows, experts]
 * (bias_stride experts) -> chosen int64 [rows, num_chosen], weights f32 like it. */
void df_route(const uint16_t* x, const void* weight, int32_t w_type, const float* bias, int64_t bias_stride,
              int64_t rows, int64_t width, int64_t experts, int64_t num_chosen, double scaling, double temperature,
              int64_t* chosen, float* weights);

/* gate and up [rows, width], each with a stride between rows; route_weight f32 [rows] or null -> out [rows, width]. */
void df_expert_activation(const uint16_t* gate, int64_t gate_stride, const uint16_t* up, int64_t up_stride, float limit,
                          const float* route_weight, int64_t rows, int64_t width, uint16_t* out);

/* x [rows, width]; chosen int64 and weights f32 [rows, num_chosen]; w13 [experts, 2 * inner, width] and w2 [experts,
 * width, inner] of experts first_expert.., as MXFP4: packed codes, the even column in the low half, and E8M0 scales of 32
 * columns -> total f64 [rows, width], experts summed by rising number. */
void df_routed_experts(const uint16_t* x, const int64_t* chosen, const float* weights, const uint8_t* w13,
                       const uint8_t* w13_scales, const uint8_t* w2, const uint8_t* w2_scales, int64_t rows,
                       int64_t width, int64_t inner, int64_t num_chosen, int64_t first_expert, int64_t experts,
                       float limit, double* total);

/* One expert that takes every row and no weight, w13 and w2 bf16 -> out bf16 [rows, width]. */
void df_shared_expert(const uint16_t* x, const uint16_t* w13, const uint16_t* w2, int64_t rows, int64_t width,
                      int64_t inner, float limit, uint16_t* out);

/* out bf16 = total f64 + added bf16, [count] each. */
void df_add_round(const double* total, const uint16_t* added, int64_t count, uint16_t* out);

/* stream and key [rows, copies, width] (key rows key_stride apart), value [rows, width] (value_stride), weight f32
 * [copies, width], alive uint8 [rows] -> out like stream. */
void df_engram_gate(const uint16_t* stream, const uint16_t* key, int64_t key_stride, const uint16_t* value,
                    int64_t value_stride, const float* weight, const uint8_t* alive, double eps, int64_t rows,
                    int64_t copies, int64_t width, uint16_t* out);

/* --- Groups ---
 *
 * All processes of a group have `file` open, one that is empty at first and has no name, such as a memfd. It is mapped, and
 * every process holds a lock on it, so that the others see its end; closing any descriptor of the file gives that lock up.
 * Everyone calls the same collectives with the same sizes in the same order, from one thread at a time. Sums are added in
 * the order of ranks, so that all have the same bits.
 *
 * A collective returns 0, or -1 - r when process r has ended or left, or -1001 - r when it is not at the same collective.
 * After either a group is of no use. A collective waits without end for a process that is there and does not come. */

enum { DF_GROUP_SLOT_BYTES = 1 << 18 }; /* what travels at a time */

/* Process `rank` of `size`, in the group of those `part` neighbours that share rank / part (part divides size): all, or one
 * division besides. may_spin: wait awake for some microseconds before sleeping. -> a handle, or a negative errno. */
int64_t df_group_open(int32_t file, int64_t rank, int64_t size, int64_t part, int32_t may_spin);

/* The handle is of no use afterwards. The lock goes with the file's descriptor. */
void df_group_close(int64_t group);

/* data [count] of type (f64, f32 or i32): the sum over processes, in place. */
int64_t df_group_all_reduce(int64_t group, void* data, int64_t count, int32_t type);

/* data [bytes] -> out [processes, bytes], in the order of ranks. */
int64_t df_group_all_gather(int64_t group, const void* data, int64_t bytes, void* out);

/* data [bytes] of the group's first process to all, in place. The first goes on before the others have taken it. */
int64_t df_group_broadcast(int64_t group, void* data, int64_t bytes);

/* For all but the first process, whose next collective is a df_group_broadcast of unknown length: its first
 * DF_GROUP_SLOT_BYTES bytes at most -> out, which has room for so many. Returns the length; who gets more than fits has the
 * rest from df_group_broadcast. */
int64_t df_group_receive(int64_t group, void* out);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
