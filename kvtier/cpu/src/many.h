// Many rows to a KV head: many queries, or many query heads. Keys and values of a tile are packed once, widened or in
// pairs, so that every product is that of a number of the left side, in all lanes, with a vector of the right side.
#pragma once

#include <type_traits>

#include "products.h"
#ifdef KVTIER_TILES
#include "tiles.h"
#endif

namespace KVTIER_ISA {

// Rows from which packing pays: measured, bf16 and fp32, on AVX-512. With tiles from 7 on: 6 take about as long either
// way, and a model with 7 or 8 query heads to a KV head decodes with them.
#ifdef KVTIER_TILES
template <class M>
constexpr int MANY_ROWS = M::PAIR == 2 ? 7 : 160;
#else
template <class M>
constexpr int MANY_ROWS = 160;
#endif

// How bf16 is multiplied with few rows, and with many. Of the processors with tiles Emerald
// Rapids multiplies half as many pairs a cycle as numbers of fp32; others were not timed.
#if defined(KVTIER_DOT) && !defined(KVTIER_TILES)
using FewOfBf16 = Dotted;
#elif defined(KVTIER_HALVES)
using FewOfBf16 = Halved;
#else
using FewOfBf16 = Widened<bf16>;
#endif
#ifdef KVTIER_DOT
using ManyOfBf16 = Dotted;
#else
using ManyOfBf16 = Widened<bf16>;
#endif
// Whether a way to multiply is used with few rows, and with many.
template <class M>
constexpr bool SERVES_FEW = !std::is_same_v<typename M::Element, bf16> || std::is_same_v<M, FewOfBf16>;
template <class M>
constexpr bool SERVES_MANY = !std::is_same_v<typename M::Element, bf16> || std::is_same_v<M, ManyOfBf16>;
// Whether so many rows to a KV head are packed.
template <class M>
constexpr bool packs(int rows) {
  if constexpr (!SERVES_MANY<M>) return false;
  else if constexpr (!SERVES_FEW<M>) return true;
  else return rows >= MANY_ROWS<M>;
}
constexpr int ROWS_AT_ONCE = 64;  // whose scores and weights are kept
constexpr int LANES = 2 * W;      // columns of a packed panel

// What a task with many rows holds on to.
template <class M>
struct Packing {};
#ifdef KVTIER_TILES
template <>
struct Packing<Dotted> {
  tiles::InUse tiles;
};
// A tile reads so many pairs at once: behind the last token they are zeros.
template <class M>
constexpr int TURNS = M::PAIR == 2 ? tiles::SIDE : 1;
#else
template <class M>
constexpr int TURNS = 1;
#endif
// Turns of the loop over n packed values.
template <class M>
inline int turns_of(int n) { return up((n + M::PAIR - 1) / M::PAIR, TURNS<M>); }

// Packed keys or values of a tile. Keys: for every LANES tokens a panel [elements of a key / PAIR, LANES, PAIR]. Values:
// for every LANES columns a panel [tokens / PAIR, LANES, PAIR], the last one perhaps of W columns.
template <class M>
inline size_t packed_elements(int tokens, int dim) {
  return static_cast<size_t>(up(tokens, LANES)) * up(dim, M::STEP > LANES ? M::STEP : LANES);
}

template <class M>
void pack_keys(const typename M::Element* const* tokens, int n, int dim, typename M::Packed* packed) {
  constexpr int PAIR = M::PAIR, ELEMENTS = W * PAIR;
  const int padded = up(dim, M::STEP);
  for (int first = 0; first < n; first += W)
    for (int c = 0; c < padded; c += ELEMENTS) {
      V x[W];
      // The last token is repeated in place of those that do not exist: their scores are not used.
      const auto key = [&](int i) KVTIER_LAMBDA { return tokens[std::min(first + i, n - 1)] + c; };
      if (c + ELEMENTS <= dim) {
        UNROLL for (int i = 0; i < W; i++) x[i] = M::widened(key(i));
      } else {
        UNROLL for (int i = 0; i < W; i++) x[i] = M::widened(key(i), dim - c);
      }
      transpose(x);
      auto* to = packed + (static_cast<size_t>(first / LANES) * padded + c) * LANES + first % LANES * PAIR;
      UNROLL for (int i = 0; i < W; i++) store(reinterpret_cast<float*>(to) + i * LANES, x[i]);
      // These come in an order that the hardware does not foresee. A wrong address would only cost time, but the list
      // itself ends behind the tile's last token: that it is not read further, only the address sanitizer notices.
      for (int i = 0; i < W; i++) __builtin_prefetch(tokens[std::min(first + W + i, n - 1)] + c, 0, NEAR);
    }
}

template <class M>
void pack_values(const typename M::Element* const* tokens, int n, int dim, typename M::Packed* packed) {
  constexpr int PAIR = M::PAIR;
  const int turns = turns_of<M>(n), columns = up(dim, M::COLUMNS);
  // Token by token, in the order of memory, into all panels.
  for (int t = 0; t < turns * PAIR; t += PAIR)
    for (int c = 0; c < columns; c += LANES) {
      const int lanes = std::min(LANES, columns - c);
#ifdef KVTIER_TILES
      // Products by tiles take so little time that it is memory which decode waits for.
      UNROLL for (int i = 0; i < PAIR; i++) __builtin_prefetch(tokens[std::min(t + 16 + i, n - 1)] + c, 0, NEAR);
#endif
      float* to = reinterpret_cast<float*>(packed + static_cast<size_t>(c) * turns * PAIR) + t / PAIR * lanes;
      if (t < n)
        M::pack_values(tokens[t] + c, t + PAIR <= n ? tokens[t + PAIR - 1] + c : nullptr, std::min(lanes, dim - c), to);
      else
        std::memset(to, 0, lanes * sizeof(float));
    }
}

// c[r, :] = or += sum over k of a[r, k] * b[k, :], for ROWS rows and VECTORS vectors of columns.
template <class M, int ROWS, int VECTORS, bool ADD>
KVTIER_INLINE void panel_rows(const typename M::Packed* a, int a_stride, const float* b, int turns, float* c, int c_stride) {
  V acc[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = zero();
  for (int k = 0; k < turns; k++, b += VECTORS * W) {
    V right[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) right[v] = load(b + v * W);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const auto left = M::everywhere(a + r * a_stride + k * M::PAIR);
      UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = M::product(acc[r][v], left, right[v]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) {
      if constexpr (ADD) add_to(c + r * c_stride + v * W, acc[r][v]);
      else store(c + r * c_stride + v * W, acc[r][v]);
    }
}

// The same for any number of rows.
template <class M, int VECTORS, bool ADD>
void panel(const typename M::Packed* a, int a_stride, int rows, const float* b, int turns, float* c, int c_stride) {
  constexpr int MOST = W == 8 ? 4 : 8;  // AVX2 has half the registers
  int r = 0;
  const auto some = [&](auto count) KVTIER_LAMBDA {
    constexpr int ROWS = decltype(count)::value;
    for (; r + ROWS <= rows; r += ROWS)
      panel_rows<M, ROWS, VECTORS, ADD>(a + static_cast<ptrdiff_t>(r) * a_stride, a_stride, b, turns,
                                        c + static_cast<ptrdiff_t>(r) * c_stride, c_stride);
  };
  some(std::integral_constant<int, MOST>());
  some(std::integral_constant<int, MOST / 2>());
  some(std::integral_constant<int, 1>());
}

// scores[r, t] = query row r . key t; columns up to the next multiple of LANES are written too.
template <class M>
void score_packed(const typename M::Query* query, int query_stride, int rows, const typename M::Packed* packed, int n,
                  float* scores) {
#ifdef KVTIER_TILES
  if constexpr (M::PAIR == 2) return tiles::score(query, query_stride, rows, packed, n, scores, ROW);
#endif
  const float* b = reinterpret_cast<const float*>(packed);
  const int turns = query_stride / M::PAIR;
  for (int t = 0; t < n; t += LANES, b += static_cast<ptrdiff_t>(turns) * LANES)
    panel<M, 2, false>(query, query_stride, rows, b, turns, scores + t, ROW);
}

// out[r, :] += sum over t of weights[r, t] * value t.
template <class M>
void add_packed(const typename M::Weight* weights, int rows, const typename M::Packed* packed, int n, float* out,
                int columns) {
#ifdef KVTIER_TILES
  if constexpr (M::PAIR == 2) return tiles::add(weights, ROW, rows, packed, turns_of<M>(n), out, columns);
#endif
  const int turns = turns_of<M>(n);
  const float* b = reinterpret_cast<const float*>(packed);
  for (int c = 0; c < columns; c += LANES, b += static_cast<ptrdiff_t>(turns) * LANES) {
    if (columns - c >= LANES) panel<M, 2, true>(weights, ROW, rows, b, turns, out + c, columns);
    else panel<M, 1, true>(weights, ROW, rows, b, turns, out + c, columns);
  }
}

}  // namespace KVTIER_ISA
