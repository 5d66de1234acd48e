#include "statecache/block_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "statecache/reuse_queue.h"

namespace statecache {
namespace {

using Blocks = std::vector<Block>;

BlockHashIndex::Key key_of(std::string_view bytes) {
  return {bytes, std::hash<std::string_view>()(bytes)};
}

// What the blocks of a pool hold, one key a block at most.
class Cache {
 public:
  explicit Cache(size_t blocks) : blocks(blocks), keys_(blocks) {}

  const std::string& key(Block block) const { return keys_[block]; }
  void set(Block block, const std::string& key) {
    clear(block);
    keys_[block] = key;
    blocks.insert(key_of(key), block);
  }
  void clear(Block block) {
    if (!keys_[block].empty()) blocks.erase(key_of(keys_[block]), block);
    keys_[block].clear();
  }

  BlockHashIndex blocks;

 private:
  std::vector<std::string> keys_;
};

// A queue with all blocks of its pool in it.
template <typename Queue>
struct Pool {
  template <typename... More>
  explicit Pool(size_t blocks, More&&... more)
      : cache(blocks), queue(cache.blocks, std::forward<More>(more)...) {
    for (Block block = 0; block < blocks; ++block) append({block});
  }
  void append(const Blocks& blocks) { queue.append(blocks); }
  Blocks take(size_t n) {
    Blocks taken(n);
    lost.clear();
    queue.take(taken, &lost);
    for (const Block block : taken) cache.clear(block);
    return taken;
  }
  // A request computes a block for each key and is done, its last block first.
  Blocks cached(const std::vector<std::string>& keys) {
    Blocks blocks = take(keys.size());
    for (size_t at = 0; at < keys.size(); ++at) cache.set(blocks[at], keys[at]);
    append({blocks.rbegin(), blocks.rend()});
    return blocks;
  }

  Cache cache;
  Queue queue;
  Blocks lost;
};

TEST(FifoQueueTest, FirstInFirstOutButBlocksThatHoldNothingGoFirst) {
  Pool<FifoQueue> pool(4);
  pool.cached({"1kv", "2kv"});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 3, 1, 0}));
  EXPECT_EQ(pool.queue.in_order(3), (Blocks{1, 0}));
  const Blocks bare = pool.take(2);
  pool.queue.prepend(bare);
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 3, 1, 0}));
}

TEST(FifoQueueTest, BlocksWithACheckpointGoFirst) {
  Pool<FifoQueue> pool(2);
  pool.cache.blocks.set_has_checkpoint(key_of("2kv"), true);
  pool.cached({"2kv", "1kv"});
  EXPECT_EQ(pool.take(1), Blocks{0});
}

TEST(BlockQueueTest, TheLastCopyIsLostOnce) {
  Pool<FifoQueue> pool(3);
  pool.cached({"1kv", "1kv", "2kv"});
  EXPECT_EQ(pool.take(2), (Blocks{2, 1}));
  EXPECT_EQ(pool.lost, Blocks{2});
  pool.take(1);
  EXPECT_EQ(pool.lost, Blocks{0});

  pool.append({0, 1, 2});
  pool.cached({"1kv", "1kv", "1kv"});
  EXPECT_EQ(pool.take(3), (Blocks{2, 1, 0}));
  EXPECT_EQ(pool.lost, Blocks{0});
}

TEST(BlockQueueTest, ErrorsChangeNothing) {
  Pool<ReuseQueue> pool(4, "kv");
  pool.cached({"1kv"});
  const Blocks taken = pool.take(2);
  EXPECT_EQ(taken, (Blocks{1, 2}));
  const auto unchanged = [&pool] { EXPECT_EQ(pool.queue.in_order(), (Blocks{3, 0})); };
  EXPECT_THROW(pool.take(3), std::invalid_argument);
  unchanged();
  EXPECT_THROW(pool.append({1, 4}), std::out_of_range);
  EXPECT_THROW(pool.append({1, 3}), std::logic_error);
  EXPECT_THROW(pool.append({1, 2, 1}), std::logic_error);
  EXPECT_THROW(pool.queue.prepend(Blocks{1, 4}), std::out_of_range);
  EXPECT_THROW(pool.queue.prepend(Blocks{1, 0}), std::logic_error);
  EXPECT_THROW(pool.queue.remove(Blocks{1}), std::logic_error);
  EXPECT_THROW(pool.queue.remove(Blocks{4}), std::out_of_range);
  EXPECT_THROW(pool.queue.remove(Blocks{3, 0, 1}), std::logic_error);
  EXPECT_THROW(pool.queue.in_order(1), std::logic_error);
  unchanged();
  EXPECT_EQ(pool.queue.free_blocks(), 2U);
}

