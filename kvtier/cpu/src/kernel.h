// The kernel, for one instruction set: included once per set, in a namespace of its own, behind its simd_*.h.
//
// A task walks over its blocks in tiles: one block, or what there is room for. For each tile and KV head: scores of all
// query rows of that head against the tile's keys, softmax online in fp32 (FlashAttention), then the weighted sum of the
// values. All query heads of a KV head, and all its queries, share the one pass over its keys and values.
#pragma once

#include "checksum.h"
#include "many.h"
#include "phases.h"
#include "products.h"

namespace KVTIER_ISA {

constexpr int MOST_ROWS = ROWS_AT_ONCE;    // whose scores and weights are kept at once, where heads can be fewer
constexpr int MOST_HEADS = MOST_ROWS / 4;  // that have so many rows
constexpr int KEY_STEP = 32;       // tokens whose scores with all rows are computed before the next ones
// Compilers fuse the scaling of a score with the subtraction of the highest one, which was rounded when it was scaled. Up
// to here that rounding is at most 1/2; where it is more, the highest score's own weight may be 0 or infinite.
constexpr float FUSED = 1 << 24;

// Neighbouring tokens of one block.
struct Segment {
  const char* block;
  int64_t position;  // of the first token
  int skip;          // tokens of the block before it
  int n;
  int column;  // where its scores begin within the tile
};

// Tokens of a tile whose positions follow each other.
struct Span {
  int64_t position;
  int n, column;
};

template <class M>
class Attention {
 public:
  using T = typename M::Element;

  static size_t partial_floats(const kvtier_problem& p, const Share& share) {
    return static_cast<size_t>(share.rows()) * (Shape<M>::value_pad(p) + 2) + 64;
  }

  static Partial partial_at(const kvtier_problem& p, const Share& share, float* memory) {
    const size_t all = static_cast<size_t>(share.rows()), values = all * Shape<M>::value_pad(p);
    return {memory + values, memory + values + all, memory};
  }

  // Rows of a KV head in scratch memory.
  static int padded_rows(const Share& share) {
    const int rows = share.group_rows();
    return up(rows, packs<M>(rows) ? 16 : 4);
  }
  static size_t query_bytes(const kvtier_problem& p, const Share& share) {
    return (static_cast<size_t>(share.kv_heads) * padded_rows(share) * Shape<M>::query_pad(p) *
                sizeof(typename M::Query) + 63) / 64 * 64;
  }
  // KV heads whose scores are kept at once: enough for a long pass through memory, few enough for the caches.
  static int heads_at_once(const Share& share) {
    return packs<M>(share.group_rows()) ? 1 : std::clamp(MOST_ROWS / padded_rows(share), 1, share.kv_heads);
  }
  static size_t score_bytes(const Share& share) {
    const bool many = packs<M>(share.group_rows());  // then so many rows take turns
    const int rows = many ? MOST_ROWS : heads_at_once(share) * padded_rows(share);
    return static_cast<size_t>(rows) * ROW * 4;
  }
  static size_t packed_bytes(const kvtier_problem& p, const Share& share) {
    if constexpr (SERVES_MANY<M>) {
      if (packs<M>(share.group_rows()))
        return packed_elements<M>(PACKED, std::max(p.k_dim, p.v_dim)) * sizeof(typename M::Packed);
    }
    return 0;
  }

  static size_t scratch_bytes(const kvtier_problem& p, const Share& share) {
    return query_bytes(p, share) + 2 * score_bytes(share) + 2 * packed_bytes(p, share);
  }

  // The tokens that were attended to. Either prefetch gives the same bits.
  static int64_t attend(const kvtier_problem& p, const Share& share, const Task& task, Prefetch prefetch, char* scratch,
                        Partial out) {
    Attention self(p, share, scratch, out);
    if constexpr (SERVES_FEW<M>) {
      if (!packs<M>(self.rows_))
        return prefetch == Prefetch::software ? self.template run<SoftwarePrefetch>(task)
                                              : self.template run<HardwarePrefetch>(task);
    }
    [[maybe_unused]] const Packing<M> packing;
    return self.template run<HardwarePrefetch>(task);
  }

