// Decode, and extend by a few tokens: check the tables, list what each sequence's queries can see,
// cut the work into items (sequence, kv head, rows, range of the list) and run them on the pool.
//
// A range is cut only as far as the threads need it; the last item of a cut list to finish merges
// the parts by their log-sum-exp. Where the mass of each split of the work list is asked for, the
// list is cut as it says. Each block is read once by up to MAX_ROWS (query, head) rows.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "error.h"
#include "isa.h"
#include "pool.h"

namespace omlx {
namespace {

// Items per thread, so that a thread that starts late or runs slower does not hold up the rest.
constexpr int64_t ITEMS_PER_THREAD = 4;

// Grow-only memory of one thread, aligned to cache lines.
class Arena {
  public:
    float* floats(int64_t count) {
        if (count > size_) {
            data_.reset();
            size_ = 0;
            data_.reset(static_cast<float*>(
                std::aligned_alloc(64, round_up(count * sizeof(float), 64))));
            if (!data_) throw std::bad_alloc();
            size_ = count;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> data_;
    int64_t size_ = 0;
};

void check(const AttentionArgs& a) {
    const Blocks& b = a.blocks;
    int64_t queries = 0;
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t first = a.query_start_loc[s], last = a.query_start_loc[s + 1];
        const int64_t length = a.seq_lens[s];
        if (first < queries || last < first || last > a.num_tokens)
            fail("paged_attention: query_start_loc must rise from 0 to at most num_tokens=%lld, "
                 "got %lld .. %lld for sequence %lld",
                 (long long)a.num_tokens, (long long)first, (long long)last, (long long)s);
        queries = last;
        if (length < last - first)
            fail("paged_attention: seq_lens[%lld] must be at least the sequence's %lld queries, "
                 "got %lld",
                 (long long)s, (long long)(last - first), (long long)length);
        const int32_t page = a.sink_pages[s];  // -1 = none
        if (b.sink_tokens && length && (page < -1 || page >= b.tiers[SINK].num_blocks))
            fail("paged_attention: sink_pages[%lld] must be in [-1, %lld), got %d", (long long)s,
                 (long long)b.tiers[SINK].num_blocks, page);
        const int32_t* bounds = a.tier_starts + s * (BLOCK_TIERS + 1);
        for (int i = 0; i < BLOCK_TIERS; ++i) {
            if (bounds[i] < 0 || bounds[i + 1] < bounds[i] || bounds[i + 1] > a.table_width)
                fail("paged_attention: tier_starts[%lld] must rise within [0, %lld], got %d .. %d",
                     (long long)s, (long long)a.table_width, bounds[i], bounds[i + 1]);
            const int64_t limit = b.tiers[HOT + i].num_blocks;
            for (int64_t e = bounds[i]; e < bounds[i + 1]; ++e) {
                const int32_t id = a.block_table[s * a.table_width + e];
                if (id < 0 || id >= limit)
                    fail("paged_attention: block_table[%lld, %lld] must be in [0, %lld), got %d",
                         (long long)s, (long long)e, (long long)limit, id);
            }
        }
    }
}

void check_splits(const AttentionArgs& a) {
    int64_t before = 0;
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t first = a.split_starts[s], last = a.split_starts[s + 1];
        if (first < before || last < first || last > a.num_splits)
            fail("paged_attention: split_starts must rise within [0, num_splits=%lld], got %lld .. "
                 "%lld for sequence %lld",
                 (long long)a.num_splits, (long long)first, (long long)last, (long long)s);
        before = last;
        if (a.query_start_loc[s + 1] - a.query_start_loc[s] > 1)
            fail("paged_attention: split_mass must be asked for with one query per sequence, got "
                 "%d .. %d for sequence %lld",
                 a.query_start_loc[s], a.query_start_loc[s + 1], (long long)s);
        const int32_t* bounds = a.tier_starts + s * (BLOCK_TIERS + 1);
        for (int64_t i = first; i < last; ++i) {
            const int32_t *split = a.splits + 4 * i, tier = split[1], begin = split[2], end = split[3];
            const bool known = split[0] == s && tier >= SINK && tier < TIERS;
            const bool inside = known && tier != SINK && bounds[tier - HOT] <= begin &&
                                begin <= end && end <= bounds[tier - HOT + 1];
            if (!known || !(tier == SINK || begin == end || inside))
                fail("paged_attention: splits[%lld] must list entries of one tier of sequence %lld, "
                     "got sequence %d, tier %d, entries %d .. %d",
                     (long long)i, (long long)s, split[0], tier, begin, end);
        }
    }
}

// Appends the pieces of sequence s that a query at `oldest_query` or later can see.
struct Lister {
    const AttentionArgs& a;
    const int64_t s, length, lowest;
    std::vector<Piece>& pieces;

