// Blocks to a colder tier. The arithmetic is that of omlx_kernels/quantization.py, operation for
// operation (hence no contraction to fma). Parts whose format stays are copied bit for bit.
#pragma once
#include "isa.h"
#include "unpack.h"
#include "vec.h"

namespace {

using namespace omlx;

constexpr float RANGE_SLACK = 0.0005f, TINY = 0x1p-24f, SMALLEST_NORMAL = 0x1p-14f;
constexpr float HALF_MAX = 65504.0f;

inline float clamp_half(float x) {
    return x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x;
}
// Round to the integers of [low, high]; ties to even.
inline vf round_between(vf x, float low, float high) {
    return to_vf(to_int(vmin(vmax(x, splat(low)), splat(high))));
}

// A step between codes, rounded so that it still reaches the end of the range.
inline f16 round_scale(float step) {
    return to_half(clamp_half(step < SMALLEST_NORMAL ? step + TINY : step));
}

// The scale and zero with which codes 0 .. levels reach from low to high.
inline void asymmetric(float low, float high, int levels, f16& scale, f16& zero) {
    const float magnitude = low < 0.0f ? -low : low;
    zero = to_half(clamp_half(low));
    if (to_float(zero) > low) zero = to_half(clamp_half(low - RANGE_SLACK * magnitude - TINY));
    scale = round_scale((high - to_float(zero)) * static_cast<float>(1.0 / levels));
}

// A group of 64 tokens; one byte a code.
template <class T>
inline void quantize_keys(const T* k, int dim, int levels, uint8_t* codes, uint16_t* scale,
                          uint16_t* zero) {
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
            f16 s, z;
            asymmetric(lows[i], highs[i], levels, s, z);
            if (c + i < dim) scale[c + i] = s.bits, zero[c + i] = z.bits;
            lows[i] = to_float(z), highs[i] = to_float(s);
        }
        const vf zeros = load(lows), scales = load(highs);
        for (int t = 0; t < QUANT_GROUP; ++t) {
            const vf x = load_row(k + int64_t(t) * dim, c, dim);
            const vf code = round_between((x - zeros) / scales, 0, static_cast<float>(levels));
            store_row(codes + int64_t(t) * dim, code, c, dim);
        }
    }
}

template <class T>
inline void quantize_v8(const T* v, int dim, int8_t* codes, uint16_t* scale) {
    vf top = splat(0.0f);
    for (int c = 0; c < dim; c += W) top = vmax(top, vabs(load_row(v, c, dim)));
    const f16 s = round_scale(reduce_max(top) * static_cast<float>(1.0 / 127));
    *scale = s.bits;
    const vf scales = splat(to_float(s));
    for (int c = 0; c < dim; c += W)
        store_row(codes, round_between(load_row(v, c, dim) / scales, -127, 127), c, dim);
}

// One byte a code; one scale and zero for every 64 channels.
template <class T>
inline void quantize_v4(const T* v, int dim, uint8_t* codes, uint16_t* scale, uint16_t* zero) {
    for (int first = 0; first < dim; first += QUANT_GROUP) {
        const int last = first + QUANT_GROUP < dim ? first + QUANT_GROUP : dim;
        float low = INF, high = -INF;
        for (int c = first; c < last; c += W) {
            float x[W];
            store(x, load_row(v, c, last));
            for (int i = 0; i < W && c + i < last; ++i) {
                low = x[i] < low ? x[i] : low;
                high = x[i] > high ? x[i] : high;
            }
        }
        f16 s, z;
        asymmetric(low, high, 15, s, z);
        *scale++ = s.bits, *zero++ = z.bits;
        const vf scales = splat(to_float(s)), zeros = splat(to_float(z));
        for (int c = first; c < last; c += W)
            store_row(codes, round_between((load_row(v, c, last) - zeros) / scales, 0, 15), c, last);
    }
}

// Floats of a group of 64 tokens of 8-bit keys, and of a row of 8-bit values.
inline void dequantize_keys(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero,
                            int dim, float* k) {
    const f16 *scales = reinterpret_cast<const f16*>(scale), *zeros = reinterpret_cast<const f16*>(zero);
    for (int64_t t = 0; t < QUANT_GROUP; ++t)
        for (int c = 0; c < dim; c += W)
            store_row(k + t * dim,
                      fma(load_row(codes + t * dim, c, dim), load_row(scales, c, dim),
                          load_row(zeros, c, dim)), c, dim);
}
inline void dequantize_v8(const int8_t* codes, uint16_t scale, int dim, float* v) {
    const vf scales = splat(to_float(f16{scale}));
    for (int c = 0; c < dim; c += W) store_row(v, load_row(codes, c, dim) * scales, c, dim);
}

