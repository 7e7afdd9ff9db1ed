// Quantize listed hot blocks (quantize.h), one (block, head) per item.
#include "error.h"
#include "isa.h"
#include "pool.h"

namespace omlx {
namespace {

void check_ids(const char* name, const int32_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            fail("convert_blocks: %s[%lld] must be in [0, %lld), got %d", name, (long long)i,
                 (long long)limit, ids[i]);
}

void convert(const ConvertArgs& a) {
    check_ids("src_ids", a.src_ids, a.count, a.num_src);
    check_ids("dst_ids", a.dst_ids, a.count, a.num_dst);
    const Kernels& kernel = kernels();
    const int64_t bytes =
        2 * a.count * a.kv_heads * a.block_size * a.head_dim * element_size(a.dtype);
    parallel_for(a.count * a.kv_heads, threads_for(bytes, a.num_threads),
                 [&](int64_t i) { kernel.convert(a, i / a.kv_heads, i % a.kv_heads); });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_convert_blocks(const omlx::ConvertArgs* a) {
    return omlx::guarded([&] { omlx::convert(*a); });
}
