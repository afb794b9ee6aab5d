// Products of many rows by AMX tiles, of bf16 in pairs: 16 rows of 32 elements by 16 pairs of 16 columns in one
// instruction. Included where KVTIER_TILES is defined; with KVTIER_EMULATED_TILES the instructions are plain loops, so
// that tests run this source on machines without AMX.
#pragma once

#include "products.h"

#ifdef KVTIER_EMULATED_TILES
#include "tiles_emulated.h"
#endif

namespace KVTIER_ISA::tiles {

constexpr int SIDE = 16;  // rows of a tile, and columns of a result

// The shape of all eight tiles: 16 rows of 64 bytes. Set once per task; a thread that has not set it cannot use tiles.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles in use by this thread: `_tile_release` lets the kernel save less at each switch of threads.
class InUse {
 public:
  InUse() {
    const Configuration configuration;
    _tile_loadconfig(&configuration);
  }
  ~InUse() { _tile_release(); }
  InUse(const InUse&) = delete;
};

// c[16 or 32 rows, 32 columns] = sum over `turns` pairs of a[r, pairs] * b[pair, columns]. Tiles 0 to 3: results; 4 and 5:
// rows; 6 and 7: columns.
inline void product(const bf16* a, int a_stride, bool both, const bf16* b, int turns, float* c, int c_stride) {
  const int row_bytes = a_stride * 2, column_bytes = 4 * 2 * W, result_bytes = c_stride * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < turns; k += SIDE, a += 2 * SIDE, b += 2 * 2 * W * SIDE) {
    _tile_loadd(6, b, column_bytes);
    _tile_loadd(7, b + 2 * SIDE, column_bytes);
    _tile_loadd(4, a, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, a + static_cast<ptrdiff_t>(SIDE) * a_stride, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, result_bytes);
  _tile_stored(1, c + SIDE, result_bytes);
  if (!both) return;
  c += static_cast<ptrdiff_t>(SIDE) * c_stride;
  _tile_stored(2, c, result_bytes);
  _tile_stored(3, c + SIDE, result_bytes);
}

// As `score_packed`. Query rows and scores are padded to a multiple of 16.
inline void score(const bf16* query, int query_stride, int rows, const bf16* packed, int n, float* scores, int stride) {
  const int turns = query_stride / 2;
  for (int t = 0; t < n; t += 2 * W, packed += static_cast<ptrdiff_t>(turns) * 4 * W)
    for (int r = 0; r < rows; r += 2 * SIDE)
      product(query + static_cast<ptrdiff_t>(r) * query_stride, query_stride, rows - r > SIDE, packed, turns,
              scores + static_cast<ptrdiff_t>(r) * stride + t, stride);
}

// As `add_packed`. Weights are padded to a multiple of 16 rows; what those add up to is left here.
inline void add(const bf16* weights, int stride, int rows, const bf16* packed, int turns, float* out, int columns) {
  alignas(64) float sums[2 * SIDE * 2 * W];
  for (int c = 0; c < columns; c += 2 * W, packed += static_cast<ptrdiff_t>(turns) * 4 * W)
    for (int r = 0; r < rows; r += 2 * SIDE) {
      product(weights + static_cast<ptrdiff_t>(r) * stride, stride, rows - r > SIDE, packed, turns, sums, 2 * W);
      for (int i = 0; i < std::min(2 * SIDE, rows - r); i++)
        for (int v = 0; v < 2 * W; v += W)
          add_to(out + static_cast<ptrdiff_t>(r + i) * columns + c + v, load(sums + i * 2 * W + v));
    }
}

}  // namespace KVTIER_ISA::tiles
