// Where a task's time goes, for benchmarks: compiled in with -DKVTIER_PHASES only.
#pragma once

enum class Phase { keys, softmax, values, other };

#ifdef KVTIER_PHASES
#include <atomic>
#include <cstdint>
#if defined(__x86_64__)
#include <x86intrin.h>
inline uint64_t phase_now() { return __rdtsc(); }
#else
#include <chrono>
inline uint64_t phase_now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif

inline std::atomic<uint64_t> phase_ticks[4];

// From its beginning, all time belongs to the phase that ends next.
class PhaseClock {
 public:
  void end(Phase phase) {
    const uint64_t now = phase_now();
    ticks_[static_cast<int>(phase)] += now - last_;
    last_ = now;
  }
  ~PhaseClock() {
    end(Phase::other);
    for (int i = 0; i < 4; i++) phase_ticks[i].fetch_add(ticks_[i], std::memory_order_relaxed);
  }

 private:
  uint64_t ticks_[4] = {};
  uint64_t last_ = phase_now();
};
#else
struct PhaseClock {
  void end(Phase) {}
};
#endif
