// Integer dots of tiles of codes with vpdpbusd, which multiplies 4 unsigned by 4 signed bytes and
// adds them to an int32. The 15-bit operand (query or weights) is split as high * 2^SHIFT + low.
//
// 4-bit codes are unpacked in registers where 64 channels are 64 low or 64 high nibbles, or, for
// dim = 64, the 32 low and the 32 high nibbles of the same bytes.
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

// Whether k_scores and v_values read 4-bit codes as they are stored.
inline bool reads_packed(int dim) { return dim == 64 || dim % 128 == 0; }

// Bytes that hold channels c .. c+63 of a row, c a multiple of 64, with other nibbles beside them.
template <int BITS>
inline __m512i load_codes(const uint8_t* row, int dim, int c, __mmask64 mask) {
    if (BITS == 8) return _mm512_maskz_loadu_epi8(mask, row + c);
    if (dim == 64)
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
    return _mm512_loadu_si512(row + (2 * c < dim ? c : c - dim / 2));
}
// The codes in such bytes.
template <int BITS>
inline __m512i unpack_codes(__m512i x, int dim, int c) {
    if (BITS == 8) return x;
    if (dim == 64) x = _mm512_srlv_epi64(x, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0));
    else if (2 * c >= dim) x = _mm512_srli_epi16(x, 4);
    return _mm512_and_si512(x, _mm512_set1_epi8(15));
}

// CHUNKS = ceil(dim / 64) when the query's codes fit into registers, else 0.
template <int BITS, int CHUNKS>
inline void k_scores_of(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                         float* scores, Fetch next) {
    const int chunks = CHUNKS ? CHUNKS : (dim + 63) / 64;
    if (BITS == 4 && CHUNKS) dim = 64 * CHUNKS;  // known to the compiler
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
                const uint8_t* row = k + int64_t(t + 4 * i + j) * (dim * BITS / 8);
                __m512i h = _mm512_setzero_si512(), l = h;
                for (int c = 0; c < chunks; ++c) {
                    const __mmask64 mask = c == chunks - 1 ? tail : ~0ull;
                    const __m512i x = unpack_codes<BITS>(load_codes<BITS>(row, dim, c * 64, mask),
                                                         dim, c * 64);
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

template <int BITS>
inline void k_scores(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                     float* scores, Fetch next) {
    switch ((dim + 63) / 64) {
        case 1: return k_scores_of<BITS, 1>(k, dim, q, step, bias, scores, next);
        case 2: return k_scores_of<BITS, 2>(k, dim, q, step, bias, scores, next);
        case 4: return k_scores_of<BITS, 4>(k, dim, q, step, bias, scores, next);
        default: return k_scores_of<BITS, 0>(k, dim, q, step, bias, scores, next);
    }
}

// Four tokens' codes of channels c .. c+63, interleaved byte by byte: dword D of lane L of x[i] holds
// 4 tokens of channel c + 16 L + 4 i + D.
template <int BITS>
inline void interleave_4(const uint8_t* codes, int dim, int c, __mmask64 mask, __m512i* x) {
    const int row = dim * BITS / 8;
    const __m512i v0 = load_codes<BITS>(codes, dim, c, mask);
    const __m512i v1 = load_codes<BITS>(codes + row, dim, c, mask);
    const __m512i v2 = load_codes<BITS>(codes + 2 * row, dim, c, mask);
    const __m512i v3 = load_codes<BITS>(codes + 3 * row, dim, c, mask);
    const __m512i a = _mm512_unpacklo_epi8(v0, v1), b = _mm512_unpackhi_epi8(v0, v1);
    const __m512i e = _mm512_unpacklo_epi8(v2, v3), f = _mm512_unpackhi_epi8(v2, v3);
    x[0] = unpack_codes<BITS>(_mm512_unpacklo_epi16(a, e), dim, c);
    x[1] = unpack_codes<BITS>(_mm512_unpackhi_epi16(a, e), dim, c);
    x[2] = unpack_codes<BITS>(_mm512_unpacklo_epi16(b, f), dim, c);
    x[3] = unpack_codes<BITS>(_mm512_unpackhi_epi16(b, f), dim, c);
}

// acc[0 .. 63] += step * (256 high + low), whose channels are in the order of interleave_4.
inline void add_channels(const __m512i* high, const __m512i* low, float step, float* acc) {
    __m512i s[4];
    for (int i = 0; i < 4; ++i) s[i] = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
    const __m512i even_a = _mm512_shuffle_i32x4(s[0], s[1], 0x88);
    const __m512i even_b = _mm512_shuffle_i32x4(s[2], s[3], 0x88);
    const __m512i odd_a = _mm512_shuffle_i32x4(s[0], s[1], 0xdd);
    const __m512i odd_b = _mm512_shuffle_i32x4(s[2], s[3], 0xdd);
    const __m512i ordered[4] = {_mm512_shuffle_i32x4(even_a, even_b, 0x88),
                                _mm512_shuffle_i32x4(odd_a, odd_b, 0x88),
                                _mm512_shuffle_i32x4(even_a, even_b, 0xdd),
                                _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd)};
    for (int i = 0; i < 4; ++i)
        store(acc + 16 * i, fma(to_vf(ordered[i]), splat(step), load(acc + 16 * i)));
}

// acc[r][c] += step[r] * sum_t weights[r][t] * v[t][c] for channels begin .. end-1 of rows of dim.
// Four tokens' rows are interleaved byte by byte: each int32 of a dot holds 4 tokens of one channel.
template <int BITS, int ROWS>
inline void v_values(const uint8_t* v, int dim, int begin, int end, int first, int last,
                     const WeightCodes* weights, const float* step, float* acc,
                     int64_t acc_stride, Fetch next) {
    const int fetches = (dim + 63) / 64 * 16, row = dim * BITS / 8;
    for (int c = begin; c < end; c += 64) {
        const __mmask64 mask = first_bytes(end - c);
        __m512i high[ROWS][4], low[ROWS][4];
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < 4; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
        for (int t = first & ~3; t < last; t += 4) {
            const uint8_t* codes = v + int64_t(t) * row;
            next.step((c + t) / 4, fetches);
            __m512i x[4];
            interleave_4<BITS>(codes, dim, c, mask, x);
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
        for (int r = 0; r < ROWS; ++r)
            add_channels(high[r], low[r], step[r], acc + r * acc_stride + c);
    }
}

}  // namespace
