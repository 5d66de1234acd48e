#ifndef STATECACHE_BLOCK_QUEUE_H_
#define STATECACHE_BLOCK_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace statecache {

// A block of a pool, numbered from 0.
using Block = uint32_t;
inline constexpr Block kNoBlock = UINT32_MAX;

// What the cache of a pool says of one block.
struct CachedBlock {
  std::string_view key;    // what the block holds; empty: nothing that could be hit
  bool apart = false;      // kept elsewhere too: the block is not needed
  uint32_t copies = 0;     // blocks cached under the key, this one included; 0: it is not cached
  Block first = kNoBlock;  // the one of them that has been cached for longest
};

// The cache of a pool, as a queue asks for it. A queue never changes it.
class BlockCache {
 public:
  virtual ~BlockCache() = default;
  // Fills in what it knows of each block, `first` only if that is asked for. `seen` is as long as
  // `blocks`, and empty. Keys stay valid until the call of the queue that asked for them returns.
  virtual void look_up(std::span<const Block> blocks, std::span<CachedBlock> seen, bool first) = 0;
};

// Doubly linked lists of blocks; a block is in one list at most. Every call is O(1). A block's
// place and what an order notes of it are side by side: which block comes next cannot be foreseen,
// so each is a cache miss.
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
// The cache may change between calls, but what a free block holds only as unhashed() and reset()
// say. A block handed out may be in the cache until the call returns, not longer. Decisions are a
// pure function of the calls and of the cache's answers. Not thread-safe: one thread at a time, by
// contract.
//
// Errors leave everything as it was: std::out_of_range for a block the pool does not have,
// std::invalid_argument for more blocks than are free, std::logic_error for a block that is free
// and should not be, or the other way around. Should the cache throw while blocks are handed out,
// they are free again, at the head.
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

  // Hands out as many blocks as fit into `out`. To `lost` it adds those that were the last one
  // cached under their key; nullptr if nobody wants to know, which saves asking the cache.
  void take(std::span<Block> out, std::vector<Block>* lost);

  // Takes blocks back, in the order in which they should go.
  void append(std::span<const Block> blocks);
  // Takes back blocks that hold nothing: they go first, the first one before the others.
  void prepend(std::span<const Block> blocks);
  // A free block was hit and is in use again.
  void remove(Block block);
  // `block` holds nothing any more, by the engine's own hand. May be in use.
  void unhashed(Block block);
  // No block holds anything any more.
  void reset();

 protected:
  using List = BlockLists::List;
  static constexpr List kFree = 0;  // in every order the list of blocks that hold nothing

  BlockQueue(size_t blocks, List lists, BlockCache& cache) : lists_(blocks, lists), cache_(cache) {}

  // Puts `block` into the list it belongs to.
  virtual void place(Block block, const CachedBlock& seen) = 0;
  // The block to hand out; there is one.
  virtual Block next() = 0;
  // Whether handed_out() needs what the cache says of a block from `list`.
  virtual bool asks_of(List) const { return true; }
  // Blocks with the key of `block` that were handed out in this call without asking.
  virtual uint32_t gone_unasked(Block) const { return 0; }
  // `block` has left the list `from` and is handed out; `last`: as the last one under its key. Of a
  // block that was not asked of, `seen` is empty and `last` false.
  virtual void handed_out(Block block, List from, const CachedBlock& seen, bool last) = 0;
  // `block` leaves its list, since it was hit, ...
  virtual void hit(Block block) = 0;
  // ... or stays free and holds nothing any more.
  virtual void emptied(Block block) = 0;
  // All blocks hold nothing any more.
  virtual void forget() = 0;

  void require_block(Block block) const;

  BlockLists lists_;
  uint64_t call_ = 0;  // of take()

 private:
  void require_free(Block block) const;
  void require_new(std::span<const Block> blocks);
  bool is_last(Block block, const CachedBlock& seen);

  BlockCache& cache_;
  size_t free_ = 0;
  // Of the blocks of one call.
  std::vector<CachedBlock> seen_;
  std::vector<Block> asked_;
  std::vector<List> from_;
  // Copies handed out in this call, which are in the cache still.
  std::unordered_map<std::string_view, uint32_t> going_;
};

// First in, first out, but blocks kept elsewhere too go first.
class StockQueue final : public BlockQueue {
 public:
  StockQueue(size_t blocks, BlockCache& cache) : BlockQueue(blocks, 1, cache) {}

 private:
  void place(Block block, const CachedBlock& seen) override;
  Block next() override { return lists_.front(kFree); }
  bool asks_of(List) const override { return false; }
  void handed_out(Block, List, const CachedBlock&, bool) override {}
  void hit(Block) override {}
  void emptied(Block) override {}
  void forget() override {}
};

}  // namespace statecache

#endif  // STATECACHE_BLOCK_QUEUE_H_