    Lister(const AttentionArgs& args, int64_t seq, int64_t oldest_query, std::vector<Piece>& to)
        : a(args),
          s(seq),
          length(args.seq_lens[seq]),
          lowest(args.window ? oldest_query - args.window + 1 : INT64_MIN),
          pieces(to) {}

    void add(Tier tier, int32_t id, int64_t start, int64_t size, Sees sees) {
        const int64_t count = std::min(size, length - start);
        if (count > 0 && (sees != Sees::WINDOW || start + count > lowest))
            pieces.push_back({tier, id, static_cast<int32_t>(count), sees, start});
    }
    void sink_page() {
        if (!a.blocks.sink_tokens || !length || a.sink_pages[s] < 0) return;
        // With a query of their own the sinks are two pieces: inside and outside the window.
        const bool split = a.window && a.keep_sinks && a.sink_q;
        const Sees sees = a.keep_sinks && !split ? Sees::ALL : Sees::WINDOW;
        add(SINK, a.sink_pages[s], 0, a.blocks.sink_tokens, sees);
        if (split && length > a.window)
            add(SINK, a.sink_pages[s], 0, a.blocks.sink_tokens, Sees::OUTSIDE);
    }
    void blocks(Tier tier, int64_t first, int64_t last) {
        for (int64_t e = first; e < last; ++e) {
            const int64_t entry = s * a.table_width + e;
            add(tier, a.block_table[entry], a.block_starts[entry], a.blocks.block_size,
                Sees::WINDOW);
        }
    }
    void all() {
        sink_page();
        const int32_t* bounds = a.tier_starts + s * (BLOCK_TIERS + 1);
        for (int i = 0; i < BLOCK_TIERS; ++i) blocks(Tier(HOT + i), bounds[i], bounds[i + 1]);
    }
    void split(const int32_t* split) {
        if (split[1] == SINK) sink_page();
        else blocks(Tier(split[1]), split[2], split[3]);
    }
};

// Rows that one set of partial results belongs to.
struct Unit {
    Rows rows;
    int64_t parts;    // items that the unit's pieces are cut into
    int64_t partial;  // where its partial results begin, in floats, when it is cut
    float* mass;      // of its parts, or null
    std::atomic<int64_t> left;

    Unit(const Rows& r, int64_t p, int64_t offset, float* m)
        : rows(r), parts(p), partial(offset), mass(m), left(p) {}
    Unit(Unit&& u) noexcept : Unit(u.rows, u.parts, u.partial, u.mass) {}
};

struct Item {
    int64_t unit, part, first_piece, last_piece;
};

void attention(const AttentionArgs& a) {
    check(a);
    if (a.split_mass) check_splits(a);
    const Blocks& b = a.blocks;
    const int64_t group = a.num_q_heads / b.kv_heads, stride = round_up(b.head_dim, 64);

    thread_local std::vector<Piece> pieces;
    thread_local std::vector<Unit> units;
    thread_local std::vector<Item> items;
    thread_local std::vector<int64_t> cuts;  // where the parts of a sequence's pieces begin, and end
    pieces.clear(), units.clear(), items.clear();

    int64_t total = 0;  // units
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t n = a.query_start_loc[s + 1] - a.query_start_loc[s];
        if (n <= a.max_queries) total += b.kv_heads * ((n * group + MAX_ROWS - 1) / MAX_ROWS);
    }
    const int64_t wanted = ITEMS_PER_THREAD * a.num_threads;
    const int64_t max_parts = a.num_threads > 1 && total ? (wanted + total - 1) / total : 1;

