// The inner loops for one instruction set: products of queries with keys, and weighted sums of values.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "prefetch.h"
#include "tasks.h"

#define UNROLL _Pragma("GCC unroll 32")
#define KVTIER_LAMBDA __attribute__((always_inline))

namespace KVTIER_ISA {

constexpr int TILE = 512;     // the most tokens whose scores are kept at once
constexpr int PACKED = 256;   // the same where keys and values are packed
constexpr int ROW = TILE + 16;  // columns of a row: where a tile ends within a vector, that is written whole
constexpr int STEP_TOKENS = 16;  // that all rows are multiplied with before the next ones, from the L1 cache
constexpr float NEVER = -std::numeric_limits<float>::infinity();

constexpr int up(int x, int to) { return (x + to - 1) / to * to; }

// Write the first n elements of a vector.
template <class O>
inline void to_first(O* p, V x, int n) {
  if (n == W) to(p, x);
  else to(p, x, n);
}

KVTIER_INLINE void add_to(float* p, V x) { store(p, add(load(p), x)); }

// exp(x) to about 1 ulp for x <= 0; 0 for -inf.
inline V exp(V x) {
  x = max(set1(-104.0f), x);  // in this order NaN stays NaN
  const V n = round(mul(x, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, set1(1.0f)));
  return scale2(y, n);
}

inline V tanh(V x) {
  // Near 0 the quotient would cancel.
  const V s = mul(x, x);
  V small = fma(s, set1(-17.0f / 315.0f), set1(2.0f / 15.0f));
  small = fma(s, small, set1(-1.0f / 3.0f));
  small = fma(mul(s, x), small, x);
  const V e = exp(mul(set1(-2.0f), abs(x)));
  const V ratio = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  return where_small(x, 0.2f, small, with_sign(ratio, x));
}

// How one dtype is multiplied. `Weight` is the type of the softmax's results.
template <class T>
struct Widened {  // in fp32, for every dtype
  using Element = T;
  using Query = float;
  using Weight = float;
  using Vector = V;
  static constexpr int STEP = W;  // elements of a vector of keys
  static constexpr int COLUMNS = W;
  static constexpr int REGISTERS = 1;  // of such a vector
  static constexpr int TOKENS = 1;     // whose values are added up at once
  static Vector key(const T* p) { return from(p); }
  static Vector key(const T* p, int n) { return from(p, n); }
  static Vector query(const float* p) { return load(p); }
  static V mac(V acc, Vector key, Vector query) { return fma(key, query, acc); }
  static Vector nothing() { return zero(); }
  static Vector weighted(Vector acc, V weight, Vector value) { return fma(weight, value, acc); }
  static void add_sums(float* p, Vector x) { add_to(p, x); }
  static void pack(float* p, const T* q, int n) {
    for (int i = 0; i < n; i++) p[i] = to_float(q[i]);
  }
  static void weights(float* p, V x) { store(p, x); }

