// Which of two ways to prefetch is faster, learned from the tasks themselves.
//
// It depends on the processor, on what a virtual machine lets it do, on how much there is to compute for each byte, and
// on how many threads read at once: docs/design/host-attention.md has figures. So each thread times some of its tasks in
// pairs, one each way, and each pair moves a counter by one towards the faster way, as a branch predictor counts. A task
// that the system held up weighs no more than any other, and a machine that changes is followed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

enum class Prefetch : int32_t { hardware, software };

// One for each dtype and number of rows to a KV head.
constexpr int ROWS_APART = 16, CONTESTS = 3 * ROWS_APART;
inline int contest_of(int32_t dtype, int rows) { return dtype * ROWS_APART + std::clamp(rows, 1, ROWS_APART) - 1; }

class Contest {
 public:
  static constexpr int SETTLED = 8;  // where the counter ends

  Prefetch winner() const { return lead() >= 0 ? Prefetch::software : Prefetch::hardware; }
  bool settled() const { return std::abs(lead()) >= SETTLED; }
  // Of software, in pairs.
  int lead() const { return lead_.load(std::memory_order_relaxed); }
  // Of two threads that count at once, one may not be counted.
  void count(Prefetch faster) {
    const int now = lead() + (faster == Prefetch::software ? 1 : -1);
    lead_.store(std::clamp(now, -SETTLED, SETTLED), std::memory_order_relaxed);
  }

 private:
  std::atomic<int> lead_{0};
};

// A thread's part in it.
template <class Clock>
class Trials {
 public:
  static constexpr int EVERY = 64;       // tasks behind which a pair is timed where all is settled
  static constexpr double SHORT = 5e-6;  // seconds up to which a task tells nothing

  // How the next task prefetches.
  Prefetch begin(const Contest& contest) {
    if (contest_ != &contest) contest_ = &contest, first_ = 0;  // that of another instruction set
    timed_ = first_ > 0 ? --gap_ < 0 : !contest.settled() || ++untimed_ >= EVERY;
    if (!timed_) return contest.winner();
    untimed_ = 0;
    if (first_ > 0) way_ = other(way_);
    else way_ = !long_ ? contest.winner() : chance() ? Prefetch::software : Prefetch::hardware;
    began_ = Clock::now();
    return way_;
  }

  // It is done, and read so many elements of keys and values.
  void end(Contest& contest, int64_t elements) {
    if (!timed_) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    long_ = elements && seconds > SHORT;
    const double cost = long_ ? seconds / static_cast<double>(elements) : 0;
    if (cost > 0 && first_ > 0) contest.count(cost < first_ ? way_ : other(way_));
    first_ = first_ > 0 ? 0 : cost;
    gap_ = chance();
  }

 private:
  // Which way is the first of a pair, and whether a task is between its two, is left to chance: the first task of a call
  // takes longer, for its query and code come from farther away, and a call may have two.
  bool chance() {
    random_ = random_ * 1664525u + 1013904223u;
    return random_ >> 31;
  }
  static Prefetch other(Prefetch way) { return way == Prefetch::software ? Prefetch::hardware : Prefetch::software; }

  const Contest* contest_ = nullptr;
  Prefetch way_ = Prefetch::software;
  bool timed_ = false;
  bool long_ = false;  // the last task that was timed told something
  double first_ = 0;   // seconds per element of a pair's first task; 0: there is none
  int gap_ = 0;        // tasks between it and the second one
  int untimed_ = 0;    // tasks since the last one that was
  uint32_t random_ = 1;
  typename Clock::time_point began_;
};