    int64_t partial = 0, bytes = 0;
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t first = a.query_start_loc[s], n = a.query_start_loc[s + 1] - first;
        if (!n || n > a.max_queries) continue;
        const int64_t position = a.seq_lens[s] - n;
        const int64_t begin = pieces.size();
        const int64_t splits = a.split_mass ? a.split_starts[s + 1] - a.split_starts[s] : 0;
        float* const mass = splits ? a.split_mass + a.split_starts[s] * a.num_q_heads : nullptr;
        Lister lister(a, s, position, pieces);
        cuts.assign(1, begin);
        if (mass) {
            for (int64_t i = 0; i < splits; ++i) {
                lister.split(a.splits + 4 * (a.split_starts[s] + i));
                cuts.push_back(pieces.size());
            }
        } else {
            lister.all();
            const int64_t count = pieces.size() - begin;
            const int64_t parts = std::max<int64_t>(1, std::min(max_parts, count));
            for (int64_t i = 1; i <= parts; ++i) cuts.push_back(begin + count * i / parts);
        }
        const int64_t parts = cuts.size() - 1;
        for (int64_t i = begin; i < int64_t(pieces.size()); ++i) {
            const int64_t codes = k_bits(pieces[i].tier) + v_bits(pieces[i].tier);
            const int64_t bits = codes ? codes : 16 * element_size(b.dtype);
            bytes += pieces[i].count * b.head_dim * b.kv_heads * bits / 8 * n;
        }
        for (int64_t head = 0; head < b.kv_heads; ++head)
            for (int64_t row = 0; row < n * group; row += MAX_ROWS) {
                const int64_t rows = std::min<int64_t>(MAX_ROWS, n * group - row);
                for (int64_t part = 0; part < parts; ++part)
                    items.push_back({int64_t(units.size()), part, cuts[part], cuts[part + 1]});
                units.emplace_back(Rows{head, first, position, row, rows}, parts, partial, mass);
                if (parts > 1) partial += parts * partial_floats(rows, stride);
            }
    }

    // Rows of q that belong to no sequence give 0.
    const int64_t row_bytes = a.num_q_heads * b.head_dim * element_size(b.dtype);
    int64_t covered = 0;
    for (int64_t s = 0; s <= a.num_seqs; ++s) {
        const int64_t first = s < a.num_seqs ? a.query_start_loc[s] : a.num_tokens;
        if (first > covered)
            std::memset(a.out + covered * row_bytes, 0, (first - covered) * row_bytes);
        if (s < a.num_seqs) covered = a.query_start_loc[s + 1];
    }

    thread_local Arena shared, own;
    float* const partials = shared.floats(partial);
    const Kernels& kernel = kernels();
    const int64_t scratch = round_up(kernel.scratch_floats(b.head_dim), 16);
    const int64_t threads = threads_for(bytes, a.num_threads);
    Unit* const all_units = units.data();
    const Item* const all_items = items.data();
    const Piece* const all_pieces = pieces.data();
    std::atomic<bool> out_of_memory{false};

    parallel_for(items.size(), threads, [&](int64_t i) {
        const Item& item = all_items[i];
        Unit& unit = all_units[item.unit];
        float* memory;
        try {
            memory = own.floats(scratch + partial_floats(MAX_ROWS, stride));
        } catch (const std::bad_alloc&) {
            out_of_memory = true;
            return;
        }
        float* const results = unit.parts > 1 ? partials + unit.partial : memory + scratch;
        kernel.attend(a, unit.rows, all_pieces + item.first_piece,
                      item.last_piece - item.first_piece,
                      partial_at(results, item.part, unit.rows.count, stride), memory);
        if (unit.left.fetch_sub(1) == 1)
            kernel.finish(a, unit.rows, results, unit.parts, unit.mass);
    });
    if (out_of_memory) throw std::bad_alloc();
}

}  // namespace
}  // namespace omlx

OMLX_API int omlx_paged_attention(const omlx::AttentionArgs* a) {
    return omlx::guarded([&] { omlx::attention(*a); });
}
