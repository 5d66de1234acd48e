#include "tracked_states.h"

#include <algorithm>
#include <bit>

namespace statecache {

namespace {

constexpr int64_t kBlockTokens = 512;
// Below are the buckets of prompt ends with one tracked state below them at most.
constexpr int kAddingUp = 2 * LearnedTable::kKinds * LearnedTable::kAgeBuckets;

}  // namespace

TrackedStates::TrackedStates(PointTree& points, size_t most_ghosts,
                             std::function<void(Node)> rank_changed)
    : points_(points), rank_changed_(std::move(rank_changed)), most_ghosts_(most_ghosts) {}

void TrackedStates::look_up(std::span<const Node> path, size_t resumable,
                            std::span<const Node> admitted) {
  const uint64_t now = requests_++;
  advance(now);
  if (now % LearnedTable::kEvery == 0) table_.expose(counts_);
  size_t at = resumable;
  while (at > 0 && !contains(path[at - 1])) --at;
  std::optional<int64_t> resumed;
  if (at > 0) {
    const Node node = path[at - 1];
    table_.hit(tracked_[node].bucket);
    tracked_[node].superseded = 0;
    renew(node);
    reclass(node);
    resumed = points_[node].key;
  }
  for (const Node node : admitted) {
    TrackedState& offered = state_of(node);
    offered.source = resumed;
    offered.born = points_[node].born;
  }
  if (now % LearnedTable::kEvery == 0) {
    table_.rebuild();
    for (GhostGroup& group : groups_) {
      assess(group);
      rank_changed_(group.inheritor);
    }
    table_.fade();
  }
}

void TrackedStates::set(Node node, bool end) {
  TrackedState& entry = state_of(node);
  uint8_t generation = 0;
  if (entry.source && entry.born == points_[node].born) {
    if (const Node source = points_.find(*entry.source); contains(source)) {
      generation = static_cast<uint8_t>(std::min(3, tracked_[source].generation + 1));
    }
  }
  const bool was_ghost = entry.in;
  if (was_ghost) {
    if (const Node inheritor = inheritor_of(node); inheritor != kNone) {
      remove_ghost(inheritor, entry.bucket);
      ghosts_changed(inheritor);
    }
    leave_ghosts(node);
  } else {
    enter(node);
  }
  // Ghosts below it, with no resident state in between, get a new inheritor.
  std::vector<ClassBucket> below;
  collect_ghosts(node, below);
  if (!below.empty()) {
    if (const Node inheritor = inheritor_of(node); inheritor != kNone) {
      for (const ClassBucket bucket : below) remove_ghost(inheritor, bucket);
      ghosts_changed(inheritor);
    }
  }
  tracked_[node].resident = true;
  for (const ClassBucket bucket : below) add_ghosts(node, bucket, 1);
  if (!below.empty()) ghosts_changed(node);
  tracked_[node].generation = generation;
  tracked_[node].superseded = 0;
  tracked_[node].end = end;
  renew(node);
  reclass(node);
  if (end) supersede(node);
}

void TrackedStates::use(Node node, bool end) {
  renew(node);
  if (!end) return;
  tracked_[node].end = true;
  reclass(node);
  supersede(node);
}

void TrackedStates::evict(Node node) {
  TrackedState& entry = tracked_[node];
  const Node inheritor = inheritor_of(node);
  entry.resident = false;
  if (entry.group != kNoGroup) {
    const GhostGroup group = std::move(groups_[entry.group]);
    close_group(node);
    if (inheritor != kNone) {
      for (const auto& [bucket, count] : group.buckets) add_ghosts(inheritor, bucket, count);
    }
  }
  if (inheritor != kNone) {
    add_ghosts(inheritor, entry.bucket, 1);
    ghosts_changed(inheritor);
  }
  ++ghosts_;
  entry.evicted_before = last_evicted_;
  entry.evicted_after = kNone;
  (last_evicted_ == kNone ? first_evicted_ : tracked_[last_evicted_].evicted_after) = node;
  last_evicted_ = node;
}

void TrackedStates::trim() {
  while (ghosts_ > most_ghosts_) forget(first_evicted_);
}

void TrackedStates::forget(Node node) {
  if (tracked_[node].resident) evict(node);
  TrackedState& entry = tracked_[node];
  if (const Node inheritor = inheritor_of(node); inheritor != kNone) {
    remove_ghost(inheritor, entry.bucket);
    ghosts_changed(inheritor);
  }
  leave_ghosts(node);
  std::vector<Node> children;
  for_each_child(node, [&](Node child) { children.push_back(child); });
  const Node above = entry.above;
  const int age_bucket = entry.bucket % kAgeBuckets;
  --counts_[entry.bucket];
  take_out(node, age_bucket);
  TrackedState blank;
  blank.source = entry.source;
  blank.born = entry.born;
  entry = blank;
  for (const Node child : children) {
    tracked_[child].above = above;
    reclass(child);
  }
  if (above != kNone) {
    tracked_[above].children += static_cast<uint32_t>(children.size()) - 1;
    reclass(above);
  }
  points_.release(node);
}

double TrackedStates::worth(Node node) const {
  const TrackedState& entry = tracked_[node];
  const double own = table_.index(entry.bucket);
  if (entry.group == kNoGroup) return own;
  const GhostGroup& group = groups_[entry.group];
  return std::max(group.best, own + group.chances);
}

TrackedStates::TrackedState& TrackedStates::state_of(Node node) {
  if (node >= tracked_.size()) tracked_.resize(std::max<size_t>(node + 1, points_.capacity()));
  return tracked_[node];
}

TrackedStates::Node TrackedStates::find_above(Node node) const {
  Node above = points_[node].above;
  while (above != kNone && !contains(above)) above = points_[above].above;
  return above;
}

TrackedStates::Node TrackedStates::inheritor_of(Node ghost) const {
  Node above = tracked_[ghost].above;
  while (above != kNone && !tracked_[above].resident) above = tracked_[above].above;
  return above;
}

int TrackedStates::class_of(Node node) const {
  const TrackedState& entry = tracked_[node];
  const int role = static_cast<int>(std::min(entry.children, 2U)) + (entry.end ? 0 : 3);
  int kind = entry.generation;
  if (entry.children > 0) {
    const int64_t above = entry.above == kNone ? 0 : points_[entry.above].depth;
    const auto blocks = static_cast<uint64_t>((points_[node].depth - above) / kBlockTokens);
    const int log2 = blocks == 0 ? 0 : static_cast<int>(std::bit_width(blocks)) - 1;
    kind = 8 * static_cast<int>(entry.superseded >= 2) + std::min(7, log2);
  }
  return role * LearnedTable::kKinds + kind;
}

void TrackedStates::reclass(Node node) {
  const int age_bucket = tracked_[node].bucket % kAgeBuckets;
  move_to(node, static_cast<ClassBucket>(class_of(node) * kAgeBuckets + age_bucket));
}

void TrackedStates::move_to(Node node, ClassBucket bucket) {
  TrackedState& entry = tracked_[node];
  if (entry.bucket == bucket) return;
  --counts_[entry.bucket];
  ++counts_[bucket];
  const ClassBucket before = entry.bucket;
  entry.bucket = bucket;
  if (entry.resident) {
    rank_changed_(node);
  } else if (const Node inheritor = inheritor_of(node); inheritor != kNone) {
    add_ghosts(inheritor, bucket, 1);
    remove_ghost(inheritor, before);
    ghosts_changed(inheritor);
  }
}

// Moves tracked states whose age has reached the next age_bucket, oldest first.
void TrackedStates::advance(uint64_t now) {
  for (int age_bucket = 0; age_bucket + 1 < kAgeBuckets; ++age_bucket) {
    for (Node node = ages_[age_bucket].oldest; node != kNone; node = ages_[age_bucket].oldest) {
      if (now - tracked_[node].last < uint64_t{2} << age_bucket) break;
      take_out(node, age_bucket);
      append(node, age_bucket + 1);
      move_to(node, static_cast<ClassBucket>(tracked_[node].bucket + 1));
    }
  }
}

void TrackedStates::renew(Node node) {
  TrackedState& entry = tracked_[node];
  const int age_bucket = entry.bucket % kAgeBuckets;
  take_out(node, age_bucket);
  entry.last = now();
  append(node, 0);
  move_to(node, static_cast<ClassBucket>(entry.bucket - age_bucket));
}

void TrackedStates::append(Node node, int age_bucket) {
  List& list = ages_[age_bucket];
  TrackedState& entry = tracked_[node];
  entry.older = list.newest;
  entry.newer = kNone;
  (list.newest == kNone ? list.oldest : tracked_[list.newest].newer) = node;
  list.newest = node;
}

void TrackedStates::take_out(Node node, int age_bucket) {
  List& list = ages_[age_bucket];
  const TrackedState& entry = tracked_[node];
  (entry.older == kNone ? list.oldest : tracked_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? list.newest : tracked_[entry.newer].older) = entry.older;
}

// A prompt end was set or used below these.
void TrackedStates::supersede(Node node) {
  for (Node above = tracked_[node].above; above != kNone; above = tracked_[above].above) {
    TrackedState& entry = tracked_[above];
    if (entry.superseded >= 2) continue;
    if (++entry.superseded == 2) reclass(above);
  }
}

// Makes a node a tracked state, in bucket 0.
void TrackedStates::enter(Node node) {
  points_.hold(node);
  std::vector<Node> children;
  for_each_child(node, [&](Node child) { children.push_back(child); });
  TrackedState& entry = tracked_[node];
  entry.in = true;
  entry.bucket = 0;
  entry.group = kNoGroup;
  entry.above = find_above(node);
  entry.children = static_cast<uint32_t>(children.size());
  entry.last = now();
  ++counts_[0];
  append(node, 0);
  for (const Node child : children) {
    tracked_[child].above = node;
    reclass(child);
  }
  if (entry.above != kNone) {
    tracked_[entry.above].children += 1 - static_cast<uint32_t>(children.size());
    reclass(entry.above);
  }
}

void TrackedStates::leave_ghosts(Node node) {
  TrackedState& entry = tracked_[node];
  const Node before = entry.evicted_before, after = entry.evicted_after;
  (before == kNone ? first_evicted_ : tracked_[before].evicted_after) = after;
  (after == kNone ? last_evicted_ : tracked_[after].evicted_before) = before;
  entry.evicted_before = entry.evicted_after = kNone;
  --ghosts_;
}

void TrackedStates::add_ghosts(Node inheritor, ClassBucket bucket, uint32_t count) {
  TrackedState& entry = tracked_[inheritor];
  if (entry.group == kNoGroup) {
    entry.group = static_cast<uint32_t>(groups_.size());
    groups_.push_back({inheritor, 0, 0, {}});
  }
  auto& buckets = groups_[entry.group].buckets;
  const auto at = std::lower_bound(buckets.begin(), buckets.end(), std::pair{bucket, 0U});
  if (at != buckets.end() && at->first == bucket) {
    at->second += count;
  } else {
    buckets.emplace(at, bucket, count);
  }
}

void TrackedStates::remove_ghost(Node inheritor, ClassBucket bucket) {
  auto& buckets = groups_[tracked_[inheritor].group].buckets;
  const auto at = std::lower_bound(buckets.begin(), buckets.end(), std::pair{bucket, 0U});
  if (--at->second == 0) buckets.erase(at);
}

void TrackedStates::ghosts_changed(Node inheritor) {
  GhostGroup& group = groups_[tracked_[inheritor].group];
  if (group.buckets.empty()) {
    close_group(inheritor);
  } else {
    assess(group);
  }
  rank_changed_(inheritor);
}

// In the order of buckets, so that sums are the same whatever came first.
void TrackedStates::assess(GhostGroup& group) const {
  group.best = group.chances = 0;
  for (const auto& [bucket, count] : group.buckets) {
    group.best = std::max(group.best, table_.index(bucket));
    if (bucket < kAddingUp) group.chances += count * table_.rate(bucket);
  }
}

// The buckets of the ghosts below `node` with no resident state in between.
void TrackedStates::collect_ghosts(Node node, std::vector<ClassBucket>& buckets) const {
  std::vector<Node> open = {node};
  while (!open.empty()) {
    const Node at = open.back();
    open.pop_back();
    for_each_child(at, [&](Node child) {
      if (tracked_[child].resident) return;
      buckets.push_back(tracked_[child].bucket);
      open.push_back(child);
    });
  }
}

void TrackedStates::close_group(Node node) {
  const uint32_t at = tracked_[node].group;
  tracked_[node].group = kNoGroup;
  if (at + 1 != groups_.size()) {
    groups_[at] = std::move(groups_.back());
    tracked_[groups_[at].inheritor].group = at;
  }
  groups_.pop_back();
}

}  // namespace statecache
