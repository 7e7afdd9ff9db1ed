// Tiles of codes laid out for vpdpbusd, which pays where many rows share a tile: no sums across
// lanes, and tokens are interleaved once for all rows.
//   keys    [channel / 4][64 tokens][4 channels], one dword of 4 channels for each token
//   values  [token / 4][channel][4 tokens], channels in the order of interleave_4
#pragma once
#include "dot_avx512.h"

namespace {

// Rows that make laying out a tile worth it.
constexpr int64_t PACKED_ROWS = 8;

// Turn 16 rows of 16 dwords into columns.
inline void transpose_16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // lane L of r[i + j]: rows i .. i+3 of column 4 L + j
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        r[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        r[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

template <int BITS>
inline void pack_keys(const uint8_t* k, int dim, uint8_t* packed) {
    for (int t = 0; t < 64; t += 16)
        for (int c = 0; c < dim; c += 64) {
            __m512i x[16];
            for (int i = 0; i < 16; ++i)
                x[i] = unpack_codes<BITS>(
                    load_codes<BITS>(k + int64_t(t + i) * (dim * BITS / 8), dim, c,
                                     first_bytes(dim - c)),
                    dim, c);
            transpose_16(x);
            for (int i = 0; i < 16; ++i)
                _mm512_storeu_si512(packed + (c / 4 + i) * 256 + t * 4, x[i]);
        }
}

template <int BITS>
inline void pack_values(const uint8_t* v, int dim, int64_t stride, uint8_t* packed) {
    for (int t = 0; t < 64; t += 4)
        for (int c = 0; c < dim; c += 64) {
            __m512i x[4];
            interleave_4<BITS>(v + int64_t(t) * (dim * BITS / 8), dim, c, first_bytes(dim - c), x);
            for (int i = 0; i < 4; ++i)
                _mm512_storeu_si512(packed + t * stride + c * 4 + i * 64, x[i]);
        }
}

inline __m512i splat_4(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}

// scores[r][t] = steps[r] * (q[r] . k_t) + biases[r]; rows of q are `stride` channels.
template <int ROWS>
inline void packed_scores(const uint8_t* packed, int dim, int stride, QueryCodes q,
                          const float* steps, const float* biases, float* scores) {
    __m512i high[ROWS][4], low[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
    for (int c = 0; c < dim; c += 4) {
        __m512i x[4];
        for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_si512(packed + c * 64 + i * 64);
        for (int r = 0; r < ROWS; ++r) {
            const __m512i h = splat_4(q.high + r * 2 * stride + c);
            const __m512i l = splat_4(q.low + r * 2 * stride + c);
            for (int i = 0; i < 4; ++i) {
                high[r][i] = _mm512_dpbusd_epi32(high[r][i], x[i], h);
                low[r][i] = _mm512_dpbusd_epi32(low[r][i], x[i], l);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][i], 7), low[r][i]);
            store(scores + r * 64 + 16 * i, fma(to_vf(sum), splat(steps[r]), splat(biases[r])));
        }
}

// acc[r][c .. c+63] += steps[r] * sum_t weights[r][t] * v[t][c ..] for tokens first .. last-1.
template <int ROWS>
inline void packed_values(const uint8_t* packed, int64_t stride, int c, int first, int last,
                          const WeightCodes* weights, const float* steps, float* acc) {
    __m512i high[ROWS][4], low[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
    for (int t = first & ~3; t < last; t += 4) {
        __m512i x[4];
        for (int i = 0; i < 4; ++i)
            x[i] = _mm512_loadu_si512(packed + t * stride + c * 4 + i * 64);
        for (int r = 0; r < ROWS; ++r) {
            const __m512i h = splat_4(weights[r].high + t), l = splat_4(weights[r].low + t);
            for (int i = 0; i < 4; ++i) {
                high[r][i] = _mm512_dpbusd_epi32(high[r][i], h, x[i]);
                low[r][i] = _mm512_dpbusd_epi32(low[r][i], l, x[i]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) add_channels(high[r], low[r], steps[r], acc + r * stride + c);
}

}  // namespace
