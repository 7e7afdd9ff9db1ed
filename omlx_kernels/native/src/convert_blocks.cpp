// Quantize listed hot blocks (quantize.h), one (block, head) per item; and the way back for extend:
// gather listed blocks of any tier as contiguous keys and values in the model's dtype.
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
    parallel_for(a.count * a.kv_heads, a.num_threads,
                 [&](int64_t i) { kernel.convert(a, i / a.kv_heads, i % a.kv_heads); });
}

void gather(const GatherArgs& a) {
    const Blocks& b = a.blocks;
    const int64_t limits[] = {b.num_sinks, b.num_hot, b.num_k8v8};
    int64_t tokens = 0;
    for (int64_t i = 0; i < a.num_pieces; ++i) {
        const int32_t tier = a.tiers[i], first = a.firsts[i], count = a.counts[i];
        const int64_t size = tier == SINK ? b.sink_tokens : b.block_size;
        if (tier < SINK || tier > K8V8 || a.ids[i] < 0 || a.ids[i] >= limits[tier] || first < 0 ||
            count < 0 || int64_t{first} + count > size)
            fail("paged_attention: block_table must list stored blocks, got tokens %d .. %d of "
                 "block %d of tier %d", first, first + count, a.ids[i], tier);
        tokens += count;
    }
    if (tokens != a.num_tokens)
        fail("paged_attention: blocks must hold %lld tokens, got %lld", (long long)a.num_tokens,
             (long long)tokens);
    const Kernels& kernel = kernels();
    parallel_for(a.last_head - a.first_head, a.num_threads, [&](int64_t head) {
        int64_t at = head * a.num_tokens * b.head_dim * element_size(b.dtype);
        for (int64_t i = 0; i < a.num_pieces; ++i) {
            kernel.gather(b, Tier(a.tiers[i]), a.ids[i], a.first_head + head, a.firsts[i],
                          a.counts[i], a.k + at, a.v + at);
            at += a.counts[i] * b.head_dim * element_size(b.dtype);
        }
    });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_convert_blocks(const omlx::ConvertArgs* a) {
    return omlx::guarded([&] { omlx::convert(*a); });
}
OMLX_API int omlx_gather(const omlx::GatherArgs* a) {
    return omlx::guarded([&] { omlx::gather(*a); });
}
