// A tile of codes that many rows share: laid out once, then like quantized_tile.
#pragma once
#include "packed_avx512.h"
#include "tile_quantized.h"

namespace {

// Call body(r, Count<n>) for rows r .. r+n-1, two at a time.
template <class F>
inline void by_two(int64_t rows, F&& body) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) body(r, Count<2>{});
    if (r < rows) body(r, Count<1>{});
}

template <int K_BITS, int V_BITS>
inline void packed_tile(const QuantizedTile& tile, int dim, Span seen, const Span* spans,
                        int64_t num_rows, const Scratch& s, Partial out) {
    const int stride = static_cast<int>(s.stride);
    const bool reads = reads_packed(dim);
    if (K_BITS == 8) pack_keys<8>(tile.k, dim, s.packed);
    else if (reads) pack_keys<4>(tile.k, dim, s.packed);
    else pack_keys<8>(unpack_tile(tile.k, dim, s), dim, s.packed);
    for (int64_t r = 0; r < num_rows; ++r)
        if (!spans[r].empty()) fold_query<K_BITS>(tile, dim, r, s);
    by_two(num_rows, [&](int64_t r, auto n) {
        packed_scores<decltype(n)::value>(s.packed, dim, stride, s.codes(r), s.k_steps + r,
                                          s.biases + r, s.scores + r * TILE);
    });
    softmax_rows(spans, num_rows, s, out);
    if (V_BITS == 8) pack_values<8>(tile.v, dim, stride, s.packed);
    else if (reads) pack_values<4>(tile.v, dim, stride, s.packed);
    else pack_values<8>(unpack_tile(tile.v, dim, s), dim, stride, s.packed);
    auto weigh_channels = [&](int c) {
        by_two(num_rows, [&](int64_t r, auto n) {
            packed_values<decltype(n)::value>(s.packed, stride, c, seen.first, seen.last,
                                              s.weights + r, s.steps + r, out.acc + r * stride);
        });
    };
    const int groups = (dim + 63) / 64;
    if (V_BITS == 8) {
        float scales[TILE];
        load_column(tile.v_scale, 1, seen, scales);
        for (int64_t r = 0; r < num_rows; ++r)
            s.steps[r] = fold_weights(s.scores + r * TILE, scales, s.weights[r]);
    }
    for (int g = 0; g < groups; ++g) {
        if (V_BITS == 4) fold_group(tile, groups, g, seen, num_rows, s, out);
        weigh_channels(64 * g);
    }
}

}  // namespace
