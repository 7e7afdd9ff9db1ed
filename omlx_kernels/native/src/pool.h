// Threads for the kernels: torch's own OpenMP team while that answers at once, else a pool of
// sleeping threads.
//
// After each parallel region torch's threads spin for milliseconds, waiting for the next one.
// Threads of our own would have to fight them for the cores, so regions run on torch's team
// (omlx_share_openmp). But a team must wait for its last member even if that has nothing to do,
// which on cores that others use too costs a time slice: when that is seen to happen, calls go to
// the pool for a while. There the caller hands out indices one by one and works too, and waits only
// for threads that took one: at worst it is as slow as one thread. Nothing here spins.
//
// Several Python threads may call at once; after fork the child uses a fresh pool.
#pragma once
#include <cstdint>
#include <type_traits>

namespace omlx {

void run_in_threads(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context);

// Threads that so many bytes of memory traffic keep busy for longer than it takes to wake them.
inline int64_t threads_for(int64_t bytes, int64_t threads) {
    const int64_t useful = 1 + bytes / (256 * 1024);
    return useful < threads ? useful : threads;
}

// Call body(i) for i in [0, count) on at most `threads` threads.
template <class F>
void parallel_for(int64_t count, int64_t threads, F&& body) {
    using Body = std::remove_reference_t<F>;
    run_in_threads(
        count, threads, [](void* f, int64_t i) { (*static_cast<Body*>(f))(i); }, &body);
}

}  // namespace omlx