 private:
  Attention(const kvtier_problem& p, const Share& share, char* scratch, Partial out)
      : p_(p), share_(share), out_(out), queries_(share.queries), group_(share.query_heads / share.kv_heads),
        rows_(share.group_rows()), padded_(padded_rows(share)), query_pad_(Shape<M>::query_pad(p)),
        value_pad_(Shape<M>::value_pad(p)), length_(share.length) {
    query_ = reinterpret_cast<typename M::Query*>(scratch);
    scratch += query_bytes(p, share);
    scores_ = reinterpret_cast<float*>(scratch);
    scratch += score_bytes(share);
    weights_ = reinterpret_cast<typename M::Weight*>(scratch);
    scratch += score_bytes(share);
    packed_keys_ = scratch;
    packed_values_ = scratch + packed_bytes(p, share);
    tile_ = packs<M>(rows_) ? PACKED : std::min(up(16, p.block_size), TILE);
    const bool biased = p.mask_dtype != KVTIER_NONE && p.mask_dtype != KVTIER_BOOL;
    // Else the scores behind a tile's last token, which are -inf, are scaled too: a scale of 0 would make them NaN, and
    // a negative one +inf.
    adjusted_ = !(p.scale > 0) || p.softcap > 0 || p.slopes || biased;
  }

  template <class P>
  int64_t run(const Task& task) {
    pack_query();
    const int all = share_.rows();
    std::fill_n(out_.highest, all, NEVER);
    std::fill_n(out_.sum, all, 0.0f);
    std::memset(out_.values, 0, static_cast<size_t>(all) * value_pad_ * 4);

    // Two tiles: one is attended when the next one is known.
    Segment tiles[2][PACKED];
    Segment *tile = tiles[0], *last = tiles[1];
    int count = 0, columns = 0, last_count = 0, last_columns = 0;
    int64_t tokens = 0;
    const auto end_tile = [&] {
      if (last_count) attend_tile<P>(last, last_count, last_columns, count ? tile : nullptr);
      std::swap(tile, last);
      last_count = count, last_columns = columns;
      count = columns = 0;
    };
    const kvtier_run* run = task.run;
    int64_t skip = task.skip;
    for (int64_t left = task.blocks; left > 0; run++, skip = 0) {
      const int64_t blocks = std::min(run->count - skip, left);
      left -= blocks;
      const char* block = reinterpret_cast<const char*>(run->address + skip * p_.block_stride);
      int64_t start = (run->index + skip) * p_.block_size;
      for (int64_t b = 0; b < blocks; b++, block += p_.block_stride, start += p_.block_size) {
        // The tokens of this block that are seen.
        int64_t position = std::max(start, share_.lowest);
        int skipped = static_cast<int>(position - start);
        int n = static_cast<int>(std::min<int64_t>(start + p_.block_size, share_.length) - position);
        // A tile does not end in the middle of a block that fits into one, wherever the first one begins.
        if (columns && n > tile_ - columns && !packs<M>(rows_)) end_tile();
        tokens += std::max(n, 0);
        while (n > 0) {
          const int take = std::min(n, tile_ - columns);
          tile[count++] = {block, position, skipped, take, columns};
          columns += take;
          position += take;
          skipped += take;
          n -= take;
          if (columns == tile_) end_tile();
        }
      }
    }
    if (columns) end_tile();
    end_tile();
    return tokens;
  }

  void pack_query() {
    const T* query = static_cast<const T*>(p_.query) + share_.query;
    for (int g = 0; g < share_.kv_heads; g++) {
      typename M::Query* q = query_ + static_cast<size_t>(g) * padded_ * query_pad_;
      std::memset(q, 0, static_cast<size_t>(padded_) * query_pad_ * sizeof(*q));
      for (int h = 0; h < group_; h++)
        for (int i = 0; i < queries_; i++)
          M::pack(q + static_cast<size_t>(h * queries_ + i) * query_pad_,
                  query + head_of(g, h) * p_.query_strides[0] + i * p_.query_strides[1], p_.k_dim);
    }
  }

