#ifndef STATECACHE_LEARNED_INDEX_H_
#define STATECACHE_LEARNED_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "statecache/cell_heaps.h"
#include "statecache/members.h"
#include "statecache/point_tree.h"
#include "statecache/state_index.h"

namespace statecache {

class LearnedGuard;

// The policy `learned`: a state is worth the chance that it is the one resumed, learnt by kind and
// age, times its gain. A state's id is the key of its point: the same prefix has the same id, also
// after it was evicted.
//
// With `slots` a guard plays learned, gds and lru beside it, without data, and this index follows
// whoever saves most. The latest `ghosts` evicted states are remembered, in each. Stamps and the
// watermark are kept as under gds, whoever is followed; when gds is, those of its shadow are taken.
//
// Costs, with n resident states: O(log n) a call as in StateIndex, plus what the points given and
// the members directly below a new point take; every 16th request the table is brought up to date
// in time that does not depend on n. A change of the order followed costs O(n log n).
class LearnedIndex final : public StateIndex {
 public:
  enum class Order : uint8_t { kLearned, kGds, kLru };

  LearnedIndex(CostModel cost, std::optional<int64_t> slots, int64_t ghosts);
  ~LearnedIndex() override;

  // A prompt was looked up. `points` are the keys of the points of its path, as many as known, with
  // their depths in tokens, shallowest first; it may resume at the first `resumable` of them;
  // `admitted` are those of them that will be offered for caching, shallowest first, wherever it
  // resumes; the last one is the prompt's end. O(points). Throws std::invalid_argument for what is
  // no path, changing nothing.
  void on_prompt(std::span<const StateId> points, std::span<const int64_t> depths,
                 int64_t resumable, std::span<const StateId> admitted) override;
  void insert(StateId state, int64_t depth, std::optional<StateId> parent,
              std::span<const StateId> children, bool end = false) override;
  void touch(StateId state, bool end = false) override;
  void drop(std::span<const StateId> points) override;

  Order order() const;
  size_t ghosts() const { return members_.ghosts(); }
  size_t points() const { return points_->size(); }
  // Of two entries of a heap, guard included, since construction.
  uint64_t comparisons() const;
  // The price of a state under `learned`, whoever is followed.
  double rank(StateId state) const;
  void check() const override;

 private:
  friend class LearnedGuard;
  using PointNode = PointTree::Node;

  LearnedIndex(CostModel cost, size_t ghosts, std::shared_ptr<PointTree> points);
  void look_up(std::span<const PointNode> path, size_t resumable,
               std::span<const PointNode> admitted);
  void follow(Order order);

  void rank_changed(Slot slot) override;
  void removing(Slot slot) override;
  Slot lowest() override;
  PointNode point_of(Slot slot) const { return slot < point_of_.size() ? point_of_[slot] : kNone; }

  std::shared_ptr<PointTree> points_;
  Members members_;
  CellHeaps heaps_;
  std::unique_ptr<LearnedGuard> guard_;
  Order order_ = Order::kLearned;
  bool dropping_ = false;
  std::vector<PointNode> point_of_;  // by slot
  std::vector<Slot> slot_at_;        // by point, of residents
};

std::string_view name_of(LearnedIndex::Order order);

// The index of a policy by name: "gds", "lru", or "learned", which alone looks at `slots` and
// `ghosts`. Throws std::invalid_argument, listing the known names, for any other.
std::unique_ptr<StateIndex> make_index(std::string_view policy, CostModel cost,
                                       std::optional<int64_t> slots, int64_t ghosts);

}  // namespace statecache

#endif  // STATECACHE_LEARNED_INDEX_H_
