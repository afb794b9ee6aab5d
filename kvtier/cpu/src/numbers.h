// The number formats of keys and values.
#pragma once

#include <cstdint>
#include <cstring>

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
static inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {  // infinity and NaN
    bits = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + 0x38000000u);
  } else {  // subnormal: an integer times 2^-24
    float y = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &y, 4);
    bits |= sign;
  }
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

static inline void from_float(float* p, float x) { *p = x; }
static inline void from_float(bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits |= 0x00400000u;  // rounding would carry a NaN's last bits away
  else bits += 0x7fffu + ((bits >> 16) & 1u);
  p->bits = static_cast<uint16_t>(bits >> 16);
}
static inline void from_float(f16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t result;
  if (bits >= 0x47800000u) {  // too large, or NaN
    result = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: adding 0.5 lets the hardware round at 2^-24
    float y;
    std::memcpy(&y, &bits, 4);
    y += 0.5f;
    std::memcpy(&result, &y, 4);
    result -= 0x3f000000u;
  } else {
    bits += 0xc8000fffu + ((bits >> 13) & 1u);
    result = bits >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | result);
}
