// Merging parts of a softmax: sums and accumulators weighted by e^(max - largest max), or finished
// outputs weighted by e^(lse - total lse).
#pragma once
#include "hadamard.h"
#include "isa.h"

namespace {

using namespace omlx;

// Merge the partial results of some rows into the first one and write the rows' outputs; unless
// they are null, to `mass` the share of each part in a row's sum and to `a.lse` that sum's logarithm.
template <class T>
inline void finish_typed(const AttentionArgs& a, const Rows& rows, float* partials,
                         int64_t num_partials, float* mass) {
    const int dim = static_cast<int>(a.blocks.head_dim);
    const int64_t stride = round_up(dim, 64), group = a.num_q_heads / a.blocks.kv_heads;
    for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t row = rows.first + r, head = rows.kv_head * group + row % group;
        const float learned = a.sink_logits ? a.sink_logits[head] : -INF;
        float top = learned;
        for (int64_t i = 0; i < num_partials; ++i) {
            const float m = partial_at(partials, i, rows.count, stride).max[r];
            top = m > top ? m : top;
        }
        const int64_t index = (rows.first_token + row / group) * a.num_q_heads + head;
        T* out = reinterpret_cast<T*>(a.out) + index * dim;
        float sum = learned == -INF ? 0.0f : exp(learned - top);
        float* merged = partials + r * stride;  // the first partial's acc
        for (int64_t i = 0; i < num_partials; ++i) {
            const Partial p = partial_at(partials, i, rows.count, stride);
            // A part that saw nothing has max = -inf; NaN scores must not look like it.
            const float factor = p.max[r] == -INF && p.sum[r] == 0.0f ? 0.0f : exp(p.max[r] - top);
            sum += factor * p.sum[r];
            if (mass) mass[i * a.num_q_heads + head] = factor * p.sum[r];
            for (int c = 0; c < stride; c += W) {
                const vf x = load(p.acc + r * stride + c) * splat(factor);
                store(merged + c, i ? load(merged + c) + x : x);
            }
        }
        if (a.lse) a.lse[index] = sum == 0.0f ? -INF : top + __builtin_logf(sum);
        float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int64_t i = 0; mass && i < num_partials; ++i) mass[i * a.num_q_heads + head] *= inverse;
        if (a.rotated_v) inverse *= rotate_unscaled(merged, dim);
        for (int c = 0; c < dim; c += W)
            store_row(out, load(merged + c) * splat(inverse), c, dim);
    }
}

// Merge one head's finished part into acc and lse.
template <class T>
inline void merge_typed(const MergeArgs& a, int64_t head) {
    const int dim = static_cast<int>(a.head_dim);
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t index = head * a.rows + row;
        float* acc = a.acc + index * dim;
        const T* part = reinterpret_cast<const T*>(a.part) + index * dim;
        const bool blind = a.blind && a.blind[row];
        const float old = a.is_first ? -INF : a.lse[index];
        const float more =
            blind ? -INF : a.part_lse[head * a.lse_stride_head + row * a.lse_stride_row];
        const float top = old > more ? old : more;
        const float keep = old == -INF ? 0.0f : exp(old - top);
        const float add = blind ? 0.0f : exp(more - top);
        const float sum = keep + add, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int c = 0; c < dim; c += W) {
            vf x = splat(0.0f);
            if (keep != 0.0f) x = load_row(acc, c, dim) * splat(keep * inverse);
            if (add != 0.0f) x = fma(load_row(part, c, dim), splat(add * inverse), x);
            store_row(acc, x, c, dim);
        }
        a.lse[index] = sum == 0.0f ? -INF : top + __builtin_logf(sum);
    }
}

}  // namespace
