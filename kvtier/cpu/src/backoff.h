// When to leave a borrowed team of threads alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

using Clock = std::chrono::steady_clock;

// A borrowed team returns when all of its threads have, also one that found no task and has no core at the moment,
// because another process uses it. The pool's threads are waited for only if they took a task. So after a late return
// the pool serves for some calls, for twice as many each time in a row.
class Backoff {
 public:
  // Whether this call should leave the team alone.
  bool active() {
    int left = left_.load(std::memory_order_relaxed);
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
    }
    return left > 0;
  }
  // A call on the team: its start, the end of its last task, and the team's return.
  void observe(Clock::time_point began, Clock::time_point done, Clock::time_point returned) {
    const bool late = returned - done > std::chrono::microseconds(100) && (returned - done) * 4 > done - began;
    const int calls = late ? std::min(2 * calls_.load(std::memory_order_relaxed), LONGEST) : SHORTEST;
    calls_.store(calls, std::memory_order_relaxed);
    if (late) left_.store(calls, std::memory_order_relaxed);
  }
  void reset() {
    left_.store(0, std::memory_order_relaxed);
    calls_.store(SHORTEST, std::memory_order_relaxed);
  }

 private:
  static constexpr int SHORTEST = 8, LONGEST = 512;  // calls
  std::atomic<int> left_{0}, calls_{SHORTEST};
};
