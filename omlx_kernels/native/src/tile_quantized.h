// A tile of codes, which never become floats. With a group's key scale s_c and zero z_c,
//   q . k_t = sum_c (q_c s_c) code_tc + q . z = step sum_c n_c code_tc + bias,
// where n_c are integers of 15 bits and bias also takes the rounding of n at the middle code, so
// that only the deviation of codes from their middle meets it. For 8-bit values, p_t s_t = step w_t
// with integer weights w_t <= 32767: the error is at most 64 / 65534 < 1e-3 of the weighted mean of
// the rows' largest |v|, usually 100 times less. 4-bit values have weights of their own for every
// group of 64 channels, and an offset, sum_t p_t z_t and the rounding of w at the middle code.
#pragma once
#include "softmax.h"
#include "unpack.h"

namespace {

// A largest magnitude of at most this counts as zero; its inverse could be infinite.
constexpr float NOTHING = 1e-30f;

struct QuantizedTile {
    const uint8_t* k;
    const f16 *k_scale, *k_zero;
    const uint8_t* v;
    const f16 *v_scale, *v_zero;
};

// Tokens t .. t+63 of one head of a block.
template <int K_BITS, int V_BITS>
inline QuantizedTile tile_at(const Blocks& b, const TierBlocks& tier, int64_t block, int64_t head,
                             int64_t t) {
    const int64_t row = block * b.kv_heads + head, token = row * b.block_size + t;
    const int64_t group = (row * (b.block_size / QUANT_GROUP) + t / QUANT_GROUP) * b.head_dim;
    const int64_t scale = token * (V_BITS == 8 ? 1 : (b.head_dim + 63) / 64);
    return {reinterpret_cast<const uint8_t*>(tier.k) + token * b.head_dim * K_BITS / 8,
            reinterpret_cast<const f16*>(tier.k_scale) + group,
            reinterpret_cast<const f16*>(tier.k_zero) + group,
            reinterpret_cast<const uint8_t*>(tier.v) + token * b.head_dim * V_BITS / 8,
            reinterpret_cast<const f16*>(tier.v_scale) + scale,
            reinterpret_cast<const f16*>(tier.v_zero) + (V_BITS == 8 ? 0 : scale)};
}

// Fold the key scales into one query row: integer codes, step and bias (see above).
template <int BITS>
inline void fold_query(const QuantizedTile& tile, int dim, int64_t row, const Scratch& s) {
    constexpr int LEVELS = (1 << BITS) - 1;
    const float* q = s.q + row * s.stride;
    vf top = splat(0.0f), bias = splat(0.0f);
    for (int c = 0; c < dim; c += W) {
        const vf query = load(q + c);
        const vf x = query * load_row(tile.k_scale, c, dim);
        bias = fma(query, load_row(tile.k_zero, c, dim), bias);
        top = vmax(top, vabs(x));
        store(s.folded + c, x);
    }
    // The largest code for which a dot of dim codes fits into an int32.
    const int fits = static_cast<int>(0x7fffffffll / (int64_t{LEVELS} * dim));
    const float limit = static_cast<float>(fits < 16256 ? fits : 16256);
    const float amax = reduce_max(top);
    const float inverse = amax > NOTHING ? limit / amax : 0.0f;
    const float step = amax > NOTHING ? amax / limit : 0.0f;
    QueryCodes codes = s.codes(row);
    for (int c = 0; c < s.stride; c += W) {
        const vf x = c < dim ? load(s.folded + c) : splat(0.0f);
        const vi n = to_int(x * splat(inverse));
        codes.set(c, n);
        bias = fma(x - to_vf(n) * splat(step), splat(LEVELS / 2.0f), bias);
    }
    s.k_steps[row] = step;
    s.biases[row] = reduce_add(bias);
}

// Every `groups`-th scale or zero, zero where nobody looks: what is stored may be NaN there.
inline void load_column(const f16* p, int groups, Span seen, float* out) {
    if (groups == 1) {
        for (int t = 0; t < TILE; t += W) {
            const bool looked = t + W > seen.first && t < seen.last;
            store(out + t, looked ? load(p + t) : splat(0.0f));
        }
    } else if (groups == 2 && seen.first == 0 && seen.last == TILE) {
        for (int t = 0; t < TILE; t += W) store(out + t, load_every_other(p + 2 * t));
    } else {
        for (int t = seen.first; t < seen.last; ++t) out[t] = to_float(p[t * groups]);
    }
    for (int t = 0; t < seen.first; ++t) out[t] = 0.0f;
    for (int t = seen.last; t < TILE; ++t) out[t] = 0.0f;
}

// Quantize the tile's weights p_t s_t of one row; returns step. With zeros, `offset` is what codes
// that stand for zero and the rounding add to every channel.
inline float fold_weights(const float* p, const float* scales, WeightCodes& codes,
                          const float* zeros = nullptr, float* offset = nullptr) {
    vf w[TILE / W], top = splat(0.0f);
    for (int i = 0; i < TILE / W; ++i) {
        w[i] = load(p + i * W) * load(scales + i * W);
        top = vmax(top, w[i]);
    }
    const float amax = reduce_max(top);
    const float inverse = amax > NOTHING ? 32767.0f / amax : 0.0f;
    const float step = amax > NOTHING ? amax / 32767.0f : 0.0f;
    vf sum = splat(0.0f), rounding = splat(0.0f);
    for (int i = 0; i < TILE / W; ++i) {
        const vi n = to_int(w[i] * splat(inverse));
        codes.set(i * W, n);
        if (!zeros) continue;
        sum = fma(load(p + i * W), load(zeros + i * W), sum);
        rounding = rounding + (w[i] - to_vf(n) * splat(step));
    }
    if (zeros) *offset = reduce_add(fma(rounding, splat(7.5f), sum));
    return step;
}

inline const uint8_t* unpack_tile(const uint8_t* packed, int dim, const Scratch& s) {
    for (int64_t t = 0; t < TILE; ++t)
        unpack_row(packed + t * (dim / 2), dim, s.unpacked + t * dim);
    return s.unpacked;
}

// Weigh channels begin .. end-1 of a tile, two rows at a time.
template <int BITS>
inline void weigh(const uint8_t* v, int dim, int begin, int end, Span seen, int64_t num_rows,
                  const Scratch& s, Partial out, Fetch next) {
    auto values = [&](int64_t r, auto n) {
        v_values<BITS, decltype(n)::value>(v, dim, begin, end, seen.first, seen.last, s.weights + r,
                                           s.steps + r, out.acc + r * s.stride, s.stride,
                                           r ? Fetch{nullptr, 0} : next);
    };
    int64_t r = 0;
    for (; r + 2 <= num_rows; r += 2) values(r, Count<2>{});
    if (r < num_rows) values(r, Count<1>{});
}

// Scores of every row, by dots that take codes of BITS.
template <int BITS>
inline void score(const uint8_t* k, int dim, const Span* spans, int64_t num_rows, const Scratch& s,
                  Fetch next) {
    for (int64_t r = 0; r < num_rows; ++r)
        if (!spans[r].empty())
            k_scores<BITS>(k, dim, s.codes(r), s.k_steps[r], s.biases[r], s.scores + r * TILE,
                           r ? Fetch{nullptr, 0} : next);
}

// Fold the scales and zeros of channels 64 g .. 64 g + 63 into every row's weights.
inline void fold_group(const QuantizedTile& tile, int groups, int g, Span seen, int64_t num_rows,
                       const Scratch& s, Partial out) {
    float scales[TILE], zeros[TILE];
    load_column(tile.v_scale + g, groups, seen, scales);
    load_column(tile.v_zero + g, groups, seen, zeros);
    for (int64_t r = 0; r < num_rows; ++r) {
        float offset;
        s.steps[r] = fold_weights(s.scores + r * TILE, scales, s.weights[r], zeros, &offset);
        for (int c = 64 * g; c < 64 * (g + 1); c += W) {
            float* acc = out.acc + r * s.stride + c;
            store(acc, load(acc) + splat(offset));
        }
    }
}

// `next` is the tile that follows, or null: it is fetched while this one is computed. Its scales
// come first, because nothing can start without them and no hardware prefetcher expects them.
template <int K_BITS, int V_BITS>
inline void quantized_tile(const QuantizedTile& tile, const QuantizedTile* next, int dim, Span seen,
                           const Span* spans, int64_t num_rows, const Scratch& s, Partial out) {
    const int groups = V_BITS == 8 ? 1 : (dim + 63) / 64;
    if (next) {
        prefetch(next->k_scale, 0, 2 * dim);
        prefetch(next->k_zero, 0, 2 * dim);
        prefetch(next->v_scale, 0, 2 * TILE * groups);
        if (V_BITS == 4) prefetch(next->v_zero, 0, 2 * TILE * groups);
    }
    const Fetch values{tile.v, dim * V_BITS / 8};
    const Fetch next_keys{next ? next->k : nullptr, dim * K_BITS / 8};
    // Row by row in each phase: consecutive rows do not wait for each other's results.
    for (int64_t r = 0; r < num_rows; ++r)
        if (!spans[r].empty()) fold_query<K_BITS>(tile, dim, r, s);
    const bool packed = reads_packed(dim);
    if (K_BITS == 8 || !packed)
        score<8>(K_BITS == 8 ? tile.k : unpack_tile(tile.k, dim, s), dim, spans, num_rows, s, values);
    else
        score<4>(tile.k, dim, spans, num_rows, s, values);
    softmax_rows(spans, num_rows, s, out);
    if (V_BITS == 8) {
        float scales[TILE];
        load_column(tile.v_scale, 1, seen, scales);
        for (int64_t r = 0; r < num_rows; ++r)
            s.steps[r] = fold_weights(s.scores + r * TILE, scales, s.weights[r]);
        weigh<8>(tile.v, dim, 0, dim, seen, num_rows, s, out, next_keys);
        return;
    }
    const uint8_t* v = packed ? tile.v : unpack_tile(tile.v, dim, s);
    for (int g = 0; g < groups; ++g) {
        fold_group(tile, groups, g, seen, num_rows, s, out);
        const int begin = 64 * g, end = dim - begin < 64 ? dim : begin + 64;
        if (packed) weigh<4>(v, dim, begin, end, seen, num_rows, s, out, next_keys);
        else weigh<8>(v, dim, begin, end, seen, num_rows, s, out, next_keys);
    }
}

}  // namespace
