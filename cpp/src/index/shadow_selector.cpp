#include "shadow_selector.h"

#include <utility>

#include "gds_index.h"
#include "policy_factories.h"

namespace statecache {

namespace {

constexpr double kDecay = 0.9945994234836332;      // halves in 128 requests
constexpr double kLongDecay = 0.9996616064962437;  // in 2,048
// By how much, and for how many requests in a row, another order than learned must be ahead.
constexpr double kLead = 1.01;
constexpr int kPersistence = 600;

}  // namespace

ShadowSelector::ShadowSelector(std::shared_ptr<PointTree> points, CostModel cost, size_t slots,
                               size_t ghosts)
    : points_(std::move(points)), cost_(cost), slots_(slots) {
  std::unique_ptr<LearnedIndex> learned(new LearnedIndex(cost, ghosts, points_));
  learned_ = learned.get();
  shadows_[0].index = std::move(learned);
  auto gds = std::make_unique<GdsIndex>(cost);
  gds_ = gds.get();
  shadows_[1].index = std::move(gds);
  shadows_[2].index = make_lru({});
}

void ShadowSelector::look_up(std::span<const Node> path, size_t resumable,
                             std::span<const Node> admitted) {
  path_.assign(path.begin(), path.end());
  admitted_.assign(admitted.begin(), admitted.end());
  learned_->look_up(path, resumable, admitted);
  for (Shadow& shadow : shadows_) find_hit(shadow, resumable);
}

void ShadowSelector::settle() {
  for (Shadow& shadow : shadows_) {
    set_states(shadow);
    const double saved = cost_.cost(0, shadow.hit_depth);
    shadow.short_term_savings = shadow.short_term_savings * kDecay + saved;
    shadow.long_term_savings = shadow.long_term_savings * kLongDecay + saved;
    shadow.hit = kNone;
    shadow.hit_depth = 0;
  }
  path_.clear();
  admitted_.clear();
  choose();
}

void ShadowSelector::choose() {
  size_t leader = 0;
  for (size_t k = 1; k < kShadows; ++k) {
    if (shadows_[k].long_term_savings > shadows_[leader].long_term_savings) leader = k;
  }
  const Shadow &ahead = shadows_[leader], &active = shadows_[static_cast<size_t>(active_)];
  const double lead = leader == 0 ? 1.0 : kLead;
  const bool leads = ahead.long_term_savings > active.long_term_savings * lead &&
                     (leader == 0 || ahead.short_term_savings > active.short_term_savings * lead);
  ahead_for_ = leads ? ahead_for_ + 1 : 0;
  if (!leads || (leader != 0 && ahead_for_ <= kPersistence)) return;
  active_ = static_cast<Order>(leader);
  ahead_for_ = 0;
}

void ShadowSelector::drop(StateId key) {
  const Node node = points_->find(key);
  if (node == kNone) return;
  for (Shadow& shadow : shadows_) {
    // The point must outlive the call: its hold goes last.
    points_->hold(node);
    shadow.index->drop(std::span(&key, 1));
    if (holds(shadow, node)) let_go(shadow, node);
    points_->release(node);
    if (points_->find(key) == kNone) return;
  }
}

HeapCounters ShadowSelector::counters() const {
  HeapCounters all;
  for (const Shadow& shadow : shadows_) {
    const HeapCounters own = shadow.index->counters();
    all.comparisons += own.comparisons;
    all.repushes += own.repushes;
  }
  return all;
}

void ShadowSelector::check() const {
  for (const Shadow& shadow : shadows_) shadow.index->check();
}

void ShadowSelector::find_hit(Shadow& shadow, size_t resumable) {
  size_t at = resumable;
  while (at > 0 && !holds(shadow, path_[at - 1])) --at;
  if (at == 0) return;
  shadow.hit = path_[at - 1];
  shadow.hit_depth = (*points_)[shadow.hit].depth;
  const StateId key = (*points_)[shadow.hit].key;
  shadow.index->touch(key);
  shadow.index->pin(key);
}

void ShadowSelector::set_states(Shadow& shadow) {
  for (const Node node : admitted_) {
    if ((*points_)[node].depth > shadow.hit_depth) set(shadow, node, node == admitted_.back());
  }
  if (shadow.hit != kNone && holds(shadow, shadow.hit)) {
    shadow.index->unpin((*points_)[shadow.hit].key);
  }
}

void ShadowSelector::set(Shadow& shadow, Node node, bool end) {
  StateIndex& index = *shadow.index;
  const StateId key = (*points_)[node].key;
  if (holds(shadow, node)) {
    index.touch(key, end);
    return;
  }
  if (index.size() >= slots_) {
    const std::vector<StateId> victims = index.evict(1);
    if (victims.empty()) return;
    let_go(shadow, points_->find(victims.front()));
  }
  Node above = (*points_)[node].above;
  while (above != kNone && !holds(shadow, above)) above = (*points_)[above].above;
  find_below(shadow, node);
  index.insert(key, (*points_)[node].depth,
               above == kNone ? std::nullopt : std::optional((*points_)[above].key), below_, end);
  if (node >= shadow.held.size()) shadow.held.resize(points_->capacity());
  shadow.held[node] = 1;
  points_->hold(node);
}

void ShadowSelector::let_go(Shadow& shadow, Node node) {
  shadow.held[node] = 0;
  points_->release(node);
}

// The shadow's states below `node` with no other one in between.
void ShadowSelector::find_below(const Shadow& shadow, Node node) {
  below_.clear();
  open_.assign(1, node);
  while (!open_.empty()) {
    const Node at = open_.back();
    open_.pop_back();
    for (Node below = (*points_)[at].first_below; below != kNone; below = (*points_)[below].next) {
      if (holds(shadow, below)) {
        below_.push_back((*points_)[below].key);
      } else {
        open_.push_back(below);
      }
    }
  }
}

}  // namespace statecache
