// Any bytes as calls on an index: the first names policy and cost, then each call takes a byte for
// what it is and some for its arguments. After each call the index must keep its invariants, a call
// that throws must have changed nothing, and under gds and lru a victim must be the state with the
// lowest priority, among equals the one not used for the longest.

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "statecache/cost_model.h"
#include "statecache/policies.h"
#include "statecache/state_index.h"

[[noreturn]] void fail(const std::string& problem);

namespace {

using statecache::StateId;
using statecache::StateIndex;

constexpr StateId kIds = 16;

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool done() const { return at_ == end_; }
  uint8_t next() { return done() ? 0 : *at_++; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// What the caller of an index knows of a state.
struct Known {
  int64_t depth = 0;
  std::optional<StateId> parent;
  int pins = 0;
  uint64_t last_use = 0;
  bool proposed = false;
};

class Calls {
 public:
  Calls(Bytes bytes, uint8_t kind) : bytes_(bytes) {
    const auto table = statecache::policies();
    const statecache::CostModel costs[] = {{}, {1, 0}, {0, 1}};
    const auto slots = kind & 0x40U ? std::optional<int64_t>(1 + kind % 8) : std::nullopt;
    const auto& row = table[kind % table.size()];
    index_ = row.make({costs[kind / table.size() % 3], slots, kind % 7});
    learned_ = index_->needs_prompts();
  }

  void run() {
    while (!bytes_.done()) {
      const auto before = snapshot();
      try {
        call(bytes_.next());
      } catch (const std::out_of_range&) {  // UnknownState
        if (snapshot() != before) fail("a call that threw changed something");
      } catch (const std::logic_error&) {
        if (snapshot() != before) fail("a call that threw changed something");
      }
      check();
    }
  }

 private:
  using Snapshot = std::vector<std::pair<bool, double>>;

  Snapshot snapshot() const {
    Snapshot seen{{false, index_->watermark()}};
    for (StateId id = 0; id < kIds; ++id) {
      const bool there = index_->contains(id);
      seen.emplace_back(there, there ? index_->priority(id) : 0);
    }
    return seen;
  }

  StateId id() { return bytes_.next() % kIds; }

  void call(uint8_t what) {
    switch (what % 12) {
      case 0:
      case 1:
        return insert();
      case 2: {
        const StateId state = id();
        index_->touch(state, what & 0x80U);
        return used(state);
      }
      case 3: {
        const StateId state = id();
        index_->pin(state);
        ++known_.at(state).pins;
        return;
      }
      case 4: {
        const StateId state = id();
        index_->unpin(state);
        if (--known_.at(state).pins == 0) used(state);
        return;
      }
      case 5: {
        const StateId state = id();
        index_->erase(state);
        return gone(state);
      }
      case 6:
        return evict(static_cast<int64_t>(bytes_.next() % 5) - 1);
      case 7:
        index_->begin_walk();
        return;
      case 8:
        return next_victim();
      case 9: {
        const StateId state = id();
        index_->evicted(state);
        if (!known_.at(state).proposed) fail("a state that was not proposed was evicted");
        return gone(state);
      }
      case 10:
        index_->end_walk();
        for (auto& [state, known] : known_) known.proposed = false;
        return;
      default:
        return request(what);
    }
  }

  void insert() {
    const StateId state = id();
    const uint8_t how = bytes_.next();
    Known added;
    if (how & 1U) added.parent = id();
    const auto above = added.parent ? known_.find(*added.parent) : known_.end();
    const int64_t least = above == known_.end() ? 0 : above->second.depth;
    added.depth = how & 2U ? statecache::kMaxDepth - bytes_.next() : least + bytes_.next();
    if (how == 0xff) added.depth = -added.depth;
    std::vector<StateId> children;
    const uint8_t taken = bytes_.next();
    for (const auto& [child, known] : known_) {
      const bool fits = known.parent == added.parent && known.depth > added.depth;
      if ((fits || how == 0xfe) && (taken >> (child % 8) & 1U)) children.push_back(child);
    }
    index_->insert(state, added.depth, added.parent, children, how & 4U);
    for (const StateId child : children) known_.at(child).parent = state;
    known_[state] = added;
    used(state);
  }

  void evict(int64_t count) {
    if (count == 1) {  // alone, so that the choice can be checked
      const std::optional<StateId> expected = lowest();
      const std::vector<StateId> victims = index_->evict(1);
      if (!learned_ && victims != (expected ? std::vector{*expected} : std::vector<StateId>())) {
        fail("not the lowest state was evicted");
      }
      for (const StateId victim : victims) take(victim);
      return;
    }
    for (const StateId victim : index_->evict(count)) take(victim);
  }

  void next_victim() {
    const std::optional<StateId> expected = lowest();
    const std::optional<StateId> victim = index_->next_victim();
    if (!learned_ && victim != expected) fail("not the lowest state was proposed");
    if (!victim) return;
    Known& known = known_.at(*victim);
    if (known.pins != 0 || known.proposed) fail("a victim is pinned or was proposed before");
    known.proposed = true;
  }

  std::optional<StateId> lowest() const {
    std::optional<StateId> found;
    std::pair<double, uint64_t> key;
    for (const auto& [state, known] : known_) {
      if (known.pins != 0 || known.proposed) continue;
      const std::pair own{index_->priority(state), known.last_use};
      if (found && key < own) continue;
      found = state;
      key = own;
    }
    return found;
  }

  void request(uint8_t how) {
    std::vector<StateId> points;
    std::vector<int64_t> depths;
    std::vector<StateId> admitted;
    int64_t depth = 0;
    for (int n = how / 12 % 6; n > 0; --n) {
      const StateId point = id();
      const uint8_t more = bytes_.next();
      depth = known_.count(point) != 0 ? known_[point].depth : depth + more % 64;
      points.push_back(point);
      depths.push_back(depth);
      if (more & 0x80U) admitted.push_back(point);
    }
    if (how & 1U && !points.empty() && admitted.empty()) admitted.push_back(points.back());
    index_->on_prompt(points, depths, bytes_.next() % 8, admitted);
    if (how & 0x80U) {
      const std::vector<StateId> lost = {id()};
      index_->drop(lost);
      if (learned_ || !index_->contains(lost[0])) gone(lost[0]);
    }
  }

  void used(StateId state) { known_.at(state).last_use = ++uses_; }

  void take(StateId victim) {
    if (known_.at(victim).pins != 0) fail("a pinned state was evicted");
    gone(victim);
  }

  void gone(StateId state) {
    const auto found = known_.find(state);
    if (found == known_.end()) return;
    for (auto& [child, known] : known_) {
      if (known.parent == state) known.parent = found->second.parent;
    }
    known_.erase(found);
  }

  void check() const {
    try {
      index_->check();
    } catch (const std::exception& broken) {
      fail(std::string("invariant broken: ") + broken.what());
    }
    if (index_->size() != known_.size()) fail("another number of states than were inserted");
    for (const auto& [state, known] : known_) {
      if (!index_->contains(state)) fail("a state is gone");
    }
  }

  Bytes bytes_;
  bool learned_ = false;
  std::unique_ptr<StateIndex> index_;
  std::map<StateId, Known> known_;
  uint64_t uses_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  const uint8_t kind = bytes.next();
  Calls(bytes, kind).run();
  return 0;
}
