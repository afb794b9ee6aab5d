// Drives the native library through its C interface with random problems, against a plain loop in double precision.
//
// For the sanitizers (sanitize.py): every run of blocks is an allocation of its own, memory that no call may read is
// poisoned for the address sanitizer, and several threads attend, submit, wait and shut down at once for the thread
// sanitizer.
//
//     native_check INSTRUCTION_SET PROBLEMS SEED
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "numbers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

size_t size_of(int32_t dtype) { return dtype == KVTIER_F32 ? 4 : 2; }

double get(const char* p, int32_t dtype, size_t i) {
  switch (dtype) {
    case KVTIER_F32: return reinterpret_cast<const float*>(p)[i];
    case KVTIER_BF16: return to_float(reinterpret_cast<const bf16*>(p)[i]);
    case KVTIER_F16: return to_float(reinterpret_cast<const f16*>(p)[i]);
    default: return p[i] ? 0.0 : -std::numeric_limits<double>::infinity();
  }
}

void put(char* p, int32_t dtype, size_t i, float x) {
  switch (dtype) {
    case KVTIER_F32: from_float(reinterpret_cast<float*>(p) + i, x); break;
    case KVTIER_BF16: from_float(reinterpret_cast<bf16*>(p) + i, x); break;
    case KVTIER_F16: from_float(reinterpret_cast<f16*>(p) + i, x); break;
    default: p[i] = x > -1.0f; break;
  }
}

// Exactly so many bytes: one more is noticed.
using Bytes = std::unique_ptr<char[]>;

struct Problem {
  std::mt19937 random;
  kvtier_problem p{};
  std::vector<std::pair<Bytes, size_t>> memory;
  std::vector<std::vector<kvtier_run>> runs;
  std::vector<kvtier_sequence> sequences;
  std::vector<kvtier_queries> queries;
  std::vector<int64_t> first_valid;
  std::vector<float> sinks, slopes, lse;
  Bytes query, out, mask;
  size_t out_bytes = 0;
  int64_t mask_width = 0;
  std::vector<double> right, right_lse;  // of each row, in the order of `each_row`

  int among(std::initializer_list<int> choices) { return choices.begin()[random() % choices.size()]; }
  bool rarely() { return random() % 4 == 0; }
  float normal() { return std::normal_distribution<float>()(random); }

