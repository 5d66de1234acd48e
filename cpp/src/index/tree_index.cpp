#include "tree_index.h"

#include <algorithm>
#include <bit>
#include <string>

namespace statecache {

namespace {

std::string named(StateId state) { return "state " + std::to_string(state); }

[[noreturn]] void refuse(StateId state, const std::string& why) {
  throw std::invalid_argument(named(state) + " " + why);
}

}  // namespace

UnknownState::UnknownState(StateId state) : std::out_of_range(named(state) + " is not resident") {}

void StateIndex::on_prompt(std::span<const StateId>, std::span<const int64_t>, int64_t,
                           std::span<const StateId>) {}

void TreeIndex::insert(StateId state, int64_t depth, std::optional<StateId> parent,
                       std::span<const StateId> children, bool) {
  if (contains(state)) refuse(state, "is already resident");
  if (depth < 0 || depth > kMaxDepth) {
    refuse(state, "has depth " + std::to_string(depth) + ", outside 0 .. 2147483647");
  }
  const Slot parent_slot = parent ? slot_of(*parent) : kNone;
  if (parent && nodes_[parent_slot].depth >= depth) {
    refuse(state, "at depth " + std::to_string(depth) + " needs a shallower parent than " +
                      named(*parent));
  }
  const std::vector<Slot> child_slots = slots_of_children(state, depth, parent_slot, children);

  const Slot slot = allocate();
  slot_of_.insert(state, slot);
  nodes_[slot] = Node{.id = state, .depth = static_cast<int32_t>(depth)};
  stamp(slot);
  hang(slot, parent_slot);
  for (const Slot child : child_slots) {
    unlink(child);
    hang(child, slot);
    heap_lower(child);
  }
  if (!child_slots.empty()) children_changed(slot);
  if (parent_slot != kNone) children_changed(parent_slot);
  heap_push(slot);
}

// Verifies that these can be the children of a new state.
std::vector<TreeIndex::Slot> TreeIndex::slots_of_children(StateId state, int64_t depth, Slot parent,
                                                          std::span<const StateId> children) const {
  std::vector<Slot> found;
  found.reserve(children.size());
  for (const StateId child : children) {
    const Slot slot = slot_of(child);
    if (nodes_[slot].depth <= depth) {
      refuse(state, "needs deeper children than " + named(child));
    }
    if (nodes_[slot].parent != parent) {
      refuse(state, "cannot take child " + named(child) + ", which hangs under another parent");
    }
    found.push_back(slot);
  }
  std::vector<Slot> sorted = found;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twin = std::adjacent_find(sorted.begin(), sorted.end()); twin != sorted.end()) {
    refuse(state, "lists child " + named(nodes_[*twin].id) + " twice");
  }
  return found;
}

void TreeIndex::touch(StateId state, bool) { stamp(slot_of(state)); }

void TreeIndex::pin(StateId state) {
  const Slot slot = slot_of(state);
  ++nodes_[slot].pins;
  rank_changed(slot);
}

void TreeIndex::unpin(StateId state) {
  const Slot slot = slot_of(state);
  Node& node = nodes_[slot];
  if (node.pins == 0) refuse(state, "is not pinned");
  if (--node.pins > 0) return;
  stamp(slot);
  if (heap_at_[slot] == kNone && !node.proposed) heap_push(slot);
}

void TreeIndex::erase(StateId state) { remove(slot_of(state)); }

void TreeIndex::drop(std::span<const StateId> points) {
  for (const StateId point : points) {
    if (const Slot slot = slot_of_.find(point); slot != kNone) remove(slot);
  }
}

void TreeIndex::begin_walk() {
  if (walking_) throw std::logic_error("begin_walk inside a walk: call end_walk first");
  walking_ = true;
}

std::optional<StateId> TreeIndex::next_victim() {
  require_walk("next_victim");
  const Slot victim = propose();
  if (victim == kNone) return std::nullopt;
  return nodes_[victim].id;
}

void TreeIndex::evicted(StateId state) {
  require_walk("evicted");
  const Slot slot = slot_of(state);
  if (!nodes_[slot].proposed) refuse(state, "was not proposed in this walk");
  if (nodes_[slot].pins > 0) refuse(state, "is pinned");
  confirm(slot);
}