// A group of keys as floats, and its codes.
inline int64_t convert_floats(int64_t head_dim) {
    return QUANT_GROUP * round_up(head_dim, 64) * 5 / 4;
}

// Copy what belongs to row (block, head) of a part with `count` elements a row.
template <class P>
inline void copy_part(P* to, const P* from, int64_t to_row, int64_t from_row, int64_t count) {
    std::memcpy(to + to_row * count, from + from_row * count, count * sizeof(P));
}

template <class T>
inline void convert_keys(const ConvertArgs& a, int64_t from, int64_t to, float* floats,
                         uint8_t* codes) {
    const int dim = static_cast<int>(a.head_dim), bits = k_bits(a.dst_tier);
    const int64_t groups = a.block_size / QUANT_GROUP;
    if (k_bits(a.src_tier) == bits) {
        copy_part(a.dst.k, a.src.k, to, from, a.block_size * dim * bits / 8);
        copy_part(a.dst.k_scale, a.src.k_scale, to, from, groups * dim);
        copy_part(a.dst.k_zero, a.src.k_zero, to, from, groups * dim);
        return;
    }
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t source = (from * groups + g) * dim, target = (to * groups + g) * dim;
        uint8_t* out = reinterpret_cast<uint8_t*>(a.dst.k) + target * QUANT_GROUP * bits / 8;
        uint8_t* bytes = bits == 8 ? out : codes;
        uint16_t *scale = a.dst.k_scale + target, *zero = a.dst.k_zero + target;
        const int levels = (1 << bits) - 1;
        if (a.src_tier == HOT) {
            const T* k = reinterpret_cast<const T*>(a.src.k) + source * QUANT_GROUP;
            quantize_keys(k, dim, levels, bytes, scale, zero);
        } else {
            const uint8_t* k = reinterpret_cast<const uint8_t*>(a.src.k) + source * QUANT_GROUP;
            dequantize_keys(k, a.src.k_scale + source, a.src.k_zero + source, dim, floats);
            quantize_keys(floats, dim, levels, bytes, scale, zero);
        }
        if (bits == 4)
            for (int64_t t = 0; t < QUANT_GROUP; ++t)
                pack_row(codes + t * dim, dim, out + t * (dim / 2));
    }
}

template <class T>
inline void convert_values(const ConvertArgs& a, int64_t from, int64_t to, float* floats,
                           uint8_t* codes) {
    const int dim = static_cast<int>(a.head_dim), bits = v_bits(a.dst_tier);
    const int64_t groups = bits == 8 ? 1 : round_up(dim, QUANT_GROUP) / QUANT_GROUP;
    if (v_bits(a.src_tier) == bits) {
        copy_part(a.dst.v, a.src.v, to, from, a.block_size * dim * bits / 8);
        copy_part(a.dst.v_scale, a.src.v_scale, to, from, a.block_size * groups);
        if (bits == 4) copy_part(a.dst.v_zero, a.src.v_zero, to, from, a.block_size * groups);
        return;
    }
    for (int64_t t = 0; t < a.block_size; ++t) {
        const int64_t source = from * a.block_size + t, target = to * a.block_size + t;
        const T* v = reinterpret_cast<const T*>(a.src.v) + source * dim;
        char* out = a.dst.v + target * dim * bits / 8;
        uint16_t* scale = a.dst.v_scale + target * groups;
        if (bits == 8) {
            quantize_v8(v, dim, reinterpret_cast<int8_t*>(out), scale);
            continue;
        }
        uint16_t* zero = a.dst.v_zero + target * groups;
        if (a.src_tier == HOT) {
            quantize_v4(v, dim, codes, scale, zero);
        } else {
            dequantize_v8(reinterpret_cast<const int8_t*>(a.src.v) + source * dim,
                          a.src.v_scale[source], dim, floats);
            quantize_v4(floats, dim, codes, scale, zero);
        }
        pack_row(codes, dim, reinterpret_cast<uint8_t*>(out));
    }
}

template <class T>
inline void convert_typed(const ConvertArgs& a, int64_t index, int64_t head, float* scratch) {
    const int64_t from = a.src_ids[index] * a.kv_heads + head;  // rows (block, head)
    const int64_t to = a.dst_ids[index] * a.kv_heads + head;
    uint8_t* codes = reinterpret_cast<uint8_t*>(scratch + QUANT_GROUP * a.head_dim);
    convert_keys<T>(a, from, to, scratch, codes);
    convert_values<T>(a, from, to, scratch, codes);
}

}  // namespace
