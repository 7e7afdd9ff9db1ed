// The orthonormal Hadamard rotation of a row, in blocks of the largest power of two that divides
// dim: log2(size) passes of butterflies (a + b, a - b) over elements h = 1, 2, 4, ... apart.
#pragma once
#include "vec.h"

namespace {

// (a + b, a - b) of lanes that are H < W apart.
template <int H>
inline vf butterfly(vf x) {
    float signs[W];
    for (int i = 0; i < W; ++i) signs[i] = i & H ? -1.0f : 1.0f;
    return fma(x, load(signs), swap_lanes<H>(x));
}

// Rotate x in place but for the factor that is returned. x is padded to whole vectors; the padding
// does not mix with the row.
inline float rotate_unscaled(float* x, int dim) {
    const int size = dim & -dim;
    for (int c = 0; c < dim; c += W) {
        vf v = load(x + c);
        if (size > 1) v = butterfly<1>(v);
        if (size > 2) v = butterfly<2>(v);
        if constexpr (W > 4) if (size > 4) v = butterfly<4>(v);
        if constexpr (W > 8) if (size > 8) v = butterfly<8>(v);
        store(x + c, v);
    }
    for (int h = W; h < size; h *= 2)
        for (int c = 0; c < dim; c += 2 * h)
            for (int i = c; i < c + h; i += W) {
                const vf a = load(x + i), b = load(x + i + h);
                store(x + i, a + b);
                store(x + i + h, a - b);
            }
    return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size)));
}

template <class T>
inline void rotate_typed(const T* from, int64_t stride, T* to, int dim, float* buffer) {
    if (stride == 1)
        for (int c = 0; c < dim; c += W) store(buffer + c, load_row(from, c, dim));
    else
        for (int c = 0; c < dim; ++c) buffer[c] = to_float(from[c * stride]);
    const vf factor = splat(rotate_unscaled(buffer, dim));
    for (int c = 0; c < dim; c += W) store_row(to, load(buffer + c) * factor, c, dim);
}

}  // namespace
