#ifndef STATECACHE_STATE_INDEX_H_
#define STATECACHE_STATE_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace statecache {

// Names a state. Chosen by the caller, any value, unique among the resident states.
using StateId = int64_t;

// An id that no resident state has.
class UnknownState : public std::out_of_range {
 public:
  explicit UnknownState(StateId state);
};

// Work done by heaps since construction: what one call costs, free of clocks.
struct HeapCounters {
  uint64_t comparisons = 0;  // of two heap entries
  uint64_t repushes = 0;     // entries whose bound was brought up to date and moved
};

// Decides which resident state to evict next. Each policy is an implementation of this interface,
// made by make_index() of policies.h; the states form a tree of prefix points.
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
  StateIndex() = default;
  virtual ~StateIndex() = default;
  StateIndex(const StateIndex&) = delete;
  StateIndex& operator=(const StateIndex&) = delete;

  // The name of the policy in the table.
  virtual std::string_view policy() const = 0;
  // Whether on_prompt() is more than a no-op. If so, a state's id is the key of its prefix point:
  // the same prefix has the same id, also after it was evicted.
  virtual bool needs_prompts() const { return false; }

  // A prompt was looked up. `points` are the keys of the points of its path, as many as known, with
  // their depths in tokens, shallowest first; it may resume at the first `resumable` of them;
  // `admitted` are those of them that will be offered for caching, shallowest first, wherever it
  // resumes; the last one is the prompt's end. O(points). A policy that needs prompts throws
  // std::invalid_argument for what is no path; the others do nothing.
  virtual void on_prompt(std::span<const StateId> points, std::span<const int64_t> depths,
                         int64_t resumable, std::span<const StateId> admitted);

  // Makes `state` resident at `depth` tokens (0 .. kMaxDepth) and stamps it. `parent` is the
  // nearest shallower resident state on its path; `children` are all states that now sit directly
  // below it: each must be deeper than `state` and hang under `parent` now. A child left out
  // cannot be noticed. `end` says that this is the end of a prompt; only policies that need prompts
  // ask. O((1 + c) log n) for c children.
  virtual void insert(StateId state, int64_t depth, std::optional<StateId> parent,
                      std::span<const StateId> children, bool end = false) = 0;

  // Stamps `state` with the watermark: it was matched, cached again or loaded back from host.
  virtual void touch(StateId state, bool end = false) = 0;

  // A pinned state is never a victim but still counts as a shallower neighbour. Pins are counted;
  // the last unpin stamps.
  virtual void pin(StateId state) = 0;
  virtual void unpin(StateId state) = 0;

  // `state` is gone by the engine's own hand, pinned or not: its children get its parent, the
  // watermark stays. O(log n + c).
  virtual void erase(StateId state) = 0;

  // What is needed to resume from these points is gone: those that are resident are erased, and
  // nothing is remembered of any of them.
  virtual void drop(std::span<const StateId> points) = 0;

  // One eviction pass. next_victim() proposes the state that goes first among the unpinned states
  // that this walk has not proposed yet, or nothing. Several proposals may be open and other calls
  // may come in between. evicted() takes a state proposed in this walk and still unpinned, removes
  // it as erase() does and raises the watermark to the priority it has at that moment. end_walk()
  // drops the proposals that were not confirmed: those states stay as they were. An id erased and
  // inserted again is a new state.
  virtual void begin_walk() = 0;
  virtual std::optional<StateId> next_victim() = 0;
  virtual void evicted(StateId state) = 0;
  virtual void end_walk() = 0;

  // The state that evict() would take first. Not inside a walk.
  virtual std::optional<StateId> peek() = 0;

  // A whole walk that confirms each proposal: up to `count` states, in order; fewer when the rest
  // is pinned.
  virtual std::vector<StateId> evict(int64_t count) = 0;

  // The stamp of a state and its gain, pinned or not.
  virtual double priority(StateId state) const = 0;
  // What the policy itself orders victims by, the lowest first: its priority unless the policy has
  // a measure of its own.
  virtual double rank(StateId state) const { return priority(state); }
  virtual double watermark() const = 0;

  // The name of the policy whose order is followed now: its own, unless it chooses between several.
  virtual std::string_view order() const { return policy(); }
  // How many evicted states are remembered.
  virtual size_t ghosts() const { return 0; }
  // How many prefix points are known: those of states, ghosts and recent prompts.
  virtual size_t points() const { return 0; }

  virtual size_t size() const = 0;
  virtual bool contains(StateId state) const = 0;
  virtual HeapCounters counters() const = 0;

  // Verifies every invariant; throws std::logic_error naming the first one broken. O(n).
  virtual void check() const = 0;
};

}  // namespace statecache

#endif  // STATECACHE_STATE_INDEX_H_
