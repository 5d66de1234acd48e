#include "learned_index.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <tuple>

#include "policy_factories.h"
#include "shadow_selector.h"

namespace statecache {

std::unique_ptr<StateIndex> make_learned(const PolicyOptions& options) {
  return std::make_unique<LearnedIndex>(options.cost, options.slots, options.ghosts);
}

std::string_view LearnedIndex::name_of(Order order) {
  switch (order) {
    case Order::kGds:
      return "gds";
    case Order::kLru:
      return "lru";
    default:
      return "learned";
  }
}

LearnedIndex::LearnedIndex(CostModel cost, size_t ghosts, std::shared_ptr<PointTree> points)
    : TreeIndex(cost),
      points_(std::move(points)),
      tracked_(*points_, ghosts, [this](PointNode node) { rank_changed(slot_at_[node]); }) {
  rebuild_heap(HeapOrder::kNone);
}

LearnedIndex::LearnedIndex(CostModel cost, std::optional<int64_t> slots, int64_t ghosts)
    : LearnedIndex(cost, static_cast<size_t>(ghosts), std::make_shared<PointTree>()) {
  if (ghosts < 0) throw std::invalid_argument("cannot remember fewer than 0 ghosts");
  if (!slots) return;
  if (*slots < 1) throw std::invalid_argument("the policy learned needs 1 slot or more");
  selector_ = std::make_unique<ShadowSelector>(points_, cost, static_cast<size_t>(*slots),
                                               static_cast<size_t>(ghosts));
}

LearnedIndex::~LearnedIndex() = default;

void LearnedIndex::on_prompt(std::span<const StateId> points, std::span<const int64_t> depths,
                             int64_t resumable, std::span<const StateId> admitted) {
  if (points.size() != depths.size()) {
    throw std::invalid_argument(std::to_string(points.size()) + " points have " +
                                std::to_string(depths.size()) + " depths");
  }
  if (resumable < 0 || resumable > std::ssize(points)) {
    throw std::invalid_argument(std::to_string(resumable) + " of " + std::to_string(points.size()) +
                                " points cannot be resumable");
  }
  std::vector<size_t> places;
  size_t at = 0;
  for (const StateId point : admitted) {
    while (at < points.size() && points[at] != point) ++at;
    if (at == points.size()) {
      throw std::invalid_argument("point " + std::to_string(point) +
                                  " is admitted out of the order of its path");
    }
    places.push_back(at++);
  }
  const std::vector<PointNode>& path = points_->offer(points, depths);
  std::vector<PointNode> nodes;
  for (const size_t place : places) nodes.push_back(path[place]);
  const auto first = static_cast<size_t>(resumable);
  if (selector_) selector_->settle();
  look_up(path, first, nodes);
  if (selector_) {
    selector_->look_up(path, first, nodes);
    activate(selector_->active());
  }
}

void LearnedIndex::look_up(std::span<const PointNode> path, size_t resumable,
                           std::span<const PointNode> admitted) {
  tracked_.look_up(path, resumable, admitted);
}

void LearnedIndex::insert(StateId state, int64_t depth, std::optional<StateId> parent,
                          std::span<const StateId> children, bool end) {
  if (!contains(state)) points_->check_depth(state, depth);
  TreeIndex::insert(state, depth, parent, children);
  const Slot slot = slot_of(state);
  std::vector<PointNode> below;
  for (const StateId child : children) below.push_back(point_of_[slot_of(child)]);
  const PointNode above = parent ? point_of_[slot_of(*parent)] : kNone;
  const PointNode node = points_->ensure(state, static_cast<int32_t>(depth), above, below);
  if (slot >= point_of_.size()) point_of_.resize(slots(), kNone);
  if (node >= slot_at_.size()) slot_at_.resize(points_->capacity(), kNone);
  point_of_[slot] = node;
  slot_at_[node] = slot;
  tracked_.set(node, end);
  rank_changed(slot);
}

void LearnedIndex::touch(StateId state, bool end) {
  TreeIndex::touch(state);
  tracked_.use(point_of_[slot_of(state)], end);
}

void LearnedIndex::drop(std::span<const StateId> points) {
  for (const StateId point : points) {
    if (selector_) selector_->drop(point);
    dropping_ = true;
    if (contains(point)) erase(point);
    dropping_ = false;
    const PointNode node = points_->find(point);
    if (node != kNone && tracked_.contains(node)) tracked_.forget(node);
  }
}

HeapCounters LearnedIndex::counters() const {
  HeapCounters all = TreeIndex::counters();
  all.comparisons += heaps_.comparisons();
  if (selector_) {
    const HeapCounters beside = selector_->counters();
    all.comparisons += beside.comparisons;
    all.repushes += beside.repushes;
  }
  return all;
}

double LearnedIndex::rank(StateId state) const {
  const Slot slot = slot_of(state);
  return rank_of(slot);
}

void LearnedIndex::activate(Order order) {
  if (order == active_) return;
  active_ = order;
  // What was evicted in another order has raised the watermark far above the stamps of gds.
  if (order == Order::kGds) adopt(selector_->gds());
  heaps_.clear();
  rebuild_heap(order == Order::kGds   ? HeapOrder::kPriority
               : order == Order::kLru ? HeapOrder::kLastUse
                                      : HeapOrder::kNone);
  for (Slot slot = 0; slot < slots(); ++slot) rank_changed(slot);
}

void LearnedIndex::rank_changed(Slot slot) {
  if (active_ != Order::kLearned) return;
  const PointNode point = point_of(slot);
  if (point == kNone) return;  // on its way in or out
  if (!can_go(slot)) {
    heaps_.remove(slot);
    return;
  }
  const Node& node = node_at(slot);
  if (tracked_.inherits(point)) {
    heaps_.update(slot, BucketHeaps::kByRank, rank_of(slot), node.gain, node.last_use);
  } else {
    heaps_.update(slot, tracked_.bucket(point), node.gain, node.gain, node.last_use);
  }
}

void LearnedIndex::removing(Slot slot) {
  heaps_.remove(slot);
  const PointNode point = point_of_[slot];
  point_of_[slot] = kNone;
  slot_at_[point] = kNone;
  tracked_.evict(point);
  if (!dropping_) tracked_.trim();
}

LearnedIndex::Slot LearnedIndex::lowest() {
  if (active_ != Order::kLearned) return TreeIndex::lowest();
  const Slot slot =
      heaps_.lowest([this](BucketHeaps::ClassBucket bucket) { return tracked_.index_of(bucket); });
  return slot == kNone ? kNone : spare_in_chain(slot);
}

// The state itself, unless it is the first one of a long chain in its doubling of depth and another
// state of that chain is not. A chain are states with one child each.
LearnedIndex::Slot LearnedIndex::spare_in_chain(Slot victim) const {
  const auto in_chain = [this](Slot slot) {
    const Slot child = slot == kNone ? kNone : node_at(slot).first_child;
    return child != kNone && node_at(child).next_sibling == kNone;
  };
  const auto doubling = [this](Slot slot) {
    return slot == kNone ? 0 : std::bit_width(static_cast<uint32_t>(node_at(slot).depth));
  };
  const auto is_first = [&](Slot slot) { return doubling(slot) > doubling(node_at(slot).parent); };
  if (!in_chain(victim) || !is_first(victim)) return victim;
  Slot spare = kNone;
  size_t length = 1;
  const auto visit = [&](Slot slot) {
    ++length;
    if (!is_first(slot) && can_go(slot) && (spare == kNone || goes_before(slot, spare))) {
      spare = slot;
    }
  };
  Slot slot = node_at(victim).first_child;
  for (size_t seen = 0; seen < kReach && in_chain(slot); ++seen) {
    visit(slot);
    slot = node_at(slot).first_child;
  }
  slot = node_at(victim).parent;
  for (size_t seen = 0; seen < kReach && in_chain(slot); ++seen) {
    visit(slot);
    slot = node_at(slot).parent;
  }
  return spare != kNone && 2 * length > std::min(size(), 2 * kReach) ? spare : victim;
}

bool LearnedIndex::goes_before(Slot a, Slot b) const {
  const auto key = [this](Slot slot) {
    return std::tuple(rank_of(slot), node_at(slot).gain, node_at(slot).last_use);
  };
  return key(a) < key(b);
}

void LearnedIndex::check() const {
  TreeIndex::check();
  tracked_.check();
  if (selector_) selector_->check();
  if (!heaps_.in_order()) throw std::logic_error("broken invariant: heaps of buckets");
  for (Slot slot = 0; slot < slots(); ++slot) {
    const Node& node = node_at(slot);
    const bool held = heaps_.contains(slot);
    if (held != (active_ == Order::kLearned && can_go(slot))) {
      broken("a victim under learned is in a heap", node.id);
    }
    if (!held) continue;
    const bool by_rank = tracked_.inherits(point_of_[slot]);
    const auto bucket = by_rank ? BucketHeaps::kByRank : tracked_.bucket(point_of_[slot]);
    if (!heaps_.holds(slot, bucket, by_rank ? rank_of(slot) : node.gain, node.gain,
                      node.last_use)) {
      broken("a state is in the heap of its bucket", node.id);
    }
  }
}

}  // namespace statecache