  explicit Problem(unsigned seed) : random(seed) {
    p.dtype = among({KVTIER_F32, KVTIER_BF16, KVTIER_F16});
    p.out_dtype = rarely() ? KVTIER_F32 : p.dtype;
    p.sequence_count = among({1, 1, 2, 3});
    p.kv_heads = rarely() ? among({4, 16, 17}) : among({1, 2, 3});
    p.heads = p.kv_heads * among({1, 2, 3, 4, 5, 8});
    p.k_dim = among({32, 64, 64, 128, 256, 80, 96, 17, 33, 1});
    p.v_dim = rarely() ? among({32, 64, 128, 256, 80, 17, 33, 1}) : p.k_dim;
    p.block_size = among({1, 2, 3, 7, 15, 16, 17, 64, 256, 300, 511, 512, 513, 1024});
    p.causal = random() % 2;
    p.window = rarely() ? among({1, 2, 31, 257, 523}) : 0;
    p.softcap = rarely() ? 5.0f : 0.0f;
    const bool ragged = rarely();
    // With so many, the queries of a sequence are shared out.
    const int most_queries = among({1, 1, 1, 2, 3, 7, 16, 33, 200});
    if (most_queries > 100) {
      p.sequence_count = 1;
      p.kv_heads = std::min(p.kv_heads, 2);
      p.heads = p.kv_heads * 3;
      p.k_dim = p.v_dim = among({32, 17});
    }
    p.scale = 1.0f / std::sqrt(static_cast<float>(p.k_dim));
    p.block_stride = static_cast<int64_t>(block_bytes()) + (rarely() ? 16 : 0);
    int64_t total = 0;
    for (int s = 0; s < p.sequence_count; s++) {
      const int64_t n = ragged ? static_cast<int>(random() % static_cast<unsigned>(most_queries + 1)) : most_queries;
      // Now and then long enough for several tasks.
      const int most = most_queries > 100 ? 300 : random() % 8 || most_queries > 7 ? 600 : 9000;
      const int64_t length = n + static_cast<int64_t>(random() % static_cast<unsigned>(most));
      queries.push_back({n, total * p.heads * p.k_dim, total * p.heads * p.v_dim, total * p.heads});
      sequences.push_back({nullptr, 0, length});
      first_valid.push_back(static_cast<int64_t>(random() % static_cast<unsigned>(length + 1)));
      total += n;
    }
    fill_blocks();
    query = filled(static_cast<size_t>(total) * p.heads * p.k_dim, p.dtype);
    p.query = query.get();
    const size_t rows = static_cast<size_t>(total) * p.heads;
    out_bytes = rows * p.v_dim * size_of(p.out_dtype);
    out = Bytes(new char[out_bytes]);
    p.out = out.get();
    lse.resize(rows);
    p.lse = lse.data();
    // Heads within tokens, as a projection leaves them.
    p.query_strides[0] = p.k_dim, p.query_strides[1] = static_cast<int64_t>(p.heads) * p.k_dim;
    p.out_strides[0] = p.v_dim, p.out_strides[1] = static_cast<int64_t>(p.heads) * p.v_dim;
    p.lse_strides[0] = 1, p.lse_strides[1] = p.heads;
    p.sequences = sequences.data();
    p.queries = queries.data();
    if (rarely()) p.first_valid = first_valid.data();
    for (int h = 0; h < p.heads; h++) {
      sinks.push_back(normal());
      slopes.push_back(std::fabs(normal()));
    }
    if (rarely()) p.sinks = sinks.data();
    if (rarely()) p.slopes = slopes.data();
    p.mask_dtype = rarely() ? among({KVTIER_BOOL, KVTIER_F32, KVTIER_BF16, KVTIER_F16}) : KVTIER_NONE;
    if (p.mask_dtype != KVTIER_NONE) {
      for (const auto& sequence : sequences) mask_width = std::max(mask_width, sequence.length);
      // Broadcast over heads.
      const size_t n = static_cast<size_t>(p.sequence_count) * most_queries * mask_width;
      mask = filled(n, p.mask_dtype);
      p.mask = mask.get();
      p.mask_strides[0] = most_queries * mask_width;
      p.mask_strides[1] = 0;
      p.mask_strides[2] = mask_width;
    }
    solve();
  }

  ~Problem() {
    for (const auto& run : memory) ASAN_UNPOISON_MEMORY_REGION(run.first.get(), run.second);
  }

  size_t block_bytes() const {
    return static_cast<size_t>(p.kv_heads) * p.block_size * (p.k_dim + p.v_dim) * size_of(p.dtype);
  }

  Bytes filled(size_t n, int32_t dtype) {
    const size_t element = dtype == KVTIER_BOOL ? 1 : size_of(dtype);
    Bytes bytes(new char[n * element]);
    for (size_t i = 0; i < n; i++) put(bytes.get(), dtype, i, normal());
    return bytes;
  }

