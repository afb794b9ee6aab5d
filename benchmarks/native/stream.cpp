// How fast cores can read memory at best: a few streams, a short software prefetch or none. The ceiling of every kernel.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {
typedef uint64_t V __attribute__((vector_size(64), aligned(64)));

template <int STREAMS, int AHEAD>
uint64_t read(const char* start, size_t bytes) {
  const size_t part = bytes / STREAMS / 256 * 256;
  V sum[4] = {};
  for (size_t i = 0; i < part; i += 256)
    for (int s = 0; s < STREAMS; s++) {
      const char* p = start + s * part + i;
      for (int k = 0; k < 4; k++) {
        if (AHEAD) __builtin_prefetch(p + AHEAD + 64 * k, 0, 3);
        sum[k] ^= *reinterpret_cast<const V*>(p + 64 * k);
      }
    }
  uint64_t result = 0;
  for (const V& x : sum)
    for (int i = 0; i < 8; i++) result ^= x[i];
  return result;
}

// The variants are tried in one run, and the best one is the ceiling.
uint64_t read_with(int variant, const char* start, size_t bytes) {
  switch (variant) {
    case 0: return read<1, 0>(start, bytes);
    case 1: return read<1, 512>(start, bytes);
    case 2: return read<2, 0>(start, bytes);
    case 3: return read<2, 512>(start, bytes);
    default: return read<4, 512>(start, bytes);
  }
}

// Threads take parts from one counter, as those of the kernel do.
struct Work {
  const char* start;
  size_t bytes, parts;
  int variant;
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> sum{0};

  static void run(void* data) {
    auto& work = *static_cast<Work*>(data);
    const size_t pages = work.bytes / 4096;
    uint64_t sum = 0;
    for (size_t i; (i = work.next.fetch_add(1)) < work.parts;) {
      const size_t begin = pages * i / work.parts * 4096, end = pages * (i + 1) / work.parts * 4096;
      sum ^= read_with(work.variant, work.start + begin, end - begin);
    }
    work.sum.fetch_xor(sum);
  }
};

using Team = void (*)(void (*f)(void*), void* data, unsigned threads, unsigned flags);
}  // namespace

// `start` and `bytes` are multiples of 4096. With more than one thread: on the team of an OpenMP runtime, whose
// GOMP_parallel is `team`, for threads that are at hand cost less than new ones; null: on new ones.
extern "C" __attribute__((visibility("default"))) uint64_t stream(const char* start, size_t bytes, int variant,
                                                                  int threads, Team team) {
  if (threads <= 1) return read_with(variant, start, bytes);
  Work work{start, bytes, std::clamp<size_t>(bytes >> 20, 1, 32), variant};
  if (team) {
    team(Work::run, &work, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(Work::run, &work);
    Work::run(&work);
    for (auto& other : others) other.join();
  }
  return work.sum;
}
