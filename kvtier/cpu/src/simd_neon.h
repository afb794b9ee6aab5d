// NEON vectors of 4 floats.
#pragma once

#include <arm_neon.h>

#include "numbers.h"

namespace KVTIER_ISA {

constexpr int W = 4;
constexpr int WIDEST_OF_2 = 32, WIDEST_OF_4 = 16;  // columns of values that are added up at once, by rows
using V = float32x4_t;

inline V zero() { return vdupq_n_f32(0.0f); }
inline V set1(float x) { return vdupq_n_f32(x); }
inline V load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, V x) { vst1q_f32(p, x); }
inline V add(V a, V b) { return vaddq_f32(a, b); }
inline V sub(V a, V b) { return vsubq_f32(a, b); }
inline V mul(V a, V b) { return vmulq_f32(a, b); }
inline V div(V a, V b) { return vdivq_f32(a, b); }
inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
// Where one is not a number, the second, as AVX does it.
inline V max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float sum(V x) { return vaddvq_f32(x); }
inline float highest(V x) {
  float y = vgetq_lane_f32(x, 0);
  y = vgetq_lane_f32(x, 1) > y ? vgetq_lane_f32(x, 1) : y;
  y = vgetq_lane_f32(x, 2) > y ? vgetq_lane_f32(x, 2) : y;
  return vgetq_lane_f32(x, 3) > y ? vgetq_lane_f32(x, 3) : y;
}
inline V abs(V x) { return vabsq_f32(x); }
inline V with_sign(V x, V sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, x); }
// a where |x| < limit, else b
inline V where_small(V x, float limit, V a, V b) { return vbslq_f32(vcaltq_f32(x, set1(limit)), a, b); }
inline V round(V x) { return vrndnq_f32(x); }
// 2^n * x for an integral n; in two steps, so that results below the normal range stay right
inline V scale2(V x, V n) {
  const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
  const int32x4_t bias = vdupq_n_s32(127);
  x = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
}

inline V from(const float* p) { return load(p); }
inline V from(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
inline V from(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)))); }
// The first n < W elements, zeros behind; nothing else is read.
template <class T>
inline V from(const T* p, int n) {
  T all[W] = {};
  std::memcpy(all, p, static_cast<size_t>(n) * sizeof(T));
  return from(all);
}

inline void to(float* p, V x) { store(p, x); }
inline void to(f16* p, V x) { vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void to(bf16* p, V x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  // Rounding up may carry a NaN's last bits away; keep it one.
  const uint32x4_t kept = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000u));
  vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(kept, 16));
}
template <class T>
inline void to(T* p, V x, int n) {
  T all[W];
  to(all, x);
  std::memcpy(p, all, static_cast<size_t>(n) * sizeof(T));
}

// The sums of 4 vectors as one vector, in their order.
inline V sums(const V (&a)[4]) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }

// Rows become columns.
inline void transpose(V (&x)[4]) {
  const float32x4x2_t a = vtrnq_f32(x[0], x[1]), b = vtrnq_f32(x[2], x[3]);
  x[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  x[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  x[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  x[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

template <int N>
inline void store_part(float* p, V x, int part) {
  float all[W];
  store(all, x);
  std::memcpy(p, all + part * N, sizeof(float) * N);
}

}  // namespace KVTIER_ISA
