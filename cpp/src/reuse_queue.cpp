#include "statecache/reuse_queue.h"

#include <algorithm>
#include <array>
#include <utility>

namespace statecache {

namespace {

// Ratios of ages (unproven to proven) at which a block of either kind goes.
struct Ratio {
  uint64_t unproven, proven;
};
constexpr std::array<Ratio, 5> kRatios{{{1, 1}, {7, 5}, {2, 1}, {14, 5}, {4, 1}}};
constexpr uint64_t kLearnEvery = 64;

}  // namespace

int64_t Ghosts::id_of(std::string_view key) {
  return static_cast<int64_t>(std::hash<std::string_view>()(key));
}

void Ghosts::clear() {
  std::fill(ring_.begin(), ring_.end(), Entry{});
  slot_of_ = SlotMap();
}

void Ghosts::drop(Entry& entry) {
  if (entry.dropped_at == 0) return;
  slot_of_.erase(entry.id);
  entry = Entry{};
}

void Ghosts::put(std::string_view key, bool proven, uint64_t now) {
  const int64_t id = id_of(key);
  if (const uint32_t twin = slot_of_.find(id); twin != SlotMap::kNone) drop(ring_[twin]);
  const size_t slot = now % ring_.size();
  drop(ring_[slot]);
  ring_[slot] = {.id = id, .dropped_at = now, .proven = proven};
  slot_of_.insert(id, static_cast<uint32_t>(slot));
}

Ghosts::Ghost Ghosts::take(std::string_view key) {
  const uint32_t slot = slot_of_.find(id_of(key));
  if (slot == SlotMap::kNone) return {};
  const Ghost ghost{
      .found = true, .proven = ring_[slot].proven, .dropped_at = ring_[slot].dropped_at};
  drop(ring_[slot]);
  return ghost;
}

ReuseQueue::ReuseQueue(size_t blocks, BlockCache& cache, std::string ending)
    : BlockQueue(blocks, 4, cache),
      ending_(std::move(ending)),
      proven_(blocks),
      freed_at_(blocks),
      family_of_(blocks),
      ghosts_(blocks) {}

void ReuseQueue::looked_up(std::span<const std::string_view> missing) {
  ++clock_;
  if (watches()) {
    for (const std::string_view key : missing) {
      const Ghosts::Ghost ghost = ghosts_.take(key);
      if (ghost.found && ghost.dropped_at + blocks() > handed_out_) ++used_[ghost.proven];
    }
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
  const uint64_t unproven_age = clock_ + 1 - freed_at_[unproven];
  const uint64_t proven_age = clock_ + 1 - freed_at_[proven];
  return ratio.unproven * unproven_age >= ratio.proven * proven_age ? unproven : proven;
}

void ReuseQueue::handed_out(Block block, const CachedBlock& seen, bool last) {
  ++handed_out_;
  const bool proven = proven_[block] != 0;
  if (last && lists_.list_of(block) >= kProven && seen.key.ends_with(ending_)) {
    ghosts_.put(seen.key.substr(0, seen.key.size() - ending_.size()), proven, handed_out_);
    ++dropped_[proven];
  }
  leave_family(block);
  proven_[block] = fresh_is_proven_;
}

void ReuseQueue::hit(Block block) {
  leave_family(block);
  proven_[block] = 1;
}

void ReuseQueue::emptied(Block block) {
  leave_family(block);
  lists_.move_to(kFree, block);
}

void ReuseQueue::forget() {
  std::fill(family_of_.begin(), family_of_.end(), nullptr);
  families_.clear();
  ghosts_.clear();
}

void ReuseQueue::place(Block block, const CachedBlock& seen) {
  List list = kFree;
  if (!seen.key.empty()) {
    freed_at_[block] = clock_;
    if (!seen.apart) list = proven_[block] ? kProven : kUnproven;
    if (seen.copies > 1) list = place_of_copy(block, seen, list);
  }
  lists_.push_back(list, block);
}

BlockLists::List ReuseQueue::place_of_copy(Block block, const CachedBlock& seen, List list) {
  auto found = families_.find(seen.key);
  if (found == families_.end()) found = families_.emplace(seen.key, Family{}).first;
  Family& family = found->second;
  if (is_free(seen.first) && family_of_[seen.first] == nullptr) {
    family_of_[seen.first] = &*found;
    if (lists_.list_of(seen.first) == kFree) {
      ++family.copies;
    } else {
      family.main = seen.first;
    }
  }
  family_of_[block] = &*found;
  const uint32_t free_copies = family.copies + (family.main != kNoBlock);
  const bool used = free_copies + 1 < seen.copies;
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
  Families::value_type* const found = std::exchange(family_of_[block], nullptr);
  if (found == nullptr) return;
  Family& family = found->second;
  if (family.main == block) {
    family.main = kNoBlock;
  } else {
    --family.copies;
  }
  if (family.copies == 0 && family.main == kNoBlock) families_.erase(families_.find(found->first));
}

}  // namespace statecache
