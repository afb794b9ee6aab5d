// The kernel, for one instruction set: included once per set, in a namespace of its own, behind its simd_*.h.
//
// A task walks over its blocks in tiles of up to TILE tokens. For each tile and KV head: scores of all query rows of
// that head against the tile's keys, softmax online in fp32 (FlashAttention), then the weighted sum of the values.
// All query heads of a KV head, and all its queries, share the one pass over its keys and values.
#pragma once

#include "phases.h"
#include "products.h"

namespace KVTIER_ISA {

constexpr int TOGETHER = 64;  // rows whose weights are kept at once
constexpr int AHEAD = 4;      // lines that are prefetched with each row of softmax

// A run of tokens within one block.
struct Segment {
  const char* block;
  int64_t position;  // of the first token
  int skip;          // tokens of the block before it
  int n;
  int column;  // where its scores begin within the tile
};

template <class M>
class Attention {
 public:
  using T = typename M::Element;

  static int rows(const kvtier_problem& p) { return p.heads * p.queries; }
  static int group_rows(const kvtier_problem& p) { return p.heads / p.kv_heads * p.queries; }

  static size_t partial_floats(const kvtier_problem& p) {
    return static_cast<size_t>(rows(p)) * (Shape<M>::value_pad(p) + 2) + 64;
  }

  static Partial partial_at(const kvtier_problem& p, float* memory) {
    const size_t values = static_cast<size_t>(rows(p)) * Shape<M>::value_pad(p);
    return {memory + values, memory + values + rows(p), memory};
  }

  static size_t query_bytes(const kvtier_problem& p) {
    return (static_cast<size_t>(p.kv_heads) * up(group_rows(p), 4) * Shape<M>::query_pad(p) * sizeof(typename M::Query) +
            63) / 64 * 64;
  }
  // KV heads whose scores are kept at once: enough for a long run through memory, few enough for the first level cache.
  static int heads_at_once(const kvtier_problem& p) {
    return std::clamp(TOGETHER / up(group_rows(p), 4), 1, p.kv_heads);
  }
  static size_t score_bytes(const kvtier_problem& p) {
    return static_cast<size_t>(heads_at_once(p)) * up(group_rows(p), 4) * ROW * 4;
  }

  static size_t scratch_bytes(const kvtier_problem& p, int64_t max_blocks) {
    (void)max_blocks;
    return query_bytes(p) + 2 * score_bytes(p);
  }

  static void attend(const kvtier_problem& p, const Task& task, char* scratch, Partial out) {
    Attention self(p, task.sequence, scratch, out);
    self.run(task);
  }

 private:
  Attention(const kvtier_problem& p, int sequence, char* scratch, Partial out)
      : p_(p), sequence_(sequence), out_(out), rows_(group_rows(p)), query_pad_(Shape<M>::query_pad(p)),
        value_pad_(Shape<M>::value_pad(p)), length_(p.lengths[sequence]) {
    query_ = reinterpret_cast<typename M::Query*>(scratch);
    scratch += query_bytes(p);
    scores_ = reinterpret_cast<float*>(scratch);
    scratch += score_bytes(p);
    weights_ = reinterpret_cast<typename M::Weight*>(scratch);
    scratch += score_bytes(p);
    const int64_t first = p.first_valid ? p.first_valid[sequence] : 0;
    first_seen_ = std::max<int64_t>(first, 0);
    lowest_ = first_seen_;
    if (p.window > 0) lowest_ = std::max<int64_t>(lowest_, length_ - p.queries - p.window + 1);
    // Else scores are scaled behind their end too, where they are -inf: 0 would make them NaN, less would show them.
    special_ = !(p.scale > 0) || p.causal || p.window > 0 || p.mask_dtype != KVTIER_NONE || p.slopes || first_seen_ > 0;
  }

  void run(const Task& task) {
    pack_query();
    const int all = p_.heads * p_.queries;
    std::fill_n(out_.highest, all, NEVER);
    std::fill_n(out_.sum, all, 0.0f);
    std::memset(out_.values, 0, static_cast<size_t>(all) * value_pad_ * 4);

    Segment tile[TILE];
    int count = 0, columns = 0;
    for (int64_t b = task.first; b < task.last; b++) {
      int64_t position;
      int skip, n;
      if (!part_of(b, task, position, skip, n)) continue;
      while (n > 0) {
        const int take = std::min(n, TILE - columns);
        tile[count++] = {reinterpret_cast<const char*>(p_.blocks[b]), position, skip, take, columns};
        columns += take;
        position += take;
        skip += take;
        n -= take;
        if (columns == TILE) {
          attend_tile(tile, count, columns);
          count = columns = 0;
        }
      }
    }
    if (columns) attend_tile(tile, count, columns);
  }

