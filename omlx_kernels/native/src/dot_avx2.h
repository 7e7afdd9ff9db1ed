// Integer dots of tiles of codes with vpmaddwd: they are widened to 16 bits, so that neither the
// 15-bit operand (query or weights) nor any product saturates.
#pragma once
#include "vec.h"

namespace {

struct QueryCodes {  // |code| <= 16256
    int16_t* codes;
    QueryCodes(void* memory, int) : codes(static_cast<int16_t*>(memory)) {}
    void set(int c, vi x) {
        const __m128i packed =
            _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + c), packed);
    }
};

struct WeightCodes {  // 0 <= code <= 32767
    int16_t codes[64];
    void set(int t, vi x) {
        const __m128i packed =
            _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + t), packed);
    }
};

inline __m128i load16(const void* p, int n) {  // n bytes, at most 16, zeros after them
    if (n >= 16) return _mm_loadu_si128(static_cast<const __m128i*>(p));
    char full[16] = {};
    std::memcpy(full, p, n);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(full));
}

// The low or the high nibbles of packed codes; bytes as they are.
template <int BITS>
inline __m128i nibbles(__m128i x, bool is_high) {
    if (BITS == 8) return x;
    return _mm_and_si128(is_high ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
}

// Whether k_scores and v_values read 4-bit codes as they are stored.
inline bool reads_packed(int dim) { return dim % 32 == 0; }

template <int BITS>
inline void k_scores(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                     float* scores, Fetch next) {
    const int bytes = dim * BITS / 8;
    const auto query_at = [&](int c) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q.codes + c));
    };
    for (int t = 0; t < 64; t += 4) {
        next.step(t / 4, 16);
        __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                          _mm256_setzero_si256()};
        for (int c = 0; c < bytes; c += 16) {
            const __m256i query = query_at(c), high_query = query_at(BITS == 4 ? bytes + c : c);
            for (int j = 0; j < 4; ++j) {
                const __m128i x = load16(k + int64_t(t + j) * bytes + c, bytes - c);
                __m256i codes = _mm256_cvtepu8_epi16(x);
                if (BITS == 4) {
                    const __m256i high = _mm256_srli_epi16(codes, 4);
                    sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(high, high_query));
                    codes = _mm256_and_si256(codes, _mm256_set1_epi16(15));
                }
                sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(codes, query));
            }
        }
        const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]),
                                            _mm256_hadd_epi32(sum[2], sum[3]));
        const __m128i sums =
            _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
        _mm_storeu_ps(scores + t, _mm_fmadd_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(step),
                                               _mm_set1_ps(bias)));
    }
}

// acc[r][c] += step[r] * sum_t weights[r][t] * v[t][c] for channels begin .. end-1 of rows of dim;
// two tokens' rows are interleaved.
template <int BITS, int ROWS>
inline void v_values(const uint8_t* v, int dim, int begin, int end, int first, int last,
                     const WeightCodes* weights, const float* step, float* acc,
                     int64_t acc_stride, Fetch next) {
    const int fetches = (dim + 63) / 64 * 32, row = dim * BITS / 8;
    for (int c = begin; c < end; c += 16) {
        const bool is_high = BITS == 4 && c >= row;
        __m256i sum[ROWS][2];
        for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
        for (int t = first & ~1; t < last; t += 2) {
            const uint8_t* codes = v + int64_t(t) * row + (is_high ? c - row : c);
            if (!(c & 48)) next.step(c / 2 + t / 2, fetches);
            const __m128i v0 = nibbles<BITS>(load16(codes, end - c), is_high);
            const __m128i v1 = nibbles<BITS>(load16(codes + row, end - c), is_high);
            const __m256i x0 = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(v0, v1));
            const __m256i x1 = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(v0, v1));
            for (int r = 0; r < ROWS; ++r) {
                int32_t pair;
                std::memcpy(&pair, weights[r].codes + t, 4);
                const __m256i w = _mm256_set1_epi32(pair);
                sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(x0, w));
                sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(x1, w));
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            float* out = acc + r * acc_stride + c;
            for (int i = 0; i < 2; ++i)
                store(out + 8 * i, fma(to_vf(sum[r][i]), splat(step[r]), load(out + 8 * i)));
        }
    }
}

}  // namespace
