#include "isa.h"

#include <atomic>
#include <cstring>

#include "error.h"
#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace omlx {

thread_local char error_text[256] = "";

namespace {

#ifdef __x86_64__
// Asked of the processor itself: clang 14's __builtin_cpu_supports doesn't know the name. That the
// system saves the registers is what "avx2" has said.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}
#endif

bool runs_here([[maybe_unused]] const Kernels& k) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (&k == &kernels_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
    if (&k == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               has_f16c();
#endif
    return true;
}

// Whether torch's own attention has matrix units (AMX, bf16) to run on.
bool has_matrix_units() {
#ifdef __x86_64__
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
#else
    return false;
#endif
}

const Kernels* const best_first[] = {
#ifdef __x86_64__
    &kernels_avx512, &kernels_avx2,
#endif
    &kernels_portable};

std::atomic<const Kernels*> chosen{nullptr};

void choose(const char* name) {
    for (const Kernels* k : best_first) {
        if (*name && std::strcmp(name, k->name)) continue;
        if (runs_here(*k)) {
            chosen = k;
            return;
        }
        if (*name) fail("OMLX_NATIVE_ISA must be one that this processor has, got '%s'", name);
    }
    fail("OMLX_NATIVE_ISA must be avx512, avx2 or portable, got '%s'", name);
}

}  // namespace

const Kernels& kernels() {
    if (!chosen.load(std::memory_order_relaxed)) choose("");
    return *chosen.load(std::memory_order_relaxed);
}

}  // namespace omlx

OMLX_API int omlx_choose_isa(const char* name) {
    return omlx::guarded([&] { omlx::choose(name); });
}
OMLX_API int64_t omlx_max_queries() {
    constexpr int64_t FEW = 16;  // for which reading the blocks costs more than the arithmetic
    static const bool torch_has_more = omlx::has_matrix_units();
    return omlx::kernels().shares_tiles && !torch_has_more ? INT64_MAX : FEW;
}
OMLX_API const char* omlx_isa() { return omlx::kernels().name; }
OMLX_API const char* omlx_error() { return omlx::error_text; }
OMLX_API const char* omlx_source_hash() { return OMLX_SOURCE_HASH; }
