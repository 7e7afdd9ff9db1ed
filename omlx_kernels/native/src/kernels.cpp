// Compiled once for every instruction set, with OMLX_AVX512, OMLX_AVX2 or neither defined.
#include "attend.h"
#include "gather.h"
#include "merge.h"
#include "quantize.h"

namespace {

template <class F>
inline auto by_dtype(int64_t dtype, F&& body) {
    switch (dtype) {
        case BF16: return body(bf16{});
        case F16: return body(f16{});
        default: return body(float{});
    }
}

void attend(const AttentionArgs& a, const Rows& rows, const Piece* pieces, int64_t num_pieces,
            Partial out, float* scratch) {
    by_dtype(a.blocks.dtype, [&](auto x) {
        attend_typed<decltype(x)>(a, rows, pieces, num_pieces, out, scratch);
    });
}

void finish(const AttentionArgs& a, const Rows& rows, float* partials, int64_t num_partials,
            float* mass) {
    by_dtype(a.blocks.dtype,
             [&](auto x) { finish_typed<decltype(x)>(a, rows, partials, num_partials, mass); });
}

void rotate(const char* from, int64_t stride, char* to, int64_t dim, int64_t dtype,
            float* buffer) {
    by_dtype(dtype, [&](auto x) {
        using T = decltype(x);
        rotate_typed(reinterpret_cast<const T*>(from), stride, reinterpret_cast<T*>(to),
                     static_cast<int>(dim), buffer);
    });
}

void convert(const ConvertArgs& a, int64_t index, int64_t head, float* scratch) {
    by_dtype(a.dtype, [&](auto x) { convert_typed<decltype(x)>(a, index, head, scratch); });
}

void gather(const Blocks& b, Tier tier, int64_t id, int64_t head, int64_t first, int64_t count,
            char* k, char* v) {
    by_dtype(b.dtype, [&](auto x) {
        using T = decltype(x);
        gather_typed(b, tier, id, head, first, count, reinterpret_cast<T*>(k),
                     reinterpret_cast<T*>(v));
    });
}

void merge(const MergeArgs& a, int64_t head) {
    by_dtype(a.dtype, [&](auto x) { merge_typed<decltype(x)>(a, head); });
}

}  // namespace

namespace omlx {

#define OMLX_KERNELS(isa)                                                               \
    extern const Kernels kernels_##isa{#isa,           Scratch::floats, attend, finish, rotate, \
                                       convert_floats, convert,         gather, merge}
#if defined(OMLX_AVX512)
OMLX_KERNELS(avx512);
#elif defined(OMLX_AVX2)
OMLX_KERNELS(avx2);
#else
OMLX_KERNELS(portable);
#endif

}  // namespace omlx
