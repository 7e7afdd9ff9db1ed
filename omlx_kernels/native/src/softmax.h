// The scratch of an item of work, and the online softmax of one row over one tile.
#pragma once
#include "isa.h"
#include "vec.h"

#if defined(OMLX_AVX512)
#include "dot_avx512.h"
#elif defined(OMLX_AVX2)
#include "dot_avx2.h"
#else
#include "dot_portable.h"
#endif

namespace {

using namespace omlx;

// Per row: the query (and that of sinks outside the window) in floats, and as codes for the key
// scales of a group; scores, then weights, of a tile, and the weights as codes. One query with
// scales folded in; one tile of 4-bit codes unpacked, and one of keys or values laid out anew.
struct Scratch {
    float *q, *sink_q, *folded, *scores, *steps, *k_steps, *biases;
    char* query_codes;
    WeightCodes* weights;
    uint8_t *unpacked, *packed;
    int64_t stride;  // floats of a padded row
    float softcap;

    static int64_t floats(int64_t head_dim) {
        const int64_t stride = round_up(head_dim, 64);
        return MAX_ROWS * (2 * stride + stride / 2 + TILE + sizeof(WeightCodes) / 4 + 3) + stride +
               2 * (TILE / 4 * stride);
    }
    Scratch(float* memory, const AttentionArgs& a)
        : stride(round_up(a.blocks.head_dim, 64)), softcap(static_cast<float>(a.softcap)) {
        q = memory;
        sink_q = q + MAX_ROWS * stride;
        folded = sink_q + MAX_ROWS * stride;
        scores = folded + stride;
        query_codes = reinterpret_cast<char*>(scores + MAX_ROWS * TILE);
        weights = reinterpret_cast<WeightCodes*>(query_codes + MAX_ROWS * stride * 2);
        unpacked = reinterpret_cast<uint8_t*>(weights + MAX_ROWS);
        packed = unpacked + TILE * stride;
        steps = reinterpret_cast<float*>(packed + TILE * stride);
        k_steps = steps + MAX_ROWS;
        biases = k_steps + MAX_ROWS;
    }
    QueryCodes codes(int64_t row) const {
        return {query_codes + row * stride * 2, static_cast<int>(stride)};
    }
};

// A number that a lambda can take at compile time.
template <int N>
struct Count { static constexpr int value = N; };

// Tokens [first, last) of a tile that a row sees.
struct Span {
    int first, last;
    bool empty() const { return first >= last; }
};

// cap * tanh(x / cap), from e^(-2 |x / cap|).
inline vf cap_score(vf x, float cap) {
    const vf y = x * splat(1.0f / cap), size = vabs(y);
    const vf e = exp(size * splat(-2.0f)), sign = y / vmax(splat(1e-30f), size);
    return splat(cap) * sign * ((splat(1.0f) - e) / (splat(1.0f) + e));
}

// Turn a row's scores into weights e^(s - max), zero outside its span, and rescale what it has.
inline void softmax(float* scores, Span span, int64_t row, int64_t stride, float softcap,
                    Partial out) {
    if (softcap > 0.0f)
        for (int t = 0; t < TILE; t += W) store(scores + t, cap_score(load(scores + t), softcap));
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

// The weights of every row of a tile, in place of their scores.
inline void softmax_rows(const Span* spans, int64_t num_rows, const Scratch& s, Partial out) {
    for (int64_t r = 0; r < num_rows; ++r) {
        float* scores = s.scores + r * TILE;
        if (!spans[r].empty()) softmax(scores, spans[r], r, s.stride, s.softcap, out);
        else std::memset(scores, 0, TILE * sizeof(float));
    }
}

}  // namespace
