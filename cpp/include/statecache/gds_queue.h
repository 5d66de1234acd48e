#ifndef STATECACHE_GDS_QUEUE_H_
#define STATECACHE_GDS_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "statecache/block_queue.h"
#include "statecache/state_index.h"

namespace statecache {

// Blocks that hold nothing first; then the cheapest state or the oldest other block, whichever was
// used longer ago.
//
// A state is at least one block in each of its groups, all with the same name: the key of a block
// is the name and the ending of its group. Blocks of a state leave together, since one without the
// others serves nothing. The index decides between states, and is told when one is in use (pinned)
// or free. A state the queue was never told of is treated like other blocks. O(log n) a block.
class GdsQueue final : public BlockQueue {
 public:
  // `index` must outlive the queue. `endings` are those of the groups, none the end of another.
  GdsQueue(const BlockHashIndex& cache, StateIndex& index, std::vector<std::string> endings);

  // `state` has been inserted into the index: it is what the blocks with this name hold, in use
  // now. Throws UnknownState, or std::invalid_argument for a name or a state told of already.
  void committed(StateId state, std::string_view name);

  // The states that have left the index by this queue's hand since the last call. Who keeps a
  // record of the index asks before it looks into that.
  std::vector<StateId> take_gone();

 private:
  static constexpr List kOthers = 1, kStates = 2;

  struct State {
    StateId id = 0;
    std::string_view name;
    uint64_t freed_at = 0;
    std::set<Block> blocks;          // the free ones
    std::vector<uint32_t> of_group;  // how many of them are of each group
    size_t groups = 0;               // how many groups have one
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
  };
  struct Part {
    State* state = nullptr;
    size_t group = 0;
  };

  void place(Block block, BlockHashIndex::Number key) override;
  Block next() override;
  void handed_out(Block block, List from, BlockHashIndex::Number key, bool last) override;
  void hit(Block block) override;
  void emptied(Block block) override;
  void forget() override;

  Part part_of(std::string_view key);
  void release(State& state);

  StateIndex& index_;
  std::vector<std::string> endings_;
  std::unordered_map<std::string, State, Hash, std::equal_to<>> states_;
  std::unordered_map<StateId, State*> by_id_;
  std::vector<Part> part_;  // of blocks in kStates
  uint64_t clock_ = 0;
  std::vector<StateId> gone_;
};

}  // namespace statecache

#endif  // STATECACHE_GDS_QUEUE_H_
