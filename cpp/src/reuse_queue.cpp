#include "statecache/reuse_queue.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <stdexcept>
#include <utility>

namespace statecache {

namespace {

// Ratios of ages (unproven to proven) at which a block of either kind goes.
struct Ratio {
  uint64_t unproven, proven;
};
constexpr std::array<Ratio, 5> kRatios{{{1, 1}, {7, 5}, {2, 1}, {14, 5}, {4, 1}}};
constexpr uint64_t kLearnEvery = 64;

constexpr size_t kWrittenTogether = 16;
constexpr uint64_t kTaken = 1;  // in the place of a time

uint64_t hash_of(std::string_view key) { return std::hash<std::string_view>()(key); }

}  // namespace

Ghosts::Ghosts(size_t n) : n_(n) {
  if (n > INT32_MAX) throw std::length_error("too many blocks for one queue");
  current_.entries.resize(std::bit_ceil(n + n / 3 + 1));
  before_ = current_;
}

Ghosts::Entry& Ghosts::Table::find(uint64_t hash) {
  const size_t mask = entries.size() - 1;
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t at = hash & mask;
  while (entries[at].dropped != 0 && entries[at].tag != tag) at = (at + 1) & mask;
  entries[at].tag = tag;
  return entries[at];
}

void Ghosts::clear() {
  for (Table* table : {&current_, &before_}) {
    std::fill(table->entries.begin(), table->entries.end(), Entry{});
  }
  unwritten_.clear();
  newest_ = 0;
}

void Ghosts::put(std::string_view key, bool proven, uint64_t now) {
  const uint64_t hash = hash_of(key);
  current_.prefetch(hash);
  unwritten_.push_back({hash, now, proven});
  newest_ = now;
  if (unwritten_.size() < kWrittenTogether) return;
  for (const Dropped& one : unwritten_) write(one);
  unwritten_.clear();
}

void Ghosts::write(const Dropped& one) {
  if (one.now > current_.began + n_) {
    std::swap(current_, before_);
    std::fill(current_.entries.begin(), current_.entries.end(), Entry{});
    current_.began = one.now - 1;
  }
  const uint64_t age = one.now - current_.began;
  current_.find(one.hash).dropped = static_cast<uint32_t>(2 * age + one.proven);
}

std::array<uint64_t, 2> Ghosts::take(std::span<const std::string_view> keys, uint64_t now) {
  for (const Dropped& one : unwritten_) write(one);
  unwritten_.clear();
  hashes_.clear();
  for (const std::string_view key : keys) {
    hashes_.push_back(hash_of(key));
    before_.prefetch(hashes_.back());
    current_.prefetch(hashes_.back());
  }
  std::array<uint64_t, 2> found{};
  for (const uint64_t hash : hashes_) {
    uint32_t dropped = 0;
    for (Table* table : {&before_, &current_}) {  // the later one counts
      Entry& entry = table->find(hash);
      if (entry.dropped <= kTaken) continue;
      const bool recent = table->began + entry.dropped / 2 + n_ > now;
      dropped = recent ? entry.dropped : 0;
      entry.dropped = kTaken;  // not 0: a search must not end here
    }
    if (dropped != 0) ++found[dropped % 2];
  }
  return found;
}

ReuseQueue::ReuseQueue(const CachedBlocks& cache, std::string ending)
    : BlockQueue(4, cache), ending_(std::move(ending)), ghosts_(cache.blocks()) {}

void ReuseQueue::looked_up(std::span<const std::string_view> missing) {
  ++clock_;
  if (watches()) {
    const auto [unproven, proven] = ghosts_.take(missing, handed_out_);
    used_[0] += unproven;
    used_[1] += proven;
  }
  if (clock_ % kLearnEvery == 0) learn();
}

void ReuseQueue::learn() {
  const auto [used, used_proven] = used_;
  const auto [dropped, dropped_proven] = dropped_;
  if (used + used_proven > 0) {
    const uint64_t gain = used_proven * dropped, loss = used * dropped_proven;
    int step = (gain > loss) - (gain < loss);
    if (dropped_proven == 0) {
      step = -1;
    } else if (dropped == 0) {
      step = 1;
    }
    ratio_ = std::clamp(ratio_ + step, 0, static_cast<int>(kRatios.size()) - 1);
  }
  for (uint64_t* count : {&used_[0], &used_[1], &dropped_[0], &dropped_[1]}) *count /= 2;
}

Block ReuseQueue::next() {
  for (const List list : {kFree, kCopies}) {
    if (const Block block = lists_.front(list); block != kNoBlock) return block;
  }
  const Block proven = lists_.front(kProven), unproven = lists_.front(kUnproven);
  if (proven == kNoBlock) return unproven;
  if (unproven == kNoBlock) return proven;
  const Ratio& ratio = kRatios[static_cast<size_t>(ratio_)];
  const uint64_t unproven_age = clock_ + 1 - lists_[unproven].time;
  const uint64_t proven_age = clock_ + 1 - lists_[proven].time;
  return ratio.unproven * unproven_age >= ratio.proven * proven_age ? unproven : proven;
}

void ReuseQueue::mark_proven(Block block) {
  require_block(block);
  lists_[block].marked = true;
}

void ReuseQueue::handed_out(Block block, List from, Key key, bool last) {
  ++handed_out_;
  bool& proven = lists_[block].marked;
  if (last && from >= kProven) {
    const std::string_view bytes = cache_.key(key);
    if (bytes.ends_with(ending_)) {
      ghosts_.put(bytes.substr(0, bytes.size() - ending_.size()), proven, handed_out_);
      ++dropped_[proven];
    }
  }
  leave_family(block);
  proven = fresh_is_proven_;
}

void ReuseQueue::hit(Block block) {
  leave_family(block);
  lists_[block].marked = true;
}

void ReuseQueue::emptied(Block block) {
  leave_family(block);
  lists_.move_to(kFree, block);
}

void ReuseQueue::forget() {
  for (Block block = 0; block < blocks(); ++block) lists_[block].note = kNoFamily;
  families_.clear();
  ghosts_.clear();
}

void ReuseQueue::place(Block block, Key key) {
  List list = kFree;
  if (key != CachedBlocks::kNone) {
    lists_[block].time = clock_;
    if (!cache_.is_apart(key)) list = lists_[block].marked ? kProven : kUnproven;
    if (cache_.copies(key) > 1) list = place_of_copy(block, key, list);
  }
  lists_.push_back(list, block);
}

BlockLists::List ReuseQueue::place_of_copy(Block block, Key key, List list) {
  if (families_.size() <= key) families_.resize(cache_.numbers());
  Family& family = families_[key];
  const Block first = cache_.first(key);
  if (is_free(first) && lists_[first].note == kNoFamily) {
    lists_[first].note = key;
    // One main block at most, even if the cache took out a key without a word.
    if (lists_.list_of(first) == kFree || family.main != kNoBlock) {
      ++family.copies;
    } else {
      family.main = first;
    }
  }
  lists_[block].note = key;
  const uint32_t free_copies = family.copies + (family.main != kNoBlock);
  const bool used = free_copies + 1 < cache_.copies(key);
  if (used || list == kFree) {
    ++family.copies;
    return list == kFree ? kFree : kCopies;
  }
  if (family.main != kNoBlock) {
    lists_.move_to(kCopies, family.main);
    ++family.copies;
  }
  family.main = block;
  return list;
}

void ReuseQueue::leave_family(Block block) {
  const Key key = std::exchange(lists_[block].note, kNoFamily);
  if (key == kNoFamily) return;
  Family& family = families_[key];
  if (family.main == block) {
    family.main = kNoBlock;
  } else {
    --family.copies;
  }
}

}  // namespace statecache