  // In the problem, of KV heads and rows of the share.
  int64_t head_of(int g, int h) const { return static_cast<int64_t>(share_.kv_head + g) * group_ + h; }
  const T* keys_of(const Segment& s, int g) const {
    const size_t head = static_cast<size_t>(share_.kv_head + g);
    return reinterpret_cast<const T*>(s.block) + (head * p_.block_size + s.skip) * p_.k_dim;
  }
  const T* values_of(const Segment& s, int g) const {
    const size_t head = static_cast<size_t>(share_.kv_head + g), keys = static_cast<size_t>(p_.kv_heads) * p_.block_size;
    return reinterpret_cast<const T*>(s.block) + keys * p_.k_dim + (head * p_.block_size + s.skip) * p_.v_dim;
  }

  template <int ROWS, class P>
  void score_rows(const Segment& s, int g, int row, int slot, P& ahead) {
    const auto* q = query_ + (static_cast<size_t>(g) * padded_ + row) * query_pad_;
    float* scores = scores_ + (slot + row) * ROW + s.column;
    const int passes = (rows_ + 3) / 4;
    switch (p_.k_dim) {
      case 32: return score<M, ROWS, 32>(keys_of(s, g), 32, s.n, q, query_pad_, scores, ROW, passes, ahead);
      case 64: return score<M, ROWS, 64>(keys_of(s, g), 64, s.n, q, query_pad_, scores, ROW, passes, ahead);
      case 80: return score<M, ROWS, 80>(keys_of(s, g), 80, s.n, q, query_pad_, scores, ROW, passes, ahead);
      case 96: return score<M, ROWS, 96>(keys_of(s, g), 96, s.n, q, query_pad_, scores, ROW, passes, ahead);
      case 128: return score<M, ROWS, 128>(keys_of(s, g), 128, s.n, q, query_pad_, scores, ROW, passes, ahead);
      case 256: return score<M, ROWS, 256>(keys_of(s, g), 256, s.n, q, query_pad_, scores, ROW, passes, ahead);
      default: return score<M, ROWS, 0>(keys_of(s, g), p_.k_dim, s.n, q, query_pad_, scores, ROW, passes, ahead);
    }
  }

  template <class P>
  void score_step(const Segment& s, int g, int slot, P& ahead) {
    for (int row = 0; row < rows_; row += 4) {
      const int left = rows_ - row;
      if (left >= 3) score_rows<4>(s, g, row, slot, ahead);
      else if (left == 2) score_rows<2>(s, g, row, slot, ahead);
      else score_rows<1>(s, g, row, slot, ahead);
    }
  }

  template <class P>
  void score_tokens(const Segment& s, int g, int slot, P& ahead) {
    // One pass without prefetches needs no steps.
    const int step = P::BY_SOFTWARE || rows_ > 4 ? KEY_STEP : s.n;
    for (int t = 0; t < s.n; t += step) {
      const Segment some{s.block, s.position + t, s.skip + t, std::min(step, s.n - t), s.column + t};
      ahead.begin(static_cast<int64_t>(some.n) * p_.k_dim * sizeof(T));
      score_step(some, g, slot, ahead);
    }
  }

  // The keys of a block's heads are neighbours, and then its values: where a tile is a block, memory is read in its order.
  // `next` is the first segment of the next tile, or null.
  template <class P>
  void attend_tile(const Segment* tile, int count, int columns, const Segment* next) {
    look_at(tile, count);
    if constexpr (SERVES_MANY<M>) {
      if (packs<M>(rows_)) return attend_packed(tile, count, columns);
    }
    if constexpr (SERVES_FEW<M>) attend_few<P>(tile, count, next, columns);
  }

  template <class P>
  void attend_few(const Segment* tile, int count, const Segment* next, int columns) {
    const int at_once = heads_at_once(share_);
    for (int first = 0; first < share_.kv_heads; first += at_once) {
      const int last = std::min(first + at_once, share_.kv_heads);
      const Bytes* const first_values = P::BY_SOFTWARE ? list_runs(tile, count, first, last, next) : nullptr;
      P keys(runs_), values(first_values);
      for (int i = 0; i < count; i++)
        for (int g = first; g < last; g++) score_tokens(tile[i], g, (g - first) * padded_, keys);
      clock_.end(Phase::keys);
      for (int g = first; g < last; g++)
        for (int row = 0; row < rows_; row++) softmax(columns, g, row, (g - first) * padded_ + row);
      clock_.end(Phase::softmax);
      for (int i = 0; i < count; i++)
        for (int g = first; g < last; g++) add_tokens(tile[i], g, (g - first) * padded_, values);
      clock_.end(Phase::values);
    }
  }

