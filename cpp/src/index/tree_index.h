#ifndef STATECACHE_TREE_INDEX_H_
#define STATECACHE_TREE_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "slot_map.h"
#include "statecache/cost_model.h"
#include "statecache/state_index.h"

namespace statecache {

// States in a tree of prefix points, and a heap of those that can be a victim: what the policies
// have in common. priority = watermark at last use + gain over the nearest shallower state.
//
// The heap is lazy and indexed: each state that can be a victim has exactly one entry, whose key
// is a lower bound of the state's true (priority, last use). A use only ever raises the true key,
// so it does not touch the heap; next_victim() recomputes the top and lets it sink until the top is
// exact. Whatever can lower a key (a new state above it) moves the entry at once. There are never
// more entries than states.
class TreeIndex : public StateIndex {
 public:
  // The gain of a state is what `cost` says, 0 without one.
  explicit TreeIndex(std::optional<CostModel> cost) : cost_(cost) {}

  void insert(StateId state, int64_t depth, std::optional<StateId> parent,
              std::span<const StateId> children, bool end = false) override;
  void touch(StateId state, bool end = false) override;
  void pin(StateId state) override;
  void unpin(StateId state) override;
  void erase(StateId state) override;
  void drop(std::span<const StateId> points) override;
  void begin_walk() override;
  std::optional<StateId> next_victim() override;
  void evicted(StateId state) override;
  void end_walk() override;
  std::optional<StateId> peek() override;
  std::vector<StateId> evict(int64_t count) override;

  double priority(StateId state) const override;
  double watermark() const override { return watermark_; }
  size_t size() const override { return slot_of_.size(); }
  bool contains(StateId state) const override { return slot_of_.find(state) != kNone; }
  HeapCounters counters() const override { return counters_; }
  void check() const override;

 protected:
  using Slot = uint32_t;
  static constexpr Slot kNone = SlotMap::kNone;
  static constexpr size_t kArity = 4;
  static constexpr int32_t kFree = -1;

  struct alignas(64) Node {  // one cache line
    StateId id = 0;
    double gain = 0;        // over the nearest shallower state
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

  // What a policy may say differently.
  //
  // What a state is worth over what is above it: its cost from the nearest shallower state.
  virtual double gain_of(Slot slot) const;
  // Other states are directly below it now, none if there was one.
  virtual void children_changed(Slot) {}
  // The gain, the last use of a state or whether it can be a victim may have changed.
  virtual void rank_changed(Slot) {}
  // It is about to go.
  virtual void removing(Slot) {}
  // The state to propose next, kNone if there is none.
  virtual Slot lowest();

  // What a policy builds on.
  bool can_go(Slot slot) const {
    const Node& node = nodes_[slot];
    return node.depth != kFree && node.pins == 0 && !node.proposed;
  }
  const Node& node_at(Slot slot) const { return nodes_[slot]; }
  // Asks for the gain of a state anew, if it is one.
  void regain(Slot slot);
  size_t slots() const { return nodes_.size(); }  // all are below
  Slot slot_of(StateId state) const;              // throws UnknownState
  // Puts all states that can be a victim into the heap, in the order of their last use alone or of
  // their priority; or leaves the heap empty from here on.
  enum class HeapOrder : uint8_t { kPriority, kLastUse, kNone };
  void rebuild_heap(HeapOrder order);
  // Takes the watermark and the stamps of `other`; states that it does not hold count as used now.
  // The heap is to be rebuilt.
  void adopt(const TreeIndex& other);
  [[noreturn]] static void broken(const char* invariant, StateId state);

 private:
  // Orders victims. Priorities are never negative, so their bits order like their values.
  struct Key {
    uint64_t priority_bits;
    uint64_t last_use;
  };
  struct Entry {
    Key key;
    Slot slot;
  };

  static double priority_of(const Node& node) { return node.stamp + node.gain; }
  Key key_of(const Node& node) const;
  void stamp(Slot slot);
  void require_walk(const char* call) const;
  Slot propose();
  void confirm(Slot slot);

  std::vector<Slot> slots_of_children(StateId state, int64_t depth, Slot parent,
                                      std::span<const StateId> children) const;
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

  void check_tree() const;
  void check_heap() const;

  std::optional<CostModel> cost_;
  HeapOrder heap_order_ = HeapOrder::kPriority;
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

#endif  // STATECACHE_TREE_INDEX_H_
