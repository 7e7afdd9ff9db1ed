// Integer dots of 8-bit tiles with vpdpbusd, which multiplies 4 unsigned by 4 signed bytes and adds
// them to an int32. The 15-bit operand (query or weights) is split as high * 2^SHIFT + low.
#pragma once
#include "vec.h"

namespace {

struct QueryCodes {  // |code| <= 16256 = 127 * 128, as high * 128 + low with low in -64 .. 63
    int8_t *high, *low;
    QueryCodes(void* memory, int padded)
        : high(static_cast<int8_t*>(memory)), low(high + padded) {}
    void set(int c, vi codes) {
        const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(64)), 7);
        const __m512i l = _mm512_sub_epi32(codes, _mm512_slli_epi32(h, 7));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + c), _mm512_cvtepi32_epi8(h));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + c), _mm512_cvtepi32_epi8(l));
    }
};

struct WeightCodes {  // 0 <= code <= 32767, as high * 256 + low
    uint8_t high[64], low[64];
    void set(int t, vi codes) {
        const __m512i h = _mm512_srli_epi32(codes, 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + t), _mm512_cvtepi32_epi8(h));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + t), _mm512_cvtepi32_epi8(codes));
    }
};

// The lowest n bytes of a vector; all of them for n >= 64.
inline __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

inline __m512i sums_of_4(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// CHUNKS = ceil(dim / 64) when the query's codes fit into registers, else 0.
template <int CHUNKS>
inline void k8_scores_of(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                         float* scores, Fetch next) {
    const int chunks = CHUNKS ? CHUNKS : (dim + 63) / 64;
    const __mmask64 tail = first_bytes(dim - (chunks - 1) * 64);
    __m512i high[CHUNKS ? CHUNKS : 1], low[CHUNKS ? CHUNKS : 1];
    for (int c = 0; c < CHUNKS; ++c) {
        high[c] = _mm512_loadu_si512(q.high + c * 64);
        low[c] = _mm512_loadu_si512(q.low + c * 64);
    }
    for (int t = 0; t < 64; t += 16) {
        __m512i quad[4];  // quad[i]: in each 128-bit lane, parts of the sums of tokens 4i .. 4i+3
        for (int i = 0; i < 4; ++i) {
            next.step(t / 4 + i, 16);
            __m512i sum[4];
            for (int j = 0; j < 4; ++j) {
                const uint8_t* row = k + int64_t(t + 4 * i + j) * dim;
                __m512i h = _mm512_setzero_si512(), l = h;
                for (int c = 0; c < chunks; ++c) {
                    const __m512i x = c == chunks - 1 ? _mm512_maskz_loadu_epi8(tail, row + c * 64)
                                                      : _mm512_loadu_si512(row + c * 64);
                    h = _mm512_dpbusd_epi32(
                        h, x, CHUNKS ? high[CHUNKS ? c : 0] : _mm512_loadu_si512(q.high + c * 64));
                    l = _mm512_dpbusd_epi32(
                        l, x, CHUNKS ? low[CHUNKS ? c : 0] : _mm512_loadu_si512(q.low + c * 64));
                }
                sum[j] = _mm512_add_epi32(_mm512_slli_epi32(h, 7), l);
            }
            quad[i] = sums_of_4(sum[0], sum[1], sum[2], sum[3]);
        }
        // Add the four lanes of each quad; lane i of the result comes from quad i.
        const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(quad[0], quad[1], 0x88),
                                           _mm512_shuffle_i32x4(quad[0], quad[1], 0xdd));
        const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(quad[2], quad[3], 0x88),
                                           _mm512_shuffle_i32x4(quad[2], quad[3], 0xdd));
        const __m512i sums = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88),
                                              _mm512_shuffle_i32x4(a, b, 0xdd));
        store(scores + t, fma(_mm512_cvtepi32_ps(sums), splat(step), splat(bias)));
    }
}