void TreeIndex::end_walk() {
  require_walk("end_walk");
  walking_ = false;
  for (const Slot slot : proposals_) {
    Node& node = nodes_[slot];
    if (!node.proposed) continue;
    node.proposed = false;
    if (node.pins == 0) heap_push(slot);
    rank_changed(slot);
  }
  proposals_.clear();
}

std::optional<StateId> TreeIndex::peek() {
  if (walking_) throw std::logic_error("peek inside a walk: call end_walk first");
  const Slot slot = lowest();
  return slot == kNone ? std::nullopt : std::optional(nodes_[slot].id);
}

std::vector<StateId> TreeIndex::evict(int64_t count) {
  if (count < 0) throw std::invalid_argument("cannot evict " + std::to_string(count) + " states");
  begin_walk();
  std::vector<StateId> victims;
  while (std::ssize(victims) < count) {
    const Slot victim = propose();
    if (victim == kNone) break;
    victims.push_back(nodes_[victim].id);
    confirm(victim);
  }
  end_walk();
  return victims;
}

double TreeIndex::priority(StateId state) const { return priority_of(nodes_[slot_of(state)]); }

TreeIndex::Slot TreeIndex::slot_of(StateId state) const {
  const Slot slot = slot_of_.find(state);
  if (slot == kNone) throw UnknownState(state);
  return slot;
}

TreeIndex::Key TreeIndex::key_of(const Node& node) const {
  if (heap_order_ == HeapOrder::kLastUse) return {0, node.last_use};
  return {std::bit_cast<uint64_t>(priority_of(node)), node.last_use};
}

double TreeIndex::gain_of(Slot slot) const {
  if (!cost_) return 0;
  const Node& node = nodes_[slot];
  return cost_->cost(node.parent == kNone ? 0 : nodes_[node.parent].depth, node.depth);
}

void TreeIndex::regain(Slot slot) {
  if (slot == kNone) return;
  nodes_[slot].gain = gain_of(slot);
  rank_changed(slot);
  heap_lower(slot);
}

void TreeIndex::stamp(Slot slot) {
  nodes_[slot].stamp = watermark_;
  nodes_[slot].last_use = ++uses_;
  rank_changed(slot);
}

void TreeIndex::require_walk(const char* call) const {
  if (!walking_) throw std::logic_error(std::string(call) + " outside a walk: call begin_walk");
}

TreeIndex::Slot TreeIndex::lowest() {
  while (!heap_.empty()) {
    Entry top = heap_.front();
    const Node& node = nodes_[top.slot];
    if (node.pins > 0) {
      heap_erase(top.slot);
      continue;
    }
    const Key key = key_of(node);
    ++counters_.comparisons;
    if (less(top.key, key)) {
      ++counters_.repushes;
      top.key = key;
      sift_down(0, top);
      continue;
    }
    return top.slot;
  }
  return kNone;
}

TreeIndex::Slot TreeIndex::propose() {
  const Slot slot = lowest();
  if (slot == kNone) return kNone;
  if (heap_at_[slot] != kNone) heap_erase(slot);
  nodes_[slot].proposed = true;
  rank_changed(slot);
  proposals_.push_back(slot);
  return slot;
}

void TreeIndex::confirm(Slot slot) {
  watermark_ = std::max(watermark_, priority_of(nodes_[slot]));
  remove(slot);
}

