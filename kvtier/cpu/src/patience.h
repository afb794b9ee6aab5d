// When to leave a borrowed team of threads alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

using Clock = std::chrono::steady_clock;

// A borrowed team ends when all of its threads have, also one that somebody else's work keeps from its core and that had
// nothing left to do. The library's own threads are waited for only once they have taken a task: after a late end they
// serve for some calls, for more of them each time.
class Patience {
 public:
  bool lost() {
    int left = rest_.load(std::memory_order_relaxed);
    while (left > 0 && !rest_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
    }
    return left > 0;
  }
  void observe(Clock::time_point began, Clock::time_point done, Clock::time_point returned) {
    const bool late = returned - done > std::chrono::microseconds(100) && (returned - done) * 4 > done - began;
    const int span = late ? std::min(2 * span_.load(std::memory_order_relaxed), MOST) : LEAST;
    span_.store(span, std::memory_order_relaxed);
    if (late) rest_.store(span, std::memory_order_relaxed);
  }
  void forget() {
    rest_.store(0, std::memory_order_relaxed);
    span_.store(LEAST, std::memory_order_relaxed);
  }

 private:
  static constexpr int LEAST = 8, MOST = 512;  // calls
  std::atomic<int> rest_{0}, span_{LEAST};
};
