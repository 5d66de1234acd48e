#ifndef STATECACHE_BLOCK_HASH_INDEX_H_
#define STATECACHE_BLOCK_HASH_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace statecache {

// A block of a pool, numbered from 0.
using Block = uint32_t;
inline constexpr Block kNoBlock = UINT32_MAX;

// What the blocks of a pool hold: under each key the blocks that are cached under it, in the order
// in which they came; and which keys are kept in a checkpoint too, so that no block need hold
// them. A block is under one key as a rule, its first one; engines may add others.
//
// Every call is O(1), with a factor of the keys of a block. Not thread-safe: one thread at a time,
// by contract.
class BlockHashIndex {
 public:
  // A key and a hash of it, always the same one; hashes need not differ.
  struct Key {
    std::string_view bytes;
    uint64_t hash;
  };
  // Of a key that is cached or has a checkpoint; used again for another one when it is neither.
  using Number = uint32_t;
  static constexpr Number kNone = UINT32_MAX;

  explicit BlockHashIndex(size_t blocks);

  size_t blocks() const { return blocks_; }
  // How many keys are cached.
  size_t size() const { return cached_; }

  // kNone if the key is neither cached nor in a checkpoint.
  Number find(const Key& key) const;
  // The number of the first key of a block, kNone where it is under none.
  Number number_of(Block block) const { return nodes_[block].key; }
  // Loads what number_of(), and then copies() and has_checkpoint(), will read.
  void prefetch(Block block) const { __builtin_prefetch(&nodes_[block]); }
  void prefetch_use(Number number) const {
    if (number != kNone) __builtin_prefetch(&uses_[number]);
  }
  // Of a number that is in use: its key, how many blocks are under it, which came first (kNoBlock
  // where there is none), whether it has a checkpoint.
  std::string_view key(Number number) const { return keys_[number].bytes; }
  uint32_t copies(Number number) const { return uses_[number].copies; }
  Block first(Number number) const {
    const Node node = uses_[number].first;
    return node == kNone ? kNoBlock : nodes_[node].block;
  }
  bool has_checkpoint(Number number) const { return uses_[number].has_checkpoint; }
  // All numbers are below.
  size_t numbers() const { return keys_.size(); }

  bool contains(const Key& key, Block block) const;
  // Nothing happens if the block is under the key already. Throws std::out_of_range for a block the
  // pool does not have.
  void insert(const Key& key, Block block);
  // Returns whether the block was under the key.
  bool erase(const Key& key, Block block);
  void set_has_checkpoint(const Key& key, bool has_checkpoint);
  // No key has a checkpoint any more.
  void clear_checkpoints();
  // No key is cached any more; checkpoints stay.
  void clear();

 private:
  using Node = uint32_t;  // a block under a key; that of its first key has the block's number
  struct Place {
    Block block = kNoBlock;
    Number key = kNone;
    Node next = kNone, prev = kNone;  // under the same key
    Node also = kNone;                // of the same block
  };
  struct Use {
    uint32_t copies = 0;
    Node first = kNone, last = kNone;
    bool has_checkpoint = false;
  };
  struct Named {
    std::string bytes;
    uint64_t hash = 0;
  };

  size_t mask() const { return table_.size() - 1; }
  size_t home(uint64_t hash) const;
  Number add(const Key& key);
  void drop_if_unused(Number number);
  void grow();
  Node node_of(Number number, Block block) const;
  // Makes what is before and behind `place` point to these nodes.
  void relink(const Place& place, Use& use, Node before, Node behind);

  size_t blocks_;
  size_t cached_ = 0;
  std::vector<Place> nodes_;
  std::vector<Node> free_nodes_;
  // By number.
  std::vector<Use> uses_;
  std::vector<Named> keys_;
  std::vector<Number> free_numbers_;
  std::vector<Number> table_;  // a power of two, at most half full; linear probing
};

}  // namespace statecache

#endif  // STATECACHE_BLOCK_HASH_INDEX_H_
