// What holds for every policy of the table.

#include "statecache/policies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace statecache {
namespace {

constexpr StateId A = 1, B = 2, C = 3, kAbsent = 99;
const std::vector<StateId> kNobody;

TEST(PoliciesTest, NamesAreDifferentAndEachMakesItsOwn) {
  std::set<std::string_view> names;
  for (const PolicySpec& spec : policies()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_EQ(spec.make({})->policy(), spec.name);
    EXPECT_EQ(make_index(spec.name)->policy(), spec.name);
  }
}

TEST(PoliciesTest, AnUnknownNameIsAnsweredWithThoseOfTheTable) {
  try {
    make_index("mru");
    FAIL();
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'mru'"), std::string::npos);
    for (const PolicySpec& spec : policies()) {
      EXPECT_NE(message.find(spec.name), std::string::npos) << message;
    }
  }
}

class EveryPolicy : public testing::TestWithParam<PolicySpec> {
 protected:
  // A and B below it, C beside them.
  std::unique_ptr<StateIndex> three_states() {
    auto index = GetParam().make({.cost = CostModel(1, 0)});
    index->insert(A, 1024, std::nullopt, {});
    index->insert(B, 2048, A, {}, true);
    index->insert(C, 512, std::nullopt, {}, true);
    return index;
  }
};

TEST_P(EveryPolicy, BeginsEmptyAndFollowsItself) {
  const auto index = GetParam().make({});
  EXPECT_EQ(index->size(), 0U);
  EXPECT_EQ(index->watermark(), 0);
  EXPECT_EQ(index->order(), GetParam().name);
  EXPECT_EQ(index->ghosts(), 0U);
  EXPECT_EQ(index->points(), 0U);
  EXPECT_EQ(index->counters().comparisons, 0U);
  EXPECT_FALSE(index->peek());
  EXPECT_EQ(index->evict(3), kNobody);
  index->check();
}

TEST_P(EveryPolicy, EvictsEveryStateOnceAndPinnedOnesNever) {
  const auto index = three_states();
  index->pin(B);
  std::vector<StateId> victims = index->evict(5);
  std::sort(victims.begin(), victims.end());
  EXPECT_EQ(victims, (std::vector<StateId>{A, C}));
  EXPECT_TRUE(index->contains(B));
  index->check();
  index->unpin(B);
  EXPECT_EQ(index->evict(5), std::vector<StateId>{B});
  EXPECT_EQ(index->size(), 0U);
  index->check();
}

TEST_P(EveryPolicy, TheLowestRankGoesFirst) {
  const auto index = three_states();
  const double lowest = std::min({index->rank(A), index->rank(B), index->rank(C)});
  const std::optional<StateId> first = index->peek();
  ASSERT_TRUE(first);
  EXPECT_EQ(index->rank(*first), lowest);
  EXPECT_EQ(index->evict(1), std::vector<StateId>{*first});
}

TEST_P(EveryPolicy, AProposalThatIsNotConfirmedStays) {
  const auto index = three_states();
  index->begin_walk();
  const auto first = index->next_victim(), second = index->next_victim();
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  index->evicted(*second);
  index->end_walk();
  EXPECT_TRUE(index->contains(*first));
  EXPECT_FALSE(index->contains(*second));
  EXPECT_EQ(index->peek(), first);
  index->check();
}

TEST_P(EveryPolicy, AStateIsErasedAndDroppedByHand) {
  const auto index = three_states();
  const double watermark = index->watermark();
  index->erase(A);
  index->drop(std::vector<StateId>{C, kAbsent});
  EXPECT_EQ(index->size(), 1U);
  EXPECT_TRUE(index->contains(B));
  EXPECT_EQ(index->watermark(), watermark);
  index->check();
}

TEST_P(EveryPolicy, APromptChangesNoStateAndIsHeardOnlyWhereItIsNeeded) {
  const auto index = three_states();
  const size_t points = index->points();
  const std::vector<StateId> path = {A, B, 4};
  index->on_prompt(path, std::vector<int64_t>{1024, 2048, 3072}, 2, path);
  EXPECT_EQ(index->size(), 3U);
  EXPECT_EQ(index->points(), points + (index->needs_prompts() ? 1 : 0));
  const std::vector<int64_t> not_ascending = {5, 5, 5};
  if (index->needs_prompts()) {
    EXPECT_THROW(index->on_prompt(path, not_ascending, 2, path), std::invalid_argument);
  } else {
    index->on_prompt(path, not_ascending, 2, path);
  }
  index->check();
}

TEST_P(EveryPolicy, ErrorsChangeNothing) {
  const auto index = three_states();
  EXPECT_THROW(index->insert(A, 10, std::nullopt, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(4, -1, std::nullopt, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(4, 1024, A, {}), std::invalid_argument);
  EXPECT_THROW(index->insert(4, 600, std::nullopt, std::vector<StateId>{A, A}),
               std::invalid_argument);
  EXPECT_THROW(index->touch(kAbsent), UnknownState);
  EXPECT_THROW(index->erase(kAbsent), UnknownState);
  EXPECT_THROW(index->rank(kAbsent), UnknownState);
  EXPECT_THROW(index->priority(kAbsent), UnknownState);
  EXPECT_THROW(index->unpin(A), std::invalid_argument);
  EXPECT_THROW(index->evict(-1), std::invalid_argument);
  EXPECT_THROW(index->next_victim(), std::logic_error);
  EXPECT_THROW(index->evicted(A), std::logic_error);
  EXPECT_THROW(index->end_walk(), std::logic_error);
  EXPECT_EQ(index->size(), 3U);
  index->check();
}

TEST_P(EveryPolicy, KeepsItsInvariantsOverRandomCalls) {
  std::mt19937 random(5);
  const auto index = GetParam().make({.slots = 8, .ghosts = 8});
  std::vector<StateId> resident;
  const auto pick = [&] { return resident[random() % resident.size()]; };
  for (StateId next = 1; next < 2000; ++next) {
    index->on_prompt(std::vector<StateId>{next}, std::vector<int64_t>{next * 16}, 0,
                     std::vector<StateId>{next});
    index->insert(next, next * 16, std::nullopt, {}, random() % 2 == 0);
    resident.push_back(next);
    index->touch(pick());
    if (random() % 4 == 0) {
      const StateId state = pick();
      index->pin(state);
      index->unpin(state);
    }
    if (resident.size() > 8) {
      const std::vector<StateId> victims = index->evict(1);
      ASSERT_EQ(victims.size(), 1U);
      std::erase(resident, victims.front());
    }
    ASSERT_EQ(index->size(), resident.size());
    if (next % 16 == 0) index->check();
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryPolicy,
                         testing::ValuesIn(policies().begin(), policies().end()),
                         [](const auto& spec) {
                           std::string name(spec.param.name);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace statecache