  // The tokens of block b that any query may see.
  bool part_of(int64_t b, const Task&, int64_t& position, int& skip, int& n) const {
    const int64_t index = p_.indices ? p_.indices[b] : b - p_.begins[sequence_];
    const int64_t start = index * p_.block_size, end = std::min<int64_t>(start + p_.block_size, length_);
    position = std::max(start, lowest_);
    skip = static_cast<int>(position - start);
    n = static_cast<int>(end - position);
    return n > 0;
  }

  void pack_query() {
    const int group = p_.heads / p_.kv_heads, padded = up(rows_, 4);
    const T* query = static_cast<const T*>(p_.query) + sequence_ * p_.query_strides[0];
    for (int g = 0; g < p_.kv_heads; g++) {
      typename M::Query* q = query_ + static_cast<size_t>(g) * padded * query_pad_;
      std::memset(q, 0, static_cast<size_t>(padded) * query_pad_ * sizeof(*q));
      for (int h = 0; h < group; h++)
        for (int i = 0; i < p_.queries; i++)
          M::pack(q + static_cast<size_t>(h * p_.queries + i) * query_pad_,
                  query + (g * group + h) * p_.query_strides[1] + i * p_.query_strides[2], p_.k_dim);
    }
  }

  const T* keys_of(const Segment& s, int g) const {
    return reinterpret_cast<const T*>(s.block) + (static_cast<size_t>(g) * p_.block_size + s.skip) * p_.k_dim;
  }
  const T* values_of(const Segment& s, int g) const {
    return reinterpret_cast<const T*>(s.block) + static_cast<size_t>(p_.kv_heads) * p_.block_size * p_.k_dim +
           (static_cast<size_t>(g) * p_.block_size + s.skip) * p_.v_dim;
  }

  template <int ROWS>
  void score_rows(const Segment& s, int g, int row, int slot) {
    const auto* q = query_ + (static_cast<size_t>(g) * up(rows_, 4) + row) * query_pad_;
    float* scores = scores_ + (slot + row) * ROW + s.column;
    switch (p_.k_dim) {
      case 64: return score<M, ROWS, 64>(keys_of(s, g), 64, s.n, q, query_pad_, scores, ROW);
      case 128: return score<M, ROWS, 128>(keys_of(s, g), 128, s.n, q, query_pad_, scores, ROW);
      case 256: return score<M, ROWS, 256>(keys_of(s, g), 256, s.n, q, query_pad_, scores, ROW);
      default: return score<M, ROWS, 0>(keys_of(s, g), p_.k_dim, s.n, q, query_pad_, scores, ROW);
    }
  }

  void score_tokens(const Segment& s, int g, int slot) {
    for (int row = 0; row < rows_; row += 4) {
      const int left = rows_ - row;
      if (left >= 3) score_rows<4>(s, g, row, slot);
      else if (left == 2) score_rows<2>(s, g, row, slot);
      else score_rows<1>(s, g, row, slot);
    }
  }

