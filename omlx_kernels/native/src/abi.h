// The C ABI: what Python packs into structs (see ../__init__.py, which must list the same fields
// in the same order) and the functions that it calls. Every integer is 64-bit, every tensor but q,
// k and v (of append_kv) is contiguous; layouts are those of omlx_kernels/layout.py.
#pragma once
#include <cstdint>

#define OMLX_API extern "C" __attribute__((visibility("default")))

namespace omlx {

enum Tier : int32_t { SINK = 0, HOT = 1, K8V8 = 2, K8V4 = 3, K4V4 = 4 };
constexpr int TIERS = 5;
constexpr int BLOCK_TIERS = 4;  // HOT to K4V4: the tiers that a table row lists, in this order
constexpr int QUANT_GROUP = 64;

// Bits of a code; 0 where the model's dtype is stored.
static inline int k_bits(int64_t tier) { return tier < K8V8 ? 0 : tier < K4V4 ? 8 : 4; }
static inline int v_bits(int64_t tier) { return tier < K8V8 ? 0 : tier < K8V4 ? 8 : 4; }

enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2 };
static inline int64_t element_size(int64_t dtype) { return dtype == F32 ? 4 : 2; }

struct TierBlocks {  // a part that the tier's format lacks is null
    char *k, *v;
    uint16_t *k_scale, *k_zero, *v_scale, *v_zero;
    int64_t num_blocks;
};

struct Blocks {  // one layer
    TierBlocks tiers[TIERS];
    int64_t kv_heads, head_dim, block_size, sink_tokens, dtype;
};

struct AttentionArgs {
    Blocks blocks;
    const int32_t *block_table, *block_starts, *tier_starts, *sink_pages, *seq_lens,
        *query_start_loc;
    int64_t num_seqs, table_width;
    const char *q, *sink_q;    // sink_q may be null
    const float* sink_logits;  // [num_q_heads]; or null
    char* out;                 // [num_tokens, num_q_heads, head_dim], contiguous
    int64_t q_stride_token, q_stride_head, sink_q_stride_token, sink_q_stride_head;  // in elements
    int64_t num_tokens, num_q_heads;
    int64_t window;       // keys that a query sees, itself included; 0 = all
    int64_t keep_sinks, rotated_v;
    int64_t max_queries;  // sequences with more queries are left to the caller
    int64_t num_threads;
    // The share of each split of the work list in its sequence's attention. With it the work is cut
    // as the list says, and a sequence has at most one query.
    float* split_mass;  // [num_splits, num_q_heads], of zeros; or null
    const int32_t *splits, *split_starts;  // [num_splits, 4], [num_seqs + 1]
    int64_t num_splits;
    float* lse;  // [num_tokens, num_q_heads], of -inf: log-sum-exp of a row's scores; or null
    double sm_scale, softcap;  // softcap 0 = none
};

struct AppendArgs {
    const char *k, *v;
    int64_t k_stride_token, k_stride_head, k_stride_dim;
    int64_t v_stride_token, v_stride_head, v_stride_dim;
    const int64_t* slots;
    char *dst_k, *dst_v;
    int64_t num_tokens, kv_heads, head_dim, size, num_blocks, dtype, rotate_v, num_threads;
};

struct ConvertArgs {
    TierBlocks src, dst;
    int64_t src_tier, dst_tier;
    const int32_t *src_ids, *dst_ids;
    int64_t count, kv_heads, head_dim, block_size, dtype, num_threads;
};

constexpr int PARTS = 6;  // tensors of TierBlocks

struct CopyArgs {
    char* parts[PARTS];
    int64_t block_bytes[PARTS];  // of one block; 0 for a part that is null
    int64_t num_blocks;
    const int32_t *src_ids, *dst_ids;
    int64_t count, num_threads;
};

struct GatherArgs {  // heads [first_head, last_head) of the listed blocks as contiguous K and V
    Blocks blocks;
    const int32_t *tiers, *ids, *firsts, *counts;  // tokens [first, first + count) of each block
    int64_t num_pieces, first_head, last_head, num_tokens;
    char *k, *v;  // [last_head - first_head, num_tokens, head_dim], in the model's dtype
    int64_t num_threads;
};

struct MergeArgs {  // one more part of attention into what is merged so far
    float *acc, *lse;  // [heads, rows, head_dim], [heads, rows]
    const char* part;  // the same shape in the model's dtype, contiguous
    const float* part_lse;
    const uint8_t* blind;  // [rows]: 1 where the row sees no key of the part; or null
    int64_t lse_stride_head, lse_stride_row;
    int64_t heads, rows, head_dim, dtype;
    int64_t is_first;  // nothing is merged so far
    int64_t num_threads;
};

}  // namespace omlx

// Each returns 0, or 1 with the reason in omlx_error(), in which case nothing was written.
OMLX_API int omlx_append_kv(const omlx::AppendArgs*);
OMLX_API int omlx_convert_blocks(const omlx::ConvertArgs*);
OMLX_API int omlx_copy_blocks(const omlx::CopyArgs*);
OMLX_API int omlx_paged_attention(const omlx::AttentionArgs*);
OMLX_API int omlx_gather(const omlx::GatherArgs*);
OMLX_API int omlx_merge(const omlx::MergeArgs*);
OMLX_API const char* omlx_error();             // of the calling thread's last failed call
OMLX_API int omlx_choose_isa(const char* name);  // "" = the best one; 1 if it can't run here
OMLX_API const char* omlx_isa();               // the one in use
OMLX_API int64_t omlx_max_queries();  // of a sequence that it serves faster than torch would
OMLX_API void omlx_share_openmp(void* gomp_parallel);  // null: the library's own threads
OMLX_API const char* omlx_source_hash();       // of the sources that this library was built from
