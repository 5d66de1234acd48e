#ifndef STATECACHE_LEARNED_INDEX_H_
#define STATECACHE_LEARNED_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "bucket_heaps.h"
#include "point_tree.h"
#include "tracked_states.h"
#include "tree_index.h"

namespace statecache {

class ShadowSelector;

// The policy `learned`: a state's rank is the chance that it is the one resumed, learnt by kind and
// age, times its gain. A state's id is the key of its point.
//
// With `slots` a selector plays learned, gds and lru beside it, without data, and this index evicts
// in the order of the one that saves most. The latest `ghosts` evicted states are remembered, in
// each. Stamps and the watermark are kept as under gds, whichever order is active; when that of gds
// becomes active, those of its shadow are taken.
//
// Costs, with n resident states: O(log n) a call as in StateIndex, plus what the points given and
// the tracked states directly below a new point take; every 16th prompt the table is brought up to
// date in time that grows with the ghosts remembered, not with n. A change of the active order
// costs O(n log n).
class LearnedIndex final : public TreeIndex {
 public:
  enum class Order : uint8_t { kLearned, kGds, kLru };

  // Throws std::invalid_argument for fewer slots than 1, or fewer ghosts than 0.
  LearnedIndex(CostModel cost, std::optional<int64_t> slots, int64_t ghosts);
  ~LearnedIndex() override;

  std::string_view policy() const override { return name_of(Order::kLearned); }
  bool needs_prompts() const override { return true; }
  void on_prompt(std::span<const StateId> points, std::span<const int64_t> depths,
                 int64_t resumable, std::span<const StateId> admitted) override;
  void insert(StateId state, int64_t depth, std::optional<StateId> parent,
              std::span<const StateId> children, bool end = false) override;
  void touch(StateId state, bool end = false) override;
  void drop(std::span<const StateId> points) override;

  std::string_view order() const override { return name_of(active_); }
  size_t ghosts() const override { return tracked_.ghosts(); }
  size_t points() const override { return points_->size(); }
  // With those of the shadows.
  HeapCounters counters() const override;
  // The rank under `learned`, whichever order is active.
  double rank(StateId state) const override;
  void check() const override;

 private:
  friend class ShadowSelector;
  using PointNode = PointTree::Node;
  static constexpr size_t kReach = 64;  // states of a chain that are looked at on each side

  LearnedIndex(CostModel cost, size_t ghosts, std::shared_ptr<PointTree> points);
  void look_up(std::span<const PointNode> path, size_t resumable,
               std::span<const PointNode> admitted);
  void activate(Order order);
  static std::string_view name_of(Order order);

  void rank_changed(Slot slot) override;
  void removing(Slot slot) override;
  Slot lowest() override;
  double rank_of(Slot slot) const { return tracked_.worth(point_of_[slot]) * node_at(slot).gain; }
  Slot spare_in_chain(Slot victim) const;
  bool goes_before(Slot a, Slot b) const;
  PointNode point_of(Slot slot) const { return slot < point_of_.size() ? point_of_[slot] : kNone; }

  std::shared_ptr<PointTree> points_;
  TrackedStates tracked_;
  BucketHeaps heaps_;
  std::unique_ptr<ShadowSelector> selector_;
  Order active_ = Order::kLearned;
  bool dropping_ = false;
  std::vector<PointNode> point_of_;  // by slot
  std::vector<Slot> slot_at_;        // by point, of residents
};

}  // namespace statecache

#endif  // STATECACHE_LEARNED_INDEX_H_
