// Scatter new tokens, [token, head, dim] of any strides, into their slots [block, head, slot, dim];
// rotate the values on the way where the cache has 4-bit values.
#include <algorithm>
#include <cstring>
#include <vector>

#include "error.h"
#include "isa.h"
#include "pool.h"

namespace omlx {
namespace {

template <class T>
void copy_row(T* to, const T* from, int64_t dim, int64_t stride) {
    if (stride == 1) {
        std::memcpy(to, from, dim * sizeof(T));
        return;
    }
    for (int64_t c = 0; c < dim; ++c) to[c] = from[c * stride];
}

// `buffer` is null where values are not rotated.
template <class T>
void append_token(const AppendArgs& a, int64_t token, float* buffer) {
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    const T* k = reinterpret_cast<const T*>(a.k) + token * a.k_stride_token;
    const T* v = reinterpret_cast<const T*>(a.v) + token * a.v_stride_token;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        const int64_t row = (slot / a.size * a.kv_heads + head) * a.size + slot % a.size;
        copy_row(reinterpret_cast<T*>(a.dst_k) + row * a.head_dim, k + head * a.k_stride_head,
                 a.head_dim, a.k_stride_dim);
        const T* from = v + head * a.v_stride_head;
        T* to = reinterpret_cast<T*>(a.dst_v) + row * a.head_dim;
        if (!buffer) copy_row(to, from, a.head_dim, a.v_stride_dim);
        else
            kernels().rotate(reinterpret_cast<const char*>(from), a.v_stride_dim,
                             reinterpret_cast<char*>(to), a.head_dim, a.dtype, buffer);
    }
}

void append(const AppendArgs& a) {
    for (int64_t token = 0; token < a.num_tokens; ++token)
        if (a.slots[token] >= a.num_blocks * a.size)
            fail("append_kv: slot_mapping[%lld] must be below %lld blocks * %lld tokens, got %lld",
                 (long long)token, (long long)a.num_blocks, (long long)a.size,
                 (long long)a.slots[token]);
    const int64_t bytes =
        2 * a.num_tokens * a.kv_heads * a.head_dim * element_size(a.dtype);
    const int64_t step = 16, threads = threads_for(bytes, a.num_threads);
    const int64_t padded = a.rotate_v ? round_up(a.head_dim, 64) : 0;
    std::vector<float> buffers(padded * ((a.num_tokens + step - 1) / step));
    parallel_for((a.num_tokens + step - 1) / step, threads, [&](int64_t i) {
        float* buffer = padded ? buffers.data() + i * padded : nullptr;
        for (int64_t t = i * step; t < std::min((i + 1) * step, a.num_tokens); ++t) {
            if (a.dtype == F32) append_token<float>(a, t, buffer);
            else append_token<uint16_t>(a, t, buffer);
        }
    });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_append_kv(const omlx::AppendArgs* a) {
    return omlx::guarded([&] { omlx::append(*a); });
}
