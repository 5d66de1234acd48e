#include "statecache/cached_blocks.h"

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

using Key = CachedBlocks::Key;

TEST(CachedBlocksTest, TheFirstOfTheBlocksThatAreLeftComesFirst) {
  CachedBlocks cache(4);
  const Key key{"a", 1};
  for (const Block block : {2U, 0U, 3U}) cache.insert(key, block);
  cache.insert(key, 0);  // it stays where it is
  const CachedBlocks::Number number = cache.find(key);
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
  EXPECT_EQ(cache.find(key), CachedBlocks::kNone);
  EXPECT_EQ(cache.size(), 0U);
}

TEST(CachedBlocksTest, ABlockIsKnownByItsFirstKeyAndFoundUnderEach) {
  CachedBlocks cache(2);
  const Key first{"a", 1}, second{"b", 2}, third{"c", 3};
  for (const Key& key : {first, second, third}) cache.insert(key, 1);
  EXPECT_EQ(cache.key(cache.number_of(1)), "a");
  EXPECT_EQ(cache.number_of(0), CachedBlocks::kNone);
  for (const Key& key : {first, second, third}) EXPECT_TRUE(cache.contains(key, 1));
  EXPECT_FALSE(cache.contains(second, 0));
  EXPECT_TRUE(cache.erase(second, 1));
  EXPECT_TRUE(cache.contains(third, 1));
  EXPECT_FALSE(cache.contains(second, 1));
  EXPECT_TRUE(cache.erase(first, 1));
  EXPECT_TRUE(cache.erase(third, 1));
  EXPECT_EQ(cache.size(), 0U);
}

TEST(CachedBlocksTest, KeysWithOneHashAreTwo) {
  CachedBlocks cache(2);
  cache.insert({"a", 7}, 0);
  cache.insert({"b", 7}, 1);
  EXPECT_NE(cache.number_of(0), cache.number_of(1));
  EXPECT_EQ(cache.first(cache.find({"b", 7})), 1U);
  EXPECT_EQ(cache.find({"c", 7}), CachedBlocks::kNone);
}

TEST(CachedBlocksTest, AKeyStaysApartWhateverIsCachedUnderIt) {
  CachedBlocks cache(2);
  const Key key{"a", 1};
  cache.set_apart(key, false);
  EXPECT_EQ(cache.find(key), CachedBlocks::kNone);
  cache.set_apart(key, true);
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_EQ(cache.first(cache.find(key)), kNoBlock);
  cache.insert(key, 0);
  EXPECT_TRUE(cache.is_apart(cache.number_of(0)));
  cache.clear();
  EXPECT_TRUE(cache.is_apart(cache.find(key)));
  cache.insert(key, 1);
  cache.none_apart();
  EXPECT_FALSE(cache.is_apart(cache.number_of(1)));
  cache.erase(key, 1);
  EXPECT_EQ(cache.find(key), CachedBlocks::kNone);
}

TEST(CachedBlocksTest, ABlockThePoolDoesNotHaveIsRefused) {
  CachedBlocks cache(2);
  EXPECT_THROW(cache.insert({"a", 1}, 2), std::out_of_range);
  EXPECT_FALSE(cache.contains({"a", 1}, 2));
  EXPECT_FALSE(cache.erase({"a", 1}, kNoBlock));
  EXPECT_EQ(cache.size(), 0U);
}

// The same in maps and lists, searched through.
struct Plain {
  std::map<std::string, std::vector<Block>> blocks;
  std::set<std::string> apart;
  std::vector<std::vector<std::string>> keys;  // by block, the first one first
};

void expect_equal(const CachedBlocks& cache, const Plain& plain,
                  const std::vector<std::string>& names, const auto& key_of) {
  size_t cached = 0;
  for (const std::string& name : names) {
    const auto found = plain.blocks.find(name);
    const size_t copies = found == plain.blocks.end() ? 0 : found->second.size();
    cached += copies > 0;
    const CachedBlocks::Number number = cache.find(key_of(name));
    ASSERT_EQ(number != CachedBlocks::kNone, copies > 0 || plain.apart.contains(name));
    if (number == CachedBlocks::kNone) continue;
    ASSERT_EQ(cache.key(number), name);
    ASSERT_EQ(cache.copies(number), copies);
    ASSERT_EQ(cache.first(number), copies == 0 ? kNoBlock : found->second.front());
    ASSERT_EQ(cache.is_apart(number), plain.apart.contains(name));
  }
  ASSERT_EQ(cache.size(), cached);
  for (Block block = 0; block < plain.keys.size(); ++block) {
    for (const std::string& name : names) {
      ASSERT_EQ(cache.contains(key_of(name), block),
                std::ranges::count(plain.keys[block], name) > 0);
    }
  }
}

TEST(CachedBlocksTest, RandomCallsEqualAPlainForm) {
  std::mt19937 random(1);
  const auto below = [&random](size_t n) { return random() % n; };
  std::vector<std::string> names;
  for (int i = 0; i < 60; ++i) names.push_back("key " + std::to_string(i));
  // Few hashes, some of them at the end of the table: most keys meet another one.
  const auto key_of = [](const std::string& name) {
    return Key{name, static_cast<uint64_t>(name.back()) * 0x100000001U};
  };
  CachedBlocks cache(12);
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
        for (const std::string& one : own) {
          ASSERT_TRUE(cache.erase(key_of(one), block));
          std::erase(plain.blocks[one], block);
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
        cache.set_apart(key_of(name), true);
        plain.apart.insert(name);
        break;
      case 7:
        cache.set_apart(key_of(name), false);
        plain.apart.erase(name);
        break;
      default:
        if (below(2'000) == 0) {
          cache.none_apart();
          plain.apart.clear();
        } else if (below(2'000) == 0) {
          cache.clear();
          plain.blocks.clear();
          for (auto& one : plain.keys) one.clear();
        }
    }
    if (step % 20 == 0) expect_equal(cache, plain, names, key_of);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace statecache
