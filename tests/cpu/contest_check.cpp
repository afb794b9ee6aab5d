// `Trials` on a clock that only a task's cost moves: prints, for each machine, how often software was chosen.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "contest.h"

struct FakeClock {
  using duration = std::chrono::nanoseconds;
  using time_point = std::chrono::time_point<FakeClock, duration>;
  static inline time_point time{};
  static time_point now() { return time; }
};

// A machine: nanoseconds of a task that prefetches by software, and of one that does not; how much longer the first of
// `call` tasks takes; one in `held` tasks is held up for a millisecond.
int main(int, char** arguments) {
  const double software = std::atof(arguments[1]), hardware = std::atof(arguments[2]), cold = std::atof(arguments[3]);
  const int call = std::atoi(arguments[4]), held = std::atoi(arguments[5]), tasks = std::atoi(arguments[6]);
  Contest contest;
  Trials<FakeClock> trials;
  std::srand(1);
  // In the first half and in the second one, where the two ways change places.
  for (const bool turned : {false, true}) {
    int chosen = 0, last = 0;
    for (int i = 0; i < tasks; i++) {
      const Prefetch way = trials.begin(contest);
      chosen += way == Prefetch::software;
      last += i >= tasks / 2 && way == Prefetch::software;
      double cost = (way == Prefetch::software) != turned ? software : hardware;
      cost *= .9 + .2 * std::rand() / RAND_MAX;
      if (i % call == 0) cost *= cold;
      if (held && std::rand() % held == 0) cost += 1e6;
      FakeClock::time += FakeClock::duration(static_cast<int64_t>(cost));
      trials.end(contest, 256);
    }
    std::printf("%d %d %d\n", chosen, last, contest.lead());
  }
}