  // NaN, and no read at all where the address sanitizer can tell: only whole words of eight can be poisoned.
  static void poison(char* from, char* to) {
    std::memset(from, 0xff, static_cast<size_t>(to - from));
    char* const word = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + 7) / 8 * 8);
    if (word < to) ASAN_POISON_MEMORY_REGION(word, static_cast<size_t>(to - word) / 8 * 8);
  }

  // Runs of random lengths. Their last block has no padding behind it.
  void fill_blocks() {
    const size_t element = size_of(p.dtype), bytes = block_bytes();
    for (int s = 0; s < p.sequence_count; s++) {
      runs.emplace_back();
      const int64_t length = sequences[s].length, blocks = (length + p.block_size - 1) / p.block_size;
      for (int64_t index = 0; index < blocks;) {
        const int64_t count = std::min<int64_t>(among({1, 1, 2, 9}), blocks - index);
        const size_t size = static_cast<size_t>((count - 1) * p.block_stride) + bytes;
        memory.emplace_back(filled((size + element - 1) / element, p.dtype), size);
        char* const run = memory.back().first.get();
        runs.back().push_back({static_cast<int64_t>(reinterpret_cast<intptr_t>(run)), static_cast<int32_t>(index),
                               static_cast<int32_t>(count)});
        for (int64_t i = 0; i < count; i++) {
          char* at = run + i * p.block_stride;
          const int64_t used = std::min<int64_t>(p.block_size, length - (index + i) * p.block_size);
          for (const int64_t dim : {p.k_dim, p.v_dim})
            for (int g = 0; g < p.kv_heads; g++, at += p.block_size * dim * element)
              poison(at + used * dim * element, at + p.block_size * dim * element);
          if (i + 1 < count) poison(at, run + (i + 1) * p.block_stride);
        }
        index += count;
      }
      sequences[s].runs = runs.back().data();
      sequences[s].run_count = static_cast<int64_t>(runs.back().size());
    }
  }

  const char* block_of(int s, int64_t token) const {
    const int64_t index = token / p.block_size;
    const auto run = std::partition_point(runs[s].begin(), runs[s].end(), [index](const kvtier_run& r) {
      return r.index + r.count <= index;
    });
    return reinterpret_cast<const char*>(run->address + (index - run->index) * p.block_stride);
  }

  // Of the key or the value of a token: its first element within the block.
  size_t element_of(int g, int64_t token, bool value) const {
    const int64_t row = static_cast<int64_t>(g) * p.block_size + token % p.block_size;
    const int64_t keys = static_cast<int64_t>(p.kv_heads) * p.block_size * p.k_dim;
    return static_cast<size_t>(value ? keys + row * p.v_dim : row * p.k_dim);
  }

  // f(sequence, head, query) for every row.
  template <class F>
  void each_row(F f) const {
    for (int s = 0; s < p.sequence_count; s++)
      for (int h = 0; h < p.heads; h++)
        for (int64_t i = 0; i < queries[s].count; i++) f(s, h, i);
  }

  void solve() {
    each_row([this](int s, int h, int64_t i) {
      const int g = h / (p.heads / p.kv_heads);
      const int64_t n = sequences[s].length, at = n - queries[s].count + i;
      std::vector<double> scores(static_cast<size_t>(n), -INFINITE);
      double top = p.sinks ? sinks[h] : -INFINITE;
      const size_t row = static_cast<size_t>(queries[s].query + h * p.query_strides[0] + i * p.query_strides[1]);
      for (int64_t t = 0; t < n; t++) {
        if ((p.causal && t > at) || (p.window && t <= at - p.window) || (p.first_valid && t < first_valid[s])) continue;
        double x = 0;
        const char* block = block_of(s, t);
        const size_t key = element_of(g, t, false);
        for (int c = 0; c < p.k_dim; c++) x += get(query.get(), p.dtype, row + c) * get(block, p.dtype, key + c);
        x *= p.scale;
        if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
        if (p.slopes) x += slopes[h] * static_cast<double>(t - at);
        if (p.mask)
          x += get(mask.get(), p.mask_dtype, static_cast<size_t>(s * p.mask_strides[0] + i * p.mask_strides[2] + t));
        scores[static_cast<size_t>(t)] = x;
        top = std::max(top, x);
      }
      if (top == -INFINITE) top = 0;
      double sum = p.sinks ? std::exp(sinks[h] - top) : 0;
      std::vector<double> values(static_cast<size_t>(p.v_dim));
      for (int64_t t = 0; t < n; t++) {
        const double weight = std::exp(scores[static_cast<size_t>(t)] - top);
        sum += weight;
        if (!(weight > 0)) continue;
        const char* block = block_of(s, t);
        const size_t value = element_of(g, t, true);
        for (int c = 0; c < p.v_dim; c++) values[c] += weight * get(block, p.dtype, value + c);
      }
      for (const double x : values) right.push_back(sum > 0 ? x / sum : 0);
      right_lse.push_back(sum > 0 ? top + std::log(sum) : -INFINITE);
    });
  }

  void forget() {
    std::memset(out.get(), 0x55, out_bytes);
    std::fill(lse.begin(), lse.end(), 12345.0f);
  }

  bool is_right() const {
    const double tolerance = p.dtype == KVTIER_F32 && p.out_dtype == KVTIER_F32 ? 1e-4 : 2e-2;
    size_t row = 0;
    bool good = true;
    each_row([&](int s, int h, int64_t i) {
      const double want = right_lse[row];
      const float got = lse[static_cast<size_t>(queries[s].lse + h * p.lse_strides[0] + i * p.lse_strides[1])];
      good = good && (want == got || std::fabs(want - got) < 1e-4 * (1 + std::fabs(want)));
      const size_t at = static_cast<size_t>(queries[s].out + h * p.out_strides[0] + i * p.out_strides[1]);
      for (int c = 0; c < p.v_dim; c++)
        good = good && std::fabs(get(out.get(), p.out_dtype, at + c) - right[row * p.v_dim + c]) < tolerance;
      row++;
    });
    return good;
  }
};

