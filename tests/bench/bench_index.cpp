// Cost of one call of the state index at 1e3 to 1e6 states. See tests/bench/README.md.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "statecache/policies.h"

namespace statecache {
namespace {

constexpr int64_t kBatch = 1000;

// Of this thread, so that a busy machine does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Agent sessions: chains that grow by a few hundred tokens, used at random, evicted when full.
class Sessions {
 public:
  explicit Sessions(int64_t states) : tips_(static_cast<size_t>(states / 8 + 1)) {
    while (static_cast<int64_t>(index_->size()) < states) grow(plan());
    for (int64_t use = 0; use < states; ++use) touch(pick());
  }

  struct Growth {
    size_t session;
    int64_t tokens;
  };
  Growth plan() { return {random_() % tips_.size(), 400 + static_cast<int64_t>(random_() % 256)}; }
  void grow(const Growth& growth) {
    Tip& tip = tips_[growth.session];
    const bool alive = tip.depth > 0 && index_->contains(tip.state);
    const int64_t depth = (alive ? tip.depth : 0) + growth.tokens;
    index_->insert(++last_, depth, alive ? std::optional(tip.state) : std::nullopt, {});
    tip = {last_, depth};
  }
  // A state that is resident.
  StateId pick() {
    for (;;) {
      const Tip& tip = tips_[random_() % tips_.size()];
      if (tip.depth > 0 && index_->contains(tip.state)) return tip.state;
    }
  }
  void touch(StateId state) { index_->touch(state); }
  void evict() { benchmark::DoNotOptimize(index_->evict(1)); }
  HeapCounters counters() const { return index_->counters(); }

 private:
  struct Tip {
    StateId state = 0;
    int64_t depth = 0;
  };
  std::unique_ptr<StateIndex> index_ = make_index("gds");
  std::vector<Tip> tips_;
  StateId last_ = 0;
  std::mt19937_64 random_{7};
};

enum class Timed { kInsert, kTouch, kEvict, kAll };

// Rounds of 1,000 evictions, insertions and touches. One kind is timed, or all of them: an eviction
// pays for the bounds that the touches and insertions before it left outdated, so only the mean
// over all calls is the amortised cost of one.
void rounds(benchmark::State& state, Timed timed) {
  Sessions sessions(state.range(0));
  std::vector<Sessions::Growth> growths(kBatch);
  std::vector<StateId> uses(kBatch);
  double seconds = 0, timed_seconds = 0;
  const auto time_if = [&](Timed kind, auto&& work) {
    const double start = cpu_seconds();
    work();
    if (kind == timed || timed == Timed::kAll) seconds += cpu_seconds() - start;
  };
  const HeapCounters before = sessions.counters();
  for (auto _ : state) {
    seconds = 0;
    for (auto& growth : growths) growth = sessions.plan();
    time_if(Timed::kEvict, [&] {
      for (int64_t i = 0; i < kBatch; ++i) sessions.evict();
    });
    time_if(Timed::kInsert, [&] {
      for (const auto& growth : growths) sessions.grow(growth);
    });
    for (auto& use : uses) use = sessions.pick();
    time_if(Timed::kTouch, [&] {
      for (const StateId use : uses) sessions.touch(use);
    });
    state.SetIterationTime(seconds);
    timed_seconds += seconds;
  }
  const auto calls = static_cast<double>(state.iterations() * kBatch * 3);
  state.counters["ns_a_call"] = timed_seconds * 1e9 / (timed == Timed::kAll ? calls : calls / 3);
  state.counters["comparisons_a_call"] =
      static_cast<double>(sessions.counters().comparisons - before.comparisons) / calls;
  state.counters["repushes_a_call"] =
      static_cast<double>(sessions.counters().repushes - before.repushes) / calls;
}

#define SIZES RangeMultiplier(10)->Range(1000, 1000000)->UseManualTime()->Iterations(200)
BENCHMARK_CAPTURE(rounds, insert, Timed::kInsert)->SIZES;
BENCHMARK_CAPTURE(rounds, touch, Timed::kTouch)->SIZES;
BENCHMARK_CAPTURE(rounds, evict, Timed::kEvict)->SIZES;
BENCHMARK_CAPTURE(rounds, amortised, Timed::kAll)->SIZES;

}  // namespace
}  // namespace statecache

BENCHMARK_MAIN();
