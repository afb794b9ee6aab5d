// AVX2 vectors of 8 floats.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace KVTIER_ISA {

constexpr int W = 8;
constexpr int WIDEST_OF_2 = 32, WIDEST_OF_4 = 16;  // columns of values that are added up at once, by rows
using V = __m256;

inline V zero() { return _mm256_setzero_ps(); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V abs(V x) { return _mm256_andnot_ps(set1(-0.0f), x); }
inline V with_sign(V x, V sign) { return _mm256_or_ps(abs(x), _mm256_and_ps(sign, set1(-0.0f))); }
// a where |x| < limit, else b
inline V where_small(V x, float limit, V a, V b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(abs(x), set1(limit), _CMP_LT_OQ));
}
inline V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n * x for an integral n; in two steps, so that results below the normal range stay right
inline V scale2(V x, V n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline float sum(V x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float highest(V x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

inline __m128i load8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load8(const void* p, int n) {
  __m128i x = _mm_setzero_si128();
  std::memcpy(&x, p, static_cast<size_t>(n) * 2);
  return x;
}
inline V widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline __m256i first_n(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline V from(const float* p) { return load(p); }
inline V from(const bf16* p) { return widen(load8(p)); }
inline V from(const f16* p) { return _mm256_cvtph_ps(load8(p)); }
// The first n < W elements, zeros behind; nothing else is read.
inline V from(const float* p, int n) { return _mm256_maskload_ps(p, first_n(n)); }
inline V from(const bf16* p, int n) { return widen(load8(p, n)); }
inline V from(const f16* p, int n) { return _mm256_cvtph_ps(load8(p, n)); }

#define KVTIER_HALVES 1
// Elements 0, 2, 4 ... and 1, 3, 5 ... of 16 in bf16.
struct Halves {
  V even, odd;
};
inline Halves halves(__m256i x) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_and_si256(x, upper))};
}
inline Halves halves(const bf16* p) { return halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Halves halves(const bf16* p, int n) {
  __m256i x = _mm256_setzero_si256();
  std::memcpy(&x, p, static_cast<size_t>(n) * 2);
  return halves(x);
}
// Halves become neighbours again.
inline void interleave(V& even, V& odd) {
  const V a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
  even = _mm256_permute2f128_ps(a, b, 0x20);
  odd = _mm256_permute2f128_ps(a, b, 0x31);
}

inline __m128i narrow(V x) {
  __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  // Rounding up may carry a NaN's last bits away; keep it one.
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
inline __m128i narrow_f16(V x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void to(float* p, V x) { store(p, x); }
inline void to(bf16* p, V x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void to(f16* p, V x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16(x)); }
inline void to(float* p, V x, int n) { _mm256_maskstore_ps(p, first_n(n), x); }
inline void to(bf16* p, V x, int n) {
  const __m128i bits = narrow(x);
  std::memcpy(p, &bits, static_cast<size_t>(n) * 2);
}
inline void to(f16* p, V x, int n) {
  const __m128i bits = narrow_f16(x);
  std::memcpy(p, &bits, static_cast<size_t>(n) * 2);
}

// The sums of 8 vectors as one vector, in their order.
inline __attribute__((always_inline)) V sums(const V (&a)[8]) {
  const V b0 = _mm256_hadd_ps(a[0], a[1]), b1 = _mm256_hadd_ps(a[2], a[3]);
  const V b2 = _mm256_hadd_ps(a[4], a[5]), b3 = _mm256_hadd_ps(a[6], a[7]);
  const V c0 = _mm256_hadd_ps(b0, b1), c1 = _mm256_hadd_ps(b2, b3);
  return _mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20), _mm256_permute2f128_ps(c0, c1, 0x31));
}

// Rows become columns.
inline __attribute__((always_inline)) void transpose(V (&x)[8]) {
  V y[8];
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 4)
    _Pragma("GCC unroll 8") for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
      x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
  _Pragma("GCC unroll 8") for (int j = 0; j < 4; j++) {
    y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) x[i] = y[i];
}

template <int N>
inline void store_part(float* p, V x, int part) {
  if constexpr (N == 8) {
    store(p, x);
  } else if constexpr (N == 4) {
    _mm_storeu_ps(p, part ? _mm256_extractf128_ps(x, 1) : _mm256_castps256_ps128(x));
  } else {
    static_assert(N == 2);
    const __m128 half = part & 2 ? _mm256_extractf128_ps(x, 1) : _mm256_castps256_ps128(x);
    _mm_storel_pi(reinterpret_cast<__m64*>(p), part & 1 ? _mm_movehl_ps(half, half) : half);
  }
}

}  // namespace KVTIER_ISA
