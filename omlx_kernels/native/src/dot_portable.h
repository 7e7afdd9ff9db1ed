// Integer dots of 8-bit tiles as plain loops, which compilers turn into 16-bit multiply-adds.
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

inline void k8_scores(const uint8_t* k, int dim, QueryCodes q, float step, float bias,
                      float* scores, Fetch) {
    for (int t = 0; t < 64; ++t) {
        const uint8_t* row = k + int64_t(t) * dim;
        int32_t sum = 0;
        for (int c = 0; c < dim; ++c) sum += int32_t{static_cast<int16_t>(row[c])} * q.codes[c];
        scores[t] = static_cast<float>(sum) * step + bias;
    }
}

// acc[r][c] += step[r] * sum_t weights[r][t] * v[t][c], where rows of v are `row` bytes apart.
template <int ROWS>
inline void v8_values(const int8_t* v, int row, int dim, int first, int last,
                      const WeightCodes* weights, const float* step, float* acc,
                      int64_t acc_stride, Fetch) {
    constexpr int CHUNK = 32;
    for (int c = 0; c < dim; c += CHUNK) {
        const int n = dim - c < CHUNK ? dim - c : CHUNK;
        int32_t sum[ROWS][CHUNK] = {};
        for (int t = first; t < last; ++t) {
            const int8_t* codes = v + int64_t(t) * row + c;
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
