// Turn listed blocks into colder ones (quantize.h), one (block, head) per item.
#include <algorithm>
#include <vector>

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
    check_ids("src_ids", a.src_ids, a.count, a.src.num_blocks);
    check_ids("dst_ids", a.dst_ids, a.count, a.dst.num_blocks);
    const Kernels& kernel = kernels();
    const int64_t bytes =
        2 * a.count * a.kv_heads * a.block_size * a.head_dim * element_size(a.dtype);
    const int64_t items = a.count * a.kv_heads;
    const int64_t threads = threads_for(bytes, a.num_threads);
    const int64_t shares = std::min(items, 4 * threads);  // each with scratch of its own
    const int64_t floats = round_up(kernel.convert_floats(a.head_dim), 16);
    std::vector<float> scratch(floats * shares);
    parallel_for(shares, threads, [&](int64_t i) {
        for (int64_t j = items * i / shares; j < items * (i + 1) / shares; ++j)
            kernel.convert(a, j / a.kv_heads, j % a.kv_heads, scratch.data() + i * floats);
    });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_convert_blocks(const omlx::ConvertArgs* a) {
    return omlx::guarded([&] { omlx::convert(*a); });
}
