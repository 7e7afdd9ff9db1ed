// Integer dots of tiles of bytes as plain loops, which compilers turn into 16-bit multiply-adds.
#pragma once
#include "vec.h"

namespace {

struct QueryCodes {  // |code| <= 16256
    int16_t* codes;
    QueryCodes(void* memory, int) : codes(static_cast<int16_t*>(memory)) {}
    void set(int c, vi x) {
        for (int i = 0; i < W; ++i) codes[c + i] = static_cast<int16_t>(x[i]);
    }
};

struct WeightCodes {  // 0 <= code <= 32767
    int16_t codes[64];
    void set(int t, vi x) {
        for (int i = 0; i < W; ++i) codes[t + i] = static_cast<int16_t>(x[i]);
    }
};

// Whether k_scores and v_values read 4-bit codes as they are stored.
inline bool reads_packed(int) { return false; }

template <int BITS>
inline void k_scores(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                     float* scores, Fetch) {
    for (int t = 0; t < 64; ++t) {
        const uint8_t* row = k + int64_t(t) * dim;
        int32_t sum = 0;
        for (int c = 0; c < dim; ++c) sum += int32_t{static_cast<int16_t>(row[c])} * q.codes[c];
        scores[t] = static_cast<float>(sum) * step + bias;
    }
}

// acc[r][c] += step[r] * sum_t weights[r][t] * v[t][c] for channels begin .. end-1 of rows of dim.
template <int BITS, int ROWS>
inline void v_values(const uint8_t* v, int dim, int begin, int end, int first, int last,
                     const WeightCodes* weights, const float* step, float* acc,
                     int64_t acc_stride, Fetch) {
    constexpr int CHUNK = 32;
    for (int c = begin; c < end; c += CHUNK) {
        const int n = end - c < CHUNK ? end - c : CHUNK;
        int32_t sum[ROWS][CHUNK] = {};
        for (int t = first; t < last; ++t) {
            const int8_t* codes = reinterpret_cast<const int8_t*>(v) + int64_t(t) * dim + c;
            for (int r = 0; r < ROWS; ++r) {
                const int32_t w = weights[r].codes[t];
                for (int i = 0; i < n; ++i) sum[r][i] += w * codes[i];
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < n; ++i)
                acc[r * acc_stride + c + i] += static_cast<float>(sum[r][i]) * step[r];
    }
}

}  // namespace