  // For many rows (many.h).
  using Packed = float;
  static constexpr int PAIR = 1;
  static V widened(const T* p) { return from(p); }
  static V widened(const T* p, int n) { return n > 0 ? from(p, n) : zero(); }
  static V everywhere(const float* p) { return set1(*p); }
  static V product(V acc, V a, V b) { return fma(a, b, acc); }
  static void pack_values(const T* value, const T*, int n, float* to) {
    for (int c = 0; c < n; c += W) store(to + c, n - c >= W ? from(value + c) : from(value + c, n - c));
  }
};

#ifdef KVTIER_HALVES
// bf16 in fp32, elements at even and at odd places apart: widened by half the instructions that take them in order.
struct Halved {
  using Element = bf16;
  using Query = float;
  using Weight = float;
  using Vector = Halves;
  static constexpr int STEP = 2 * W;
  static constexpr int COLUMNS = 2 * W;
  static constexpr int REGISTERS = 2;
  static constexpr int TOKENS = 1;
  static Vector key(const bf16* p) { return halves(p); }
  static Vector key(const bf16* p, int n) { return halves(p, n); }
  static Vector query(const float* p) { return {load(p), load(p + W)}; }
  static V mac(V acc, Vector key, Vector query) { return fma(key.odd, query.odd, fma(key.even, query.even, acc)); }
  static Vector nothing() { return {zero(), zero()}; }
  static Vector weighted(Vector acc, V weight, Vector value) {
    return {fma(weight, value.even, acc.even), fma(weight, value.odd, acc.odd)};
  }
  static void add_sums(float* p, Vector x) {
    add_to(p, x.even);
    add_to(p + W, x.odd);
  }
  static void pack(float* p, const bf16* q, int n) {
    for (int i = 0; i < n; i++) p[i / STEP * STEP + i % 2 * W + i % STEP / 2] = to_float(q[i]);
  }
  static void weights(float* p, V x) { store(p, x); }
  static void in_order(V& even, V& odd) { interleave(even, odd); }
};
#endif

#ifdef KVTIER_DOT
struct Dotted {  // bf16 in pairs, added up in fp32
  using Element = bf16;
  using Query = bf16;
  using Weight = bf16;
  using Vector = D;
  static constexpr int STEP = DOT;
  static constexpr int COLUMNS = DOT;
  static constexpr int REGISTERS = 1;
  static constexpr int TOKENS = 2;
  static Vector key(const bf16* p) { return load_pairs(p); }
  static Vector key(const bf16* p, int n) { return load_pairs(p, n); }
  static Vector query(const bf16* p) { return load_pairs(p); }
  static V mac(V acc, Vector key, Vector query) { return dot(acc, key, query); }
  static void pack(bf16* p, const bf16* q, int n) { std::memcpy(p, q, static_cast<size_t>(n) * 2); }
  static void weights(bf16* p, V x) { to(p, x); }
  static void in_order(V& low, V& high) { KVTIER_ISA::in_order(low, high); }

  using Packed = bf16;
  static constexpr int PAIR = 2;
  static V widened(const bf16* p) { return (V)load_pairs(p); }
  static V widened(const bf16* p, int n) { return n > 0 ? (V)load_pairs(p, n) : zero(); }
  static D everywhere(const bf16* p) { return set_pair(p); }
  static V product(V acc, D a, V b) { return dot(acc, a, (D)b); }
  // `next` is null where the last token is an odd one.
  static void pack_values(const bf16* value, const bf16* next, int n, float* to) {
    const D a = n < DOT ? load_pairs(value, n) : load_pairs(value);
    const D b = !next ? zero_pairs() : n < DOT ? load_pairs(next, n) : load_pairs(next);
    store(to, (V)pairs_low(a, b));
    store(to + W, (V)pairs_high(a, b));
  }
};
#endif

// Dot products of ROWS query rows with one key.
template <class M, int ROWS, int DIM>
KVTIER_INLINE void multiply(V (&acc)[W], int i, const typename M::Query* query, int query_stride,
                            const typename M::Element* key, int dim) {
  constexpr int TOKENS = W / ROWS;
  const auto step = [&](auto k, int c) KVTIER_LAMBDA {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      acc[r * TOKENS + i] = M::mac(acc[r * TOKENS + i], k, M::query(query + r * query_stride + c));
  };
  if constexpr (DIM != 0) {
#pragma GCC unroll 4
    for (int c = 0; c + M::STEP <= DIM; c += M::STEP) step(M::key(key + c), c);
    if constexpr (DIM % M::STEP != 0) step(M::key(key + DIM / M::STEP * M::STEP, DIM % M::STEP), DIM / M::STEP * M::STEP);
  } else {
    int c = 0;
    for (; c + M::STEP <= dim; c += M::STEP) step(M::key(key + c), c);
    if (c < dim) step(M::key(key + c, dim - c), c);
  }
}

template <class M, int ROWS, int DIM, class At>
KVTIER_INLINE void score_some(const typename M::Query* query, int query_stride, At at, int dim, float* scores,
                              int score_stride) {
  constexpr int TOKENS = W / ROWS;
  V acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) acc[i] = zero();
  if constexpr (TOKENS == 2 && DIM != 0) {
    static_assert(DIM % M::STEP == 0);
    // In turns: a step of the queries is loaded once for both, and twice as many sums are at work.
    const auto *first = at(0), *second = at(1);
#pragma GCC unroll 4
    for (int c = 0; c < DIM; c += M::STEP) {
      const auto a = M::key(first + c), b = M::key(second + c);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const auto q = M::query(query + r * query_stride + c);
        acc[2 * r] = M::mac(acc[2 * r], a, q);
        acc[2 * r + 1] = M::mac(acc[2 * r + 1], b, q);
      }
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) multiply<M, ROWS, DIM>(acc, i, query, query_stride, at(i), dim);
  }
  const V s = sums(acc);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) store_part<W / ROWS>(scores + r * score_stride, s, r);
}

