// The 16-bit float formats, one element at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// What a uint16_t element stands for.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

constexpr float INF = __builtin_inff();

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float to_float(f16 h) {
    const uint32_t sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31;
    const uint32_t mantissa = h.bits & 0x3ff;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
        const float x = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -x : x;
    }
    if (exponent == 31) return as_float(sign | 0x7f800000u | mantissa << 13);
    return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline float to_float(bf16 x) { return as_float(uint32_t{x.bits} << 16); }
inline float to_float(float x) { return x; }

// Round to nearest, ties to even.
inline f16 to_half(float x) {
    const uint32_t sign = as_bits(x) >> 16 & 0x8000u;
    uint32_t u = as_bits(x) & 0x7fffffffu;
    if (u > 0x7f800000u) u = 0x7e00;  // NaN
    else if (u >= 0x47800000u) u = 0x7c00;  // 65536 and more, infinity
    else if (u < 0x38800000u) u = as_bits(as_float(u) + 0.5f) - 0x3f000000u;  // subnormal
    else u = (u - (112u << 23) + 0xfffu + (u >> 13 & 1)) >> 13;
    return {static_cast<uint16_t>(sign | u)};
}

inline bf16 to_bf16(float x) {
    const uint32_t u = as_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(u >> 16 | 0x40)};
    return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}

}  // namespace
