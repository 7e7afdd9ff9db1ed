// Scores and values of a tile that is stored in the model's dtype (hot blocks and sink pages).
#pragma once
#include "softmax.h"

namespace {

// scores[r][t] = q[r] . k[t] for tokens first .. last-1; q rows are padded with zeros to W.
template <int ROWS, class T>
inline void float_scores_of(const T* k, int dim, int first, int last, const float* q,
                            int64_t q_stride, float* scores, int64_t scores_stride) {
    int t = first;
    for (; t + 4 <= last; t += 4) {
        const T* row = k + int64_t(t) * dim;
        vf sum[ROWS][4];
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < 4; ++j) sum[r][j] = splat(0.0f);
        for (int c = 0; c < dim; c += W) {
            vf x[4];
            for (int j = 0; j < 4; ++j) x[j] = load_row(row + int64_t(j) * dim, c, dim);
            for (int r = 0; r < ROWS; ++r) {
                const vf query = load(q + r * q_stride + c);
                for (int j = 0; j < 4; ++j) sum[r][j] = fma(x[j], query, sum[r][j]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            reduce_add4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * scores_stride + t);
    }
    for (; t < last; ++t) {
        for (int r = 0; r < ROWS; ++r) {
            vf sum = splat(0.0f);
            for (int c = 0; c < dim; c += W)
                sum = fma(load_row(k + int64_t(t) * dim, c, dim), load(q + r * q_stride + c), sum);
            scores[r * scores_stride + t] = reduce_add(sum);
        }
    }
}

// acc[r][c] += sum_t weights[r][t] * v[t][c] for tokens first .. last-1. VECS vectors of each row
// stay in registers while the tokens pass.
template <int ROWS, int VECS, class T>
inline void float_values_of(const T* v, int dim, int first, int last, const float* weights,
                            int64_t weights_stride, float* acc, int64_t acc_stride) {
    int c = 0;
    for (; c + VECS * W <= dim; c += VECS * W) {
        vf sum[ROWS][VECS];
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < VECS; ++i) sum[r][i] = load(acc + r * acc_stride + c + i * W);
        for (int t = first; t < last; ++t) {
            vf x[VECS];
            for (int i = 0; i < VECS; ++i) x[i] = load(v + int64_t(t) * dim + c + i * W);
            for (int r = 0; r < ROWS; ++r) {
                const vf weight = splat(weights[r * weights_stride + t]);
                for (int i = 0; i < VECS; ++i) sum[r][i] = fma(x[i], weight, sum[r][i]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < VECS; ++i) store(acc + r * acc_stride + c + i * W, sum[r][i]);
    }
    for (; c < dim; c += W) {
        for (int r = 0; r < ROWS; ++r) {
            vf sum = load(acc + r * acc_stride + c);
            for (int t = first; t < last; ++t)
                sum = fma(load_row(v + int64_t(t) * dim, c, dim),
                          splat(weights[r * weights_stride + t]), sum);
            store(acc + r * acc_stride + c, sum);
        }
    }
}

// Call body(r, integral_constant of n) for rows r .. r+n-1, n <= 4, until `rows` are done.
template <class F>
inline void by_rows(int64_t rows, F&& body) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) body(r, Count<4>{});
    switch (rows - r) {
        case 3: return body(r, Count<3>{});
        case 2: return body(r, Count<2>{});
        case 1: return body(r, Count<1>{});
        default: return;
    }
}

// `q`: the rows' queries, s.q or s.sink_q.
template <class T>
inline void float_tile(const T* k, const T* v, int dim, const float* q, Span seen,
                       const Span* spans, int64_t num_rows, const Scratch& s, Partial out) {
    by_rows(num_rows, [&](int64_t r, auto n) {
        float_scores_of<decltype(n)::value>(k, dim, seen.first, seen.last, q + r * s.stride,
                                            s.stride, s.scores + r * TILE, TILE);
    });
    softmax_rows(spans, num_rows, s, out);
    by_rows(num_rows, [&](int64_t r, auto n) {
        constexpr int ROWS = decltype(n)::value;
        float_values_of<ROWS, ROWS == 1 ? 8 : 4>(v, dim, seen.first, seen.last,
                                                 s.scores + r * TILE, TILE,
                                                 out.acc + r * s.stride, s.stride);
    });
}

}  // namespace
