// Cost of `learned`, shadows included, for each depth offered or matched. See
// tests/bench/README.md.

#include <benchmark/benchmark.h>

#include <ctime>

#include "learned_sessions.h"

namespace statecache {
namespace {

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void serve(benchmark::State& state) {
  LearnedSessions sessions(state.range(0));
  const uint64_t offered = sessions.depths_offered();
  const uint64_t compared = sessions.index().counters().comparisons;
  double seconds = 0;
  for (auto _ : state) {
    const double start = cpu_seconds();
    for (int request = 0; request < 1000; ++request) sessions.serve();
    seconds += cpu_seconds() - start;
    state.SetIterationTime(cpu_seconds() - start);
  }
  const auto depths = static_cast<double>(sessions.depths_offered() - offered);
  state.counters["ns_a_depth"] = seconds * 1e9 / depths;
  state.counters["comparisons_a_depth"] =
      static_cast<double>(sessions.index().counters().comparisons - compared) / depths;
}

BENCHMARK(serve)->RangeMultiplier(10)->Range(1000, 100000)->UseManualTime()->Iterations(20);

}  // namespace
}  // namespace statecache

BENCHMARK_MAIN();
