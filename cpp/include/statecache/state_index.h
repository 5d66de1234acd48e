#ifndef STATECACHE_STATE_INDEX_H_
#define STATECACHE_STATE_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "statecache/cost_model.h"
#include "statecache/slot_map.h"

namespace statecache {

// Names a state. Chosen by the caller, any value, unique among the resident states.
using StateId = int64_t;

enum class Policy : uint8_t {
  kGds,  // priority = watermark at last use + cost(nearest shallower state, state)
  kLru,  // every gain is 0, so the tie rule (least recently used first) decides everything
};

// Throws std::invalid_argument, listing the known names, for anything but "gds" and "lru".
Policy parse_policy(std::string_view name);
std::string_view name_of(Policy policy);

// An id that no resident state has.
class UnknownState : public std::out_of_range {
 public:
  explicit UnknownState(StateId state);
};

// Work done by the heap since construction: what one call costs, free of clocks.
struct HeapCounters {
  uint64_t comparisons = 0;  // of two heap entries
  uint64_t repushes = 0;     // entries whose bound was brought up to date and moved
};

// Decides which resident state to evict next: GreedyDual-Size over a tree of prefix points, or LRU.
//
// The heap is lazy and indexed: each state that can be a victim has exactly one entry, whose key
// is a lower bound of the state's true (priority, last use). A use only ever raises the true key,
// so it does not touch the heap; next_victim() recomputes the top and lets it sink until the top is
// exact. Whatever can lower a key (a new state above it) moves the entry at once. There are never
// more entries than states.
//
// All decisions are a pure function of the sequence of calls: no clock, no randomness, no
// iteration over hash maps, no addresses. Not thread-safe: one thread at a time, by contract.
//
// Unless said otherwise a call is O(log n) in the number of resident states n (touch, pin and the
// look-ups are O(1)). Calls that throw change nothing. Errors: UnknownState for an id that is not
// resident, std::invalid_argument for any other bad argument, std::logic_error for a walk that is
// begun twice or used without a begin.
class StateIndex {
 public:
  explicit StateIndex(Policy policy = Policy::kGds, CostModel cost = CostModel());
  virtual ~StateIndex() = default;
  StateIndex(const StateIndex&) = delete;
  StateIndex& operator=(const StateIndex&) = delete;

  // A prompt was looked up. For the policy `learned` (see learned_index.h); others ignore it.
  virtual void on_prompt(std::span<const StateId> points, std::span<const int64_t> depths,
                         int64_t resumable, std::span<const StateId> admitted);

  // Makes `state` resident at `depth` tokens (0 .. kMaxDepth) and stamps it. `parent` is the
  // nearest shallower resident state on its path; `children` are all states that now sit directly
  // below it: each must be deeper than `state` and hang under `parent` now. A child left out
  // cannot be noticed. `end` says that this is the end of a prompt; only `learned` asks.
  // O((1 + c) log n) for c children.
  virtual void insert(StateId state, int64_t depth, std::optional<StateId> parent,
                      std::span<const StateId> children, bool end = false);

  // Stamps `state` with the watermark: it was matched, cached again or loaded back from host.
  virtual void touch(StateId state, bool end = false);

  // A pinned state is never a victim but still counts as a shallower neighbour. Pins are counted;
  // the last unpin stamps.
  void pin(StateId state);
  void unpin(StateId state);

  // `state` is gone by the engine's own hand, pinned or not: its children get its parent, the
  // watermark stays. O(log n + c).
  void erase(StateId state);

  // What is needed to resume from these points is gone: those that are resident are erased.
  virtual void drop(std::span<const StateId> points);

  // One eviction pass. next_victim() proposes the lowest (priority, last use) among the unpinned
  // states that this walk has not proposed yet, or nothing. Several proposals may be open and other
  // calls may come in between. evicted() takes a state proposed in this walk and still unpinned,
  // removes it as erase() does and raises the watermark to the priority it has at that moment.
  // end_walk() drops the proposals that were not confirmed: those states stay as they were.
  // An id erased and inserted again is a new state.
  void begin_walk();
  std::optional<StateId> next_victim();
  void evicted(StateId state);
  void end_walk();

