// Online softmax of some rows over some pieces, tile by tile.
//
//   tile of 64 tokens: scores s, m' = max(m, max s), p = e^(s - m'), and with a = e^(m - m')
//   sum = a sum + sum p        acc = a acc + p V
//
// 8-bit tiles never become floats. With a group's key scale s_c and zero z_c,
//   q . k_t = sum_c (q_c s_c) code_tc + q . z = step sum_c n_c code_tc + bias,
// where n_c are integers of 15 bits and bias also takes the rounding of n at the middle code, so
// that only the deviation of codes from 127.5 meets it. For values, p_t s_t = step w_t with integer
// weights w_t <= 32767: the error is at most 64 / 65534 < 1e-3 of the weighted mean of the rows'
// largest |v|, usually 100 times less. Bytes moved: each block once, whatever the group size.
#pragma once
#include "isa.h"
#include "tile_float.h"

#if defined(OMLX_AVX512)
#include "dot_avx512.h"
#elif defined(OMLX_AVX2)
#include "dot_avx2.h"
#else
#include "dot_portable.h"
#endif

namespace {

using namespace omlx;

// A largest magnitude of at most this counts as zero; its inverse could be infinite.
constexpr float NOTHING = 1e-30f;

struct Scratch {
    float *q, *folded, *scores, *steps, *k_steps, *biases;
    char* query_codes;
    WeightCodes* weights;
    int64_t stride;  // floats of a padded row

    static int64_t floats(int64_t head_dim) {
        const int64_t stride = round_up(head_dim, 64);
        return MAX_ROWS * (stride + stride / 2 + TILE + sizeof(WeightCodes) / 4 + 3) + stride;
    }
    Scratch(float* memory, int64_t head_dim) : stride(round_up(head_dim, 64)) {
        q = memory;
        folded = q + MAX_ROWS * stride;
        scores = folded + stride;
        query_codes = reinterpret_cast<char*>(scores + MAX_ROWS * TILE);
        weights = reinterpret_cast<WeightCodes*>(query_codes + MAX_ROWS * stride * 2);
        steps = reinterpret_cast<float*>(weights + MAX_ROWS);
        k_steps = steps + MAX_ROWS;
        biases = k_steps + MAX_ROWS;
    }
    QueryCodes codes(int64_t row) const {
        return {query_codes + row * stride * 2, static_cast<int>(stride)};
    }
};

struct K8V8Tile {
    const uint8_t* k;
    const uint16_t *k_scale, *k_zero;
    const int8_t* v;
    const uint16_t* v_scale;
};

// Tokens t .. t+63 of one head of a block.
inline K8V8Tile k8v8_tile_at(const Blocks& b, int64_t block, int64_t head, int64_t t) {
    const int64_t row = block * b.kv_heads + head, token = row * b.block_size + t;
    const int64_t group = row * (b.block_size / QUANT_GROUP) + t / QUANT_GROUP;
    return {b.k8 + token * b.head_dim, b.k8_scale + group * b.head_dim,
            b.k8_zero + group * b.head_dim, b.v8 + token * b.head_dim, b.v8_scale + token};
}

// Tokens [first, last) of a tile that a row sees.
struct Span {
    int first, last;
    bool empty() const { return first >= last; }
};

template <class T>
inline void load_queries(const AttentionArgs& a, const Rows& rows, const Scratch& s) {
    const int dim = static_cast<int>(a.blocks.head_dim);
    const int64_t group = a.num_q_heads / a.blocks.kv_heads;
    const vf factor = splat(static_cast<float>(a.sm_scale));
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i;
        const T* q = reinterpret_cast<const T*>(a.q) +
                     (rows.first_token + row / group) * a.q_stride_token +
                     (rows.kv_head * group + row % group) * a.q_stride_head;
        for (int c = 0; c < s.stride; c += W)
            store(s.q + i * s.stride + c, c < dim ? load_row(q, c, dim) * factor : splat(0.0f));
    }
}

