// One pool of sleeping threads for the process.
//
// parallel_for hands out the indices 0 .. count-1 one by one. The caller works too, so a call never
// waits for a thread that has not started yet: on shared cores it degrades to serial speed, with no
// busy-wait. Several Python threads may call at once; after fork the child starts a fresh pool.
#pragma once
#include <cstdint>
#include <type_traits>

namespace omlx {

void run_in_pool(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t count, int64_t threads, F&& body) {
    using Body = std::remove_reference_t<F>;
    run_in_pool(
        count, threads, [](void* f, int64_t i) { (*static_cast<Body*>(f))(i); }, &body);
}

}  // namespace omlx
