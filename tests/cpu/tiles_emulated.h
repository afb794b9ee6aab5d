// The tile instructions of AMX as plain loops, for tests: what Intel's manual says of them, bf16 products in fp32.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
  alignas(64) uint8_t bytes[16][64];
};

struct State {
  bool configured = false;
  uint16_t row_bytes[8];
  uint8_t rows[8];
  Tile tiles[8];
};

inline State& state() {
  static thread_local State it;
  return it;
}

inline void expect(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "a tile instruction would fault: %s\n", what);
  std::abort();
}

inline Tile& tile(int i) {
  expect(state().configured, "no configuration is loaded");
  return state().tiles[i];
}

inline void load_configuration(const void* memory) {
  const auto* bytes = static_cast<const uint8_t*>(memory);
  expect(bytes[0] == 1, "palette");
  for (int i = 1; i < 16; i++) expect(bytes[i] == 0, "reserved bytes");
  State& it = state();
  std::memcpy(it.row_bytes, bytes + 16, sizeof(it.row_bytes));
  std::memcpy(it.rows, bytes + 48, sizeof(it.rows));
  for (int i = 0; i < 8; i++) expect(it.rows[i] <= 16 && it.row_bytes[i] <= 64, "shape");
  std::memset(it.tiles, 0, sizeof(it.tiles));
  it.configured = true;
}

inline void release() { state().configured = false; }

inline void zero(int i) { std::memset(&tile(i), 0, sizeof(Tile)); }

inline void load(int i, const void* base, int64_t stride) {
  Tile& to = tile(i);
  std::memset(&to, 0, sizeof(to));
  for (int r = 0; r < state().rows[i]; r++)
    std::memcpy(to.bytes[r], static_cast<const char*>(base) + r * stride, state().row_bytes[i]);
}

inline void store(int i, void* base, int64_t stride) {
  const Tile& from = tile(i);
  for (int r = 0; r < state().rows[i]; r++)
    std::memcpy(static_cast<char*>(base) + r * stride, from.bytes[r], state().row_bytes[i]);
}

inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void multiply(int sum, int left, int right) {
  Tile& c = tile(sum);
  const Tile &a = tile(left), &b = tile(right);
  for (int m = 0; m < state().rows[sum]; m++)
    for (int k = 0; k < state().row_bytes[left] / 4; k++)
      for (int n = 0; n < state().row_bytes[sum] / 4; n++) {
        uint16_t x[2], y[2];
        float total;
        std::memcpy(x, a.bytes[m] + 4 * k, 4);
        std::memcpy(y, b.bytes[k] + 4 * n, 4);
        std::memcpy(&total, c.bytes[m] + 4 * n, 4);
        total += widened(x[0]) * widened(y[0]);
        total += widened(x[1]) * widened(y[1]);
        std::memcpy(c.bytes[m] + 4 * n, &total, 4);
      }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_configuration
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
