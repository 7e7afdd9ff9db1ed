// Online softmax of some rows over some pieces, tile by tile.
//
//   tile of 64 tokens: scores s, m' = max(m, max s), p = e^(s - m'), and with a = e^(m - m')
//   sum = a sum + sum p        acc = a acc + p V
//
// Bytes moved: each block once, whatever the group size.
#pragma once
#include "tile_float.h"
#include "tile_quantized.h"
#if defined(OMLX_AVX512)
#include "tile_packed.h"
#endif

namespace {

using namespace omlx;

// The rows of q or sink_q as floats, scaled.
template <class T>
inline void load_queries(const AttentionArgs& a, const Rows& rows, const char* queries,
                         int64_t stride_token, int64_t stride_head, int64_t padded, float* out) {
    const int dim = static_cast<int>(a.blocks.head_dim);
    const int64_t group = a.num_q_heads / a.blocks.kv_heads;
    const vf factor = splat(static_cast<float>(a.sm_scale));
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i;
        const T* q = reinterpret_cast<const T*>(queries) +
                     (rows.first_token + row / group) * stride_token +
                     (rows.kv_head * group + row % group) * stride_head;
        for (int c = 0; c < padded; c += W)
            store(out + i * padded + c, c < dim ? load_row(q, c, dim) * factor : splat(0.0f));
    }
}

// Tokens of tile t .. t+63 of a piece that a row sees, the row itself being token `self` of it.
inline Span span_of(const Piece& piece, int64_t self, int64_t count, int64_t window) {
    const auto within = [](int64_t x, int64_t most) {
        return static_cast<int>(x < 0 ? 0 : x > most ? most : x);
    };
    const int64_t oldest = self - window + 1;  // the first in the row's window
    if (piece.sees == Sees::OUTSIDE) return {0, within(oldest, count)};
    const bool windowed = window && piece.sees == Sees::WINDOW;
    return {windowed ? within(oldest, TILE) : 0, within(self < -1 ? 0 : self + 1, count)};
}

// The tile at token t of a piece, and the fetch of the one after it if that is of the same tier.
template <int K_BITS, int V_BITS>
inline void attend_codes(const Blocks& b, int64_t head, const Piece* piece, const Piece* end,
                         int64_t t, Span seen, const Span* spans, int64_t num_rows,
                         const Scratch& s, Partial out) {
    const TierBlocks& tier = b.tiers[piece->tier];
    const Piece* after = t + TILE < piece->count ? piece : piece + 1;
    const bool more = after < end && after->tier == piece->tier;
    QuantizedTile next;
    if (more)
        next = tile_at<K_BITS, V_BITS>(b, tier, after->id, head, after == piece ? t + TILE : 0);
    const QuantizedTile tile = tile_at<K_BITS, V_BITS>(b, tier, piece->id, head, t);
#if defined(OMLX_AVX512)
    if (num_rows >= PACKED_ROWS)
        return packed_tile<K_BITS, V_BITS>(tile, static_cast<int>(b.head_dim), seen, spans,
                                           num_rows, s, out);
#endif
    quantized_tile<K_BITS, V_BITS>(tile, more ? &next : nullptr, static_cast<int>(b.head_dim), seen,
                                   spans, num_rows, s, out);
}

template <class T>
inline void attend_floats(const Blocks& b, int64_t head, const Piece& piece, int64_t t, Span seen,
                          const Span* spans, int64_t num_rows, const Scratch& s, Partial out) {
    const TierBlocks& tier = b.tiers[piece.tier];
    const int64_t size = piece.tier == SINK ? b.sink_tokens : b.block_size;
    const int64_t at = ((piece.id * b.kv_heads + head) * size + t) * b.head_dim;
    float_tile(reinterpret_cast<const T*>(tier.k) + at, reinterpret_cast<const T*>(tier.v) + at,
               static_cast<int>(b.head_dim), piece.sees == Sees::OUTSIDE ? s.sink_q : s.q, seen,
               spans, num_rows, s, out);
}

template <class T>
inline void attend_typed(const AttentionArgs& a, const Rows& rows, const Piece* pieces,
                         int64_t num_pieces, Partial out, float* memory) {
    const Blocks& b = a.blocks;
    const Scratch s(memory, a);
    const int64_t group = a.num_q_heads / b.kv_heads;
    load_queries<T>(a, rows, a.q, a.q_stride_token, a.q_stride_head, s.stride, s.q);
    if (a.sink_q)
        load_queries<T>(a, rows, a.sink_q, a.sink_q_stride_token, a.sink_q_stride_head, s.stride,
                        s.sink_q);
    std::memset(out.acc, 0, rows.count * s.stride * sizeof(float));
    for (int64_t r = 0; r < rows.count; ++r) out.max[r] = -INF, out.sum[r] = 0.0f;

    Span spans[MAX_ROWS];
    const Piece* end = pieces + num_pieces;
    for (const Piece* piece = pieces; piece < end; ++piece) {
        for (int64_t t = 0; t < piece->count; t += TILE) {
            const int64_t left = piece->count - t, count = left < TILE ? left : TILE;
            Span seen{TILE, 0};
            for (int64_t r = 0; r < rows.count; ++r) {
                const int64_t self =
                    rows.first_position + (rows.first + r) / group - piece->start - t;
                spans[r] = span_of(*piece, self, count, a.window);
                if (spans[r].empty()) continue;
                if (spans[r].first < seen.first) seen.first = spans[r].first;
                if (spans[r].last > seen.last) seen.last = spans[r].last;
            }
            if (seen.empty()) continue;
            auto codes = [&](auto k_bits, auto v_bits) {
                attend_codes<decltype(k_bits)::value, decltype(v_bits)::value>(
                    b, rows.kv_head, piece, end, t, seen, spans, rows.count, s, out);
            };
            switch (piece->tier) {
                case K8V8: codes(Count<8>{}, Count<8>{}); break;
                case K8V4: codes(Count<8>{}, Count<4>{}); break;
                case K4V4: codes(Count<4>{}, Count<4>{}); break;
                default:
                    attend_floats<T>(b, rows.kv_head, *piece, t, seen, spans, rows.count, s, out);
            }
        }
    }
}

}  // namespace
