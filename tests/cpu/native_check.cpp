// Drives the native library through its C interface with random problems, against a plain loop in double precision.
//
// For the sanitizers (sanitize.py): every block is an allocation of its own, what no call may read is poisoned for the
// address sanitizer, and several threads attend, submit, wait and shut down at once for the thread sanitizer.
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
  std::vector<Bytes> memory;
  std::vector<int64_t> blocks, begins, lengths, first_valid;
  std::vector<float> sinks, slopes, lse;
  Bytes query, out, mask;
  size_t out_bytes = 0;
  int64_t mask_width = 0;
  std::vector<double> right, right_lse;

  int among(std::initializer_list<int> choices) { return choices.begin()[random() % choices.size()]; }
  bool rarely() { return random() % 4 == 0; }
  float normal() { return std::normal_distribution<float>()(random); }

  explicit Problem(unsigned seed) : random(seed) {
    p.dtype = among({KVTIER_F32, KVTIER_BF16, KVTIER_F16});
    p.out_dtype = rarely() ? KVTIER_F32 : p.dtype;
    p.sequences = among({1, 1, 2, 3});
    p.kv_heads = among({1, 2, 3});
    p.heads = p.kv_heads * among({1, 2, 3, 4, 5, 8});
    p.queries = among({1, 1, 1, 2, 3, 7});
    p.k_dim = among({64, 64, 128, 256, 80, 96, 17, 33, 1});
    p.v_dim = rarely() ? among({64, 128, 256, 80, 17, 33, 1}) : p.k_dim;
    p.block_size = among({1, 7, 16, 64, 256, 300});
    p.causal = random() % 2;
    p.window = rarely() ? among({1, 2, 31, 257}) : 0;
    p.softcap = rarely() ? 5.0f : 0.0f;
    p.scale = 1.0f / std::sqrt(static_cast<float>(p.k_dim));
    for (int s = 0; s < p.sequences; s++) {
      // Now and then long enough for several tasks.
      const int most = random() % 8 ? 600 : 9000;
      lengths.push_back(p.queries + static_cast<int>(random() % static_cast<unsigned>(most)));
      first_valid.push_back(static_cast<int64_t>(random() % static_cast<unsigned>(lengths.back() + 1)));
    }
    fill_blocks();
    query = filled(static_cast<size_t>(p.sequences) * p.heads * p.queries * p.k_dim, p.dtype);
    p.query = query.get();
    strides(p.query_strides, p.k_dim);
    const size_t rows = static_cast<size_t>(p.sequences) * p.heads * p.queries;
    out_bytes = rows * p.v_dim * size_of(p.out_dtype);
    out = Bytes(new char[out_bytes]);
    p.out = out.get();
    strides(p.out_strides, p.v_dim);
    lse.resize(rows);
    p.lse = lse.data();
    p.blocks = blocks.data();
    p.begins = begins.data();
    p.lengths = lengths.data();
    if (rarely()) p.first_valid = first_valid.data();
    for (int h = 0; h < p.heads; h++) {
      sinks.push_back(normal());
      slopes.push_back(std::fabs(normal()));
    }
    if (rarely()) p.sinks = sinks.data();
    if (rarely()) p.slopes = slopes.data();
    p.mask_dtype = rarely() ? among({KVTIER_BOOL, KVTIER_F32, KVTIER_BF16, KVTIER_F16}) : KVTIER_NONE;
    if (p.mask_dtype != KVTIER_NONE) {
      mask_width = *std::max_element(lengths.begin(), lengths.end());
      // Broadcast over heads.
      const size_t n = static_cast<size_t>(p.sequences) * p.queries * mask_width;
      mask = filled(n, p.mask_dtype);
      p.mask = mask.get();
      p.mask_strides[0] = p.queries * mask_width;
      p.mask_strides[1] = 0;
      p.mask_strides[2] = mask_width;
    }
    solve();
  }

  ~Problem() {
    for (size_t i = 0; i < memory.size(); i++) ASAN_UNPOISON_MEMORY_REGION(memory[i].get(), block_bytes());
  }

  size_t block_bytes() const {
    return static_cast<size_t>(p.kv_heads) * p.block_size * (p.k_dim + p.v_dim) * size_of(p.dtype);
  }

  void strides(int64_t* to, int64_t dim) const {
    // Heads lie within tokens, as a projection leaves them.
    to[0] = static_cast<int64_t>(p.queries) * p.heads * dim;
    to[1] = dim;
    to[2] = p.heads * dim;
  }

  Bytes filled(size_t n, int32_t dtype) {
    const size_t element = dtype == KVTIER_BOOL ? 1 : size_of(dtype);
    Bytes bytes(new char[n * element]);
    for (size_t i = 0; i < n; i++) put(bytes.get(), dtype, i, normal());
    return bytes;
  }

  void fill_blocks() {
    const size_t element = size_of(p.dtype);
    for (int s = 0; s < p.sequences; s++) {
      begins.push_back(static_cast<int64_t>(blocks.size()));
      for (int64_t start = 0; start < lengths[s]; start += p.block_size) {
        memory.push_back(filled(block_bytes() / element, p.dtype));
        blocks.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(memory.back().get())));
        const int64_t n = std::min<int64_t>(p.block_size, lengths[s] - start);
        char* at = memory.back().get();
        for (const int dim : {p.k_dim, p.v_dim})
          for (int g = 0; g < p.kv_heads; g++, at += p.block_size * dim * element) {
            const size_t used = static_cast<size_t>(n) * dim * element, all = p.block_size * dim * element;
            std::memset(at + used, 0xff, all - used);  // NaN
            // Only whole words of eight can be poisoned.
            const size_t from = (used + 7) / 8 * 8;
            if (from < all) ASAN_POISON_MEMORY_REGION(at + from, (all - from) / 8 * 8);
          }
      }
    }
    begins.push_back(static_cast<int64_t>(blocks.size()));
  }

  double number(int s, int g, int64_t token, int dim, bool value) const {
    const char* block = reinterpret_cast<const char*>(blocks[begins[s] + token / p.block_size]);
    const int64_t row = static_cast<int64_t>(g) * p.block_size + token % p.block_size;
    const int64_t keys = static_cast<int64_t>(p.kv_heads) * p.block_size * p.k_dim;
    return get(block, p.dtype, static_cast<size_t>(value ? keys + row * p.v_dim + dim : row * p.k_dim + dim));
  }

  void solve() {
    for (int s = 0; s < p.sequences; s++)
      for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < p.queries; i++) {
          const int g = h / (p.heads / p.kv_heads);
          const int64_t n = lengths[s], at = n - p.queries + i;
          std::vector<double> scores(static_cast<size_t>(n), -INFINITE);
          double top = p.sinks ? sinks[h] : -INFINITE;
          for (int64_t t = 0; t < n; t++) {
            if ((p.causal && t > at) || (p.window && t <= at - p.window) || (p.first_valid && t < first_valid[s])) continue;
            double x = 0;
            const size_t row = static_cast<size_t>(s * p.query_strides[0] + h * p.query_strides[1] + i * p.query_strides[2]);
            for (int c = 0; c < p.k_dim; c++) x += get(query.get(), p.dtype, row + c) * number(s, g, t, c, false);
            x *= p.scale;
            if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
            if (p.slopes) x += slopes[h] * static_cast<double>(t - at);
            if (p.mask) x += get(mask.get(), p.mask_dtype, static_cast<size_t>((s * p.queries + i) * mask_width + t));
            scores[static_cast<size_t>(t)] = x;
            top = std::max(top, x);
          }
          if (top == -INFINITE) top = 0;
          double sum = p.sinks ? std::exp(sinks[h] - top) : 0;
          std::vector<double> values(static_cast<size_t>(p.v_dim));
          for (int64_t t = 0; t < n; t++) {
            const double weight = std::exp(scores[static_cast<size_t>(t)] - top);
            sum += weight;
            if (weight > 0)
              for (int c = 0; c < p.v_dim; c++) values[c] += weight * number(s, g, t, c, true);
          }
          for (const double x : values) right.push_back(sum > 0 ? x / sum : 0);
          right_lse.push_back(sum > 0 ? top + std::log(sum) : -INFINITE);
        }
  }

  void forget() {
    std::memset(out.get(), 0x55, out_bytes);
    std::fill(lse.begin(), lse.end(), 12345.0f);
  }

  bool is_right() const {
    const double tolerance = p.dtype == KVTIER_F32 && p.out_dtype == KVTIER_F32 ? 1e-4 : 2e-2;
    size_t row = 0;
    for (int s = 0; s < p.sequences; s++)
      for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < p.queries; i++, row++) {
          const double want = right_lse[row];
          if (!(want == lse[row] || std::fabs(want - lse[row]) < 1e-4 * (1 + std::fabs(want)))) return false;
          const size_t at = static_cast<size_t>(s * p.out_strides[0] + h * p.out_strides[1] + i * p.out_strides[2]);
          for (int c = 0; c < p.v_dim; c++)
            if (!(std::fabs(get(out.get(), p.out_dtype, at + c) - right[row * p.v_dim + c]) < tolerance)) return false;
        }
    return true;
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
    expect(kvtier_wait(&job) == KVTIER_OK && one.is_right(), "submit", seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (kvtier_use_instruction_set(argv[1])) {
    std::printf("%s: this CPU does not have it\n", argv[1]);
    return 0;
  }
  const unsigned problems = static_cast<unsigned>(std::atoi(argv[2])), seed = static_cast<unsigned>(std::atoi(argv[3]));
  for (unsigned i = 0; i < problems; i++) try_one(seed + i);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; t++)
    threads.emplace_back([=] {
      for (unsigned i = t; i < problems / 2; i += 4) {
        try_one(seed + problems + i);
        if (i % 16 == t) kvtier_shutdown();
      }
    });
  for (auto& thread : threads) thread.join();
  kvtier_shutdown();
  expect(kvtier_threads() == 0, "shutdown", seed);
  std::printf("%s: %u problems, %d wrong\n", argv[1], problems + problems / 2, wrong.load());
  return wrong ? 1 : 0;
}
