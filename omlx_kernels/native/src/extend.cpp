// What extend by many queries needs around torch's own attention: listed blocks of any tier as
// contiguous keys and values in the model's dtype, and the merging of parts by log-sum-exp.
#include "error.h"
#include "isa.h"
#include "pool.h"

namespace omlx {
namespace {

void gather(const GatherArgs& a) {
    const Blocks& b = a.blocks;
    int64_t tokens = 0;
    for (int64_t i = 0; i < a.num_pieces; ++i) {
        const int32_t tier = a.tiers[i], first = a.firsts[i], count = a.counts[i];
        const int64_t size = tier == SINK ? b.sink_tokens : b.block_size;
        if (tier < SINK || tier >= TIERS || a.ids[i] < 0 ||
            a.ids[i] >= b.tiers[tier].num_blocks || first < 0 || count < 0 ||
            int64_t{first} + count > size)
            fail("paged_attention: block_table must list stored blocks, got tokens %d .. %lld of "
                 "block %d of tier %d", first, (long long)first + count, a.ids[i], tier);
        tokens += count;
    }
    if (tokens != a.num_tokens)
        fail("paged_attention: blocks must hold %lld tokens, got %lld", (long long)a.num_tokens,
             (long long)tokens);
    const Kernels& kernel = kernels();
    const int64_t row_bytes = b.head_dim * element_size(b.dtype);
    const int64_t heads = a.last_head - a.first_head;
    // By piece and head: one head alone still uses every thread.
    const int64_t bytes = 2 * heads * tokens * row_bytes;
    parallel_for(a.num_pieces, threads_for(bytes, a.num_threads), [&](int64_t i) {
        int64_t before = 0;
        for (int64_t j = 0; j < i; ++j) before += a.counts[j];
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t at = (head * a.num_tokens + before) * row_bytes;
            kernel.gather(b, Tier(a.tiers[i]), a.ids[i], a.first_head + head, a.firsts[i],
                          a.counts[i], a.k + at, a.v + at);
        }
    });
}

void merge(const MergeArgs& a) {
    const Kernels& kernel = kernels();
    const int64_t bytes = a.heads * a.rows * a.head_dim * element_size(a.dtype);
    parallel_for(a.heads, threads_for(bytes, a.num_threads),
                 [&](int64_t head) { kernel.merge(a, head); });
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_gather(const omlx::GatherArgs* a) {
    return omlx::guarded([&] { omlx::gather(*a); });
}
OMLX_API int omlx_merge(const omlx::MergeArgs* a) {
    return omlx::guarded([&] { omlx::merge(*a); });
}
