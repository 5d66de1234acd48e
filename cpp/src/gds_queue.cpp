#include "statecache/gds_queue.h"

#include <stdexcept>
#include <utility>

namespace statecache {

GdsQueue::GdsQueue(const BlockHashIndex& cache, StateIndex& index, std::vector<std::string> endings)
    : BlockQueue(3, cache), index_(index), endings_(std::move(endings)), part_(cache.blocks()) {}

void GdsQueue::committed(StateId state, std::string_view name) {
  if (states_.contains(name) || by_id_.contains(state)) {
    throw std::invalid_argument("state " + std::to_string(state) + " or its name is known already");
  }
  index_.pin(state);
  const auto made = states_.emplace(name, State{}).first;
  made->second.id = state;
  made->second.name = made->first;
  made->second.of_group.resize(endings_.size());
  by_id_[state] = &made->second;
}

std::vector<StateId> GdsQueue::take_gone() { return std::exchange(gone_, {}); }

GdsQueue::Part GdsQueue::part_of(std::string_view key) {
  for (size_t group = 0; group < endings_.size(); ++group) {
    if (!key.ends_with(endings_[group])) continue;
    const auto found = states_.find(key.substr(0, key.size() - endings_[group].size()));
    return {found == states_.end() ? nullptr : &found->second, group};
  }
  return {};
}

void GdsQueue::place(Block block, BlockHashIndex::Number key) {
  lists_[block].time = ++clock_;
  if (key == BlockHashIndex::kNone || cache_.has_checkpoint(key)) {
    lists_.push_back(kFree, block);
    return;
  }
  const Part part = part_of(cache_.key(key));
  if (part.state == nullptr) {
    lists_.push_back(kOthers, block);
    return;
  }
  lists_.push_back(kStates, block);
  part_[block] = part;
  State& state = *part.state;
  state.freed_at = clock_;
  state.blocks.insert(block);
  if (++state.of_group[part.group] == 1 && ++state.groups == endings_.size()) {
    index_.unpin(state.id);
  }
}

Block GdsQueue::next() {
  if (const Block block = lists_.front(kFree); block != kNoBlock) return block;
  const Block oldest = lists_.front(kOthers);
  const std::optional<StateId> cheapest = index_.peek();
  if (cheapest) {
    State& state = *by_id_.at(*cheapest);
    if (oldest == kNoBlock || state.freed_at < lists_[oldest].time) {
      index_.evict(1);
      release(state);
      return lists_.front(kFree);
    }
  }
  if (oldest != kNoBlock) return oldest;
  // What is left are blocks of states that are partly in use.
  State& state = *part_[lists_.front(kStates)].state;
  index_.erase(state.id);
  release(state);
  return lists_.front(kFree);
}

// Its free blocks serve nothing any more.
void GdsQueue::release(State& state) {
  for (const Block block : state.blocks) {
    lists_.move_to(kFree, block);
    part_[block] = {};
  }
  gone_.push_back(state.id);
  by_id_.erase(state.id);
  states_.erase(states_.find(state.name));
}

void GdsQueue::handed_out(Block, List, BlockHashIndex::Number key, bool last) {
  if (!last) return;
  // A block that is kept apart, or was freed before its state was told of, takes the state along.
  if (State* const state = part_of(cache_.key(key)).state; state != nullptr) {
    index_.erase(state->id);
    release(*state);
  }
}

void GdsQueue::hit(Block block) {
  if (lists_.list_of(block) != kStates) return;
  const Part part = std::exchange(part_[block], {});
  State& state = *part.state;
  state.blocks.erase(block);
  if (--state.of_group[part.group] > 0) return;
  if (state.groups-- == endings_.size()) index_.pin(state.id);
}

void GdsQueue::emptied(Block block) {
  if (lists_.list_of(block) == kStates) {
    State& state = *part_[block].state;
    index_.erase(state.id);
    release(state);
  } else {
    lists_.move_to(kFree, block);
  }
}

void GdsQueue::forget() {
  for (const auto& [id, state] : by_id_) {
    index_.erase(id);
    gone_.push_back(id);
  }
  by_id_.clear();
  states_.clear();
  part_.assign(part_.size(), {});
}

}  // namespace statecache
