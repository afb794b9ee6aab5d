// Vectors of 8 floats in plain C++, which the compiler maps to the instructions it has. For every machine, also ARM.
#pragma once

#include <cmath>

#include "numbers.h"

namespace KVTIER_ISA {

constexpr int W = 8;
constexpr int WIDEST_OF_2 = 32, WIDEST_OF_4 = 16;  // columns of values that are added up at once, by rows
typedef float V __attribute__((vector_size(32)));

template <class F>
inline V each(F f) {
  float y[W];
#pragma GCC unroll 1
  for (int i = 0; i < W; i++) y[i] = f(i);
  V result;
  std::memcpy(&result, y, sizeof(result));
  return result;
}

inline V set1(float x) { return V{x, x, x, x, x, x, x, x}; }
inline V zero() { return set1(0.0f); }
inline V load(const float* p) {
  V x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, V x) { std::memcpy(p, &x, sizeof(x)); }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V div(V a, V b) { return a / b; }
inline V fma(V a, V b, V c) { return a * b + c; }
// Where one is not a number, the second, as the instruction does it.
inline V max(V a, V b) {
  return each([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
inline V abs(V x) {
  return each([&](int i) { return std::fabs(x[i]); });
}
inline V with_sign(V x, V sign) {
  return each([&](int i) { return std::copysign(x[i], sign[i]); });
}
// a where |x| < limit, else b
inline V where_small(V x, float limit, V a, V b) {
  return each([&](int i) { return std::fabs(x[i]) < limit ? a[i] : b[i]; });
}
inline V round(V x) {
  return each([&](int i) { return std::nearbyint(x[i]); });
}
// 2^n * x for an integral n
inline V scale2(V x, V n) {
  return each([&](int i) {
    // In two steps, so that results below the normal range stay right.
    const int whole = n[i] == n[i] ? static_cast<int>(n[i]) : 0, half = whole >> 1;
    const uint32_t first = static_cast<uint32_t>(half + 127) << 23, second = static_cast<uint32_t>(whole - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &first, 4);
    std::memcpy(&b, &second, 4);
    return x[i] * a * b;
  });
}
inline float sum(V x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
inline float highest(V x) {
  float y = x[0];
  for (int i = 1; i < W; i++) y = x[i] > y ? x[i] : y;
  return y;
}

template <class T>
inline V from(const T* p) {
  return each([&](int i) { return to_float(p[i]); });
}
inline V from(const float* p) { return load(p); }
// The first n < W elements, zeros behind; nothing else is read.
template <class T>
inline V from(const T* p, int n) {
  return each([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
}
template <class T>
inline void to(T* p, V x, int n) {
  for (int i = 0; i < n; i++) from_float(p + i, x[i]);
}
template <class T>
inline void to(T* p, V x) {
  to(p, x, W);
}

// The sums of 8 vectors as one vector, in their order.
inline V sums(const V (&a)[8]) {
  return each([&](int i) { return sum(a[i]); });
}

// Rows become columns.
inline void transpose(V (&x)[8]) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      const float y = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = y;
    }
}

template <int N>
inline void store_part(float* p, V x, int part) {
  for (int i = 0; i < N; i++) p[i] = x[part * N + i];
}

}  // namespace KVTIER_ISA