  // Heads of a block lie behind each other: a block's keys of all heads are one run through memory, then its values
  // are. The shorter blocks are, the more this counts: a head after the other, each through all blocks of a tile, was a
  // fifth slower where a block has 64 tokens (docs/design/host-attention.md).
  void attend_tile(const Segment* tile, int count, int columns) {
    const int at_once = heads_at_once(p_), padded = up(rows_, 4);
    for (int first = 0; first < p_.kv_heads; first += at_once) {
      const int last = std::min(first + at_once, p_.kv_heads);
      for (int i = 0; i < count; i++)
        for (int g = first; g < last; g++) score_tokens(tile[i], g, (g - first) * padded);
      clock_.end(Phase::keys);
      // Softmax reads nothing from memory: meanwhile what comes next is brought nearer.
      const char* ahead = reinterpret_cast<const char*>(values_of(tile[0], first));
      for (int g = first; g < last; g++)
        for (int row = 0; row < rows_; row++) {
          for (int line = 0; line < AHEAD; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
          soften(tile, count, columns, g, row, (g - first) * padded + row);
        }
      clock_.end(Phase::softmax);
      for (int i = 0; i < count; i++)
        for (int g = first; g < last; g++) add_tokens(tile[i], g, (g - first) * padded);
      clock_.end(Phase::values);
    }
  }

  void add_tokens(const Segment& s, int g, int slot) {
    const typename M::Weight* weights = weights_ + slot * ROW + s.column;
    float* out = out_.values + static_cast<size_t>(g) * rows_ * value_pad_;
    switch (p_.v_dim) {
      case 64: return add_rows<M, 64>(values_of(s, g), 64, s.n, weights, rows_, out, 64);
      case 128: return add_rows<M, 128>(values_of(s, g), 128, s.n, weights, rows_, out, 128);
      case 256: return add_rows<M, 256>(values_of(s, g), 256, s.n, weights, rows_, out, 256);
      default: return add_rows<M, 0>(values_of(s, g), p_.v_dim, s.n, weights, rows_, out, value_pad_);
    }
  }

  // Scores of one row become weights; what was added up before is scaled down where the highest score rises.
  void soften(const Segment* tile, int count, int columns, int g, int row, int slot) {
    float* s = scores_ + slot * ROW;
    const int padded = up(columns, W);
    V top = set1(NEVER);
    for (int i = columns; i < padded; i++) s[i] = NEVER;
    const bool adjusted = special_ || p_.softcap > 0;
    if (adjusted) adjust(tile, count, columns, g, row, s);
    for (int i = 0; i < padded; i += W) top = max(top, load(s + i));
    // Scaled below, with the weights; the highest stays the highest.
    const V scale = set1(adjusted ? 1.0f : p_.scale);
    top = mul(top, scale);
    const size_t at = static_cast<size_t>(g) * rows_ + row;
    const float before = out_.highest[at], now = std::max(before, highest(top));
    typename M::Weight* weights = weights_ + slot * ROW;
    V total = zero();
    // Where nothing is seen yet all weights are 0, but a score that is not a number shows.
    const V m = set1(now == NEVER ? 0.0f : now);
    for (int i = 0; i < padded; i += W) {
      const V w = exp(sub(mul(load(s + i), scale), m));
      M::weights(weights + i, w);
      total = add(total, w);
    }
    M::weights(weights + padded, zero());  // an odd last token is multiplied with a partner: memory might hold NaN
    if (now > before) {
      const float shrink = std::exp(before - now);
      out_.highest[at] = now;
      out_.sum[at] *= shrink;
      float* values = out_.values + at * value_pad_;
      for (int i = 0; i < value_pad_; i += W) store(values + i, mul(load(values + i), set1(shrink)));
    }
    out_.sum[at] += sum(total);
  }

  // Scale, softcap, biases and masks of one row.
  void adjust(const Segment* tile, int count, int columns, int g, int row, float* s) {
    const int group = p_.heads / p_.kv_heads, head = g * group + row / p_.queries, query = row % p_.queries;
    const int64_t position = length_ - p_.queries + query;
    for (int i = 0; i < columns; i += W) {
      V x = mul(load(s + i), set1(p_.scale));
      if (p_.softcap > 0) x = mul(set1(p_.softcap), tanh(mul(x, set1(1.0f / p_.softcap))));
      store(s + i, x);
    }
    for (int i = columns; i < up(columns, W); i++) s[i] = NEVER;
    for (int i = 0; i < count; i++) {
      const Segment& segment = tile[i];
      float* scores = s + segment.column;
      if (p_.slopes) {
        const float slope = p_.slopes[head];
        for (int t = 0; t < segment.n; t++) scores[t] += slope * static_cast<float>(segment.position + t - position);
      }
      if (p_.mask_dtype != KVTIER_NONE) {
        const int64_t offset = sequence_ * p_.mask_strides[0] + head * p_.mask_strides[1] +
                               query * p_.mask_strides[2] + segment.position;
        mask(scores, segment.n, offset);
      }
      int64_t low = first_seen_, high = length_;
      if (p_.causal) high = std::min(high, position + 1);
      if (p_.window > 0) low = std::max(low, position - p_.window + 1);
      const int64_t begin = std::clamp<int64_t>(low - segment.position, 0, segment.n);
      const int64_t end = std::clamp<int64_t>(high - segment.position, begin, segment.n);
      std::fill(scores, scores + begin, NEVER);
      std::fill(scores + end, scores + segment.n, NEVER);
    }
  }

  void mask(float* scores, int n, int64_t offset) const {
    switch (p_.mask_dtype) {
      case KVTIER_BOOL: {
        const uint8_t* m = static_cast<const uint8_t*>(p_.mask) + offset;
        for (int t = 0; t < n; t++) scores[t] = m[t] ? scores[t] : NEVER;
        break;
      }
      case KVTIER_F32: bias(scores, n, static_cast<const float*>(p_.mask) + offset); break;
      case KVTIER_BF16: bias(scores, n, static_cast<const bf16*>(p_.mask) + offset); break;
      default: bias(scores, n, static_cast<const f16*>(p_.mask) + offset); break;
    }
  }
  template <class B>
  static void bias(float* scores, int n, const B* m) {
    for (int t = 0; t < n; t++) scores[t] += to_float(m[t]);
  }

 public:
  static void finish(const kvtier_problem& p, int32_t sequence, const Partial* parts, size_t count) {
    const int pad = Shape<M>::value_pad(p);
    const Partial& first = parts[0];
    for (int h = 0; h < p.heads; h++)
      for (int i = 0; i < p.queries; i++) {
        const size_t row = static_cast<size_t>(h) * p.queries + i;
        float top = p.sinks ? p.sinks[h] : NEVER;
        for (size_t k = 0; k < count; k++) top = std::max(top, parts[k].highest[row]);
        if (top == NEVER) top = 0.0f;  // nothing is seen; or nothing but NaN, which must show
        float* values = first.values + row * pad;
        float total = p.sinks ? std::exp(p.sinks[h] - top) : 0.0f;
        for (size_t k = 0; k < count; k++) {
          const float weight = std::exp(parts[k].highest[row] - top);
          total += weight * parts[k].sum[row];
          const float* other = parts[k].values + row * pad;
          if (k == 0) {
            for (int c = 0; c < pad; c += W) store(values + c, mul(load(values + c), set1(weight)));
          } else if (weight > 0) {
            for (int c = 0; c < pad; c += W) store(values + c, fma(load(other + c), set1(weight), load(values + c)));
          }
        }
        const bool blind = total == 0.0f;
        const float share = blind ? 0.0f : 1.0f / total;
        if (p.lse) {
          float* lse = p.lse + (static_cast<size_t>(sequence) * p.heads + h) * p.queries + i;
          *lse = blind ? NEVER : top + std::log(total);
        }
        const int64_t offset = sequence * p.out_strides[0] + h * p.out_strides[1] + i * p.out_strides[2];
        switch (p.out_dtype) {
          case KVTIER_F32: write(static_cast<float*>(p.out) + offset, values, p.v_dim, share); break;
          case KVTIER_BF16: write(static_cast<bf16*>(p.out) + offset, values, p.v_dim, share); break;
          default: write(static_cast<f16*>(p.out) + offset, values, p.v_dim, share); break;
        }
      }
  }

 private:
  template <class O>
  static void write(O* out, const float* values, int dim, float share) {
    const V s = set1(share);
#ifdef KVTIER_DOT
    if constexpr (std::is_same_v<M, Dotted>) {
      for (int c = 0; c < dim; c += DOT) {
        V a = load(values + c), b = load(values + c + W);
        in_order(a, b);
        put(out + c, mul(a, s), std::min(W, dim - c));
        if (dim - c > W) put(out + c + W, mul(b, s), std::min(W, dim - c - W));
      }
      return;
    }
#endif
    for (int c = 0; c < dim; c += W) put(out + c, mul(load(values + c), s), std::min(W, dim - c));
  }
  template <class O>
  static void put(O* out, V x, int n) {
    if (n == W) to(out, x);
    else to(out, x, n);
  }

  const kvtier_problem& p_;
  const int sequence_;
  const Partial out_;
  const int rows_, query_pad_, value_pad_;
  const int64_t length_;
  int64_t first_seen_, lowest_;
  bool special_;
  PhaseClock clock_;
  typename M::Query* query_;
  float* scores_;
  typename M::Weight* weights_;
};

template <class F>
inline auto with_dtype(const kvtier_problem& p, F f) {
  switch (p.dtype) {
    case KVTIER_F32: return f(static_cast<Attention<Widened<float>>*>(nullptr));
#ifdef KVTIER_DOT
    case KVTIER_BF16: return f(static_cast<Attention<Dotted>*>(nullptr));
#else
    case KVTIER_BF16: return f(static_cast<Attention<Widened<bf16>>*>(nullptr));
#endif
    default: return f(static_cast<Attention<Widened<f16>>*>(nullptr));
  }
}

inline const Kernel* kernel(const char* name) {
  static const Kernel it{
      name,
      [](const kvtier_problem& p) {
        return with_dtype(p, [&](auto* a) { return std::remove_reference_t<decltype(*a)>::partial_floats(p); });
      },
      [](const kvtier_problem& p, int64_t blocks) {
        return with_dtype(p, [&](auto* a) { return std::remove_reference_t<decltype(*a)>::scratch_bytes(p, blocks); });
      },
      [](const kvtier_problem& p, float* memory) {
        return with_dtype(p, [&](auto* a) { return std::remove_reference_t<decltype(*a)>::partial_at(p, memory); });
      },
      [](const kvtier_problem& p, const Task& task, char* scratch, Partial out) {
        with_dtype(p, [&](auto* a) { std::remove_reference_t<decltype(*a)>::attend(p, task, scratch, out); });
      },
      [](const kvtier_problem& p, int32_t sequence, const Partial* parts, size_t count) {
        with_dtype(p, [&](auto* a) { std::remove_reference_t<decltype(*a)>::finish(p, sequence, parts, count); });
      },
  };
  return &it;
}

}  // namespace KVTIER_ISA
