// AVX-512 vectors of 16 floats, and, where the compiler may, dot products of bf16 pairs.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace KVTIER_ISA {

constexpr int W = 16;
constexpr int WIDEST_OF_2 = 128, WIDEST_OF_4 = 96;  // columns of values that are added up at once, by rows
#define KVTIER_HELD 1     // there are registers for queries, too: `score_held`
using V = __m512;

inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline float sum(V x) { return _mm512_reduce_add_ps(x); }
inline float highest(V x) { return _mm512_reduce_max_ps(x); }
inline V abs(V x) { return _mm512_abs_ps(x); }
inline V with_sign(V x, V sign) { return _mm512_or_ps(abs(x), _mm512_and_ps(sign, set1(-0.0f))); }
// a where |x| < limit, else b
inline V where_small(V x, float limit, V a, V b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(abs(x), set1(limit), _CMP_LT_OQ), b, a);
}
// 2^n * x for an integral n; 0 far below
inline V scale2(V x, V n) { return _mm512_scalef_ps(x, n); }
inline V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline __mmask16 first_n(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline V widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline V from(const float* p) { return load(p); }
inline V from(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V from(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The first n < W elements, zeros behind; nothing else is read.
inline V from(const float* p, int n) { return _mm512_maskz_loadu_ps(first_n(n), p); }
inline V from(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_n(n), p)); }
inline V from(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_n(n), p)); }

#define KVTIER_HALVES 1
// Elements 0, 2, 4 ... and 1, 3, 5 ... of 32 in bf16.
struct Halves {
  V even, odd;
};
inline Halves halves(__m512i x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_and_si512(x, upper))};
}
inline __m512i load_32(const bf16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_32(const bf16* p, int n) { return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p); }
inline Halves halves(const bf16* p) { return halves(load_32(p)); }
inline Halves halves(const bf16* p, int n) { return halves(load_32(p, n)); }
// Halves become neighbours again.
inline void interleave(V& even, V& odd) {
  const V a = even, b = odd;
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  even = _mm512_permutex2var_ps(a, first, b);
  odd = _mm512_permutex2var_ps(a, second, b);
}

inline __m256i narrow(V x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // Rounding up may carry a NaN's last bits away; keep it one.
  bits = _mm512_mask_set1_epi32(_mm512_srli_epi32(bits, 16), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), 0x7fc0);
  return _mm512_cvtepi32_epi16(bits);
#endif
}

inline void to(float* p, V x) { store(p, x); }
inline void to(bf16* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void to(f16* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void to(float* p, V x, int n) { _mm512_mask_storeu_ps(p, first_n(n), x); }
inline void to(bf16* p, V x, int n) { _mm256_mask_storeu_epi16(p, first_n(n), narrow(x)); }
inline void to(f16* p, V x, int n) {
  _mm256_mask_storeu_epi16(p, first_n(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The sums of 4 vectors, still four parts of each: 128-bit lanes belong to vectors 0, 2, 1 and 3.
inline __attribute__((always_inline)) V sums_of_4(const V& a, const V& b, const V& c, const V& d) {
  const V e = _mm512_add_ps(_mm512_shuffle_f32x4(a, c, 0x44), _mm512_shuffle_f32x4(a, c, 0xee));
  const V f = _mm512_add_ps(_mm512_shuffle_f32x4(b, d, 0x44), _mm512_shuffle_f32x4(b, d, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(e, f, 0x88), _mm512_shuffle_f32x4(e, f, 0xdd));
}
// The rest of the way for four of those: element 4 * i + j is the sum of vector i of a[j].
inline __attribute__((always_inline)) V sums_of_parts(const V (&a)[4]) {
  const V b = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[2]), _mm512_unpackhi_ps(a[0], a[2]));
  const V c = _mm512_add_ps(_mm512_unpacklo_ps(a[1], a[3]), _mm512_unpackhi_ps(a[1], a[3]));
  const V d = _mm512_add_ps(_mm512_unpacklo_ps(b, c), _mm512_unpackhi_ps(b, c));
  return _mm512_shuffle_f32x4(d, d, 0xd8);
}
// The sums of 16 vectors as one vector, in their order.
inline __attribute__((always_inline)) V sums(const V (&a)[16]) {
  const V parts[4] = {sums_of_4(a[0], a[4], a[8], a[12]), sums_of_4(a[1], a[5], a[9], a[13]),
                      sums_of_4(a[2], a[6], a[10], a[14]), sums_of_4(a[3], a[7], a[11], a[15])};
  return sums_of_parts(parts);
}

// Rows become columns.
inline __attribute__((always_inline)) void transpose(V (&x)[16]) {
  V y[16];
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4)
    _Pragma("GCC unroll 16") for (int j = 0; j < 2; j++) {
      const __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  // Lane l of x[4 * i + j] holds column 4 * l + j of rows 4 * i to 4 * i + 3.
  _Pragma("GCC unroll 16") for (int j = 0; j < 4; j++) {
    const V a = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    const V c = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    y[8 + j] = _mm512_shuffle_f32x4(a, b, 0xdd);
    y[4 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    y[12 + j] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) x[i] = y[i];
}

template <int N>
inline void store_part(float* p, V x, int part) {
  if constexpr (N == 16) {
    store(p, x);
  } else if constexpr (N == 8) {
    _mm256_storeu_ps(p, part ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
  } else {
    static_assert(N == 4);
    switch (part) {
      case 0: _mm_storeu_ps(p, _mm512_castps512_ps128(x)); break;
      case 1: _mm_storeu_ps(p, _mm512_extractf32x4_ps(x, 1)); break;
      case 2: _mm_storeu_ps(p, _mm512_extractf32x4_ps(x, 2)); break;
      default: _mm_storeu_ps(p, _mm512_extractf32x4_ps(x, 3)); break;
    }
  }
}

#ifdef __AVX512BF16__
#define KVTIER_DOT 1

constexpr int DOT = 32;  // bf16 elements of a vector

using D = __m512i;

inline D load_pairs(const bf16* p) { return load_32(p); }
inline D load_pairs(const bf16* p, int n) { return load_32(p, n); }
inline D zero_pairs() { return _mm512_setzero_si512(); }
inline D set_pair(const bf16* p) {
  int pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
inline V dot(V acc, D a, D b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
// Rows a and b as pairs (a[i], b[i]): dims 0-3, 8-11, 16-19, 24-27, and the rest.
inline D pairs_low(D a, D b) { return _mm512_unpacklo_epi16(a, b); }
inline D pairs_high(D a, D b) { return _mm512_unpackhi_epi16(a, b); }
// What was added up from the two, in the order of dims.
inline void in_order(V& low, V& high) {
  const V a = low, b = high;
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  low = _mm512_permutex2var_ps(a, first, b);
  high = _mm512_permutex2var_ps(a, second, b);
}
#endif

}  // namespace KVTIER_ISA
