#ifndef STATECACHE_TRACKED_STATES_H_
#define STATECACHE_TRACKED_STATES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "learned_table.h"
#include "point_tree.h"

namespace statecache {

// What `learned` knows of the states of one cache: those that are resident, and the latest of those
// evicted, which are tracked without data as ghosts. A tracked state's parent is the nearest
// shallower tracked state of its path.
//
// Each tracked state is in a bucket: its class (role and kind) and the range of its age. The table
// has an index for each bucket. The inheritor of a ghost, the nearest resident state above it,
// is worth the index of its best ghost, or its own with the chances of its ghosts that were ends of
// prompts and no forks, if that is more.
//
// There is a list for each range of ages, in the order of last use, so a tracked state costs O(1)
// for each range it enters. The ghosts of an inheritor are a group, counted by bucket.
class TrackedStates {
 public:
  using Node = PointTree::Node;
  using ClassBucket = LearnedTable::ClassBucket;
  static constexpr Node kNone = PointTree::kNone;

  // `rank_changed` is told each resident node whose bucket() or worth() may have changed.
  TrackedStates(PointTree& points, size_t most_ghosts, std::function<void(Node)> rank_changed);

  // A prompt was looked up: counts exposure, finds the deepest tracked state among the first
  // `resumable` of `path`, counts it as a hit, and remembers it as the source of the `admitted`
  // points.
  void look_up(std::span<const Node> path, size_t resumable, std::span<const Node> admitted);

  void set(Node node, bool end);  // resident from now on
  void use(Node node, bool end);  // a resident one was used
  void evict(Node node);          // a resident one becomes a ghost
  void trim();                    // forgets the oldest ghosts beyond the most allowed
  void forget(Node node);         // any tracked state
  bool contains(Node node) const { return node < tracked_.size() && tracked_[node].in; }

  ClassBucket bucket(Node node) const { return tracked_[node].bucket; }
  // Whether a resident state has ghosts. One without is worth the index of its bucket.
  bool inherits(Node node) const { return tracked_[node].group != kNoGroup; }
  // How much a resident state is worth keeping for each unit of its gain.
  double worth(Node node) const;
  // How much a state in this bucket is worth keeping for each unit of its gain.
  double index_of(ClassBucket bucket) const { return table_.index(bucket); }
  size_t ghosts() const { return ghosts_; }
  uint64_t requests() const { return requests_; }

  void check() const;

 private:
  static constexpr int kAgeBuckets = LearnedTable::kAgeBuckets;
  static constexpr uint32_t kNoGroup = UINT32_MAX;

  struct TrackedState {
    bool in = false;
    bool resident = false;
    bool end = false;        // of a prompt
    uint8_t generation = 0;  // turns of its lineage before it, at most 3
    uint8_t superseded = 0;  // prompt ends set below it since its last use, at most 2
    ClassBucket bucket = 0;
    uint32_t children = 0;                               // among the tracked states
    uint32_t group = kNoGroup;                           // of a resident one that has ghosts
    Node above = kNone;                                  // parent among the tracked states
    uint64_t last = 0;                                   // request of its last use
    Node older = kNone, newer = kNone;                   // in the list of its age
    Node evicted_before = kNone, evicted_after = kNone;  // of a ghost
    uint64_t born = 0;                                   // of the point that `source` was noted for
    std::optional<int64_t> source;  // key of the point its request would have resumed
  };
  // The ghosts of one inheritor, counted by bucket in ascending order.
  struct GhostGroup {
    Node inheritor = kNone;
    double best = 0;     // index of the best one
    double chances = 0;  // of those that add up, together
    std::vector<std::pair<ClassBucket, uint32_t>> buckets;
  };
  struct List {
    Node oldest = kNone, newest = kNone;
  };

  TrackedState& state_of(Node node);
  uint64_t now() const { return requests_ == 0 ? 0 : requests_ - 1; }
  Node find_above(Node node) const;
  Node inheritor_of(Node ghost) const;
  template <class Visit>
  void for_each_child(Node node, Visit&& visit) const;

  // Role and kind as one number.
  int class_of(Node node) const;
  void reclass(Node node);
  void move_to(Node node, ClassBucket bucket);
  void advance(uint64_t now);
  void renew(Node node);
  void append(Node node, int age_bucket);
  void take_out(Node node, int age_bucket);
  void supersede(Node node);

  void enter(Node node);
  void leave_ghosts(Node node);
  void add_ghosts(Node inheritor, ClassBucket bucket, uint32_t count);
  void remove_ghost(Node inheritor, ClassBucket bucket);
  void ghosts_changed(Node inheritor);  // after the last of several such calls
  void assess(GhostGroup& group) const;
  void collect_ghosts(Node node, std::vector<ClassBucket>& buckets) const;
  void close_group(Node node);

  PointTree& points_;
  std::function<void(Node)> rank_changed_;
  LearnedTable table_;
  uint64_t requests_ = 0;
  size_t ghosts_ = 0;
  size_t most_ghosts_;
  std::vector<TrackedState> tracked_;  // by node
  std::vector<GhostGroup> groups_;
  std::array<uint32_t, LearnedTable::kClassBuckets> counts_{};
  std::array<List, LearnedTable::kAgeBuckets> ages_{};
  Node first_evicted_ = kNone, last_evicted_ = kNone;
};

// Visits the tracked states below `node` with no other tracked state in between.
template <class Visit>
void TrackedStates::for_each_child(Node node, Visit&& visit) const {
  const auto leave = [&](Node from) {  // the next one in preorder that is not below `from`
    while (from != node && points_[from].next == kNone) from = points_[from].above;
    return from == node ? node : points_[from].next;
  };
  Node at = points_[node].first_below;
  if (at == kNone) return;
  while (at != node) {
    if (contains(at)) {
      visit(at);
      at = leave(at);
    } else {
      at = points_[at].first_below != kNone ? points_[at].first_below : leave(at);
    }
  }
}

}  // namespace statecache

#endif  // STATECACHE_TRACKED_STATES_H_
