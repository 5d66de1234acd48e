#ifndef STATECACHE_LEARNED_GUARD_H_
#define STATECACHE_LEARNED_GUARD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "statecache/learned_index.h"

namespace statecache {

// Plays every request on three caches of `slots` states that hold no data, and says whose order to
// follow: the one that saved most over the latest thousands of requests is home, and another one is
// followed from there while it is well ahead in the latest hundreds. A request's states are set
// when the next request comes, after whatever was dropped in between.
class LearnedGuard {
 public:
  using Node = PointTree::Node;
  using Order = LearnedIndex::Order;

  LearnedGuard(std::shared_ptr<PointTree> points, CostModel cost, size_t slots, size_t ghosts);

  void look_up(std::span<const Node> path, size_t resumable, std::span<const Node> admitted);
  void settle();
  void drop(StateId key);
  Order order() const { return order_; }
  const StateIndex& gds() const { return *shadows_[1].index; }
  uint64_t comparisons() const;
  void check() const;

 private:
  static constexpr Node kNone = PointTree::kNone;
  static constexpr size_t kShadows = 3;

  struct Shadow {
    std::unique_ptr<StateIndex> index;
    std::vector<uint8_t> held;     // by point
    double saved = 0, lately = 0;  // both fade, `lately` faster
    Node hit = kNone;
    int32_t hit_depth = 0;
  };
  bool holds(const Shadow& shadow, Node node) const {
    return node < shadow.held.size() && shadow.held[node] != 0;
  }
  size_t choose();
  void find_hit(Shadow& shadow, size_t resumable);
  void set_states(Shadow& shadow);
  void set(Shadow& shadow, Node node, bool end);
  void let_go(Shadow& shadow, Node node);
  void find_below(const Shadow& shadow, Node node);

  std::shared_ptr<PointTree> points_;
  CostModel cost_;
  size_t slots_;
  LearnedIndex* learned_ = nullptr;  // the first shadow
  std::array<Shadow, kShadows> shadows_;
  Order order_ = Order::kLearned;
  size_t home_ = 0;
  std::vector<Node> path_, admitted_;  // of the last request
  std::vector<StateId> below_;
  std::vector<Node> open_;
};

}  // namespace statecache

#endif  // STATECACHE_LEARNED_GUARD_H_
