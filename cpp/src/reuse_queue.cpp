#include "statecache/reuse_queue.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <stdexcept>
#include <utility>

namespace statecache {

namespace {

// Ratios of ages (on probation to protected) at which a block of either kind goes.
struct Ratio {
  uint64_t of_probation, of_protected;
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

void Ghosts::put(std::string_view key, bool is_protected, uint64_t now) {
  const uint64_t hash = hash_of(key);
  current_.prefetch(hash);
  unwritten_.push_back({hash, now, is_protected});
  newest_ = now;
  if (unwritten_.size() < kWrittenTogether) return;
  for (const Dropped& ghost : unwritten_) write(ghost);
  unwritten_.clear();
}

void Ghosts::write(const Dropped& ghost) {
  if (ghost.now > current_.began + n_) {
    std::swap(current_, before_);
    std::fill(current_.entries.begin(), current_.entries.end(), Entry{});
    current_.began = ghost.now - 1;
  }
  const uint64_t age = ghost.now - current_.began;
  current_.find(ghost.hash).dropped = static_cast<uint32_t>(2 * age + ghost.is_protected);
}

std::array<uint64_t, 2> Ghosts::take(std::span<const std::string_view> keys, uint64_t now) {
  for (const Dropped& ghost : unwritten_) write(ghost);
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

ReuseQueue::ReuseQueue(const BlockHashIndex& cache, std::string ending)
    : BlockQueue(4, cache), ending_(std::move(ending)), ghosts_(cache.blocks()) {}

void ReuseQueue::looked_up(std::span<const std::string_view> missing) {
  ++clock_;
  if (watches()) {
    const auto [of_probation, of_protected] = ghosts_.take(missing, handed_out_);
    used_[0] += of_probation;
    used_[1] += of_protected;
  }
  if (clock_ % kLearnEvery == 0) learn();
}

void ReuseQueue::learn() {
  const auto [used, used_protected] = used_;
  const auto [dropped, dropped_protected] = dropped_;
  if (used + used_protected > 0) {
    const uint64_t gain = used_protected * dropped, loss = used * dropped_protected;
    int step = (gain > loss) - (gain < loss);
    if (dropped_protected == 0) {
      step = -1;
    } else if (dropped == 0) {
      step = 1;
    }
    ratio_ = std::clamp(ratio_ + step, 0, static_cast<int>(kRatios.size()) - 1);
  }
  for (uint64_t* count : {&used_[0], &used_[1], &dropped_[0], &dropped_[1]}) *count /= 2;
}

Block ReuseQueue::next() {
  for (const List list : {kFree, kDuplicates}) {
    if (const Block block = lists_.front(list); block != kNoBlock) return block;
  }
  const Block oldest_protected = lists_.front(kProtected),
              oldest_on_probation = lists_.front(kProbation);
  if (oldest_protected == kNoBlock) return oldest_on_probation;
  if (oldest_on_probation == kNoBlock) return oldest_protected;
  const Ratio& ratio = kRatios[static_cast<size_t>(ratio_)];
  const uint64_t probation_age = clock_ + 1 - lists_[oldest_on_probation].time;
  const uint64_t protected_age = clock_ + 1 - lists_[oldest_protected].time;
  return ratio.of_probation * probation_age >= ratio.of_protected * protected_age
             ? oldest_on_probation
             : oldest_protected;
}

void ReuseQueue::mark_protected(Block block) {
  require_block(block);
  lists_[block].marked = true;
}

void ReuseQueue::handed_out(Block block, List from, Key key, bool last) {
  ++handed_out_;
  bool& is_protected = lists_[block].marked;
  if (last && from >= kProtected) {
    const std::string_view bytes = cache_.key(key);
    if (bytes.ends_with(ending_)) {
      ghosts_.put(bytes.substr(0, bytes.size() - ending_.size()), is_protected, handed_out_);
      ++dropped_[is_protected];
    }
  }
  leave_family(block);
  is_protected = start_protected_;
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
  if (key != BlockHashIndex::kNone) {
    lists_[block].time = clock_;
    if (!cache_.has_checkpoint(key)) list = lists_[block].marked ? kProtected : kProbation;
    if (cache_.copies(key) > 1) list = place_of_duplicate(block, key, list);
  }
  lists_.push_back(list, block);
}

BlockLists::List ReuseQueue::place_of_duplicate(Block block, Key key, List list) {
  if (families_.size() <= key) families_.resize(cache_.numbers());
  Family& family = families_[key];
  const Block first = cache_.first(key);
  if (is_free(first) && lists_[first].note == kNoFamily) {
    lists_[first].note = key;
    // One main block at most, even if the cache took out a key without a word.
    if (lists_.list_of(first) == kFree || family.main != kNoBlock) {
      ++family.duplicates;
    } else {
      family.main = first;
    }
  }
  lists_[block].note = key;
  const uint32_t free_duplicates = family.duplicates + (family.main != kNoBlock);
  const bool used = free_duplicates + 1 < cache_.copies(key);
  if (used || list == kFree) {
    ++family.duplicates;
    return list == kFree ? kFree : kDuplicates;
  }
  if (family.main != kNoBlock) {
    lists_.move_to(kDuplicates, family.main);
    ++family.duplicates;
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
    --family.duplicates;
  }
}

}  // namespace statecache
