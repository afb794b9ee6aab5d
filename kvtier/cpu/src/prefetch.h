// Who fetches keys and values into the caches before they are read: instructions of the kernel, or the hardware alone.
#pragma once

#include <algorithm>
#include <cstdint>

#define KVTIER_INLINE inline __attribute__((always_inline))

namespace KVTIER_ISA {

// The cache that is prefetched into. x86 processors have few lines under way to the first-level cache, which a jump from
// one head's tokens to the next one's waits for, and more to the second: docs/design/host-attention.md has figures.
#if defined(__x86_64__)
constexpr int NEAR = 2;
#else
constexpr int NEAR = 3;
#endif
constexpr int DISTANCE = 8 << 10;  // bytes that are prefetched ahead: more than memory's rate times its latency

// Neighbouring bytes.
struct Bytes {
  const char *begin, *end;
};

// Prefetches what a task reads, in the order in which it does, some bytes ahead and at its pace. The hardware foresees
// neither where a run ends nor what comes behind it, and stops soon while rows after the first ones are at work on
// tokens that are in the L1 cache already.
class SoftwarePrefetch {
 public:
  static constexpr bool BY_SOFTWARE = true;

  // Of runs that are read one after the other. The last one has no end.
  explicit SoftwarePrefetch(const Bytes* run) : run_(run) {
    int64_t distance = DISTANCE;
    for (; run_->end - run_->begin <= distance; run_++) distance -= run_->end - run_->begin;
    at_ = stop_ = run_->begin + distance;
  }

  // The next `bytes` bytes are read now.
  void begin(int64_t bytes) {
    wanted_ += bytes;
    if (at_ >= run_->end) at_ = stop_ = (++run_)->begin;
    const int64_t some = std::min<int64_t>(wanted_, run_->end - stop_);
    stop_ += some;
    wanted_ -= some;
  }
  // Each of `passes` passes over them, all alike, has turns of so many bytes.
  void pace(int bytes, int passes) { turn_ = (bytes / passes + 63) / 64 * 64; }

  KVTIER_INLINE void step() {
    const char* const stop = std::min(at_ + turn_, stop_);
    const char* at = at_;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, NEAR);
    at_ = at;
  }

 private:
  const Bytes* run_;
  const char *at_, *stop_;
  int64_t wanted_ = 0;  // bytes behind the end of the run
  int64_t turn_ = 0;    // bytes with each turn
};

// Nothing. A type of its own: to find with each token that there is nothing to do costs fp32 a fifth of its speed.
class HardwarePrefetch {
 public:
  static constexpr bool BY_SOFTWARE = false;

  explicit HardwarePrefetch(const Bytes*) {}
  void begin(int64_t) {}
  void pace(int, int) {}
  KVTIER_INLINE void step() {}
};

}  // namespace KVTIER_ISA
