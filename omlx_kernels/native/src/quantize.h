// Blocks of the model's dtype to 8 bits, and any block back to the model's dtype. The arithmetic is
// that of omlx_kernels/quantization.py, operation for operation (hence no contraction to fma).
#pragma once
#include "isa.h"
#include "vec.h"

namespace {

using namespace omlx;

constexpr float RANGE_SLACK = 0.0005f, TINY = 0x1p-24f, HALF_MAX = 65504.0f;

inline float clamp_half(float x) {
    return x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x;
}
// Round to the integers of [low, high]; ties to even.
inline vf round_between(vf x, float low, float high) {
    return to_vf(to_int(vmin(vmax(x, splat(low)), splat(high))));
}

template <class T>
inline void quantize_keys(const T* k, int dim, uint8_t* codes, uint16_t* scale, uint16_t* zero) {
    for (int c = 0; c < dim; c += W) {
        vf low = splat(INF), high = splat(-INF);
        for (int t = 0; t < QUANT_GROUP; ++t) {
            const vf x = load_row(k + int64_t(t) * dim, c, dim);
            low = vmin(low, x);
            high = vmax(high, x);
        }
        float lows[W], highs[W];
        store(lows, low);
        store(highs, high);
        for (int i = 0; i < W; ++i) {
            const float magnitude = lows[i] < 0.0f ? -lows[i] : lows[i];
            const f16 z = to_half(clamp_half(lows[i] - RANGE_SLACK * magnitude - TINY));
            const float span = highs[i] - to_float(z);
            const f16 s = to_half(
                clamp_half(span * static_cast<float>((1 + 0.0005) / 255) + TINY));
            if (c + i < dim) scale[c + i] = s.bits, zero[c + i] = z.bits;
            lows[i] = to_float(z), highs[i] = to_float(s);
        }
        const vf zeros = load(lows), scales = load(highs);
        for (int t = 0; t < QUANT_GROUP; ++t) {
            const vf x = load_row(k + int64_t(t) * dim, c, dim);
            const vf code = round_between((x - zeros) / scales, 0, 255);
            store_row(codes + int64_t(t) * dim, code, c, dim);
        }
    }
}

template <class T>
inline void quantize_values(const T* v, int dim, int8_t* codes, uint16_t* scale) {
    vf top = splat(0.0f);
    for (int c = 0; c < dim; c += W) top = vmax(top, vabs(load_row(v, c, dim)));
    const f16 s = to_half(
        clamp_half(reduce_max(top) * static_cast<float>((1 + 0.0005) / 127) + TINY));
    *scale = s.bits;
    const vf scales = splat(to_float(s));
    for (int c = 0; c < dim; c += W)
        store_row(codes, round_between(load_row(v, c, dim) / scales, -127, 127), c, dim);
}

template <class T>
inline void convert_typed(const ConvertArgs& a, int64_t index, int64_t head) {
    const int dim = static_cast<int>(a.head_dim);
    const int64_t groups = a.block_size / QUANT_GROUP;
    const int64_t from = (a.src_ids[index] * a.kv_heads + head) * a.block_size;  // in tokens
    const int64_t block = a.dst_ids[index] * a.kv_heads + head, to = block * a.block_size;
    const T* k = reinterpret_cast<const T*>(a.src_k) + from * dim;
    const T* v = reinterpret_cast<const T*>(a.src_v) + from * dim;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t offset = (block * groups + g) * dim;
        quantize_keys(k + g * QUANT_GROUP * dim, dim, a.k + (to + g * QUANT_GROUP) * dim,
                      a.k_scale + offset, a.k_zero + offset);
    }
    for (int64_t t = 0; t < a.block_size; ++t)
        quantize_values(v + t * dim, dim, a.v + (to + t) * dim, a.v_scale + to + t);
}

template <class T>
inline void gather_typed(const Blocks& b, Tier tier, int64_t id, int64_t head, int64_t first,
                         int64_t count, T* k, T* v) {
    const int dim = static_cast<int>(b.head_dim);
    const int64_t size = tier == SINK ? b.sink_tokens : b.block_size;
    const int64_t row = id * b.kv_heads + head, token = row * size + first;
    if (tier != K8V8) {
        const int64_t bytes = dim * sizeof(T);
        std::memcpy(k, (tier == SINK ? b.sink_k : b.hot_k) + token * bytes, count * bytes);
        std::memcpy(v, (tier == SINK ? b.sink_v : b.hot_v) + token * bytes, count * bytes);
        return;
    }
    for (int64_t t = 0; t < count; ++t) {
        const int64_t group = row * (size / QUANT_GROUP) + (first + t) / QUANT_GROUP;
        const f16* scale = reinterpret_cast<const f16*>(b.k8_scale) + group * dim;
        const f16* zero = reinterpret_cast<const f16*>(b.k8_zero) + group * dim;
        const vf v_scale = splat(to_float(f16{b.v8_scale[token + t]}));
        const uint8_t* kc = b.k8 + (token + t) * dim;
        const int8_t* vc = b.v8 + (token + t) * dim;
        for (int c = 0; c < dim; c += W) {
            store_row(k + t * dim,
                      fma(load_row(kc, c, dim), load_row(scale, c, dim), load_row(zero, c, dim)), c,
                      dim);
            store_row(v + t * dim, load_row(vc, c, dim) * v_scale, c, dim);
        }
    }
}

}  // namespace
