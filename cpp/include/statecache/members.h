#ifndef STATECACHE_MEMBERS_H_
#define STATECACHE_MEMBERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "statecache/learned_table.h"
#include "statecache/point_tree.h"

namespace statecache {

// What `learned` knows of the states of one cache: those that are resident and the latest
// of those evicted, which live on without data as ghosts. Together they are the members; a member's
// parent is the nearest shallower member of its path.
//
// Each member has a cell: its class (role and kind) and the bucket of its age. Its worth is that of
// the cell in the table. A ghost lends its worth to its heir, the nearest resident state above it:
// worth(resident) is the best of its own and what its ghosts lend.
//
// Ages are kept in one list a bucket, in the order of last use, so a member costs O(1) for each
// bucket it enters. Heirs keep counts of their ghosts by cell.
class Members {
 public:
  using Node = PointTree::Node;
  using Cell = LearnedTable::Cell;
  static constexpr Node kNone = PointTree::kNone;

  // `worth_changed` is told each resident node whose best_cell() may have changed.
  Members(PointTree& points, size_t most_ghosts, std::function<void(Node)> worth_changed);

  // A prompt was looked up: counts exposure, finds the deepest member among the first `resumable`
  // of `path`, counts it as a hit, and remembers it as the source of the `admitted` points.
  void look_up(std::span<const Node> path, size_t resumable, std::span<const Node> admitted);

  void set(Node node, bool end);  // resident from now on
  void use(Node node, bool end);  // a resident one was used
  void evict(Node node);          // a resident one becomes a ghost
  void trim();                    // forgets the oldest ghosts beyond the most allowed
  void forget(Node node);         // any member
  bool contains(Node node) const { return node < members_.size() && members_[node].in; }

  // The cell that a resident state's worth comes from: its own, or that of the best ghost.
  Cell best_cell(Node node) const;
  double worth(Cell cell) const { return table_.index(cell); }
  size_t ghosts() const { return ghosts_; }
  uint64_t requests() const { return requests_; }

  void check() const;

 private:
  static constexpr int kBuckets = LearnedTable::kBuckets;
  static constexpr uint32_t kNoNest = UINT32_MAX;

  struct Member {
    bool in = false;
    bool resident = false;
    bool end = false;        // of a prompt
    uint8_t generation = 0;  // turns of its lineage before it, at most 3
    uint8_t superseded = 0;  // prompt ends set below it since its last use, at most 2
    Cell cell = 0;
    uint32_t children = 0;                               // among the members
    uint32_t nest = kNoNest;                             // of a resident one: what its ghosts lend
    Node above = kNone;                                  // parent among the members
    uint64_t last = 0;                                   // request of its last use
    Node older = kNone, newer = kNone;                   // in the list of its bucket
    Node evicted_before = kNone, evicted_after = kNone;  // of a ghost
    uint64_t born = 0;                                   // of the point that `source` was noted for
    std::optional<int64_t> source;  // key of the point its request would have resumed
  };
  // The ghosts of one heir, by cell, and the best cell.
  struct Nest {
    Node heir = kNone;
    Cell best = 0;
    std::vector<std::pair<Cell, uint32_t>> cells;
  };
  struct List {
    Node oldest = kNone, newest = kNone;
  };

  Member& member(Node node);
  uint64_t now() const { return requests_ == 0 ? 0 : requests_ - 1; }
  Node find_above(Node node) const;
  Node heir_of(Node ghost) const;
  template <class Visit>
  void for_each_child(Node node, Visit&& visit) const;

  // Role and kind as one number.
  int class_of(Node node) const;
  void reclass(Node node);
  void move_to(Node node, Cell cell);
  void advance(uint64_t now);
  void renew(Node node);
  void append(Node node, int bucket);
  void take_out(Node node, int bucket);
  void supersede(Node node);

  void enter(Node node);
  void leave_ghosts(Node node);
  void lend(Node heir, Cell cell, uint32_t count);
  void take_back(Node heir, Cell cell, uint32_t count);
  void find_best(Nest& nest);
  void collect_ghosts(Node node, std::vector<Cell>& cells) const;
  void close_nest(Node node);

  PointTree& points_;
  std::function<void(Node)> worth_changed_;
  LearnedTable table_;
  uint64_t requests_ = 0;
  size_t ghosts_ = 0;
  size_t most_ghosts_;
  std::vector<Member> members_;  // by node
  std::vector<Nest> nests_;
  std::array<uint32_t, LearnedTable::kCells> counts_{};
  std::array<List, LearnedTable::kBuckets> ages_{};
  Node first_evicted_ = kNone, last_evicted_ = kNone;
};

// Visits the members below `node` with no other member in between.
template <class Visit>
void Members::for_each_child(Node node, Visit&& visit) const {
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

#endif  // STATECACHE_MEMBERS_H_