// Turn a row's scores into weights e^(s - max), zero outside its span, and rescale what it has.
inline void softmax(float* scores, Span span, int64_t row, int64_t stride, Partial out) {
    for (int t = 0; t < span.first; ++t) scores[t] = -INF;
    for (int t = span.last; t < TILE; ++t) scores[t] = -INF;
    vf top = splat(-INF);
    for (int t = 0; t < TILE; t += W) top = vmax(top, load(scores + t));
    const float old = out.max[row], tile_max = reduce_max(top);
    const float now = tile_max > old ? tile_max : old;
    if (now > old) {
        const float factor = old == -INF ? 0.0f : exp(old - now);
        out.max[row] = now;
        out.sum[row] *= factor;
        for (int64_t c = 0; c < stride; c += W) {
            float* acc = out.acc + row * stride + c;
            store(acc, load(acc) * splat(factor));
        }
    }
    vf sum = splat(0.0f);
    for (int t = 0; t < TILE; t += W) {
        const vf p = exp(load(scores + t) - splat(now));
        sum = sum + p;
        store(scores + t, p);
    }
    out.sum[row] += reduce_add(sum);
    for (int t = 0; t < span.first; ++t) scores[t] = 0.0f;
    for (int t = span.last; t < TILE; ++t) scores[t] = 0.0f;
}

// Fold the key scales into one query row: integer codes, step and bias (see above).
inline void fold_query(const K8V8Tile& tile, int dim, int64_t row, const Scratch& s) {
    const f16* scales = reinterpret_cast<const f16*>(tile.k_scale);
    const f16* zeros = reinterpret_cast<const f16*>(tile.k_zero);
    const float* q = s.q + row * s.stride;
    vf top = splat(0.0f), bias = splat(0.0f);
    for (int c = 0; c < dim; c += W) {
        const vf query = load(q + c);
        const vf x = query * load_row(scales, c, dim);
        bias = fma(query, load_row(zeros, c, dim), bias);
        top = vmax(top, vabs(x));
        store(s.folded + c, x);
    }
    // The largest code for which a dot of dim bytes fits into an int32.
    const int fits = static_cast<int>(0x7fffffffll / (255ll * dim));
    const float limit = static_cast<float>(fits < 16256 ? fits : 16256);
    const float amax = reduce_max(top);
    const float inverse = amax > NOTHING ? limit / amax : 0.0f;
    const float step = amax > NOTHING ? amax / limit : 0.0f;
    QueryCodes codes = s.codes(row);
    for (int c = 0; c < s.stride; c += W) {
        const vf x = c < dim ? load(s.folded + c) : splat(0.0f);
        const vi n = to_int(x * splat(inverse));
        codes.set(c, n);
        bias = fma(x - to_vf(n) * splat(step), splat(127.5f), bias);
    }
    s.k_steps[row] = step;
    s.biases[row] = reduce_add(bias);
}

// Quantize the tile's weights p_t s_t of one row; returns step.
inline float fold_weights(const float* p, const float* scales, WeightCodes& codes) {
    vf w[TILE / W], top = splat(0.0f);
    for (int i = 0; i < TILE / W; ++i) {
        w[i] = load(p + i * W) * load(scales + i * W);
        top = vmax(top, w[i]);
    }
    const float amax = reduce_max(top);
    const float inverse = amax > NOTHING ? 32767.0f / amax : 0.0f;
    for (int i = 0; i < TILE / W; ++i) codes.set(i * W, to_int(w[i] * splat(inverse)));
    return amax > NOTHING ? amax / 32767.0f : 0.0f;
}

template <class T>
inline void float_tile(const T* k, const T* v, int dim, Span seen, const Span* spans,
                       int64_t num_rows, const Scratch& s, Partial out) {
    by_rows(num_rows, [&](int64_t r, auto n) {
        float_scores_of<decltype(n)::value>(k, dim, seen.first, seen.last, s.q + r * s.stride,
                                            s.stride, s.scores + r * TILE, TILE);
    });
    for (int64_t r = 0; r < num_rows; ++r) {
        if (!spans[r].empty()) softmax(s.scores + r * TILE, spans[r], r, s.stride, out);
        else std::memset(s.scores + r * TILE, 0, TILE * sizeof(float));
    }
    by_rows(num_rows, [&](int64_t r, auto n) {
        constexpr int ROWS = decltype(n)::value;
        float_values_of<ROWS, ROWS == 1 ? 8 : 4>(v, dim, seen.first, seen.last,
                                                 s.scores + r * TILE, TILE,
                                                 out.acc + r * s.stride, s.stride);
    });
}

