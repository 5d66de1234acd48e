#ifndef STATECACHE_SHADOW_SELECTOR_H_
#define STATECACHE_SHADOW_SELECTOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "learned_index.h"

namespace statecache {

// Plays every prompt on three caches of `slots` states that hold no data, and says whose order is
// to be active: learned, until another one is ahead both over the latest thousands of prompts and
// over the latest hundreds, for hundreds in a row; and learned again when it leads. A prompt's
// states are set when the next prompt comes, after whatever was dropped in between.
class ShadowSelector {
 public:
  using Node = PointTree::Node;
  using Order = LearnedIndex::Order;

  ShadowSelector(std::shared_ptr<PointTree> points, CostModel cost, size_t slots, size_t ghosts);

  void look_up(std::span<const Node> path, size_t resumable, std::span<const Node> admitted);
  void settle();
  void drop(StateId key);
  Order active() const { return active_; }
  const TreeIndex& gds() const { return *gds_; }
  HeapCounters counters() const;
  void check() const;

 private:
  static constexpr Node kNone = PointTree::kNone;
  static constexpr size_t kShadows = 3;

  struct Shadow {
    std::unique_ptr<StateIndex> index;
    std::vector<uint8_t> held;  // by point
    // Both fade, the second one faster.
    double long_term_savings = 0, short_term_savings = 0;
    Node hit = kNone;
    int32_t hit_depth = 0;
  };
  bool holds(const Shadow& shadow, Node node) const {
    return node < shadow.held.size() && shadow.held[node] != 0;
  }
  void choose();
  void find_hit(Shadow& shadow, size_t resumable);
  void set_states(Shadow& shadow);
  void set(Shadow& shadow, Node node, bool end);
  void let_go(Shadow& shadow, Node node);
  void find_below(const Shadow& shadow, Node node);

  std::shared_ptr<PointTree> points_;
  CostModel cost_;
  size_t slots_;
  std::array<Shadow, kShadows> shadows_;  // in the order of Order
  LearnedIndex* learned_ = nullptr;       // the first of them
  const TreeIndex* gds_ = nullptr;        // the second
  Order active_ = Order::kLearned;
  int ahead_for_ = 0;                  // requests in a row in which another order led
  std::vector<Node> path_, admitted_;  // of the last prompt
  std::vector<StateId> below_;
  std::vector<Node> open_;
};

}  // namespace statecache

#endif  // STATECACHE_SHADOW_SELECTOR_H_
