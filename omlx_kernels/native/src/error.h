// Argument errors: checks throw Error, the C entry points turn it into a return code.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <exception>

namespace omlx {

extern thread_local char error_text[256];

struct Error {};

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
    throw Error{};
}

template <class F>
int guarded(F&& body) {
    try {
        body();
        return 0;
    } catch (const Error&) {
    } catch (const std::exception& e) {  // std::bad_alloc
        std::snprintf(error_text, sizeof error_text, "native kernels: %s", e.what());
    }
    return 1;
}

}  // namespace omlx
