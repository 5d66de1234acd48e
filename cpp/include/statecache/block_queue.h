#ifndef STATECACHE_BLOCK_QUEUE_H_
#define STATECACHE_BLOCK_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "statecache/block_hash_index.h"

namespace statecache {

// Doubly linked lists of blocks; a block is in one list at most. Every call is O(1). A block's
// place and what an order notes of it are side by side: which block comes next cannot be foreseen,
// so each is a cache miss. Calls for many blocks load them all before they look at the first.
class BlockLists {
 public:
  using List = uint8_t;
  static constexpr List kNone = UINT8_MAX;  // the list of a block that is in none

  struct Node {
    Block next = 0;
    Block prev = 0;
    List list = kNone;
    // For an order's own use.
    bool marked = false;
    uint32_t note = UINT32_MAX;
    uint64_t time = 0;
  };

  BlockLists(size_t blocks, List lists);

  size_t blocks() const { return blocks_; }
  List lists() const { return static_cast<List>(nodes_.size() - blocks_); }
  Node& operator[](Block block) { return nodes_[block]; }
  const Node& operator[](Block block) const { return nodes_[block]; }
  List list_of(Block block) const { return nodes_[block].list; }
  // Loads what will be read of `block`, which need not be one.
  void prefetch(Block block) const {
    if (block < blocks_) __builtin_prefetch(&nodes_[block], 1);
  }
  // The first block of a list, kNoBlock when it is empty.
  Block front(List list) const { return block_at(nodes_[end_of(list)].next); }
  // The block behind `block` in its list, kNoBlock at the end.
  Block after(Block block) const { return block_at(nodes_[block].next); }

  // `block` must be in no list.
  void push_back(List list, Block block) { insert(end_of(list), list, block); }
  void push_front(List list, Block block) { insert(nodes_[end_of(list)].next, list, block); }
  // `block` must be in a list.
  void erase(Block block);
  // `block` must be in a list; it stays where it is if that is the one.
  void move_to(List list, Block block) {
    if (list_of(block) == list) return;
    erase(block);
    push_back(list, block);
  }

 private:
  Block end_of(List list) const { return static_cast<Block>(blocks_ + list); }
  Block block_at(Block node) const { return node < blocks_ ? node : kNoBlock; }
  void insert(Block before, List list, Block block);

  size_t blocks_;
  std::vector<Node> nodes_;  // behind the blocks come the ends of the lists, each a circle
};

// The free blocks of a pool in the order in which they should be handed out. A block that holds
// something can be hit until it is handed out.
//
// The queue never changes the cache. It may change between calls, but what a free block holds only
// as unhashed() and reset() say. A block handed out may be in the cache until the call returns, not
// longer. Decisions are a pure function of the calls and of the cache. Not thread-safe: one thread
// at a time, by contract.
//
// Errors leave everything as it was: std::out_of_range for a block the pool does not have,
// std::invalid_argument for more blocks than are free, std::logic_error for a block that is free
// and should not be, or the other way around.
class BlockQueue {
 public:
  virtual ~BlockQueue() = default;
  BlockQueue(const BlockQueue&) = delete;
  BlockQueue& operator=(const BlockQueue&) = delete;

  size_t blocks() const { return lists_.blocks(); }
  size_t free_blocks() const { return free_; }
  bool is_free(Block block) const;

  // Throws std::invalid_argument if fewer than `n` blocks are free.
  void require_free_blocks(size_t n) const;

  // Every free block, roughly in the order in which they would go; those behind `cursor`, if one
  // is given, which must be free. O(n).
  std::vector<Block> in_order(Block cursor = kNoBlock) const;

  // Hands out as many blocks as fit into `out`. To `lost`, if there is one, it adds those that were
  // the last one cached under their key.
  void take(std::span<Block> out, std::vector<Block>* lost);

  // Takes blocks back, in the order in which they should go.
  void append(std::span<const Block> blocks);
  // Takes back blocks that hold nothing: they go first, the first one before the others.
  void prepend(std::span<const Block> blocks);
  // Free blocks were hit and are in use again. One that is named twice leaves once.
  void remove(std::span<const Block> blocks);
  // `block` holds nothing any more, by the engine's own hand. May be in use.
  void unhashed(Block block);
  // No block holds anything any more.
  void reset();

 protected:
  using List = BlockLists::List;
  static constexpr List kFree = 0;  // in every order the list of blocks that hold nothing

  // `cache` must outlive the queue.
  BlockQueue(List lists, const BlockHashIndex& cache)
      : lists_(cache.blocks(), lists), cache_(cache) {}

  // Puts `block` into the list it belongs to. `key` is that of what it holds, kNone for nothing.
  virtual void place(Block block, BlockHashIndex::Number key) = 0;
  // The block to hand out; there is one.
  virtual Block next() = 0;
  // `block` has left the list `from` and is handed out; `last`: as the last one under its key.
  virtual void handed_out(Block block, List from, BlockHashIndex::Number key, bool last) = 0;
  // `block` leaves its list, since it was hit, ...
  virtual void hit(Block block) = 0;
  // ... or stays free and holds nothing any more.
  virtual void emptied(Block block) = 0;
  // All blocks hold nothing any more.
  virtual void forget() = 0;

  void require_block(Block block) const;

  BlockLists lists_;
  const BlockHashIndex& cache_;

 private:
  struct Going {  // copies handed out in one call, which are in the cache still
    uint64_t call = 0;
    uint32_t copies = 0;
  };

  void require_free(Block block) const;
  void require_new(std::span<const Block> blocks);
  bool is_last(BlockHashIndex::Number key);

  size_t free_ = 0;
  uint64_t call_ = 0;  // of take()
  std::vector<List> from_;
  std::vector<Going> going_;  // by key
};

// First in, first out, but blocks kept elsewhere too go first.
class FifoQueue final : public BlockQueue {
 public:
  explicit FifoQueue(const BlockHashIndex& cache) : BlockQueue(1, cache) {}

 private:
  void place(Block block, BlockHashIndex::Number key) override;
  Block next() override { return lists_.front(kFree); }
  void handed_out(Block, List, BlockHashIndex::Number, bool) override {}
  void hit(Block) override {}
  void emptied(Block) override {}
  void forget() override {}
};

}  // namespace statecache

#endif  // STATECACHE_BLOCK_QUEUE_H_
