#include "statecache/state_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "statecache/policies.h"

namespace statecache {
namespace {

constexpr StateId A = 1, B = 2, C = 3;
const std::vector<StateId> kNobody;

// One second a token, so that a gain is a distance in tokens.
std::unique_ptr<StateIndex> by_distance() { return make_index("gds", {.cost = CostModel(1, 0)}); }

TEST(CostModelTest, RefusesUnusableCoefficients) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_THROW(CostModel(std::nan(""), 1), std::invalid_argument);
  EXPECT_THROW(CostModel(1, inf), std::invalid_argument);
  EXPECT_THROW(CostModel(-1, 1), std::invalid_argument);
  EXPECT_THROW(CostModel(0, 0), std::invalid_argument);
  EXPECT_THROW(CostModel(1e300, 1e308), std::invalid_argument);
  EXPECT_THROW(CostModel(8e270, 0), std::invalid_argument);  // 2^31 tokens: over 1e280
  EXPECT_NO_THROW(CostModel(0, 1));
}

TEST(CostModelTest, DeepestStateDoesNotOverflow) {
  // (2^31 - 1)^2 = 4611686014132420609, rounded to a double: 4611686014132420608.
  EXPECT_EQ(CostModel(0, 1).cost(0, kMaxDepth), 4611686014132420608.0 / 2e5);
}

TEST(StateIndexTest, EvictsTheCheapestToRebuildFirst) {
  const auto index = by_distance();
  index->insert(A, 1000, std::nullopt, {});
  index->insert(B, 1010, A, {});
  index->insert(C, 500, std::nullopt, {});
  EXPECT_EQ(index->evict(5), (std::vector<StateId>{B, C, A}));
  EXPECT_EQ(index->size(), 0U);
}

TEST(StateIndexTest, PeekReturnsWhatEvictTakes) {
  const auto index = by_distance();
  EXPECT_FALSE(index->peek());
  index->insert(A, 1000, std::nullopt, {});
  index->insert(B, 500, std::nullopt, {});
  EXPECT_EQ(index->peek(), B);
  index->pin(B);
  EXPECT_EQ(index->peek(), A);
  index->unpin(B);
  EXPECT_EQ(index->peek(), B);
  EXPECT_EQ(index->size(), 2U);
  index->check();
  index->begin_walk();
  EXPECT_THROW(index->peek(), std::logic_error);
}

TEST(StateIndexTest, InsertingAboveLowersAndEvictingAboveRaises) {
  const auto index = by_distance();
  index->insert(B, 30, std::nullopt, {});
  index->insert(A, 20, std::nullopt, std::vector<StateId>{B});
  EXPECT_EQ(index->priority(B), 10);
  EXPECT_EQ(index->evict(1), std::vector<StateId>{B});
  index->insert(B, 30, A, {});  // watermark 10
  index->erase(A);
  EXPECT_EQ(index->priority(B), 40);
  index->check();
}

TEST(StateIndexTest, LruIsTheTieRuleAlone) {
  const auto index = make_index("lru");
  index->insert(A, 60000, std::nullopt, {});
  index->insert(B, 1, std::nullopt, {});
  index->touch(A);
  EXPECT_EQ(index->evict(2), (std::vector<StateId>{B, A}));
  EXPECT_EQ(index->watermark(), 0);
}

TEST(StateIndexTest, ErrorsNameTheStateAndChangeNothing) {
  const auto index = by_distance();
  index->insert(A, 10, std::nullopt, {});
  EXPECT_THROW(index->insert(A, 10, std::nullopt, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(B, -1, std::nullopt, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(B, kMaxDepth + 1, std::nullopt, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(B, 10, A, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(B, 5, std::nullopt, std::vector<StateId>{A, A}),
               std::invalid_argument);
  EXPECT_THROW(index->insert(B, 5, std::nullopt, std::vector<StateId>{A, C}), UnknownState);
  EXPECT_THROW(index->touch(B), UnknownState);
  EXPECT_THROW(index->unpin(A), std::invalid_argument);
  EXPECT_THROW(index->next_victim(), std::logic_error);
  EXPECT_THROW(index->end_walk(), std::logic_error);
  index->check();
  EXPECT_EQ(index->size(), 1U);
  EXPECT_EQ(index->priority(A), 10);
}

TEST(StateIndexTest, ExtremeIdsAndDepths) {
  const auto index = make_index("gds");
  const StateId lowest = std::numeric_limits<StateId>::min();
  const StateId highest = std::numeric_limits<StateId>::max();
  index->insert(highest, kMaxDepth, std::nullopt, {});
  index->insert(lowest, 0, std::nullopt, std::vector<StateId>{highest});
  EXPECT_EQ(index->priority(lowest), 0);
  EXPECT_EQ(index->evict(2), (std::vector<StateId>{lowest, highest}));
}

// Recomputes every priority from its definition and keeps its own tree and order of uses.
class Model {
 public:
  void insert(StateId state, int64_t depth, std::optional<StateId> parent,
              std::span<const StateId> children, double watermark) {
    for (const StateId child : children) states_.at(child).parent = state;
    states_[state] = {depth, parent, watermark, ++uses_, 0};
  }
  void use(StateId state, double watermark) {
    states_.at(state).stamp = watermark;
    states_.at(state).last_use = ++uses_;
  }
  void erase(StateId state) {
    const auto parent = states_.at(state).parent;
    for (auto& [id, other] : states_) {
      if (other.parent == state) other.parent = parent;
    }
    states_.erase(state);
  }
  double priority(StateId state) const {
    const auto& [depth, parent, stamp, last_use, pins] = states_.at(state);
    const auto a = static_cast<double>(parent ? states_.at(*parent).depth : 0);
    const auto b = static_cast<double>(depth);
    return stamp + (1.862e-5 * (b - a) + 3.33e-6 * (b * b - a * a) / 2e5);
  }
  std::optional<StateId> victim() const {
    std::optional<std::tuple<double, uint64_t, StateId>> lowest;
    for (const auto& [id, state] : states_) {
      if (state.pins > 0) continue;
      const std::tuple key{priority(id), state.last_use, id};
      if (!lowest || key < *lowest) lowest = key;
    }
    return lowest ? std::optional(std::get<2>(*lowest)) : std::nullopt;
  }
  std::vector<StateId> below(std::optional<StateId> parent, int64_t depth) const {
    std::vector<StateId> found;
    for (const auto& [id, state] : states_) {
      if (state.parent == parent && state.depth > depth) found.push_back(id);
    }
    return found;
  }
  struct State {
    int64_t depth;
    std::optional<StateId> parent;
    double stamp;
    uint64_t last_use;
    int pins;
  };
  std::map<StateId, State> states_;

 private:
  uint64_t uses_ = 0;
};

class RandomEvents : public testing::TestWithParam<unsigned> {};

TEST_P(RandomEvents, AgreeWithRecomputingEverything) {
  std::mt19937 random(GetParam());
  const auto below = [&](size_t n) { return static_cast<int64_t>(random() % n); };
  const auto index = make_index("gds");
  Model model;
  StateId next = 0;
  for (int event = 0; event < 20000; ++event) {
    auto at = model.states_.begin();
    if (at != model.states_.end()) std::advance(at, below(model.states_.size()));
    const auto roll = below(100);
    if (model.states_.size() < 4 || (roll < 35 && model.states_.size() < 40)) {
      const auto parent = roll % 3 ? std::optional(at->first) : std::nullopt;
      const bool rooted = !parent || model.states_.empty();
      const int64_t depth = (rooted ? 0 : at->second.depth) + 1 + below(2000);
      std::vector<StateId> children = model.below(rooted ? std::nullopt : parent, depth);
      if (roll % 2) children.clear();
      index->insert(++next, depth, rooted ? std::nullopt : parent, children);
      model.insert(next, depth, rooted ? std::nullopt : parent, children, index->watermark());
    } else if (roll < 60) {
      index->touch(at->first);
      model.use(at->first, index->watermark());
    } else if (roll < 65) {
      index->pin(at->first);
      ++at->second.pins;
    } else if (roll < 75) {
      if (at->second.pins == 0) continue;
      index->unpin(at->first);
      if (--at->second.pins == 0) model.use(at->first, index->watermark());
    } else if (roll < 80) {
      index->erase(at->first);
      model.erase(StateId{at->first});
    } else {
      const auto expected = model.victim();
      const double priority = expected ? model.priority(*expected) : 0;
      const double watermark = std::max(index->watermark(), priority);
      const auto victims = index->evict(1);
      ASSERT_EQ(victims.size(), expected ? 1U : 0U);
      if (!expected) continue;
      ASSERT_EQ(victims[0], *expected) << "event " << event;
      ASSERT_EQ(index->watermark(), watermark);
      model.erase(*expected);
    }
    index->check();
  }
  for (const auto& [id, state] : model.states_) EXPECT_EQ(index->priority(id), model.priority(id));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomEvents, testing::Values(1U, 2U, 3U));

// Comparisons and re-pushes of one round of insert, touch and evict among n states.
struct Work {
  double comparisons;
  double repushes;
};

Work work_of_a_round(int64_t n) {
  std::mt19937_64 random(7);
  const auto index = make_index("gds");
  std::vector<StateId> tips(static_cast<size_t>(n) / 8);
  std::vector<int64_t> depths(tips.size(), 0);
  StateId next = 0;
  const auto grow = [&] {
    const size_t session = random() % tips.size();
    const bool alive = depths[session] > 0 && index->contains(tips[session]);
    const int64_t depth = (alive ? depths[session] : 0) + 500 + static_cast<int64_t>(random() % 99);
    index->insert(++next, depth, alive ? std::optional(tips[session]) : std::nullopt, kNobody);
    tips[session] = next;
    depths[session] = depth;
  };
  while (std::ssize(tips) > 0 && static_cast<int64_t>(index->size()) < n) grow();
  const HeapCounters before = index->counters();
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    index->evict(1);
    grow();
    const StateId tip = tips[random() % tips.size()];
    if (index->contains(tip)) index->touch(tip);
  }
  const auto per_round = [](uint64_t from, uint64_t to) {
    return static_cast<double>(to - from) / kRounds;
  };
  return {per_round(before.comparisons, index->counters().comparisons),
          per_round(before.repushes, index->counters().repushes)};
}

TEST(StateIndexTest, WorkGrowsWithTheLogarithm) {
  const Work small = work_of_a_round(1000);
  const Work large = work_of_a_round(100000);
  // One call in three touches, so a round leaves at most one outdated bound behind, and each
  // eviction or insertion outdates those of the few states next to it.
  EXPECT_LT(small.repushes, 4);
  EXPECT_LT(large.repushes, 4);
  // A sift in a heap of arity 4 makes at most 4 comparisons a level; 5 levels hold 1e3 entries and
  // 9 levels 1e5. A scan or a rebuild would grow a hundredfold.
  EXPECT_LT(small.comparisons, 4 * 5 * (2 + small.repushes));
  EXPECT_LT(large.comparisons, 4 * 9 * (2 + large.repushes));
  EXPECT_GT(small.comparisons, 1);
}

TEST(StateIndexTest, OldUsesLeaveNothingBehind) {
  const auto index = make_index("gds");
  for (StateId state = 0; state < 100; ++state) index->insert(state, 1000 + state, {}, {});
  for (int use = 0; use < 1000000; ++use) index->touch(use % 100);
  const uint64_t before = index->counters().comparisons;
  EXPECT_EQ(index->evict(100).size(), 100U);
  // 100 outdated bounds and 100 evictions, 4 levels of 4 comparisons each.
  EXPECT_LE(index->counters().comparisons - before, 200U * 4 * 5);
}

}  // namespace
}  // namespace statecache
