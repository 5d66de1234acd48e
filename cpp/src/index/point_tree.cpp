#include "point_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "statecache/cost_model.h"

namespace statecache {

namespace {

[[noreturn]] void refuse(int64_t key, const std::string& why) {
  throw std::invalid_argument("point " + std::to_string(key) + " " + why);
}

}  // namespace

const std::vector<PointTree::Node>& PointTree::offer(std::span<const int64_t> keys,
                                                     std::span<const int64_t> depths) {
  std::vector<Node> path;
  if (paths_.size() == kHeldPaths) path.reserve(keys.size());
  std::vector<int64_t> fresh;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (depths[i] < 0 || depths[i] > kMaxDepth || (i > 0 && depths[i] <= depths[i - 1])) {
      refuse(keys[i], "at depth " + std::to_string(depths[i]) + " is not below the one before it");
    }
    const Node node = find(keys[i]);
    path.push_back(node);
    if (node == kNone) {
      fresh.push_back(keys[i]);
    } else if (points_[node].depth != depths[i]) {
      check_depth(keys[i], depths[i]);
    }
  }
  std::sort(fresh.begin(), fresh.end());
  if (const auto twin = std::adjacent_find(fresh.begin(), fresh.end()); twin != fresh.end()) {
    refuse(*twin, "is on the path twice");
  }
  Node last = kNone;
  Node known = kNone;  // the deepest so far that was there before
  for (size_t i = 0; i < keys.size(); ++i) {
    Node& node = path[i];
    if (node == kNone) {
      node = add(keys[i], static_cast<int32_t>(depths[i]), last);
    } else {
      if (last != known && points_[node].above == known) {
        unlink(node);
        hang(node, last);
      }
      known = node;
    }
    last = node;
  }
  for (const Node node : path) hold(node);
  paths_.push_back(std::move(path));
  if (paths_.size() > kHeldPaths) {
    const std::vector<Node> oldest = std::move(paths_.front());
    paths_.pop_front();
    for (auto node = oldest.rbegin(); node != oldest.rend(); ++node) release(*node);
  }
  return paths_.back();
}

PointTree::Node PointTree::ensure(int64_t key, int32_t depth, Node above,
                                  std::span<const Node> below) {
  if (const Node known = find(key); known != kNone) return known;
  const Node node = add(key, depth, above);
  for (const Node deeper : below) {
    Node top = deeper;
    while (points_[top].above != kNone && points_[points_[top].above].depth > depth) {
      top = points_[top].above;
    }
    if (points_[top].above == above) {
      unlink(top);
      hang(top, node);
    }
  }
  return node;
}

void PointTree::release(Node node) {
  --points_[node].holders;
  while (node != kNone && points_[node].holders == 0 && points_[node].first_below == kNone) {
    const Node above = points_[node].above;
    unlink(node);
    nodes_.erase(points_[node].key);
    points_[node] = Point{};
    free_.push_back(node);
    node = above;
  }
}

void PointTree::check_depth(int64_t key, int64_t depth) const {
  const Node node = find(key);
  if (node == kNone || points_[node].depth == depth) return;
  refuse(key,
         "has depth " + std::to_string(points_[node].depth) + ", not " + std::to_string(depth));
}

PointTree::Node PointTree::add(int64_t key, int32_t depth, Node above) {
  Node node;
  if (!free_.empty()) {
    node = free_.back();
    free_.pop_back();
  } else {
    if (points_.size() >= kNone) throw std::length_error("more than 4294967294 points");
    node = static_cast<Node>(points_.size());
    points_.emplace_back();
  }
  nodes_.insert(key, node);
  points_[node].key = key;
  points_[node].depth = depth;
  points_[node].born = ++births_;
  hang(node, above);
  return node;
}

void PointTree::hang(Node node, Node above) {
  Point& point = points_[node];
  point.above = above;
  point.before = point.next = kNone;
  if (above == kNone) return;
  point.next = points_[above].first_below;
  if (point.next != kNone) points_[point.next].before = node;
  points_[above].first_below = node;
}

void PointTree::unlink(Node node) {
  const Point& point = points_[node];
  if (point.before != kNone) {
    points_[point.before].next = point.next;
  } else if (point.above != kNone) {
    points_[point.above].first_below = point.next;
  }
  if (point.next != kNone) points_[point.next].before = point.before;
}

}  // namespace statecache
