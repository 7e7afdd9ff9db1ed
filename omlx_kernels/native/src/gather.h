// Tokens of a block of any tier as rows of the model's dtype (values as stored: maybe rotated).
#pragma once
#include "isa.h"
#include "unpack.h"
#include "vec.h"

namespace {

using namespace omlx;

// to = codes * scale + zero for n channels, where scale(c) and zero(c) are vectors.
template <class T, class C, class Scale, class Zero>
inline void gather_channels(T* to, const C* codes, int n, Scale&& scale, Zero&& zero) {
    for (int c = 0; c < n; c += W)
        store_row(to, fma(load_row(codes, c, n), scale(c), zero(c)), c, n);
}

template <class T>
inline void gather_key(const TierBlocks& b, int bits, int64_t token, int64_t group, int dim, T* to) {
    const f16* scales = reinterpret_cast<const f16*>(b.k_scale) + group * dim;
    const f16* zeros = reinterpret_cast<const f16*>(b.k_zero) + group * dim;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(b.k) + token * dim * bits / 8;
    const int step = bits == 8 ? dim : 64;
    uint8_t unpacked[64];
    for (int first = 0; first < dim; first += step) {
        const int n = dim - first < step ? dim - first : step;
        if (bits == 4) unpack_some(codes, dim, first, n, unpacked);
        gather_channels(
            to + first, bits == 8 ? codes : unpacked, n,
            [&](int c) { return load_row(scales + first, c, n); },
            [&](int c) { return load_row(zeros + first, c, n); });
    }
}

template <class T>
inline void gather_value(const TierBlocks& b, int bits, int64_t token, int dim, T* to) {
    if (bits == 8) {
        const vf scale = splat(to_float(f16{b.v_scale[token]}));
        gather_channels(
            to, reinterpret_cast<const int8_t*>(b.v) + token * dim, dim,
            [&](int) { return scale; }, [&](int) { return splat(0.0f); });
        return;
    }
    const int64_t groups = round_up(dim, 64) / 64;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(b.v) + token * (dim / 2);
    uint8_t unpacked[64];
    for (int64_t g = 0; g < groups; ++g) {
        const int first = static_cast<int>(g) * 64, n = dim - first < 64 ? dim - first : 64;
        const vf scale = splat(to_float(f16{b.v_scale[token * groups + g]}));
        const vf zero = splat(to_float(f16{b.v_zero[token * groups + g]}));
        unpack_some(codes, dim, first, n, unpacked);
        gather_channels(
            to + first, unpacked, n, [&](int) { return scale; }, [&](int) { return zero; });
    }
}

template <class T>
inline void gather_typed(const Blocks& b, Tier tier, int64_t id, int64_t head, int64_t first,
                         int64_t count, T* k, T* v) {
    const int dim = static_cast<int>(b.head_dim);
    const int64_t size = tier == SINK ? b.sink_tokens : b.block_size;
    const int64_t row = id * b.kv_heads + head, token = row * size + first;
    const TierBlocks& blocks = b.tiers[tier];
    if (!k_bits(tier)) {
        const int64_t bytes = dim * sizeof(T);
        std::memcpy(k, blocks.k + token * bytes, count * bytes);
        std::memcpy(v, blocks.v + token * bytes, count * bytes);
        return;
    }
    for (int64_t t = 0; t < count; ++t) {
        const int64_t group = row * (size / QUANT_GROUP) + (first + t) / QUANT_GROUP;
        gather_key(blocks, k_bits(tier), token + t, group, dim, k + t * dim);
        gather_value(blocks, v_bits(tier), token + t, dim, v + t * dim);
    }
}

}  // namespace
