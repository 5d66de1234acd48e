#include "statecache/block_queue.h"

#include <stdexcept>
#include <string>

namespace statecache {

namespace {

std::string named(Block block) { return "block " + std::to_string(block); }

}  // namespace

BlockLists::BlockLists(size_t blocks, List lists)
    : next_(blocks + lists), prev_(blocks + lists), list_of_(blocks, kNone) {
  if (blocks + lists >= kNoBlock) throw std::length_error("too many blocks for one queue");
  for (List list = 0; list < lists; ++list) {
    next_[end_of(list)] = prev_[end_of(list)] = end_of(list);
  }
}

void BlockLists::erase(Block block) {
  next_[prev_[block]] = next_[block];
  prev_[next_[block]] = prev_[block];
  list_of_[block] = kNone;
}

void BlockLists::insert(Block before, List list, Block block) {
  const Block last = prev_[before];
  next_[last] = prev_[before] = block;
  prev_[block] = last;
  next_[block] = before;
  list_of_[block] = list;
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

void BlockQueue::take(std::span<Block> out, std::vector<Block>& lost) {
  if (out.size() > free_) {
    throw std::invalid_argument(std::to_string(out.size()) + " blocks asked for, " +
                                std::to_string(free_) + " are free");
  }
  going_.clear();
  for (size_t taken = 0; taken < out.size(); ++taken) {
    const Block block = next();
    CachedBlock seen;
    try {
      seen = cache_.look_up(block);
    } catch (...) {
      free_ += taken;
      while (taken > 0) lists_.push_front(kFree, out[--taken]);
      throw;
    }
    const bool last = is_last(seen);
    handed_out(block, seen, last);
    lists_.erase(block);
    --free_;
    out[taken] = block;
    if (last) lost.push_back(block);
  }
}

bool BlockQueue::is_last(const CachedBlock& seen) {
  if (seen.copies < 2) return seen.copies == 1;
  return ++going_[seen.key] == seen.copies;
}

void BlockQueue::append(std::span<const Block> blocks) {
  seen_.clear();
  for (const Block block : blocks) {
    require_block(block);
    seen_.push_back(cache_.look_up(block));
  }
  require_new(blocks);
  for (size_t at = 0; at < blocks.size(); ++at) place(blocks[at], seen_[at]);
  free_ += blocks.size();
}

void BlockQueue::prepend(std::span<const Block> blocks) {
  require_new(blocks);
  for (size_t at = blocks.size(); at-- > 0;) lists_.push_front(kFree, blocks[at]);
  free_ += blocks.size();
}

void BlockQueue::require_new(std::span<const Block> blocks) {
  // Each is put into a list on trial, so that a block named twice is noticed.
  size_t good = 0;
  for (; good < blocks.size(); ++good) {
    const Block block = blocks[good];
    if (block >= lists_.blocks() || lists_.list_of(block) != BlockLists::kNone) break;
    lists_.push_back(kFree, block);
  }
  for (size_t at = good; at-- > 0;) lists_.erase(blocks[at]);
  if (good == blocks.size()) return;
  require_block(blocks[good]);
  throw std::logic_error(named(blocks[good]) + " is free already");
}

void BlockQueue::remove(Block block) {
  require_free(block);
  hit(block);
  lists_.erase(block);
  --free_;
}

void BlockQueue::unhashed(Block block) {
  if (is_free(block)) emptied(block);
}

void BlockQueue::reset() {
  forget();
  for (const Block block : in_order()) lists_.move_to(kFree, block);
}

void StockQueue::place(Block block, const CachedBlock& seen) {
  if (seen.apart) {
    lists_.push_front(kFree, block);
  } else {
    lists_.push_back(kFree, block);
  }
}

}  // namespace statecache
