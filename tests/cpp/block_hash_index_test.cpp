#include "statecache/block_hash_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace statecache {
namespace {

using Key = BlockHashIndex::Key;

TEST(BlockHashIndexTest, TheFirstOfTheBlocksThatAreLeftComesFirst) {
  BlockHashIndex cache(4);
  const Key key{"a", 1};
  for (const Block block : {2U, 0U, 3U}) cache.insert(key, block);
  cache.insert(key, 0);  // it stays where it is
  const BlockHashIndex::Number number = cache.find(key);
  EXPECT_EQ(cache.copies(number), 3U);
  EXPECT_EQ(cache.first(number), 2U);
  EXPECT_TRUE(cache.erase(key, 2));
  EXPECT_FALSE(cache.erase(key, 2));
  EXPECT_FALSE(cache.erase(key, 1));
  EXPECT_EQ(cache.first(number), 0U);
  EXPECT_TRUE(cache.erase(key, 3));
  cache.insert(key, 1);
  EXPECT_TRUE(cache.erase(key, 0));
  EXPECT_EQ(cache.first(number), 1U);
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_TRUE(cache.erase(key, 1));
  EXPECT_EQ(cache.find(key), BlockHashIndex::kNone);
  EXPECT_EQ(cache.size(), 0U);
}

TEST(BlockHashIndexTest, ABlockIsKnownByItsFirstKeyAndFoundUnderEach) {
  BlockHashIndex cache(2);
  const Key first{"a", 1}, second{"b", 2}, third{"c", 3};
  for (const Key& key : {first, second, third}) cache.insert(key, 1);
  EXPECT_EQ(cache.key(cache.number_of(1)), "a");
  EXPECT_EQ(cache.number_of(0), BlockHashIndex::kNone);
  for (const Key& key : {first, second, third}) EXPECT_TRUE(cache.contains(key, 1));
  EXPECT_FALSE(cache.contains(second, 0));
  EXPECT_TRUE(cache.erase(second, 1));
  EXPECT_TRUE(cache.contains(third, 1));
  EXPECT_FALSE(cache.contains(second, 1));
  EXPECT_TRUE(cache.erase(first, 1));
  EXPECT_TRUE(cache.erase(third, 1));
  EXPECT_EQ(cache.size(), 0U);
}

TEST(BlockHashIndexTest, KeysWithOneHashAreTwo) {
  BlockHashIndex cache(2);
  cache.insert({"a", 7}, 0);
  cache.insert({"b", 7}, 1);
  EXPECT_NE(cache.number_of(0), cache.number_of(1));
  EXPECT_EQ(cache.first(cache.find({"b", 7})), 1U);
  EXPECT_EQ(cache.find({"c", 7}), BlockHashIndex::kNone);
}

TEST(BlockHashIndexTest, AKeyStaysApartWhateverIsCachedUnderIt) {
  BlockHashIndex cache(2);
  const Key key{"a", 1};
  cache.set_has_checkpoint(key, false);
  EXPECT_EQ(cache.find(key), BlockHashIndex::kNone);
  cache.set_has_checkpoint(key, true);
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_EQ(cache.first(cache.find(key)), kNoBlock);
  cache.insert(key, 0);
  EXPECT_TRUE(cache.has_checkpoint(cache.number_of(0)));
  cache.clear();
  EXPECT_TRUE(cache.has_checkpoint(cache.find(key)));
  cache.insert(key, 1);
  cache.clear_checkpoints();
  EXPECT_FALSE(cache.has_checkpoint(cache.number_of(1)));
  cache.erase(key, 1);
  EXPECT_EQ(cache.find(key), BlockHashIndex::kNone);
}

TEST(BlockHashIndexTest, ABlockThePoolDoesNotHaveIsRefused) {
  BlockHashIndex cache(2);
  EXPECT_THROW(cache.insert({"a", 1}, 2), std::out_of_range);
  EXPECT_FALSE(cache.contains({"a", 1}, 2));
  EXPECT_FALSE(cache.erase({"a", 1}, kNoBlock));
  EXPECT_EQ(cache.size(), 0U);
}

// The same in maps and lists, searched through.
struct Plain {
  std::map<std::string, std::vector<Block>> blocks;
  std::set<std::string> with_checkpoint;
  std::vector<std::vector<std::string>> keys;  // by block, the first one first
};

void expect_equal(const BlockHashIndex& cache, const Plain& plain,
                  const std::vector<std::string>& names, const auto& key_of) {
  size_t cached = 0;
  for (const std::string& name : names) {
    const auto found = plain.blocks.find(name);
    const size_t copies = found == plain.blocks.end() ? 0 : found->second.size();
    cached += copies > 0;
    const BlockHashIndex::Number number = cache.find(key_of(name));
    ASSERT_EQ(number != BlockHashIndex::kNone, copies > 0 || plain.with_checkpoint.contains(name));
    if (number == BlockHashIndex::kNone) continue;
    ASSERT_EQ(cache.key(number), name);
    ASSERT_EQ(cache.copies(number), copies);
    ASSERT_EQ(cache.first(number), copies == 0 ? kNoBlock : found->second.front());
    ASSERT_EQ(cache.has_checkpoint(number), plain.with_checkpoint.contains(name));
  }
  ASSERT_EQ(cache.size(), cached);
  for (Block block = 0; block < plain.keys.size(); ++block) {
    for (const std::string& name : names) {
      ASSERT_EQ(cache.contains(key_of(name), block),
                std::ranges::count(plain.keys[block], name) > 0);
    }
  }
}

TEST(BlockHashIndexTest, RandomCallsEqualAPlainForm) {
  std::mt19937 random(1);
  const auto below = [&random](size_t n) { return random() % n; };
  std::vector<std::string> names;
  for (int i = 0; i < 60; ++i) names.push_back("key " + std::to_string(i));
  // Few hashes, some of them at the end of the table: most keys meet another one.
  const auto key_of = [](const std::string& name) {
    return Key{name, static_cast<uint64_t>(name.back()) * 0x100000001U};
  };
  BlockHashIndex cache(12);
  Plain plain{{}, {}, std::vector<std::vector<std::string>>(12)};
  for (int step = 0; step < 60'000; ++step) {
    const std::string& name = names[below(names.size())];
    const Block block = static_cast<Block>(below(12));
    auto& own = plain.keys[block];
    const bool there = std::ranges::count(own, name) > 0;
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
        cache.insert(key_of(name), block);
        if (!there) {
          plain.blocks[name].push_back(block);
          own.push_back(name);
        }
        break;
      case 3: {  // as an engine does it: all keys of a block
        if (!own.empty()) {
          ASSERT_EQ(cache.key(cache.number_of(block)), own.front());
        }
        for (const std::string& name : own) {
          ASSERT_TRUE(cache.erase(key_of(name), block));
          std::erase(plain.blocks[name], block);
        }
        own.clear();
        break;
      }
      case 4:
      case 5:
        ASSERT_EQ(cache.erase(key_of(name), block), there);
        std::erase(plain.blocks[name], block);
        std::erase(own, name);
        break;
      case 6:
        cache.set_has_checkpoint(key_of(name), true);
        plain.with_checkpoint.insert(name);
        break;
      case 7:
        cache.set_has_checkpoint(key_of(name), false);
        plain.with_checkpoint.erase(name);
        break;
      default:
        if (below(2'000) == 0) {
          cache.clear_checkpoints();
          plain.with_checkpoint.clear();
        } else if (below(2'000) == 0) {
          cache.clear();
          plain.blocks.clear();
          for (auto& keys : plain.keys) keys.clear();
        }
    }
    if (step % 20 == 0) expect_equal(cache, plain, names, key_of);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace statecache
