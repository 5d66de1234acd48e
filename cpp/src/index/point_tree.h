#ifndef STATECACHE_POINT_TREE_H_
#define STATECACHE_POINT_TREE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "slot_map.h"

namespace statecache {

// Prefix points by their keys, as a tree: what `learned` knows of prompts.
//
// A point lives while something holds it or a deeper point, so memory is that of what is held. Its
// place is fixed by the path that names it first: below the point before it, and above the next one
// of that path if nothing was in between. Look-ups are O(1), the rest is linear in the path given.
class PointTree {
 public:
  using Node = uint32_t;
  static constexpr Node kNone = UINT32_MAX;
  static constexpr size_t kHeldPaths = 256;  // of requests whose states may still be on their way

  struct Point {
    int64_t key = 0;
    uint64_t born = 0;   // a number that no other point ever has; 0 when free
    int32_t depth = -1;  // tokens
    uint32_t holders = 0;
    Node above = kNone;
    Node first_below = kNone;
    Node next = kNone;  // siblings
    Node before = kNone;
  };

  // The nodes of a path, shallowest first, held until kHeldPaths more have come. Throws
  // std::invalid_argument, changing nothing, unless depths rise and agree with what is known.
  const std::vector<Node>& offer(std::span<const int64_t> keys, std::span<const int64_t> depths);

  // The node of `key`, put between `above` and `below` if it is new. The caller holds it.
  Node ensure(int64_t key, int32_t depth, Node above, std::span<const Node> below);

  Node find(int64_t key) const { return nodes_.find(key); }
  const Point& operator[](Node node) const { return points_[node]; }
  // Nodes are numbers below this; a forgotten point's number is given again.
  size_t capacity() const { return points_.size(); }
  size_t size() const { return nodes_.size(); }

  void hold(Node node) { ++points_[node].holders; }
  void release(Node node);  // points that nothing needs are forgotten

  // Throws std::invalid_argument if the point of this key is known at another depth.
  void check_depth(int64_t key, int64_t depth) const;

 private:
  Node add(int64_t key, int32_t depth, Node above);
  void hang(Node node, Node above);
  void unlink(Node node);

  SlotMap nodes_;
  std::vector<Point> points_;
  std::vector<Node> free_;
  std::deque<std::vector<Node>> paths_;
  uint64_t births_ = 0;
};

}  // namespace statecache

#endif  // STATECACHE_POINT_TREE_H_
