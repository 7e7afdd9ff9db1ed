// Make one call of the C ABI in a process of its own, maybe an emulated one, on memory that another
// process dumped: native_replay LIBRARY DUMP RESULT. A dump is, in 64-bit words: the length of the
// function's name, the name, the words of its argument struct, the struct, the number of regions,
// and for each its address and bytes, then its content. Words of the struct that point into a region
// are made to point to where it lies here. RESULT gets the return code, then every region, or
// the error text.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Region {
    uint64_t address;
    uint64_t bytes;
    char* here;
};

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "native_replay: %s\n", what);
    std::exit(2);
}

void read(std::FILE* file, void* to, size_t bytes) {
    if (bytes && std::fread(to, 1, bytes, file) != bytes) die("the dump ends too early");
}

uint64_t word(std::FILE* file) {
    uint64_t x;
    read(file, &x, sizeof x);
    return x;
}

template <class F>
F symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) die(name);
    return reinterpret_cast<F>(found);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) die("usage: native_replay LIBRARY DUMP RESULT");
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) die(dlerror());
    std::FILE* dump = std::fopen(argv[2], "rb");
    if (!dump) die("no dump");
    std::string name(word(dump), '\0');
    read(dump, &name[0], name.size());
    std::vector<uint64_t> arguments(word(dump));
    read(dump, arguments.data(), arguments.size() * sizeof(uint64_t));
    std::vector<Region> regions(word(dump));
    for (Region& r : regions) {
        r.address = word(dump), r.bytes = word(dump);
        r.here = static_cast<char*>(std::malloc(r.bytes));
        read(dump, r.here, r.bytes);
    }
    std::fclose(dump);
    for (uint64_t& x : arguments)
        for (const Region& r : regions)
            if (x >= r.address && x < r.address + r.bytes) {
                x = reinterpret_cast<uint64_t>(r.here) + (x - r.address);
                break;
            }

    const int rc = symbol<int (*)(const void*)>(library, name.c_str())(arguments.data());
    std::FILE* result = std::fopen(argv[3], "wb");
    if (!result) die("no result");
    std::fputc(rc, result);
    if (rc) std::fputs(symbol<const char* (*)()>(library, "omlx_error")(), result);
    else
        for (const Region& r : regions) std::fwrite(r.here, 1, r.bytes, result);
    std::fclose(result);
    std::printf("%s\n", symbol<const char* (*)()>(library, "omlx_isa")());
}
