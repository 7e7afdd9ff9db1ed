// The functions that kernels.cpp compiles once for every instruction set, and the choice of one.
#pragma once
#include <cstdint>

#include "abi.h"

namespace omlx {

constexpr int TILE = QUANT_GROUP;  // tokens that one pass of the online softmax takes
constexpr int MAX_ROWS = 32;       // (query, query head) pairs that share each read of K and V

// static: a function with external linkage must not be compiled for several instruction sets.
static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Which tokens of a piece a query sees, of those that are not after it.
enum class Sees : int32_t {
    WINDOW,
    ALL,
    OUTSIDE,  // sink tokens outside the window, scored with sink_q
};

// A stored stretch of a sequence that some query sees: a sink page or one block.
struct Piece {
    Tier tier;
    int32_t id;
    int32_t count;  // tokens stored
    Sees sees;
    int64_t start;  // position of the first
};

// Rows (query, query head of the group) of one sequence and one kv head.
struct Rows {
    int64_t kv_head;
    int64_t first_token;  // row of q where the sequence's queries begin
    int64_t first_position;  // position of that query
    int64_t first, count;  // rows, numbered query * group_size + head within the group
};

// Running softmax of some rows over some of the keys; acc rows are padded to `stride` floats.
struct Partial {
    float *acc, *max, *sum;
};
static inline int64_t partial_floats(int64_t rows, int64_t stride) {
    return round_up(rows * (stride + 2), 16);
}
static inline Partial partial_at(float* memory, int64_t index, int64_t rows, int64_t stride) {
    float* acc = memory + index * partial_floats(rows, stride);
    return {acc, acc + rows * stride, acc + rows * (stride + 1)};
}

struct Kernels {
    const char* name;
    bool shares_tiles;  // whether many rows share the work of laying out a tile
    // Floats of scratch that attend needs.
    int64_t (*scratch_floats)(int64_t head_dim);
    // Attend `rows` to the pieces: fills `out`.
    void (*attend)(const AttentionArgs&, const Rows&, const Piece*, int64_t num_pieces, Partial out,
                   float* scratch);
    // Merge partial results (into the first) and write the rows' outputs, and their log-sum-exp if
    // it is asked for; with `mass` [num_partials, num_q_heads] also the share of each.
    void (*finish)(const AttentionArgs&, const Rows&, float* partials, int64_t num_partials,
                   float* mass);
    // Write a row of dim values, `stride` elements apart, rotated; `buffer` holds round_up(dim, 64).
    void (*rotate)(const char* from, int64_t stride, char* to, int64_t dim, int64_t dtype,
                   float* buffer);
    // Floats of scratch that convert needs.
    int64_t (*convert_floats)(int64_t head_dim);
    // Quantize one head of one block.
    void (*convert)(const ConvertArgs&, int64_t index, int64_t head, float* scratch);
    // Write tokens [first, first + count) of one head of a block as model-dtype K and V rows.
    void (*gather)(const Blocks&, Tier, int64_t id, int64_t head, int64_t first, int64_t count,
                   char* k, char* v);
    // Merge one head's part.
    void (*merge)(const MergeArgs&, int64_t head);
};

extern const Kernels kernels_portable;
#ifdef __x86_64__
extern const Kernels kernels_avx2, kernels_avx512;
#endif

const Kernels& kernels();  // the chosen ones

}  // namespace omlx
