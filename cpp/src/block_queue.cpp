#include "statecache/block_queue.h"

#include <stdexcept>
#include <string>

namespace statecache {

namespace {

std::string named(Block block) { return "block " + std::to_string(block); }

}  // namespace

BlockLists::BlockLists(size_t blocks, List lists) : blocks_(blocks) {
  if (blocks + lists >= kNoBlock) throw std::length_error("too many blocks for one queue");
  nodes_.resize(blocks + lists);
  for (List list = 0; list < lists; ++list) {
    Node& end = nodes_[end_of(list)];
    end.next = end.prev = end_of(list);
  }
}

void BlockLists::erase(Block block) {
  Node& node = nodes_[block];
  nodes_[node.prev].next = node.next;
  nodes_[node.next].prev = node.prev;
  node.list = kNone;
}

void BlockLists::insert(Block before, List list, Block block) {
  Node& node = nodes_[block];
  node.next = before;
  node.prev = nodes_[before].prev;
  node.list = list;
  nodes_[node.prev].next = nodes_[before].prev = block;
}

void BlockQueue::require_block(Block block) const {
  if (block >= blocks()) throw std::out_of_range("there is no " + named(block));
}

void BlockQueue::require_free(Block block) const {
  if (!is_free(block)) throw std::logic_error(named(block) + " is not in the free queue");
}

bool BlockQueue::is_free(Block block) const {
  require_block(block);
  return lists_.list_of(block) != BlockLists::kNone;
}

std::vector<Block> BlockQueue::in_order(Block cursor) const {
  if (cursor != kNoBlock) require_free(cursor);
  std::vector<Block> all;
  all.reserve(free_);
  for (List list = cursor == kNoBlock ? List{0} : lists_.list_of(cursor); list < lists_.lists();
       ++list) {
    Block block = cursor == kNoBlock ? lists_.front(list) : lists_.after(cursor);
    for (; block != kNoBlock; block = lists_.after(block)) all.push_back(block);
    cursor = kNoBlock;
  }
  return all;
}

void BlockQueue::require_free_blocks(size_t n) const {
  if (n <= free_) return;
  throw std::invalid_argument(std::to_string(n) + " blocks asked for, " + std::to_string(free_) +
                              " are free");
}

void BlockQueue::take(std::span<Block> out, std::vector<Block>* lost) {
  require_free_blocks(out.size());
  // Which blocks go does not depend on what they hold.
  from_.clear();
  try {
    going_.resize(cache_.numbers());
    from_.reserve(out.size());
    if (lost != nullptr) lost->reserve(lost->size() + out.size());
    for (Block& block : out) {
      block = next();
      from_.push_back(lists_.list_of(block));
      lists_.erase(block);
    }
  } catch (...) {
    for (size_t at = from_.size(); at-- > 0;) lists_.push_front(kFree, out[at]);
    throw;
  }
  free_ -= out.size();
  ++call_;
  for (size_t at = 0; at < out.size(); ++at) {
    const BlockHashIndex::Number key = cache_.number_of(out[at]);
    const bool last = is_last(key);
    handed_out(out[at], from_[at], key, last);
    if (last && lost != nullptr) lost->push_back(out[at]);
  }
}

bool BlockQueue::is_last(BlockHashIndex::Number key) {
  if (key == BlockHashIndex::kNone) return false;
  const uint32_t copies = cache_.copies(key);
  if (copies == 1) return true;
  Going& going = going_[key];
  if (going.call != call_) going = {call_, 0};
  return ++going.copies == copies;
}

void BlockQueue::append(std::span<const Block> blocks) {
  for (const Block block : blocks) {
    lists_.prefetch(block);
    if (block < lists_.blocks()) cache_.prefetch(block);
  }
  require_new(blocks);
  for (const Block block : blocks) cache_.prefetch_use(cache_.number_of(block));
  for (const Block block : blocks) place(block, cache_.number_of(block));
  free_ += blocks.size();
}

void BlockQueue::prepend(std::span<const Block> blocks) {
  require_new(blocks);
  for (size_t at = blocks.size(); at-- > 0;) lists_.push_front(kFree, blocks[at]);
  free_ += blocks.size();
}

void BlockQueue::require_new(std::span<const Block> blocks) {
  // Each is marked as one in a list for now, so that a block named twice is noticed.
  size_t good = 0;
  for (; good < blocks.size(); ++good) {
    const Block block = blocks[good];
    if (block >= lists_.blocks() || lists_.list_of(block) != BlockLists::kNone) break;
    lists_[block].list = kFree;
  }
  for (size_t at = good; at-- > 0;) lists_[blocks[at]].list = BlockLists::kNone;
  if (good == blocks.size()) return;
  require_block(blocks[good]);
  throw std::logic_error(named(blocks[good]) + " is free already");
}

void BlockQueue::remove(std::span<const Block> blocks) {
  for (const Block block : blocks) lists_.prefetch(block);
  for (const Block block : blocks) require_free(block);
  for (const Block block : blocks) {
    if (!is_free(block)) continue;
    hit(block);
    lists_.erase(block);
    --free_;
  }
}

void BlockQueue::unhashed(Block block) {
  if (is_free(block)) emptied(block);
}

void BlockQueue::reset() {
  forget();
  for (const Block block : in_order()) lists_.move_to(kFree, block);
}

void FifoQueue::place(Block block, BlockHashIndex::Number key) {
  if (key != BlockHashIndex::kNone && cache_.has_checkpoint(key)) {
    lists_.push_front(kFree, block);
  } else {
    lists_.push_back(kFree, block);
  }
}

}  // namespace statecache