// `next` is the tile that follows, or null: it is fetched while this one is computed. Its scales
// come first, because nothing can start without them and no hardware prefetcher expects them.
inline void k8v8_tile(const K8V8Tile& tile, const K8V8Tile* next, int dim, Span seen,
                      const Span* spans, int64_t num_rows, const Scratch& s, Partial out) {
    if (next) {
        prefetch(next->k_scale, 0, 2 * dim);
        prefetch(next->k_zero, 0, 2 * dim);
        prefetch(next->v_scale, 0, 2 * TILE);
    }
    float scales[TILE] = {};  // zero where nobody looks: the stored scale may be NaN there
    for (int t = 0; t < TILE; t += W) {
        if (t + W <= seen.first || t >= seen.last) continue;
        store(scales + t, load(reinterpret_cast<const f16*>(tile.v_scale) + t));
    }
    for (int t = 0; t < seen.first; ++t) scales[t] = 0.0f;
    for (int t = seen.last; t < TILE; ++t) scales[t] = 0.0f;
    // Row by row in each phase: consecutive rows do not wait for each other's results.
    for (int64_t r = 0; r < num_rows; ++r)
        if (!spans[r].empty()) fold_query(tile, dim, r, s);
    for (int64_t r = 0; r < num_rows; ++r)
        if (!spans[r].empty())
            k8_scores(tile.k, dim, s.codes(r), s.k_steps[r], s.biases[r], s.scores + r * TILE,
                      r ? nullptr : tile.v);
    for (int64_t r = 0; r < num_rows; ++r) {
        float* scores = s.scores + r * TILE;
        if (!spans[r].empty()) softmax(scores, spans[r], r, s.stride, out);
        else std::memset(scores, 0, TILE * sizeof(float));
        s.steps[r] = fold_weights(scores, scales, s.weights[r]);
    }
    auto values = [&](int64_t r, auto n) {
        v8_values<decltype(n)::value>(tile.v, dim, seen.first, seen.last, s.weights + r,
                                      s.steps + r, out.acc + r * s.stride, s.stride,
                                      r || !next ? nullptr : next->k);
    };
    int64_t r = 0;
    for (; r + 2 <= num_rows; r += 2) values(r, Count<2>{});
    if (r < num_rows) values(r, Count<1>{});
}

template <class T>
inline void attend_typed(const AttentionArgs& a, const Rows& rows, const Piece* pieces,
                         int64_t num_pieces, Partial out, float* memory) {
    const Blocks& b = a.blocks;
    const int dim = static_cast<int>(b.head_dim);
    const Scratch s(memory, dim);
    const int64_t group = a.num_q_heads / b.kv_heads;
    load_queries<T>(a, rows, s);
    std::memset(out.acc, 0, rows.count * s.stride * sizeof(float));
    for (int64_t r = 0; r < rows.count; ++r) out.max[r] = -INF, out.sum[r] = 0.0f;

    Span spans[MAX_ROWS];
    for (const Piece* piece = pieces; piece < pieces + num_pieces; ++piece) {
        const bool windowed = a.window && !(piece->tier == SINK && a.keep_sinks);
        for (int64_t t = 0; t < piece->count; t += TILE) {
            const int64_t left = piece->count - t;
            const int count = static_cast<int>(left < TILE ? left : TILE);
            Span seen{TILE, 0};
            for (int64_t r = 0; r < rows.count; ++r) {
                // Offsets in the tile of the row's own position and of the first in its window.
                const int64_t self =
                    rows.first_position + (rows.first + r) / group - piece->start - t;
                const int64_t oldest = windowed ? self - a.window + 1 : 0;
                spans[r].first = static_cast<int>(oldest < 0 ? 0 : oldest > TILE ? TILE : oldest);
                spans[r].last = static_cast<int>(self < -1 ? 0 : self < count ? self + 1 : count);
                if (spans[r].empty()) continue;
                if (spans[r].first < seen.first) seen.first = spans[r].first;
                if (spans[r].last > seen.last) seen.last = spans[r].last;
            }
            if (seen.empty()) continue;
            if (piece->tier == K8V8) {
                const Piece* after = t + TILE < piece->count ? piece : piece + 1;
                const bool more = after < pieces + num_pieces && after->tier == K8V8;
                const K8V8Tile tile = k8v8_tile_at(b, piece->id, rows.kv_head, t);
                K8V8Tile next;
                if (more)
                    next = k8v8_tile_at(b, after->id, rows.kv_head, after == piece ? t + TILE : 0);
                k8v8_tile(tile, more ? &next : nullptr, dim, seen, spans, rows.count, s, out);
            } else {
                const int64_t token =
                    (piece->id * b.kv_heads + rows.kv_head) *
                        (piece->tier == SINK ? b.sink_tokens : b.block_size) + t;
                const char* k = piece->tier == SINK ? b.sink_k : b.hot_k;
                const char* v = piece->tier == SINK ? b.sink_v : b.hot_v;
                float_tile(reinterpret_cast<const T*>(k) + token * dim,
                           reinterpret_cast<const T*>(v) + token * dim, dim, seen, spans,
                           rows.count, s, out);
            }
        }
    }
}

}  // namespace
