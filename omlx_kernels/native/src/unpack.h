// 4-bit codes: a byte holds channel c in its low and channel c + dim/2 in its high nibble.
#pragma once
#include <cstdint>

namespace {

// A row of dim codes of one byte each, 16 at a time for the compiler to vectorise.
inline void unpack_row(const uint8_t* __restrict packed, int dim, uint8_t* __restrict codes) {
    const int half = dim / 2;
    int c = 0;
    for (; c + 16 <= half; c += 16)
        for (int i = c; i < c + 16; ++i) {
            const uint8_t x = packed[i];
            codes[i] = x & 15;
            codes[half + i] = x >> 4;
        }
    for (; c < half; ++c) codes[c] = packed[c] & 15, codes[half + c] = packed[c] >> 4;
}

inline void pack_row(const uint8_t* codes, int dim, uint8_t* packed) {
    const int half = dim / 2;
    for (int c = 0; c < half; ++c) packed[c] = static_cast<uint8_t>(codes[c] | codes[half + c] << 4);
}

// Channels first .. first + n - 1 of a row.
inline void unpack_some(const uint8_t* packed, int dim, int first, int n, uint8_t* codes) {
    const int half = dim / 2, low = half - first < 0 ? 0 : half - first < n ? half - first : n;
    for (int i = 0; i < low; ++i) codes[i] = packed[first + i] & 15;
    for (int i = low; i < n; ++i) codes[i] = packed[first + i - half] >> 4;
}

}  // namespace