#ifdef KVTIER_HELD
// How many of four query rows of DIM elements stay in registers together with the accumulators: all if they are short;
// three where the fourth can be loaded with each key. Either way keys are converted once and read in one pass.
template <class M, int ROWS, int DIM>
constexpr int held = [] {
  constexpr int REGISTERS = up(DIM, M::STEP) / M::STEP * M::REGISTERS;
  return ROWS != 4 || DIM == 0 ? 0 : REGISTERS <= 4 ? 4 : REGISTERS <= 8 ? 3 : 0;
}();

template <class M, int DIM, class P>
inline void score_held(const typename M::Element* keys, int n, const typename M::Query* query, int query_stride,
                       float* scores, int score_stride, P& ahead) {
  constexpr int N = up(DIM, M::STEP) / M::STEP, REST = DIM % M::STEP, HELD = held<M, 4, DIM>;
  typename M::Vector q[HELD][N];
  UNROLL for (int r = 0; r < HELD; r++)
    UNROLL for (int c = 0; c < N; c++) q[r][c] = M::query(query + r * query_stride + c * M::STEP);
  for (int t = 0; t + 4 <= n; t += 4, keys += 4 * DIM) {
    V parts[4];
    UNROLL for (int i = 0; i < 4; i++) {
      ahead.step();
      V acc[4] = {zero(), zero(), zero(), zero()};
      UNROLL for (int c = 0; c < N; c++) {
        const auto* at = keys + i * DIM + c * M::STEP;
        const auto key = REST && c == N - 1 ? M::key(at, REST) : M::key(at);
        UNROLL for (int r = 0; r < HELD; r++) acc[r] = M::mac(acc[r], key, q[r][c]);
        if constexpr (HELD == 3) acc[3] = M::mac(acc[3], key, M::query(query + 3 * query_stride + c * M::STEP));
      }
      parts[i] = sums_of_4(acc[0], acc[1], acc[2], acc[3]);
    }
    const V s = sums_of_parts(parts);
    UNROLL for (int r = 0; r < 4; r++) store_part<4>(scores + r * score_stride + t, s, r);
  }
}
#endif

// scores[r, t] = query row r . key t, for ROWS rows and n tokens of `dim` elements, in one of `passes` passes over them.
// Up to W - 1 columns of scores behind n are undefined, wherever the row begins.
template <class M, int ROWS, int DIM, class P>
inline void score(const typename M::Element* keys, int dim, int n, const typename M::Query* query, int query_stride,
                  float* scores, int score_stride, int passes, P& ahead) {
  constexpr int TOKENS = W / ROWS;
  if constexpr (DIM != 0) dim = DIM;
  int t = 0;
  ahead.pace(TOKENS * dim * static_cast<int>(sizeof(*keys)), passes);
#ifdef KVTIER_HELD
  if constexpr (held<M, ROWS, DIM> != 0) {
    ahead.pace(DIM * static_cast<int>(sizeof(*keys)), passes);
    score_held<M, DIM>(keys, n, query, query_stride, scores, score_stride, ahead);
    t = n / TOKENS * TOKENS;
  }
#endif
  for (; t + TOKENS <= n; t += TOKENS) {
    const typename M::Element* base = keys + static_cast<ptrdiff_t>(t) * dim;
    const auto at = [base, dim](int i) KVTIER_LAMBDA { return base + static_cast<ptrdiff_t>(i) * (DIM ? DIM : dim); };
    ahead.step();
    score_some<M, ROWS, DIM>(query, query_stride, at, dim, scores + t, score_stride);
  }
  if (t < n) {
    if (t == 0) ahead.step();
    // The last token is repeated in place of those that do not exist: behind it the memory may end.
    const auto at = [=](int i) KVTIER_LAMBDA { return keys + static_cast<ptrdiff_t>(std::min(t + i, n - 1)) * dim; };
    score_some<M, ROWS, 0>(query, query_stride, at, dim, scores + t, score_stride);
  }
}

