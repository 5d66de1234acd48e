#include "statecache/learned_index.h"

#include <stdexcept>
#include <string>

#include "statecache/learned_guard.h"

namespace statecache {

std::string_view name_of(LearnedIndex::Order order) {
  switch (order) {
    case LearnedIndex::Order::kGds:
      return "gds";
    case LearnedIndex::Order::kLru:
      return "lru";
    default:
      return "learned";
  }
}

std::unique_ptr<StateIndex> make_index(std::string_view policy, CostModel cost,
                                       std::optional<int64_t> slots, int64_t ghosts) {
  if (policy == "learned") return std::make_unique<LearnedIndex>(cost, slots, ghosts);
  return std::make_unique<StateIndex>(parse_policy(policy), cost);
}

LearnedIndex::LearnedIndex(CostModel cost, size_t ghosts, std::shared_ptr<PointTree> points)
    : StateIndex(Policy::kGds, cost),
      points_(std::move(points)),
      members_(*points_, ghosts, [this](PointNode node) { rank_changed(slot_at_[node]); }) {
  rebuild_heap(HeapOrder::kNone);
}

LearnedIndex::LearnedIndex(CostModel cost, std::optional<int64_t> slots, int64_t ghosts)
    : LearnedIndex(cost, static_cast<size_t>(ghosts), std::make_shared<PointTree>()) {
  if (ghosts < 0) throw std::invalid_argument("cannot remember fewer than 0 ghosts");
  if (!slots) return;
  if (*slots < 1) throw std::invalid_argument("the guard needs 1 slot or more");
  guard_ = std::make_unique<LearnedGuard>(points_, cost, static_cast<size_t>(*slots),
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
  if (guard_) guard_->settle();
  look_up(path, first, nodes);
  if (guard_) {
    guard_->look_up(path, first, nodes);
    follow(guard_->order());
  }
}

void LearnedIndex::look_up(std::span<const PointNode> path, size_t resumable,
                           std::span<const PointNode> admitted) {
  members_.look_up(path, resumable, admitted);
}

void LearnedIndex::insert(StateId state, int64_t depth, std::optional<StateId> parent,
                          std::span<const StateId> children, bool end) {
  if (!contains(state)) points_->check_depth(state, depth);
  StateIndex::insert(state, depth, parent, children);
  const Slot slot = slot_of(state);
  std::vector<PointNode> below;
  for (const StateId child : children) below.push_back(point_of_[slot_of(child)]);
  const PointNode above = parent ? point_of_[slot_of(*parent)] : kNone;
  const PointNode node = points_->ensure(state, static_cast<int32_t>(depth), above, below);
  if (slot >= point_of_.size()) point_of_.resize(nodes_.size(), kNone);
  if (node >= slot_at_.size()) slot_at_.resize(points_->capacity(), kNone);
  point_of_[slot] = node;
  slot_at_[node] = slot;
  members_.set(node, end);
  rank_changed(slot);
}

void LearnedIndex::touch(StateId state, bool end) {
  StateIndex::touch(state);
  members_.use(point_of_[slot_of(state)], end);
}

void LearnedIndex::drop(std::span<const StateId> points) {
  for (const StateId point : points) {
    if (guard_) guard_->drop(point);
    dropping_ = true;
    if (contains(point)) erase(point);
    dropping_ = false;
    const PointNode node = points_->find(point);
    if (node != kNone && members_.contains(node)) members_.forget(node);
  }
}

LearnedIndex::Order LearnedIndex::order() const { return order_; }

uint64_t LearnedIndex::comparisons() const {
  return counters().comparisons + heaps_.comparisons() + (guard_ ? guard_->comparisons() : 0);
}

double LearnedIndex::rank(StateId state) const {
  const Slot slot = slot_of(state);
  return members_.worth(members_.best_cell(point_of_[slot])) * nodes_[slot].gain;
}

void LearnedIndex::follow(Order order) {
  if (order == order_) return;
  order_ = order;
  // What was evicted in another order has raised the watermark far above the stamps of gds.
  if (order == Order::kGds) adopt(guard_->gds());
  heaps_.clear();
  rebuild_heap(order == Order::kGds   ? HeapOrder::kPriority
               : order == Order::kLru ? HeapOrder::kLastUse
                                      : HeapOrder::kNone);
  for (Slot slot = 0; slot < nodes_.size(); ++slot) rank_changed(slot);
}

void LearnedIndex::rank_changed(Slot slot) {
  if (order_ != Order::kLearned) return;
  const PointNode point = point_of(slot);
  if (point == kNone) return;  // on its way in or out
  if (!can_go(slot)) {
    heaps_.take(slot);
    return;
  }
  heaps_.file(slot, members_.best_cell(point), nodes_[slot].gain, nodes_[slot].last_use);
}

void LearnedIndex::removing(Slot slot) {
  heaps_.take(slot);
  const PointNode point = point_of_[slot];
  point_of_[slot] = kNone;
  slot_at_[point] = kNone;
  members_.evict(point);
  if (!dropping_) members_.trim();
}

LearnedIndex::Slot LearnedIndex::lowest() {
  if (order_ != Order::kLearned) return StateIndex::lowest();
  return heaps_.lowest([this](CellHeaps::Cell cell) { return members_.worth(cell); });
}

void LearnedIndex::check() const {
  StateIndex::check();
  members_.check();
  if (guard_) guard_->check();
  if (!heaps_.in_order()) throw std::logic_error("broken invariant: heaps of cells");
  for (Slot slot = 0; slot < nodes_.size(); ++slot) {
    const Node& node = nodes_[slot];
    const bool filed = heaps_.filed(slot);
    if (filed != (order_ == Order::kLearned && can_go(slot))) {
      broken("a victim under learned is filed", node.id);
    }
    if (filed &&
        !heaps_.filed_as(slot, members_.best_cell(point_of_[slot]), node.gain, node.last_use)) {
      broken("a state is filed where it belongs", node.id);
    }
  }
}

}  // namespace statecache