TEST(BlockQueueTest, BlocksOfOneHitLeaveTogetherOneNamedTwiceOnce) {
  Pool<FifoQueue> pool(4);
  pool.queue.remove(Blocks{2, 0, 2});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{1, 3}));
  EXPECT_EQ(pool.queue.free_blocks(), 2U);
}

TEST(ReuseQueueTest, BlocksThatHoldNothingGoFirstThenCopies) {
  Pool<ReuseQueue> pool(4, "kv");
  pool.take(2);
  pool.cache.set(0, "1kv");
  pool.cache.set(1, "1kv");
  pool.append({0});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 3, 0}));  // a copy: the other one is in use
  pool.append({1});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 3, 0, 1}));
  pool.cached({"2kv", "3kv"});
  EXPECT_EQ(pool.take(1), Blocks{0});
}

TEST(ReuseQueueTest, TheBlockFreedLastStaysAndTheOthersBecomeCopies) {
  Pool<ReuseQueue> pool(3, "kv");
  pool.take(3);
  for (const Block block : {0U, 1U, 2U}) pool.cache.set(block, "1kv");
  pool.append({2, 0, 1});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 0, 1}));
  pool.queue.remove(Blocks{0});
  pool.queue.remove(Blocks{1});
  pool.append({1});  // block 0 is in use
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 1}));
  pool.append({0});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{2, 1, 0}));
  EXPECT_EQ(pool.take(2), (Blocks{2, 1}));
}

TEST(ReuseQueueTest, ACopyThatWasKeptApartIsNoCopyInUse) {
  Pool<ReuseQueue> pool(4, "kv");
  pool.cache.blocks.set_has_checkpoint(key_of("1state"), true);
  pool.take(3);
  pool.cache.set(0, "1state");
  pool.append({0});
  pool.cache.blocks.clear_checkpoints();
  pool.cache.set(1, "1state");
  pool.cache.set(2, "2kv");
  pool.append({2, 1});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{3, 0, 2, 1}));  // 1 is no copy: it goes after 2
}

TEST(ReuseQueueTest, TheOlderKindGoes) {
  Pool<ReuseQueue> pool(2, "kv");
  pool.queue.set_start_protected(true);
  pool.cached({"1kv"});
  pool.queue.set_start_protected(false);
  pool.cached({"2kv"});
  EXPECT_EQ(pool.queue.in_order(), (Blocks{0, 1}));
  EXPECT_EQ(pool.take(1), Blocks{1});  // of the same age: the one on probation
  pool.queue.looked_up({});
  pool.cache.set(1, "3kv");
  pool.append({1});
  EXPECT_EQ(pool.take(1), Blocks{0});  // ages 2 and 1
}

TEST(ReuseQueueTest, TheLastBlockOfAKeyIsRememberedAlthoughItsCopyWentInTheSameCall) {
  Pool<ReuseQueue> pool(3, "kv");
  pool.cached({"1kv", "2kv"});
  pool.queue.set_start_protected(true);
  EXPECT_EQ(pool.take(1), Blocks{2});
  pool.cache.set(2, "1kv");
  pool.append({2});
  EXPECT_EQ(pool.queue.in_order(),
            (Blocks{0, 2, 1}));  // a duplicate, a protected block, one on probation
  Blocks taken(3);
  pool.queue.take(taken, nullptr);
  EXPECT_EQ(taken, (Blocks{0, 1, 2}));
  // Being missed counts for protected blocks, of which block 2 was one.
  const std::vector<std::string_view> missing{"1"};
  pool.queue.looked_up(missing);
  for (int i = 0; i < 63; ++i) pool.queue.looked_up({});
  EXPECT_EQ(pool.queue.ratio(), 1);
}