// Whether values are prefetched with each turn of a pass. With few registers there are many short passes: with each pass.
constexpr bool EVENLY = W > 8;

// Columns of values that are added up at once, for so many rows.
template <int ROWS>
constexpr int widest = ROWS == 4 ? WIDEST_OF_4 : WIDEST_OF_2;

// out[r, :] += sum over t of weights[r, t] * values[t, :], for ROWS rows, n tokens, and `columns` columns of `dim`. The
// sums of a step begin at 0: where `out` has left the L1 cache, nothing waits for it.
template <class M, int ROWS, int VECTORS, class P>
KVTIER_INLINE void add_columns(const typename M::Element* values, int dim, int columns, int n, const float* weights,
                               float* out, int out_stride, P& ahead) {
  constexpr int COLUMNS = M::COLUMNS;
  typename M::Vector acc[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < VECTORS; c++) acc[r][c] = M::nothing();
  const int rest = columns - (VECTORS - 1) * COLUMNS;
  const auto token = [&](int t, auto last) KVTIER_LAMBDA {
    const auto* v = values + static_cast<ptrdiff_t>(t) * dim;
    if constexpr (EVENLY) ahead.step();
    V w[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) w[r] = set1(weights[r * ROW + t]);
    UNROLL for (int c = 0; c < VECTORS; c++) {
      const auto x = c == VECTORS - 1 ? last(v + c * COLUMNS) : M::key(v + c * COLUMNS);
      UNROLL for (int r = 0; r < ROWS; r++) acc[r][c] = M::weighted(acc[r][c], w[r], x);
    }
  };
  if (rest >= COLUMNS) {
    for (int t = 0; t < n; t++) token(t, [](const auto* v) KVTIER_LAMBDA { return M::key(v); });
  } else {
    for (int t = 0; t < n; t++) token(t, [rest](const auto* v) KVTIER_LAMBDA { return M::key(v, rest); });
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < VECTORS; c++) M::add_sums(out + r * out_stride + c * COLUMNS, acc[r][c]);
}

#ifdef KVTIER_DOT
template <class M, int ROWS, int VECTORS, class P>
KVTIER_INLINE void add_columns(const bf16* values, int dim, int columns, int n, const bf16* weights, float* out,
                               int out_stride, P& ahead) {
  V low[ROWS][VECTORS], high[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < VECTORS; c++) {
      low[r][c] = zero();
      high[r][c] = zero();
    }
  const int rest = columns - (VECTORS - 1) * DOT;
  const auto part = [&](int t, int c) KVTIER_LAMBDA {
    const bf16* v = values + static_cast<ptrdiff_t>(t) * dim + c * DOT;
    return c == VECTORS - 1 && rest < DOT ? load_pairs(v, rest) : load_pairs(v);
  };
  const auto pair = [&](int t, auto row) KVTIER_LAMBDA {
    if constexpr (EVENLY) ahead.step();
    D w[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) w[r] = set_pair(weights + r * ROW + t);
    UNROLL for (int c = 0; c < VECTORS; c++) {
      const D a = row(t, c), b = row(t + 1, c), first = pairs_low(a, b), second = pairs_high(a, b);
      UNROLL for (int r = 0; r < ROWS; r++) {
        low[r][c] = dot(low[r][c], first, w[r]);
        high[r][c] = dot(high[r][c], second, w[r]);
      }
    }
  };
  int t = 0;
  if (rest >= DOT) {
    const auto whole = [&](int s, int c) KVTIER_LAMBDA {
      return load_pairs(values + static_cast<ptrdiff_t>(s) * dim + c * DOT);
    };
    for (; t + 1 < n; t += 2) pair(t, whole);
  } else {
    for (; t + 1 < n; t += 2) pair(t, part);
  }
  if (t < n) {
    // The last token of an odd number: its partner does not exist and must not be read.
    pair(t, [&](int s, int c) KVTIER_LAMBDA { return s == t ? part(s, c) : zero_pairs(); });
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < VECTORS; c++) {
      add_to(out + r * out_stride + c * DOT, low[r][c]);
      add_to(out + r * out_stride + c * DOT + W, high[r][c]);
    }
}
#endif