inline void k8_scores(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                      float* scores, Fetch next) {
    switch ((dim + 63) / 64) {
        case 1: return k8_scores_of<1>(k, dim, q, step, bias, scores, next);
        case 2: return k8_scores_of<2>(k, dim, q, step, bias, scores, next);
        case 4: return k8_scores_of<4>(k, dim, q, step, bias, scores, next);
        default: return k8_scores_of<0>(k, dim, q, step, bias, scores, next);
    }
}

// acc[r][c] += step[r] * sum_t weights[r][t] * v[t][c]; rows of v are `row` bytes apart. Four
// tokens' rows are interleaved byte by byte: each int32 of a dot holds 4 tokens of one channel.
template <int ROWS>
inline void v8_values(const int8_t* v, int row, int dim, int first, int last,
                      const WeightCodes* weights, const float* step, float* acc,
                      int64_t acc_stride, Fetch next) {
    const int fetches = (dim + 63) / 64 * 16;
    for (int c = 0; c < dim; c += 64) {
        const __mmask64 mask = first_bytes(dim - c);
        __m512i high[ROWS][4], low[ROWS][4];
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < 4; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
        for (int t = first & ~3; t < last; t += 4) {
            const int8_t* codes = v + int64_t(t) * row + c;
            next.step((c + t) / 4, fetches);
            const __m512i v0 = _mm512_maskz_loadu_epi8(mask, codes);
            const __m512i v1 = _mm512_maskz_loadu_epi8(mask, codes + row);
            const __m512i v2 = _mm512_maskz_loadu_epi8(mask, codes + 2 * row);
            const __m512i v3 = _mm512_maskz_loadu_epi8(mask, codes + 3 * row);
            const __m512i a = _mm512_unpacklo_epi8(v0, v1), b = _mm512_unpackhi_epi8(v0, v1);
            const __m512i e = _mm512_unpacklo_epi8(v2, v3), f = _mm512_unpackhi_epi8(v2, v3);
            const __m512i x[4] = {_mm512_unpacklo_epi16(a, e), _mm512_unpackhi_epi16(a, e),
                                  _mm512_unpacklo_epi16(b, f), _mm512_unpackhi_epi16(b, f)};
            for (int r = 0; r < ROWS; ++r) {
                int32_t h, l;
                std::memcpy(&h, weights[r].high + t, 4);
                std::memcpy(&l, weights[r].low + t, 4);
                for (int i = 0; i < 4; ++i) {
                    high[r][i] = _mm512_dpbusd_epi32(high[r][i], _mm512_set1_epi32(h), x[i]);
                    low[r][i] = _mm512_dpbusd_epi32(low[r][i], _mm512_set1_epi32(l), x[i]);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            __m512i s[4];  // lane L of s[i]: channels 16 L + 4 i ..
            for (int i = 0; i < 4; ++i)
                s[i] = _mm512_add_epi32(_mm512_slli_epi32(high[r][i], 8), low[r][i]);
            const __m512i even_a = _mm512_shuffle_i32x4(s[0], s[1], 0x88);
            const __m512i even_b = _mm512_shuffle_i32x4(s[2], s[3], 0x88);
            const __m512i odd_a = _mm512_shuffle_i32x4(s[0], s[1], 0xdd);
            const __m512i odd_b = _mm512_shuffle_i32x4(s[2], s[3], 0xdd);
            const __m512i ordered[4] = {_mm512_shuffle_i32x4(even_a, even_b, 0x88),
                                        _mm512_shuffle_i32x4(odd_a, odd_b, 0x88),
                                        _mm512_shuffle_i32x4(even_a, even_b, 0xdd),
                                        _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd)};
            float* out = acc + r * acc_stride + c;
            for (int i = 0; i < 4; ++i)
                store(out + 16 * i,
                      fma(to_vf(ordered[i]), splat(step[r]), load(out + 16 * i)));
        }
    }
}

}  // namespace