TEST(ReuseQueueTest, TheRatioFollowsWhatIsMissed) {
  Pool<ReuseQueue> pool(2, "kv");
  pool.queue.set_start_protected(true);
  pool.cached({"1kv"});
  pool.queue.set_start_protected(false);
  pool.cached({"2kv"});
  EXPECT_FALSE(pool.queue.watches());
  pool.take(2);
  EXPECT_TRUE(pool.queue.watches());
  const std::vector<std::string_view> missing{"1"};
  pool.queue.looked_up(missing);
  for (int i = 0; i < 62; ++i) pool.queue.looked_up({});
  EXPECT_EQ(pool.queue.ratio(), 0);
  pool.queue.looked_up({});
  EXPECT_EQ(pool.queue.ratio(), 1);
}

TEST(GhostsTest, KnowWhatWasDroppedLessThanNTimesAgoOnce) {
  using Counts = std::array<uint64_t, 2>;
  Ghosts ghosts(2);
  const auto take = [&ghosts](std::string_view key, uint64_t now) {
    return ghosts.take({&key, 1}, now);
  };
  EXPECT_TRUE(ghosts.empty());
  ghosts.put("a", true, 1);
  ghosts.put("b", false, 2);
  ghosts.put("b", true, 3);
  EXPECT_EQ(take("a", 3), (Counts{0, 0}));
  EXPECT_EQ(take("b", 4), (Counts{0, 1}));
  EXPECT_EQ(take("b", 4), (Counts{0, 0}));
  ghosts.put("b", false, 5);
  ghosts.put("c", false, 6);
  EXPECT_EQ(take("b", 6), (Counts{1, 0}));
  EXPECT_EQ(take("c", 8), (Counts{0, 0}));
  ghosts.put("d", true, 7);
  ghosts.clear();
  EXPECT_TRUE(ghosts.empty());
  EXPECT_EQ(take("d", 7), (Counts{0, 0}));
}

// Random traffic: no block is lost or doubled, and what is in use stays so.
template <typename Queue>
void random_traffic(Pool<Queue>& pool, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&random](size_t n) { return random() % n; };
  std::vector<bool> used(pool.queue.blocks());
  for (int step = 0; step < 20'000; ++step) {
    const Block block = static_cast<Block>(below(used.size()));
    switch (below(5)) {
      case 0:
        for (const Block taken : pool.take(std::min(pool.queue.free_blocks(), below(4)))) {
          ASSERT_FALSE(used[taken]);
          used[taken] = true;
        }
        break;
      case 1:
        if (used[block]) {
          pool.cache.set(block, std::to_string(below(9)) + "ab"[below(2)]);
        }
        break;
      case 2:
        if (used[block]) {
          pool.cache.key(block).empty() ? pool.queue.prepend({&block, 1}) : pool.append({block});
          used[block] = false;
        }
        break;
      case 3:
        if (!used[block] && !pool.cache.key(block).empty()) {
          pool.queue.remove(Blocks{block});
          used[block] = true;
        }
        break;
      default:
        if (below(10) == 0) {
          pool.cache.clear(block);
          pool.queue.unhashed(block);
        }
    }
    if (step % 50 == 0) {
      Blocks free = pool.queue.in_order(), expected;
      std::sort(free.begin(), free.end());
      for (Block free = 0; free < used.size(); ++free) {
        if (!used[free]) expected.push_back(free);
      }
      ASSERT_EQ(free, expected);
      ASSERT_EQ(pool.queue.free_blocks(), free.size());
    }
  }
}

TEST(BlockQueueTest, NoBlockIsLostOrDoubledInRandomTraffic) {
  Pool<FifoQueue> fifo(16);
  random_traffic(fifo, 1);
  Pool<ReuseQueue> reuse(16, "a");
  random_traffic(reuse, 2);
}

}  // namespace
}  // namespace statecache