  // What is read for some KV heads of a tile, in this order: keys, values, and the keys that follow. Where values begin.
  const Bytes* list_runs(const Segment* tile, int count, int first, int last, const Segment* next) {
    Bytes* end = runs_;
    const auto add = [&](const T* at, int64_t elements) {
      *end++ = {reinterpret_cast<const char*>(at), reinterpret_cast<const char*>(at + elements)};
    };
    // The heads of a whole block are neighbours.
    const auto add_all = [&](const Segment& s, int first, int last, int dim, auto part) {
      if (s.n == p_.block_size) return add((this->*part)(s, first), static_cast<int64_t>(last - first) * s.n * dim);
      for (int g = first; g < last; g++) add((this->*part)(s, g), static_cast<int64_t>(s.n) * dim);
    };
    for (int i = 0; i < count; i++) add_all(tile[i], first, last, p_.k_dim, &Attention::keys_of);
    const Bytes* const values = end;
    for (int i = 0; i < count; i++) add_all(tile[i], first, last, p_.v_dim, &Attention::values_of);
    const int at_once = heads_at_once(share_);
    const int heads = share_.kv_heads;
    if (last < heads) add_all(tile[0], last, std::min(last + at_once, heads), p_.k_dim, &Attention::keys_of);
    else if (next) add_all(*next, 0, at_once, p_.k_dim, &Attention::keys_of);
    end[-1].end = end[-1].begin + (int64_t{1} << 40);
    return values;
  }

  void attend_packed(const Segment* tile, int count, int columns) {
    const T* tokens[PACKED];
    auto* const keys = reinterpret_cast<typename M::Packed*>(packed_keys_);
    auto* const values = reinterpret_cast<typename M::Packed*>(packed_values_);
    for (int g = 0; g < share_.kv_heads; g++) {
      for (int i = 0; i < count; i++)
        for (int t = 0; t < tile[i].n; t++)
          tokens[tile[i].column + t] = keys_of(tile[i], g) + static_cast<ptrdiff_t>(t) * p_.k_dim;
      pack_keys<M>(tokens, columns, p_.k_dim, keys);
      for (int i = 0; i < count; i++)
        for (int t = 0; t < tile[i].n; t++)
          tokens[tile[i].column + t] = values_of(tile[i], g) + static_cast<ptrdiff_t>(t) * p_.v_dim;
      pack_values<M>(tokens, columns, p_.v_dim, values);
      for (int row = 0; row < rows_; row += ROWS_AT_ONCE) {
        const int some = std::min(ROWS_AT_ONCE, rows_ - row);
        score_packed<M>(query_ + (static_cast<size_t>(g) * padded_ + row) * query_pad_, query_pad_, some, keys, columns,
                        scores_);
        clock_.end(Phase::keys);
        for (int r = 0; r < some; r++) softmax(columns, g, row + r, r);
        clock_.end(Phase::softmax);
        add_packed<M>(weights_, some, values, columns,
                      out_.values + (static_cast<size_t>(g) * rows_ + row) * value_pad_, value_pad_);
        clock_.end(Phase::values);
      }
    }
  }