std::atomic<int> wrong{0};

void expect(bool good, const char* what, unsigned seed) {
  if (good) return;
  wrong++;
  std::fprintf(stderr, "wrong: %s of problem %u\n", what, seed);
}

void try_one(unsigned seed) {
  Problem one(seed);
  for (const int threads : {1, 3}) {
    one.forget();
    expect(kvtier_attend(&one.p, threads) == KVTIER_OK && one.is_right(), "attend", seed);
    one.forget();
    kvtier_job* job = nullptr;
    expect(kvtier_submit(&one.p, threads, &job) == KVTIER_OK, "submit", seed);
    if (seed % 3 == 0)
      while (!kvtier_done(job)) std::this_thread::yield();
    double seconds = -1;
    expect(kvtier_wait(&job, &seconds) == KVTIER_OK && one.is_right() && seconds >= 0, "submit", seed);
  }
}

// New tokens into blocks of a poisoned pool, byte by byte.
void try_append(unsigned seed) {
  std::mt19937 random(seed);
  const auto among = [&random](std::initializer_list<int64_t> choices) {
    return choices.begin()[random() % choices.size()];
  };
  kvtier_append_problem p{};
  p.k_heads = among({1, 2, 5}), p.v_heads = among({1, 2, 3});
  p.k_bytes = among({1, 8, 34, 128}), p.v_bytes = among({1, 8, 66, 128});
  p.block_size = among({1, 4, 16});
  p.values_offset = p.k_heads * p.block_size * p.k_bytes + among({0, 8});
  p.rows = among({1, 1, 3}), p.tokens = among({1, 1, 7, 40});
  const int64_t block_bytes = p.values_offset + p.v_heads * p.block_size * p.v_bytes;
  const auto source = [&](int64_t heads, int64_t bytes, int64_t* strides) {
    const bool within = random() % 2;  // heads within tokens, or tokens within heads
    strides[0] = heads * p.tokens * bytes;
    strides[1] = within ? bytes : p.tokens * bytes;
    strides[2] = within ? heads * bytes : bytes;
    std::vector<char> all(static_cast<size_t>(p.rows * strides[0]));
    for (char& x : all) x = static_cast<char>(random());
    return all;
  };
  const std::vector<char> keys = source(p.k_heads, p.k_bytes, p.key_strides);
  const std::vector<char> values = source(p.v_heads, p.v_bytes, p.value_strides);
  std::vector<Bytes> blocks;
  std::vector<std::vector<char>> expected;
  std::vector<kvtier_span> spans;
  for (int64_t row = 0; row < p.rows; row++)
    for (int64_t token = 0, offset = static_cast<int64_t>(random()) % p.block_size; token < p.tokens; offset = 0) {
      const int64_t count = std::min(p.tokens - token, p.block_size - offset);
      blocks.emplace_back(new char[static_cast<size_t>(block_bytes)]);
      std::memset(blocks.back().get(), 0x55, static_cast<size_t>(block_bytes));
      const auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(blocks.back().get()));
      spans.push_back({address, offset, row, token, count});
      expected.emplace_back(static_cast<size_t>(block_bytes), 0x55);
      const auto write = [&](char* to, const char* from, const int64_t* strides, int64_t heads, int64_t bytes) {
        for (int64_t h = 0; h < heads; h++)
          for (int64_t t = 0; t < count; t++)
            for (int64_t b = 0; b < bytes; b++)
              to[(h * p.block_size + offset + t) * bytes + b] =
                  from[row * strides[0] + h * strides[1] + (token + t) * strides[2] + b];
      };
      write(expected.back().data(), keys.data(), p.key_strides, p.k_heads, p.k_bytes);
      write(expected.back().data() + p.values_offset, values.data(), p.value_strides, p.v_heads, p.v_bytes);
      token += count;
    }
  p.keys = keys.data();
  p.values = values.data();
  p.spans = spans.data();
  p.span_count = static_cast<int64_t>(spans.size());
  spans.back().count += p.block_size;
  expect(kvtier_append(&p) == KVTIER_INVALID, "append of too much", seed);
  spans.back().count -= p.block_size;
  expect(kvtier_append(&p) == KVTIER_OK, "append", seed);
  for (size_t i = 0; i < blocks.size(); i++)
    expect(!std::memcmp(blocks[i].get(), expected[i].data(), expected[i].size()), "append", seed);
}

