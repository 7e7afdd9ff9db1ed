// Copy listed blocks to others of the same tier, byte by byte; one (copy, part) per item.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "abi.h"
#include "error.h"
#include "pool.h"

namespace omlx {
namespace {

void check(const CopyArgs& a) {
    for (int64_t i = 0; i < a.count; ++i)
        for (const auto& [name, id] : {std::pair{"src_ids", a.src_ids[i]}, {"dst_ids", a.dst_ids[i]}})
            if (id < 0 || id >= a.num_blocks)
                fail("copy_blocks: %s[%lld] must be in [0, %lld), got %d", name, (long long)i,
                     (long long)a.num_blocks, id);
    // Copies run in any order, on several threads.
    std::vector<int32_t> written(a.dst_ids, a.dst_ids + a.count);
    std::sort(written.begin(), written.end());
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end()) fail("copy_blocks: dst_ids must be distinct, got %d twice", *twice);
    for (int64_t i = 0; i < a.count; ++i)
        if (std::binary_search(written.begin(), written.end(), a.src_ids[i]))
            fail("copy_blocks: dst_ids must not be in src_ids, got src_ids[%lld] = %d in both",
                 (long long)i, a.src_ids[i]);
}

void copy(const CopyArgs& a) {
    check(a);
    int64_t bytes = 0;
    for (const int64_t part : a.block_bytes) bytes += 2 * a.count * part;
    parallel_for(a.count * PARTS, threads_for(bytes, a.num_threads), [&](int64_t i) {
        const int64_t size = a.block_bytes[i % PARTS];
        char* const part = a.parts[i % PARTS];
        if (size)
            std::memcpy(part + a.dst_ids[i / PARTS] * size, part + a.src_ids[i / PARTS] * size, size);
    });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_copy_blocks(const omlx::CopyArgs* a) {
    return omlx::guarded([&] { omlx::copy(*a); });
}