template <class M>
struct Shape {
  static int query_pad(const kvtier_problem& p) { return up(p.k_dim, M::STEP); }
  static int value_pad(const kvtier_problem& p) { return up(p.v_dim, M::COLUMNS); }
};

// The columns are cut into as few panels as registers allow, of about the same width.
template <class M, int ROWS, int DIM>
constexpr int panels = (up(DIM, M::COLUMNS) + widest<ROWS> - 1) / widest<ROWS>;

// f(first column, columns, vectors as a type) for each panel.
template <class M, int ROWS, int DIM, class F>
KVTIER_INLINE void each_panel(int dim, F f) {
  constexpr int COLUMNS = M::COLUMNS;
  if constexpr (DIM != 0) {
    constexpr int COUNT = panels<M, ROWS, DIM>, WIDE = up((DIM + COUNT - 1) / COUNT, COLUMNS), REST = DIM % WIDE;
    int c = 0;
    for (; c + WIDE <= DIM; c += WIDE) f(c, WIDE, std::integral_constant<int, WIDE / COLUMNS>());
    if constexpr (REST != 0) f(c, REST, std::integral_constant<int, up(REST, COLUMNS) / COLUMNS>());
  } else {
    constexpr int WIDE = widest<ROWS> / 2 / COLUMNS * COLUMNS;
    int c = 0;
    for (; c + WIDE <= dim; c += WIDE) f(c, WIDE, std::integral_constant<int, WIDE / COLUMNS>());
    for (; c < dim; c += COLUMNS) f(c, std::min(COLUMNS, dim - c), std::integral_constant<int, 1>());
  }
}

// All `rows` of one KV head.
template <class M, int DIM, class P>
inline void add_rows(const typename M::Element* values, int dim, int n, const typename M::Weight* weights, int rows,
                     float* out, int out_stride, P& ahead) {
  if constexpr (DIM != 0) dim = DIM, out_stride = up(DIM, M::COLUMNS);
  constexpr int step = STEP_TOKENS;
  // Values are converted and paired once for four rows. The hardware follows whole tokens only, so that without prefetches
  // four rows must not take more columns than there are registers for.
  constexpr bool FOURS = DIM != 0 && (P::BY_SOFTWARE || W <= 8 || panels<M, 4, DIM> == 1);
  const int fours = FOURS ? rows / 4 : 0, twos = (rows - 4 * fours + 1) / 2;
  constexpr int PANELS_OF_4 = DIM ? panels<M, 4, DIM> : 1, PANELS_OF_2 = DIM ? panels<M, 2, DIM> : 1;
  const int passes = fours * PANELS_OF_4 + twos * PANELS_OF_2;
  const auto add_step = [&](const typename M::Element* values, const typename M::Weight* weights, int some,
                            P& ahead) KVTIER_LAMBDA {
    int row = 0;
    // A panel of all rows before the next panel: lines that are skipped at first were prefetched longer ago.
    const auto add = [&](auto count) KVTIER_LAMBDA {
      constexpr int ROWS = decltype(count)::value;
      const int stop = row + (rows - row) / ROWS * ROWS;
      each_panel<M, ROWS, DIM>(dim, [&](int c, int columns, auto vectors) KVTIER_LAMBDA {
        for (int r = row; r < stop; r += ROWS) {
          if constexpr (!EVENLY) ahead.step();
          add_columns<M, ROWS, decltype(vectors)::value>(values + c, dim, columns, some, weights + r * ROW,
                                                         out + r * out_stride + c, out_stride, ahead);
        }
      });
      row = stop;
    };
    if constexpr (FOURS) add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
  };
  ahead.pace((EVENLY ? M::TOKENS : step) * dim * static_cast<int>(sizeof(*values)), passes);
  for (int t = 0; t < n; t += step, values += static_cast<ptrdiff_t>(step) * dim, weights += step) {
    const int some = std::min(step, n - t);
    ahead.begin(static_cast<int64_t>(some) * dim * sizeof(*values));
    add_step(values, weights, some, ahead);
  }
}

}  // namespace KVTIER_ISA
