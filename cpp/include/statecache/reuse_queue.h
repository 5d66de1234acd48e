#ifndef STATECACHE_REUSE_QUEUE_H_
#define STATECACHE_REUSE_QUEUE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "statecache/block_queue.h"

namespace statecache {

// What was dropped during the last n times a block was handed out, to notice what is asked for
// again. Two tables, for the last n times and the n before, so that nothing is ever taken out.
// Keys are told apart by their place and 32 bits of their hash: should two ever clash, one use is
// counted wrongly.
class Ghosts {
 public:
  explicit Ghosts(size_t n);

  bool empty() const { return newest_ == 0; }
  void clear();
  // `now` counts the times a block was handed out; it never repeats.
  void put(std::string_view key, bool is_protected, uint64_t now);
  // Of each key, what was dropped less than n times ago; it is forgotten. Counts those on
  // probation and those protected.
  std::array<uint64_t, 2> take(std::span<const std::string_view> keys, uint64_t now);

 private:
  struct Entry {  // small, since each call meets another one
    uint32_t tag = 0;
    uint32_t dropped = 0;  // twice the time since the table began, and 1 if protected; 0: nothing
  };
  struct Table {
    Entry& find(uint64_t hash);
    void prefetch(uint64_t hash) const {
      __builtin_prefetch(&entries[hash & (entries.size() - 1)], 1);
    }
    uint64_t began = 0;          // a time at which it was empty
    std::vector<Entry> entries;  // a power of two, at most three quarters full
  };

  struct Dropped {
    uint64_t hash, now;
    bool is_protected;
  };
  void write(const Dropped& ghost);

  uint64_t n_;
  uint64_t newest_ = 0;  // when something was dropped last; 0: never
  Table current_, before_;
  std::vector<Dropped> unwritten_;  // until the place of each has been fetched
  std::vector<uint64_t> hashes_;    // of the keys of one call
};

// Blocks that hold nothing first, then duplicates, then what was never reused before what was.
//
// A second block with the same key can serve nothing that the first one does not. Of the rest,
// blocks of requests that resumed from at least 3/4 of their prompt ("protected") are likelier to
// be used again than those "on probation". Both kinds have a list of their own, by time of release,
// and the ratio of ages at which they are exchanged is learnt from what is asked for after it was
// dropped. All in integers; every call is O(1) a block.
class ReuseQueue final : public BlockQueue {
 public:
  // Of keys that end with `ending` it is watched whether they are asked for again.
  ReuseQueue(const BlockHashIndex& cache, std::string ending);

  // Whether blocks handed out from now on are protected from the start.
  void set_start_protected(bool start_protected) { start_protected_ = start_protected; }
  bool start_protected() const { return start_protected_; }

  // A request was looked up for the first time. `missing` are the keys, without their ending, that
  // it could have used and that are not in the cache.
  void looked_up(std::span<const std::string_view> missing);
  // Whether anything was dropped that a lookup could ask for.
  bool watches() const { return !ghosts_.empty(); }

  // A request resumes from this block, which is in use already.
  void mark_protected(Block block);

  // How much older, in steps, a protected block must be to go before one on probation.
  int ratio() const { return ratio_; }

 private:
  static constexpr List kDuplicates = 1, kProtected = 2, kProbation = 3;

  // The free blocks of a key that has several: how many are in kDuplicates or kFree, and the one
  // that is in kProtected or kProbation. The only block of a key has no family; once there is
  // another one, it is the first.
  struct Family {
    uint32_t duplicates = 0;
    Block main = kNoBlock;
  };
  // In the node of a block: whether it is protected (`marked`), the clock when it was freed
  // (`time`), and, while it is free, the key whose family it belongs to (`note`).
  using Key = BlockHashIndex::Number;
  static constexpr Key kNoFamily = BlockHashIndex::kNone;

  void place(Block block, Key key) override;
  Block next() override;
  void handed_out(Block block, List from, Key key, bool last) override;
  void hit(Block block) override;
  void emptied(Block block) override;
  void forget() override;

  List place_of_duplicate(Block block, Key key, List list);
  void leave_family(Block block);
  void learn();

  std::string ending_;
  std::vector<Family> families_;  // by key
  Ghosts ghosts_;
  uint64_t clock_ = 0;  // requests looked up
  uint64_t handed_out_ = 0;
  bool start_protected_ = false;
  int ratio_ = 0;
  // On probation, protected: dropped and asked for again; dropped.
  std::array<uint64_t, 2> used_{}, dropped_{};
};

}  // namespace statecache

#endif  // STATECACHE_REUSE_QUEUE_H_
