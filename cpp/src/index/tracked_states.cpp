#include "tracked_states.h"

#include <algorithm>
#include <bit>

namespace statecache {

namespace {

constexpr int64_t kBlockTokens = 512;

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
    for (GhostGroup& group : groups_) find_best(group);
  }
  if (now % LearnedTable::kHalving == LearnedTable::kHalving - 1) table_.halve();
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
    if (const Node inheritor = inheritor_of(node); inheritor != kNone)
      remove_ghost(inheritor, entry.bucket, 1);
    leave_ghosts(node);
  } else {
    enter(node);
  }
  // Ghosts below it, with no resident state in between, get a new inheritor.
  std::vector<ClassBucket> below;
  collect_ghosts(node, below);
  if (!below.empty()) {
    const Node inheritor = inheritor_of(node);
    for (const ClassBucket bucket : below) {
      if (inheritor != kNone) remove_ghost(inheritor, bucket, 1);
    }
  }
  tracked_[node].resident = true;
  for (const ClassBucket bucket : below) add_ghost(node, bucket, 1);
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
      for (const auto& [bucket, count] : group.buckets) add_ghost(inheritor, bucket, count);
    }
  }
  if (inheritor != kNone) add_ghost(inheritor, entry.bucket, 1);
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
  if (const Node inheritor = inheritor_of(node); inheritor != kNone)
    remove_ghost(inheritor, entry.bucket, 1);
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

TrackedStates::ClassBucket TrackedStates::best_bucket(Node node) const {
  const TrackedState& entry = tracked_[node];
  if (entry.group == kNoGroup) return entry.bucket;
  const ClassBucket inherited = groups_[entry.group].best;
  return table_.index(inherited) > table_.index(entry.bucket) ? inherited : entry.bucket;
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
    add_ghost(inheritor, bucket, 1);
    remove_ghost(inheritor, before, 1);
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

void TrackedStates::add_ghost(Node inheritor, ClassBucket bucket, uint32_t count) {
  TrackedState& entry = tracked_[inheritor];
  if (entry.group == kNoGroup) {
    entry.group = static_cast<uint32_t>(groups_.size());
    groups_.push_back({inheritor, bucket, {}});
  }
  GhostGroup& group = groups_[entry.group];
  const auto held = std::find_if(group.buckets.begin(), group.buckets.end(),
                                 [bucket](const auto& counted) { return counted.first == bucket; });
  if (held != group.buckets.end()) {
    held->second += count;
    return;
  }
  group.buckets.emplace_back(bucket, count);
  if (group.buckets.size() == 1 || table_.index(bucket) > table_.index(group.best)) {
    group.best = bucket;
    rank_changed_(inheritor);
  }
}

void TrackedStates::remove_ghost(Node inheritor, ClassBucket bucket, uint32_t count) {
  GhostGroup& group = groups_[tracked_[inheritor].group];
  const auto held = std::find_if(group.buckets.begin(), group.buckets.end(),
                                 [bucket](const auto& counted) { return counted.first == bucket; });
  if ((held->second -= count) > 0) return;
  *held = group.buckets.back();
  group.buckets.pop_back();
  if (group.buckets.empty()) {
    close_group(inheritor);
    rank_changed_(inheritor);
  } else if (group.best == bucket) {
    find_best(group);
  }
}

void TrackedStates::find_best(GhostGroup& group) {
  group.best = group.buckets.front().first;
  for (const auto& [bucket, count] : group.buckets) {
    if (table_.index(bucket) > table_.index(group.best)) group.best = bucket;
  }
  rank_changed_(group.inheritor);
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
