// A vector of W floats for the instruction set that this file is compiled for, and the loads,
// stores and functions that kernels.cpp builds on. Everything is in an unnamed namespace: no
// function compiled for one instruction set may be linked into another's code.
#pragma once
#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(OMLX_AVX512) || defined(OMLX_AVX2)
#include <immintrin.h>
#endif

namespace {

#if defined(OMLX_AVX512)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;  // W int32

inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline vf load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf load(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x));
}
inline vf load(const int8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline void store(f16* p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bf16* p, vf x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
// Codes: x holds integers that fit.
inline void store(uint8_t* p, vf x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline void store(int8_t* p, vf x) { store(reinterpret_cast<uint8_t*>(p), x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline float reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
inline vi to_int(vf x) { return _mm512_cvtps_epi32(x); }
inline vf to_vf(vi x) { return _mm512_cvtepi32_ps(x); }
// 2^n for a float z = n + 1.5 * 2^23, multiplied into x.
inline vf times_pow2(vf x, vf z) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(z), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shifted));
}
inline void reduce_add4(vf a, vf b, vf c, vf d, float* out) {
    const vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const vf s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
// Elements 0, 2, 4, ...; the one after the last of them is not read.
inline vf load_every_other(const f16* p) {
    const __m512i x = _mm512_mask_loadu_epi16(_mm512_setzero_si512(), 0x55555555u, p);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
}
// Every lane from the one that is H lanes away: i ^ H.
template <int H>
inline vf swap_lanes(vf x) {
    if constexpr (H == 1) return _mm512_permute_ps(x, 0xb1);
    else if constexpr (H == 2) return _mm512_permute_ps(x, 0x4e);
    else if constexpr (H == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    else return _mm512_shuffle_f32x4(x, x, 0x4e);
}

#elif defined(OMLX_AVX2)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

inline vf splat(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline vf load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf load(const uint8_t* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x));
}
inline vf load(const int8_t* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
}
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline void store(f16* p, vf x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, vf x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i y = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(quiet), nan));
    const __m256i h = _mm256_srli_epi32(y, 16);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}
inline __m128i to_int16(vf x) {
    const __m256i i = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
}
inline void store(uint8_t* p, vf x) {
    const __m128i h = to_int16(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(h, h));
}
inline void store(int8_t* p, vf x) {
    const __m128i h = to_int16(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
}
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vabs(vf a) { return _mm256_andnot_ps(splat(-0.0f), a); }
inline vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
inline vf to_vf(vi x) { return _mm256_cvtepi32_ps(x); }
inline vf times_pow2(vf x, vf z) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(z), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
}
inline void reduce_add4(vf a, vf b, vf c, vf d, float* out) {
    const vf s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
inline float reduce_add(vf a) {
    float sums[4];
    reduce_add4(a, a, a, a, sums);
    return sums[0];
}
inline float reduce_max(vf a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline vf load_every_other(const f16* p) {
    uint16_t bits[W];
    for (int i = 0; i < W; ++i) bits[i] = p[2 * i].bits;
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits)));
}
template <int H>
inline vf swap_lanes(vf x) {
    if constexpr (H == 1) return _mm256_permute_ps(x, 0xb1);
    else if constexpr (H == 2) return _mm256_permute_ps(x, 0x4e);
    else return _mm256_permute2f128_ps(x, x, 1);
}

#else  // portable: vectors of the compiler (SSE2, NEON, ...)

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

constexpr float ROUNDER = 0x1.8p23f;  // x + ROUNDER - ROUNDER rounds |x| < 2^22 to an integer

