#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "learned_sessions.h"
#include "statecache/policies.h"

namespace statecache {
namespace {

constexpr StateId A = 1, B = 2;

TEST(LearnedIndexTest, AnEndIsWorthMoreThanWhatLiesBetween) {
  const auto index = make_index("learned", {.cost = CostModel(1, 0), .ghosts = 8});
  const std::vector<StateId> path = {A, B};
  index->on_prompt(path, std::vector<int64_t>{8192, 9216}, 1, path);
  index->insert(A, 8192, std::nullopt, {});
  index->insert(B, 9216, A, {}, true);
  EXPECT_NEAR(index->rank(A), 8192 * 0.25 * 0.05, 1e-9);  // no end, by the priors alone
  EXPECT_NEAR(index->rank(B), 1024 * 0.25, 1e-9);
  EXPECT_EQ(index->evict(1), std::vector<StateId>{A});
  EXPECT_EQ(index->ghosts(), 1U);
  index->check();
}

TEST(LearnedIndexTest, AFailedRequestChangesNothing) {
  const auto index = make_index("learned", {.slots = 4, .ghosts = 8});
  const std::vector<StateId> path = {A, B};
  EXPECT_THROW(index->on_prompt(path, std::vector<int64_t>{512, 512}, 1, path),
               std::invalid_argument);
  EXPECT_EQ(index->points(), 0U);
  EXPECT_THROW(make_index("learned", {.slots = 0}), std::invalid_argument);
  EXPECT_THROW(make_index("learned", {.slots = 4, .ghosts = -1}), std::invalid_argument);
}

TEST(LearnedIndexTest, SessionsKeepEveryInvariant) {
  LearnedSessions sessions(64);
  for (int request = 0; request < 2000; ++request) {
    sessions.serve();
    if (request % 50 == 0) sessions.index().check();
  }
}

// Comparisons an offered depth, shadows included: 4-ary heaps, so at most a few more for each
// fourfold growth, and up to 4,096 inheritors of ghosts are ranked again every 16 requests, which a
// cache of 1,000 states does not have. Anything linear would grow a hundredfold here.
TEST(LearnedIndexTest, WorkGrowsWithTheLogarithm) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const std::vector<int64_t> sizes = {100, 1'000, 10'000};  // filling more takes minutes
#else
  const std::vector<int64_t> sizes = {1'000, 10'000, 100'000};
#endif
  std::vector<double> comparisons;
  for (const int64_t slots : sizes) {
    LearnedSessions sessions(slots);
    const uint64_t before = sessions.index().counters().comparisons;
    const uint64_t offered = sessions.depths_offered();
    for (int request = 0; request < 3000; ++request) sessions.serve();
    comparisons.push_back(static_cast<double>(sessions.index().counters().comparisons - before) /
                          static_cast<double>(sessions.depths_offered() - offered));
  }
  RecordProperty("comparisons", std::to_string(comparisons.back()));
  EXPECT_LT(comparisons[0], 60);
  EXPECT_LT(comparisons[1], 3 * comparisons[0]);
  EXPECT_LT(comparisons[2], 3 * comparisons[1]);
}

}  // namespace
}  // namespace statecache
