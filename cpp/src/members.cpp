#include "statecache/members.h"

#include <algorithm>
#include <bit>

namespace statecache {

namespace {

constexpr int64_t kBlockTokens = 512;

}  // namespace

Members::Members(PointTree& points, size_t most_ghosts, std::function<void(Node)> worth_changed)
    : points_(points), worth_changed_(std::move(worth_changed)), most_ghosts_(most_ghosts) {}

void Members::look_up(std::span<const Node> path, size_t resumable,
                      std::span<const Node> admitted) {
  const uint64_t now = requests_++;
  advance(now);
  if (now % LearnedTable::kEvery == 0) table_.expose(counts_);
  size_t at = resumable;
  while (at > 0 && !contains(path[at - 1])) --at;
  std::optional<int64_t> resumed;
  if (at > 0) {
    const Node node = path[at - 1];
    table_.hit(members_[node].cell);
    members_[node].superseded = 0;
    renew(node);
    reclass(node);
    resumed = points_[node].key;
  }
  for (const Node node : admitted) {
    Member& offered = member(node);
    offered.source = resumed;
    offered.born = points_[node].born;
  }
  if (now % LearnedTable::kEvery == 0) {
    table_.rebuild();
    for (Nest& nest : nests_) find_best(nest);
  }
  if (now % LearnedTable::kHalving == LearnedTable::kHalving - 1) table_.halve();
}

void Members::set(Node node, bool end) {
  Member& entry = member(node);
  uint8_t generation = 0;
  if (entry.source && entry.born == points_[node].born) {
    if (const Node source = points_.find(*entry.source); contains(source)) {
      generation = static_cast<uint8_t>(std::min(3, members_[source].generation + 1));
    }
  }
  const bool was_ghost = entry.in;
  if (was_ghost) {
    if (const Node heir = heir_of(node); heir != kNone) take_back(heir, entry.cell, 1);
    leave_ghosts(node);
  } else {
    enter(node);
  }
  // Ghosts below it, with no resident state in between, get a new heir.
  std::vector<Cell> below;
  collect_ghosts(node, below);
  if (!below.empty()) {
    const Node heir = heir_of(node);
    for (const Cell cell : below) {
      if (heir != kNone) take_back(heir, cell, 1);
    }
  }
  members_[node].resident = true;
  for (const Cell cell : below) lend(node, cell, 1);
  members_[node].generation = generation;
  members_[node].superseded = 0;
  members_[node].end = end;
  renew(node);
  reclass(node);
  if (end) supersede(node);
}

void Members::use(Node node, bool end) {
  renew(node);
  if (!end) return;
  members_[node].end = true;
  reclass(node);
  supersede(node);
}

void Members::evict(Node node) {
  Member& entry = members_[node];
  const Node heir = heir_of(node);
  entry.resident = false;
  if (entry.nest != kNoNest) {
    const Nest nest = std::move(nests_[entry.nest]);
    close_nest(node);
    if (heir != kNone) {
      for (const auto& [cell, count] : nest.cells) lend(heir, cell, count);
    }
  }
  if (heir != kNone) lend(heir, entry.cell, 1);
  ++ghosts_;
  entry.evicted_before = last_evicted_;
  entry.evicted_after = kNone;
  (last_evicted_ == kNone ? first_evicted_ : members_[last_evicted_].evicted_after) = node;
  last_evicted_ = node;
}

void Members::trim() {
  while (ghosts_ > most_ghosts_) forget(first_evicted_);
}

void Members::forget(Node node) {
  if (members_[node].resident) evict(node);
  Member& entry = members_[node];
  if (const Node heir = heir_of(node); heir != kNone) take_back(heir, entry.cell, 1);
  leave_ghosts(node);
  std::vector<Node> children;
  for_each_child(node, [&](Node child) { children.push_back(child); });
  const Node above = entry.above;
  const int bucket = entry.cell % kBuckets;
  --counts_[entry.cell];
  take_out(node, bucket);
  Member blank;
  blank.source = entry.source;
  blank.born = entry.born;
  entry = blank;
  for (const Node child : children) {
    members_[child].above = above;
    reclass(child);
  }
  if (above != kNone) {
    members_[above].children += static_cast<uint32_t>(children.size()) - 1;
    reclass(above);
  }
  points_.release(node);
}

Members::Cell Members::best_cell(Node node) const {
  const Member& entry = members_[node];
  if (entry.nest == kNoNest) return entry.cell;
  const Cell lent = nests_[entry.nest].best;
  return table_.index(lent) > table_.index(entry.cell) ? lent : entry.cell;
}

Members::Member& Members::member(Node node) {
  if (node >= members_.size()) members_.resize(std::max<size_t>(node + 1, points_.capacity()));
  return members_[node];
}

Members::Node Members::find_above(Node node) const {
  Node above = points_[node].above;
  while (above != kNone && !contains(above)) above = points_[above].above;
  return above;
}

Members::Node Members::heir_of(Node ghost) const {
  Node above = members_[ghost].above;
  while (above != kNone && !members_[above].resident) above = members_[above].above;
  return above;
}

int Members::class_of(Node node) const {
  const Member& entry = members_[node];
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

void Members::reclass(Node node) {
  const int bucket = members_[node].cell % kBuckets;
  move_to(node, static_cast<Cell>(class_of(node) * kBuckets + bucket));
}

void Members::move_to(Node node, Cell cell) {
  Member& entry = members_[node];
  if (entry.cell == cell) return;
  --counts_[entry.cell];
  ++counts_[cell];
  const Cell before = entry.cell;
  entry.cell = cell;
  if (entry.resident) {
    worth_changed_(node);
  } else if (const Node heir = heir_of(node); heir != kNone) {
    lend(heir, cell, 1);
    take_back(heir, before, 1);
  }
}

// Moves members whose age has reached the next bucket, oldest first.
void Members::advance(uint64_t now) {
  for (int bucket = 0; bucket + 1 < kBuckets; ++bucket) {
    for (Node node = ages_[bucket].oldest; node != kNone; node = ages_[bucket].oldest) {
      if (now - members_[node].last < uint64_t{2} << bucket) break;
      take_out(node, bucket);
      append(node, bucket + 1);
      move_to(node, static_cast<Cell>(members_[node].cell + 1));
    }
  }
}

void Members::renew(Node node) {
  Member& entry = members_[node];
  const int bucket = entry.cell % kBuckets;
  take_out(node, bucket);
  entry.last = now();
  append(node, 0);
  move_to(node, static_cast<Cell>(entry.cell - bucket));
}

void Members::append(Node node, int bucket) {
  List& list = ages_[bucket];
  Member& entry = members_[node];
  entry.older = list.newest;
  entry.newer = kNone;
  (list.newest == kNone ? list.oldest : members_[list.newest].newer) = node;
  list.newest = node;
}

void Members::take_out(Node node, int bucket) {
  List& list = ages_[bucket];
  const Member& entry = members_[node];
  (entry.older == kNone ? list.oldest : members_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? list.newest : members_[entry.newer].older) = entry.older;
}

// A prompt end was set or used below these.
void Members::supersede(Node node) {
  for (Node above = members_[node].above; above != kNone; above = members_[above].above) {
    Member& entry = members_[above];
    if (entry.superseded >= 2) continue;
    if (++entry.superseded == 2) reclass(above);
  }
}

// Makes a node a member, in cell 0 of age 0.
void Members::enter(Node node) {
  points_.hold(node);
  std::vector<Node> children;
  for_each_child(node, [&](Node child) { children.push_back(child); });
  Member& entry = members_[node];
  entry.in = true;
  entry.cell = 0;
  entry.nest = kNoNest;
  entry.above = find_above(node);
  entry.children = static_cast<uint32_t>(children.size());
  entry.last = now();
  ++counts_[0];
  append(node, 0);
  for (const Node child : children) {
    members_[child].above = node;
    reclass(child);
  }
  if (entry.above != kNone) {
    members_[entry.above].children += 1 - static_cast<uint32_t>(children.size());
    reclass(entry.above);
  }
}

void Members::leave_ghosts(Node node) {
  Member& entry = members_[node];
  const Node before = entry.evicted_before, after = entry.evicted_after;
  (before == kNone ? first_evicted_ : members_[before].evicted_after) = after;
  (after == kNone ? last_evicted_ : members_[after].evicted_before) = before;
  entry.evicted_before = entry.evicted_after = kNone;
  --ghosts_;
}

void Members::lend(Node heir, Cell cell, uint32_t count) {
  Member& entry = members_[heir];
  if (entry.nest == kNoNest) {
    entry.nest = static_cast<uint32_t>(nests_.size());
    nests_.push_back({heir, cell, {}});
  }
  Nest& nest = nests_[entry.nest];
  const auto held = std::find_if(nest.cells.begin(), nest.cells.end(),
                                 [cell](const auto& some) { return some.first == cell; });
  if (held != nest.cells.end()) {
    held->second += count;
    return;
  }
  nest.cells.emplace_back(cell, count);
  if (nest.cells.size() == 1 || table_.index(cell) > table_.index(nest.best)) {
    nest.best = cell;
    worth_changed_(heir);
  }
}

void Members::take_back(Node heir, Cell cell, uint32_t count) {
  Nest& nest = nests_[members_[heir].nest];
  const auto held = std::find_if(nest.cells.begin(), nest.cells.end(),
                                 [cell](const auto& some) { return some.first == cell; });
  if ((held->second -= count) > 0) return;
  *held = nest.cells.back();
  nest.cells.pop_back();
  if (nest.cells.empty()) {
    close_nest(heir);
    worth_changed_(heir);
  } else if (nest.best == cell) {
    find_best(nest);
  }
}

void Members::find_best(Nest& nest) {
  nest.best = nest.cells.front().first;
  for (const auto& [cell, count] : nest.cells) {
    if (table_.index(cell) > table_.index(nest.best)) nest.best = cell;
  }
  worth_changed_(nest.heir);
}

// The cells of the ghosts below `node` with no resident state in between.
void Members::collect_ghosts(Node node, std::vector<Cell>& cells) const {
  std::vector<Node> open = {node};
  while (!open.empty()) {
    const Node at = open.back();
    open.pop_back();
    for_each_child(at, [&](Node child) {
      if (members_[child].resident) return;
      cells.push_back(members_[child].cell);
      open.push_back(child);
    });
  }
}

void Members::close_nest(Node node) {
  const uint32_t at = members_[node].nest;
  members_[node].nest = kNoNest;
  if (at + 1 != nests_.size()) {
    nests_[at] = std::move(nests_.back());
    members_[nests_[at].heir].nest = at;
  }
  nests_.pop_back();
}

}  // namespace statecache