inline vf splat(float x) { return vf{x, x, x, x}; }
inline vf load(const float* p) { vf x; std::memcpy(&x, p, sizeof x); return x; }
inline vf load(const bf16* p) {
    return vf{as_float(uint32_t{p[0].bits} << 16), as_float(uint32_t{p[1].bits} << 16),
              as_float(uint32_t{p[2].bits} << 16), as_float(uint32_t{p[3].bits} << 16)};
}
inline vf load(const f16* p) {
    return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
inline vf load(const uint8_t* p) {
    return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
inline vf load(const int8_t* p) {
    return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
inline vi to_int(vf x) {  // |x| < 2^22; anything else gives some integer
    const vu bits = (vu)(x + splat(ROUNDER));
    return (vi)(bits - as_bits(ROUNDER));
}
inline vf to_vf(vi x) { return __builtin_convertvector(x, vf); }
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) { for (int i = 0; i < W; ++i) p[i] = to_bf16(x[i]); }
inline void store(f16* p, vf x) { for (int i = 0; i < W; ++i) p[i] = to_half(x[i]); }
inline void store(uint8_t* p, vf x) {
    const vi n = to_int(x);
    for (int i = 0; i < W; ++i) p[i] = static_cast<uint8_t>(n[i]);
}
inline void store(int8_t* p, vf x) { store(reinterpret_cast<uint8_t*>(p), x); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vabs(vf a) { return (vf)((vu)a & 0x7fffffffu); }
inline vf times_pow2(vf x, vf z) { return (vf)((vu)x + ((vu)z << 23)); }
inline float reduce_add(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline float reduce_max(vf a) {
    float m = a[0];
    for (int i = 1; i < W; ++i) m = a[i] > m ? a[i] : m;
    return m;
}
inline void reduce_add4(vf a, vf b, vf c, vf d, float* out) {
    out[0] = reduce_add(a), out[1] = reduce_add(b), out[2] = reduce_add(c), out[3] = reduce_add(d);
}
inline vf load_every_other(const f16* p) {
    return vf{to_float(p[0]), to_float(p[2]), to_float(p[4]), to_float(p[6])};
}
template <int H>
inline vf swap_lanes(vf x) {
    return H == 1 ? vf{x[1], x[0], x[3], x[2]} : vf{x[2], x[3], x[0], x[1]};
}

#endif

// Fetch bytes [offset, offset + bytes) of something that is needed soon; null stands for nothing.
inline void prefetch(const void* base, int offset, int bytes) {
    if (!base) return;
    const char* p = static_cast<const char*>(base) + offset;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Something of 64 rows that is needed soon, fetched in equal steps while other work runs.
struct Fetch {
    const void* base;
    int row_bytes;
    void step(int index, int steps) const {
        const int bytes = 64 * row_bytes / steps;
        prefetch(base, index * bytes, bytes);
    }
};

// The first n < W elements, zeros after them.
template <class T>
inline vf load_some(const T* p, int n) {
    T full[W] = {};
    std::memcpy(full, p, n * sizeof(T));
    return load(full);
}
template <class T>
inline void store_some(T* p, vf x, int n) {
    T full[W];
    store(full, x);
    std::memcpy(p, full, n * sizeof(T));
}
// Element c .. of a row of dim elements, zeros past its end.
template <class T>
inline vf load_row(const T* row, int c, int dim) {
    return c + W <= dim ? load(row + c) : load_some(row + c, dim - c);
}
template <class T>
inline void store_row(T* row, vf x, int c, int dim) {
    if (c + W <= dim) store(row + c, x);
    else store_some(row + c, x, dim - c);
}

// e^x for x <= 0, relative error 1e-7; at most 1e-37 for x < -86. NaN stays NaN: vmax returns its
// second argument when they don't compare.
inline vf exp(vf x) {
    const vf rounder = splat(0x1.8p23f);
    x = vmax(splat(-86.0f), x);
    const vf z = fma(x, splat(1.44269504088896341f), rounder);
    const vf n = z - rounder;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y, r * r, r + splat(1.0f));
    return times_pow2(y, z);
}
inline float exp(float x) {
    float out[W];
    store(out, exp(splat(x)));
    return out[0];
}

}  // namespace