  // The state that evict() would take first. Not inside a walk.
  std::optional<StateId> peek();

  // A whole walk that confirms each proposal: up to `count` states, in order; fewer when the rest
  // is pinned.
  std::vector<StateId> evict(int64_t count);

  double priority(StateId state) const;
  Policy policy() const { return policy_; }
  double watermark() const { return watermark_; }
  size_t size() const { return slot_of_.size(); }
  bool contains(StateId state) const { return slot_of_.find(state) != kNone; }
  const HeapCounters& counters() const { return counters_; }

  // Verifies every invariant; throws std::logic_error naming the first one broken. O(n).
  virtual void check() const;

 protected:
  using Slot = uint32_t;
  static constexpr Slot kNone = SlotMap::kNone;
  static constexpr size_t kArity = 4;
  static constexpr int32_t kFree = -1;

  struct alignas(64) Node {  // one cache line
    StateId id = 0;
    double gain = 0;        // cost from the nearest shallower state; 0 under kLru
    double stamp = 0;       // watermark at last use
    uint64_t last_use = 0;  // sequence number of last use
    int32_t depth = kFree;  // kFree when no state lives in this slot
    uint32_t pins = 0;
    bool proposed = false;
    Slot parent = kNone;
    Slot first_child = kNone;
    Slot next_sibling = kNone;
    Slot prev_sibling = kNone;
  };
  // Orders victims. Priorities are never negative, so their bits order like their values.
  struct Key {
    uint64_t priority_bits;
    uint64_t last_use;
  };
  struct Entry {
    Key key;
    Slot slot;
  };
  // For policies that build on this one. rank_changed(): the gain, the last use of a state or
  // whether it can be a victim may have changed; removing(): it is about to go.
  virtual void rank_changed(Slot) {}
  virtual void removing(Slot) {}
  virtual Slot lowest();
  bool can_go(Slot slot) const {
    const Node& node = nodes_[slot];
    return node.depth != kFree && node.pins == 0 && !node.proposed;
  }
  // Puts all states that can be a victim into the heap, in the order of their last use alone or of
  // their priority; or leaves the heap empty from here on.
  enum class HeapOrder : uint8_t { kPriority, kLastUse, kNone };
  void rebuild_heap(HeapOrder order);
  // Takes the watermark and the stamps of `other`; states that it does not hold count as used now.
  // The heap is to be rebuilt.
  void adopt(const StateIndex& other);

  Slot slot_of(StateId state) const;
  static double priority_of(const Node& node) { return node.stamp + node.gain; }
  Key key_of(const Node& node) const;
  void stamp(Slot slot);
  double gain_of(const Node& node) const;
  void require_walk(const char* call) const;
  Slot propose();
  void confirm(Slot slot);

  Slot allocate();
  void hang(Slot child, Slot parent);
  void unlink(Slot child);
  void remove(Slot slot);

  static bool less(const Key& a, const Key& b);
  void heap_push(Slot slot);
  void heap_erase(Slot slot);
  void heap_lower(Slot slot);
  void sift_up(size_t at, Entry entry);
  void sift_down(size_t at, Entry entry);
  void place(size_t at, const Entry& entry);

  [[noreturn]] static void broken(const char* invariant, StateId state);
  void check_tree() const;
  void check_heap() const;

  Policy policy_;
  HeapOrder heap_order_ = HeapOrder::kPriority;
  CostModel cost_;
  double watermark_ = 0;
  uint64_t uses_ = 0;
  bool walking_ = false;

  SlotMap slot_of_;
  std::vector<Node> nodes_;
  std::vector<Slot> free_slots_;
  std::vector<Entry> heap_;
  std::vector<uint32_t> heap_at_;  // by slot: position in heap_, kNone when it has no entry
  std::vector<Slot> proposals_;
  HeapCounters counters_;
};

}  // namespace statecache

#endif  // STATECACHE_STATE_INDEX_H_