TreeIndex::Slot TreeIndex::allocate() {
  if (!free_slots_.empty()) {
    const Slot slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (nodes_.size() >= kNone) throw std::length_error("more than 4294967294 states");
  nodes_.emplace_back();
  heap_at_.push_back(kNone);
  return static_cast<Slot>(nodes_.size() - 1);
}

void TreeIndex::hang(Slot child, Slot parent) {
  Node& node = nodes_[child];
  node.parent = parent;
  node.prev_sibling = node.next_sibling = kNone;
  if (parent != kNone) {
    Node& above = nodes_[parent];
    node.next_sibling = above.first_child;
    if (above.first_child != kNone) nodes_[above.first_child].prev_sibling = child;
    above.first_child = child;
  }
  node.gain = gain_of(child);
  rank_changed(child);
}

void TreeIndex::unlink(Slot child) {
  Node& node = nodes_[child];
  if (node.prev_sibling != kNone) {
    nodes_[node.prev_sibling].next_sibling = node.next_sibling;
  } else if (node.parent != kNone) {
    nodes_[node.parent].first_child = node.next_sibling;
  }
  if (node.next_sibling != kNone) nodes_[node.next_sibling].prev_sibling = node.prev_sibling;
}

void TreeIndex::remove(Slot slot) {
  removing(slot);
  const Slot parent = nodes_[slot].parent;
  unlink(slot);
  for (Slot child = nodes_[slot].first_child; child != kNone;) {
    const Slot next = nodes_[child].next_sibling;
    hang(child, parent);
    child = next;
  }
  if (parent != kNone) children_changed(parent);
  if (heap_at_[slot] != kNone) heap_erase(slot);
  slot_of_.erase(nodes_[slot].id);
  nodes_[slot] = Node{};
  free_slots_.push_back(slot);
}

bool TreeIndex::less(const Key& a, const Key& b) {
  // No branches: which entry is lower cannot be predicted.
  return (a.priority_bits < b.priority_bits) |
         ((a.priority_bits == b.priority_bits) & (a.last_use < b.last_use));
}

void TreeIndex::adopt(const TreeIndex& other) {
  watermark_ = other.watermark_;
  for (Node& node : nodes_) {
    if (node.depth == kFree) continue;
    const Slot theirs = other.slot_of_.find(node.id);
    node.stamp = theirs == kNone ? watermark_ : other.nodes_[theirs].stamp;
  }
}

void TreeIndex::rebuild_heap(HeapOrder order) {
  heap_order_ = order;
  heap_.clear();
  std::fill(heap_at_.begin(), heap_at_.end(), kNone);
  for (Slot slot = 0; slot < nodes_.size(); ++slot) {
    if (can_go(slot)) heap_push(slot);
  }
}

void TreeIndex::heap_push(Slot slot) {
  if (heap_order_ == HeapOrder::kNone) return;
  heap_.emplace_back();
  sift_up(heap_.size() - 1, {key_of(nodes_[slot]), slot});
}

void TreeIndex::heap_erase(Slot slot) {
  const size_t at = heap_at_[slot];
  const Entry last = heap_.back();
  heap_.pop_back();
  heap_at_[slot] = kNone;
  if (at == heap_.size()) return;
  ++counters_.comparisons;
  if (at > 0 && less(last.key, heap_[(at - 1) / kArity].key)) {
    sift_up(at, last);
  } else {
    sift_down(at, last);
  }
}

void TreeIndex::heap_lower(Slot slot) {
  const uint32_t at = heap_at_[slot];
  if (at == kNone) return;
  const Key key = key_of(nodes_[slot]);
  ++counters_.comparisons;
  if (!less(key, heap_[at].key)) return;
  ++counters_.repushes;
  sift_up(at, {key, slot});
}

void TreeIndex::sift_up(size_t at, Entry entry) {
  while (at > 0) {
    const size_t above = (at - 1) / kArity;
    ++counters_.comparisons;
    if (!less(entry.key, heap_[above].key)) break;
    place(at, heap_[above]);
    at = above;
  }
  place(at, entry);
}

void TreeIndex::sift_down(size_t at, Entry entry) {
  for (;;) {
    const size_t first = at * kArity + 1;
    if (first >= heap_.size()) break;
    const size_t end = std::min(first + kArity, heap_.size());
    counters_.comparisons += end - first;
    size_t lowest = first;
    for (size_t child = first + 1; child < end; ++child) {
      lowest = less(heap_[child].key, heap_[lowest].key) ? child : lowest;
    }
    if (!less(heap_[lowest].key, entry.key)) break;
    place(at, heap_[lowest]);
    at = lowest;
  }
  place(at, entry);
}

void TreeIndex::place(size_t at, const Entry& entry) {
  heap_[at] = entry;
  heap_at_[entry.slot] = static_cast<uint32_t>(at);
}

}  // namespace statecache