  template <class P>
  void add_tokens(const Segment& s, int g, int slot, P& ahead) {
    const typename M::Weight* weights = weights_ + slot * ROW + s.column;
    float* out = out_.values + static_cast<size_t>(g) * rows_ * value_pad_;
    switch (p_.v_dim) {
      case 32: return add_rows<M, 32>(values_of(s, g), 32, s.n, weights, rows_, out, 32, ahead);
      case 64: return add_rows<M, 64>(values_of(s, g), 64, s.n, weights, rows_, out, 64, ahead);
      case 80: return add_rows<M, 80>(values_of(s, g), 80, s.n, weights, rows_, out, value_pad_, ahead);
      case 96: return add_rows<M, 96>(values_of(s, g), 96, s.n, weights, rows_, out, value_pad_, ahead);
      case 128: return add_rows<M, 128>(values_of(s, g), 128, s.n, weights, rows_, out, 128, ahead);
      case 256: return add_rows<M, 256>(values_of(s, g), 256, s.n, weights, rows_, out, 256, ahead);
      default: return add_rows<M, 0>(values_of(s, g), p_.v_dim, s.n, weights, rows_, out, value_pad_, ahead);
    }
  }

  // Where the tokens of a tile stand, and whether a row may not see all of them.
  void look_at(const Segment* tile, int count) {
    span_count_ = 0;
    for (int i = 0; i < count; i++) {
      Span* last = spans_ + span_count_ - 1;
      if (i && tile[i].position == last->position + last->n) last->n += tile[i].n;
      else spans_[span_count_++] = {tile[i].position, tile[i].n, tile[i].column};
    }
    const Span& last = spans_[span_count_ - 1];
    const int64_t start = spans_[0].position, stop = last.position + last.n;
    // Padding is in no tile: `run` begins at the first token that any query may see.
    hidden_ = p_.mask_dtype != KVTIER_NONE || (p_.causal && stop > share_.position + 1) ||
              (p_.window > 0 && start < share_.position + queries_ - p_.window);
  }

  // Online softmax: scores of one row become weights; sums of earlier tiles are rescaled where the highest score rises.
  void softmax(int columns, int g, int row, int slot) {
    float* s = scores_ + slot * ROW;
    const int padded = up(columns, W);
    if (adjusted_) scale(columns, s);
    for (int i = columns; i < padded; i++) s[i] = NEVER;
    if (adjusted_ || hidden_) adjust(g, row, s);
    V top = set1(NEVER);
    for (int i = 0; i < padded; i += W) top = max(top, load(s + i));
    // Scaled below, together with the weights: a positive scale does not change which score is the highest.
    V factor = set1(adjusted_ ? 1.0f : p_.scale);
    top = mul(top, factor);
    const size_t at = static_cast<size_t>(g) * rows_ + row;
    const float before = out_.highest[at], now = std::max(before, highest(top));
    typename M::Weight* weights = weights_ + slot * ROW;
    V total = zero();
    if (!adjusted_ && std::fabs(now) > FUSED) {
      scale(columns, s);
      factor = set1(1.0f);
    }
    // Where nothing is seen yet all weights are 0, but a NaN score must show.
    const V m = set1(now == NEVER ? 0.0f : now);
    for (int i = 0; i < padded; i += W) {
      const V w = exp(sub(mul(load(s + i), factor), m));
      M::weights(weights + i, w);
      total = add(total, w);
    }
    // An odd last token is multiplied together with a partner, for which memory might hold NaN.
    M::weights(weights + padded, zero());
    if (now > before) {
      const float shrink = std::exp(before - now);
      out_.highest[at] = now;
      out_.sum[at] *= shrink;
      float* values = out_.values + at * value_pad_;
      for (int i = 0; i < value_pad_; i += W) store(values + i, mul(load(values + i), set1(shrink)));
    }
    out_.sum[at] += sum(total);
  }

  // Scale and cap the scores of one row.
  void scale(int columns, float* s) const {
    for (int i = 0; i < columns; i += W) {
      V x = mul(load(s + i), set1(p_.scale));
      if (p_.softcap > 0) x = mul(set1(p_.softcap), tanh(mul(x, set1(1.0f / p_.softcap))));
      store(s + i, x);
    }
  }

