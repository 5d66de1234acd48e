// What check() verifies: everything that is kept up to date, against its definition.

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <string>
#include <vector>

#include "tracked_states.h"
#include "tree_index.h"

namespace statecache {

namespace {

int age_bucket(uint64_t age) {
  if (age < 2) return 0;
  return std::min(LearnedTable::kAgeBuckets - 1, static_cast<int>(std::bit_width(age)) - 1);
}

}  // namespace

void TreeIndex::broken(const char* invariant, StateId state) {
  throw std::logic_error(std::string("broken invariant: ") + invariant + ", state " +
                         std::to_string(state));
}

void TreeIndex::check() const {
  if (slot_of_.size() + free_slots_.size() != nodes_.size()) {
    throw std::logic_error("broken invariant: resident + free slots = all slots");
  }
  check_tree();
  check_heap();
}

void TreeIndex::check_tree() const {
  size_t resident = 0;
  for (Slot slot = 0; slot < nodes_.size(); ++slot) {
    const Node& node = nodes_[slot];
    if (node.depth == kFree) {
      if (heap_at_[slot] != kNone) broken("a free slot has no heap entry", node.id);
      continue;
    }
    ++resident;
    if (slot_of_.find(node.id) != slot) broken("an id leads to its slot", node.id);
    if (node.last_use == 0 || node.last_use > uses_) broken("a use has been counted", node.id);
    if (node.gain != gain_of(slot)) broken("a gain counts from the parent", node.id);
    if (node.stamp > watermark_) broken("no stamp is above the watermark", node.id);
    if (node.proposed && !walking_) broken("proposals end with their walk", node.id);
    if (node.parent != kNone) {
      const Node& parent = nodes_[node.parent];
      if (parent.depth == kFree) broken("a parent is resident", node.id);
      if (parent.depth >= node.depth) broken("a parent is shallower", node.id);
      const Slot before = node.prev_sibling;
      if ((before == kNone ? parent.first_child : nodes_[before].next_sibling) != slot) {
        broken("a parent lists its child", node.id);
      }
    }
    for (Slot child = node.first_child; child != kNone; child = nodes_[child].next_sibling) {
      if (nodes_[child].parent != slot) broken("a child knows its parent", node.id);
    }
  }
  if (resident != slot_of_.size()) throw std::logic_error("broken invariant: count of residents");
}

void TreeIndex::check_heap() const {
  for (size_t at = 0; at < heap_.size(); ++at) {
    const auto& [key, slot] = heap_[at];
    const Node& node = nodes_[slot];
    if (node.depth == kFree) broken("a heap entry has a state", node.id);
    if (heap_at_[slot] != at) broken("a state knows its heap entry", node.id);
    if (node.proposed) broken("a proposed state is out of the heap", node.id);
    if (less(key_of(node), key)) broken("a heap entry is a lower bound", node.id);
    if (at > 0 && less(key, heap_[(at - 1) / kArity].key)) broken("heap order", node.id);
  }
  for (Slot slot = 0; slot < nodes_.size(); ++slot) {
    if (heap_order_ != HeapOrder::kNone && can_go(slot) && heap_at_[slot] == kNone) {
      broken("a state that can be a victim has a heap entry", nodes_[slot].id);
    }
  }
}

void TrackedStates::check() const {
  const auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("broken invariant: ") + invariant);
  };
  std::array<uint32_t, LearnedTable::kClassBuckets> counts{};
  size_t ghosts = 0;
  for (Node node = 0; node < tracked_.size(); ++node) {
    const TrackedState& entry = tracked_[node];
    if (!entry.in) continue;
    ++counts[entry.bucket];
    ghosts += entry.resident ? 0 : 1;
    require(entry.above == find_above(node), "a tracked state's parent is the nearest above");
    uint32_t children = 0;
    for_each_child(node, [&](Node) { ++children; });
    require(entry.children == children, "a tracked state counts its children");
    const int expected = class_of(node) * kAgeBuckets + age_bucket(now() - entry.last);
    require(entry.bucket == expected, "a tracked state is in the bucket of its class and age");
    if (!entry.resident) continue;
    std::vector<ClassBucket> below, held;
    collect_ghosts(node, below);
    if (entry.group != kNoGroup) {
      const GhostGroup& group = groups_[entry.group];
      require(group.inheritor == node, "a group knows its inheritor");
      for (const auto& [bucket, count] : group.buckets) {
        held.insert(held.end(), count, bucket);
      }
      GhostGroup again = group;
      assess(again);
      require(again.best == group.best, "a group knows its best ghost");
      require(again.chances == group.chances, "a group knows the chances of its ghosts");
    }
    std::sort(below.begin(), below.end());
    std::sort(held.begin(), held.end());
    require(below == held, "a group counts its ghosts");
  }
  require(counts == counts_, "tracked states are counted by bucket");
  require(ghosts == ghosts_, "ghosts are counted");
}

}  // namespace statecache