void try_merge(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  kvtier_merge_problem p{};
  p.out_dtype = static_cast<int32_t>(random() % 3);
  p.dim = static_cast<int32_t>(1 + random() % 70);
  const int64_t rows = 1 + static_cast<int64_t>(random() % 5), count = 1 + static_cast<int64_t>(random() % 20);
  p.shape[0] = 1, p.shape[1] = rows, p.shape[2] = 1;
  std::vector<std::vector<float>> outs, lses;
  std::vector<kvtier_part> parts;
  for (int64_t k = 0; k < count; k++) {
    outs.emplace_back(static_cast<size_t>(rows * p.dim));
    lses.emplace_back(static_cast<size_t>(rows));
    for (float& x : outs.back()) x = normal(random);
    for (float& x : lses.back()) x = random() % 5 ? 3 * normal(random) : -INFINITE;
    parts.push_back({outs.back().data(), lses.back().data(), {0, p.dim, 0}, {0, 1, 0}});
  }
  const size_t element = size_of(p.out_dtype);
  Bytes out(new char[static_cast<size_t>(rows * p.dim) * element]);
  std::vector<float> lse(static_cast<size_t>(rows));
  p.out = out.get();
  p.out_strides[1] = p.dim;
  p.lse = lse.data();
  p.lse_strides[1] = 1;
  p.parts = parts.data();
  p.part_count = count;
  expect(kvtier_merge(&p) == KVTIER_OK, "merge", seed);
  for (int64_t row = 0; row < rows; row++) {
    double total = 0;
    for (const auto& x : lses) total += std::exp(static_cast<double>(x[row]));
    expect(total > 0 ? std::fabs(std::log(total) - lse[row]) < 1e-5 : lse[row] == -INFINITE, "merge", seed);
    for (int64_t d = 0; d < p.dim; d++) {
      double right = 0;
      for (int64_t k = 0; k < count; k++)
        right += outs[k][row * p.dim + d] * (count == 1 ? 1 : total > 0 ? std::exp(lses[k][row]) / total : 0);
      const double error = get(out.get(), p.out_dtype, static_cast<size_t>(row * p.dim + d)) - right;
      expect(std::fabs(error) < (p.out_dtype == KVTIER_F32 ? 1e-5 : 2e-2), "merge", seed);
    }
  }
}

// What was submitted is done once the pool is drained, and what is submitted then is done at once.
void drained(unsigned seed) {
  Problem one(seed), two(seed + 1);
  one.forget();
  two.forget();
  kvtier_job *first = nullptr, *second = nullptr;
  kvtier_submit(&one.p, 2, &first);
  kvtier_drain();
  expect(kvtier_done(first) && one.is_right(), "drain", seed);
  kvtier_submit(&two.p, 2, &second);
  expect(kvtier_done(second) && two.is_right(), "drain", seed);
  for (kvtier_job** job : {&first, &second}) expect(kvtier_wait(job, nullptr) == KVTIER_OK, "drain", seed);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (kvtier_use_instruction_set(argv[1])) {
    std::printf("%s: this CPU does not have it\n", argv[1]);
    return 0;
  }
  const unsigned problems = static_cast<unsigned>(std::atoi(argv[2])), seed = static_cast<unsigned>(std::atoi(argv[3]));
  for (unsigned i = 0; i < problems; i++) {
    try_one(seed + i);
    try_append(seed + i);
    try_merge(seed + i);
  }
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; t++)
    threads.emplace_back([=] {
      for (unsigned i = t; i < problems / 2; i += 4) {
        try_one(seed + problems + i);
        try_append(seed + problems + i);
        try_merge(seed + problems + i);
        if (i % 16 == t) kvtier_shutdown();
      }
    });
  for (auto& thread : threads) thread.join();
  drained(seed);
  kvtier_shutdown();
  expect(kvtier_threads() == 0, "shutdown", seed);
  std::printf("%s: %u problems, %d wrong\n", argv[1], problems + problems / 2, wrong.load());
  return wrong ? 1 : 0;
}