  // Biases and masks of one row.
  void adjust(int g, int row, float* s) const {
    const int query = row % queries_;
    const int64_t head = head_of(g, row / queries_), position = share_.position + query;
    const int64_t low = p_.window > 0 ? position - p_.window + 1 : 0;
    const int64_t high = p_.causal ? position + 1 : length_;
    for (int i = 0; i < span_count_; i++) {
      const Span& span = spans_[i];
      float* scores = s + span.column;
      if (p_.slopes) {
        const float slope = p_.slopes[head];
        for (int t = 0; t < span.n; t++) scores[t] += slope * static_cast<float>(span.position + t - position);
      }
      if (p_.mask_dtype != KVTIER_NONE) {
        const int64_t offset = share_.row * p_.mask_strides[0] + head * p_.mask_strides[1] +
                               (share_.first_query + query) * p_.mask_strides[2] + span.position;
        mask(scores, span.n, offset);
      }
      const int64_t begin = std::clamp<int64_t>(low - span.position, 0, span.n);
      const int64_t end = std::clamp<int64_t>(high - span.position, begin, span.n);
      std::fill(scores, scores + begin, NEVER);
      std::fill(scores + end, scores + span.n, NEVER);
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
  static void finish(const kvtier_problem& p, const Share& share, const Partial* parts, size_t count) {
    const int pad = Shape<M>::value_pad(p);
    const Partial& first = parts[0];
    for (int of_share = 0; of_share < share.query_heads; of_share++)
      for (int i = 0; i < share.queries; i++) {
        const size_t row = static_cast<size_t>(of_share) * share.queries + i;
        const int64_t h = static_cast<int64_t>(share.kv_head) * (share.query_heads / share.kv_heads) + of_share;
        float top = p.sinks ? p.sinks[h] : NEVER;
        for (size_t k = 0; k < count; k++) top = std::max(top, parts[k].highest[row]);
        if (top == NEVER) top = 0.0f;  // nothing is seen, or only NaN, which must show
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
        const float quotient = blind ? 0.0f : 1.0f / total;
        if (p.lse)
          p.lse[share.lse + h * p.lse_strides[0] + i * p.lse_strides[1]] = blind ? NEVER : top + std::log(total);
        const int64_t offset = share.out + h * p.out_strides[0] + i * p.out_strides[1];
        switch (p.out_dtype) {
          case KVTIER_F32: write(static_cast<float*>(p.out) + offset, values, p.v_dim, quotient); break;
          case KVTIER_BF16: write(static_cast<bf16*>(p.out) + offset, values, p.v_dim, quotient); break;
          default: write(static_cast<f16*>(p.out) + offset, values, p.v_dim, quotient); break;
        }
      }
  }

 private:
  template <class O>
  static void write(O* out, const float* values, int dim, float share) {
    const V s = set1(share);
    if constexpr (M::COLUMNS == 2 * W) {
      for (int c = 0; c < dim; c += 2 * W) {
        V a = load(values + c), b = load(values + c + W);
        M::in_order(a, b);
        to_first(out + c, mul(a, s), std::min(W, dim - c));
        if (dim - c > W) to_first(out + c + W, mul(b, s), std::min(W, dim - c - W));
      }
      return;
    }
    for (int c = 0; c < dim; c += W) to_first(out + c, mul(load(values + c), s), std::min(W, dim - c));
  }

  const kvtier_problem& p_;
  const Share& share_;
  const Partial out_;
  const int queries_, group_, rows_, padded_, query_pad_, value_pad_;
  const int64_t length_;
  int tile_;       // tokens whose scores are kept at once
  bool adjusted_;  // scores are more than scaled, by a positive number
  Span spans_[PACKED];
  int span_count_ = 0;
  bool hidden_ = false;  // of the tile: some row may not see all of it
  // Keys and values of a tile, and the next keys. Only a tile that is not packed has them: of one block, or of 16 where
  // blocks are that short, of which the first and the last one may be in part, each head by itself.
  Bytes runs_[2 * (16 + 2 * MOST_HEADS) + MOST_HEADS];
  PhaseClock clock_;
  typename M::Query* query_;
  float* scores_;
  typename M::Weight* weights_;
  char *packed_keys_, *packed_values_;  // of M::Packed, where rows are many
};

template <class M>
struct Chosen {
  using type = Attention<M>;
};

// f(`Chosen`): how this share is attended.
template <class F>
inline auto with_attention(const kvtier_problem& p, const Share& share, F f) {
  switch (p.dtype) {
    case KVTIER_F32: return f(Chosen<Widened<float>>());
    case KVTIER_BF16:
      if (share.group_rows() < MANY_ROWS<ManyOfBf16>) return f(Chosen<FewOfBf16>());
      return f(Chosen<ManyOfBf16>());
    default: return f(Chosen<Widened<f16>>());
  }
}

// Shares of the parts by log-sum-exp, then their weighted sum, row by row.
template <class O>
void merge_rows(const kvtier_merge_problem& m) {
  const int64_t parts = m.part_count;
  for (int64_t a = 0; a < m.shape[0]; a++)
    for (int64_t b = 0; b < m.shape[1]; b++)
      for (int64_t c = 0; c < m.shape[2]; c++) {
        const auto at = [a, b, c](const int64_t* strides) { return a * strides[0] + b * strides[1] + c * strides[2]; };
        const auto lse_of = [&](int64_t k) { return m.parts[k].lse[at(m.parts[k].lse_strides)]; };
        float top = NEVER, sum = 0.0f, total = 0.0f;
        for (int64_t k = 0; k < parts; k++) top = std::max(top, lse_of(k));
        const float base = std::isinf(top) ? 0.0f : top;
        for (int64_t k = 0; k < parts; k++) sum += std::exp(lse_of(k) - base);
        const float lse = parts == 1 ? lse_of(0) : base + std::log(sum), reference = lse == NEVER ? 0.0f : lse;
        // Scores at the lowest number swallow the logarithm of their count: shares are made to add up.
        for (int64_t k = 0; k < parts; k++) total += std::exp(lse_of(k) - reference);
        if (total < std::numeric_limits<float>::min()) total = std::numeric_limits<float>::min();
        constexpr int AT_ONCE = 16;
        float shares[AT_ONCE];
        const int64_t kept = std::min<int64_t>(parts, AT_ONCE);
        const auto share_of = [&](int64_t k) { return parts == 1 ? 1.0f : std::exp(lse_of(k) - reference) / total; };
        for (int64_t k = 0; k < kept; k++) shares[k] = share_of(k);
        O* out = static_cast<O*>(m.out) + at(m.out_strides);
        for (int d = 0; d < m.dim; d += W) {
          const int n = std::min(W, m.dim - d);
          V x = zero();
          for (int64_t k = 0; k < parts; k++) {
            const float* row = m.parts[k].out + at(m.parts[k].out_strides) + d;
            const V y = n == W ? load(row) : from(row, n);
            const V share = set1(k < kept ? shares[k] : share_of(k));
            x = k == 0 ? mul(y, share) : fma(y, share, x);
          }
          to_first(out + d, x, n);
        }
        if (m.lse) m.lse[at(m.lse_strides)] = lse;
      }
}

inline void merge(const kvtier_merge_problem& m) {
  switch (m.out_dtype) {
    case KVTIER_F32: return merge_rows<float>(m);
    case KVTIER_BF16: return merge_rows<bf16>(m);
    default: return merge_rows<f16>(m);
  }
}

inline const Kernel* kernel(const char* name) {
  static const Kernel it{
      name,
      [](const kvtier_problem& p, const Share& share) {
        return with_attention(p, share, [&](auto a) { return decltype(a)::type::partial_floats(p, share); });
      },
      [](const kvtier_problem& p, const Share& share) {
        return with_attention(p, share, [&](auto a) { return decltype(a)::type::scratch_bytes(p, share); });
      },
      [](const kvtier_problem& p, const Share& share, float* memory) {
        return with_attention(p, share, [&](auto a) { return decltype(a)::type::partial_at(p, share, memory); });
      },
      [](const kvtier_problem& p, const Share& share, const Task& task, Prefetch prefetch, char* scratch, Partial out) {
        return with_attention(p, share, [&](auto a) {
          return decltype(a)::type::attend(p, share, task, prefetch, scratch, out);
        });
      },
      [](const kvtier_problem& p, const Share& share, const Partial* parts, size_t count) {
        with_attention(p, share, [&](auto a) { decltype(a)::type::finish(p, share, parts, count); });
      },
      merge,
      checksum,
  };
  return &it;
}

}  // namespace KVTIER_ISA
