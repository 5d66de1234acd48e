#include "statecache/block_hash_index.h"

#include <bit>
#include <stdexcept>

namespace statecache {

BlockHashIndex::BlockHashIndex(size_t blocks)
    : blocks_(blocks), nodes_(blocks), table_(std::bit_ceil(2 * blocks + 2), kNone) {
  if (blocks >= kNoBlock) throw std::length_error("too many blocks for one pool");
  for (Block block = 0; block < blocks; ++block) nodes_[block].block = block;
}

size_t BlockHashIndex::home(uint64_t hash) const {
  return static_cast<size_t>(hash ^ (hash >> 32)) & mask();
}

BlockHashIndex::Number BlockHashIndex::find(const Key& key) const {
  for (size_t at = home(key.hash); table_[at] != kNone; at = (at + 1) & mask()) {
    const Named& named = keys_[table_[at]];
    if (named.hash == key.hash && named.bytes == key.bytes) return table_[at];
  }
  return kNone;
}

BlockHashIndex::Number BlockHashIndex::add(const Key& key) {
  if (free_numbers_.empty()) {
    uses_.emplace_back();
    keys_.emplace_back();
    free_numbers_.push_back(static_cast<Number>(keys_.size() - 1));
    if (2 * keys_.size() > table_.size()) grow();
  }
  const Number number = free_numbers_.back();
  keys_[number].bytes = key.bytes;
  keys_[number].hash = key.hash;
  free_numbers_.pop_back();
  size_t at = home(key.hash);
  while (table_[at] != kNone) at = (at + 1) & mask();
  table_[at] = number;
  return number;
}

void BlockHashIndex::grow() {
  std::vector<Number> old(2 * table_.size(), kNone);
  old.swap(table_);
  for (const Number number : old) {
    if (number == kNone) continue;
    size_t at = home(keys_[number].hash);
    while (table_[at] != kNone) at = (at + 1) & mask();
    table_[at] = number;
  }
}

// Closes the gap in the table by moving back what was displaced across it.
void BlockHashIndex::drop_if_unused(Number number) {
  if (uses_[number].copies > 0 || uses_[number].has_checkpoint) return;
  size_t gap = home(keys_[number].hash);
  while (table_[gap] != number) gap = (gap + 1) & mask();
  for (size_t at = (gap + 1) & mask(); table_[at] != kNone; at = (at + 1) & mask()) {
    const size_t displaced = (at - home(keys_[table_[at]].hash)) & mask();
    if (displaced < ((at - gap) & mask())) continue;
    table_[gap] = table_[at];
    gap = at;
  }
  table_[gap] = kNone;
  free_numbers_.push_back(number);
}

BlockHashIndex::Node BlockHashIndex::node_of(Number number, Block block) const {
  if (block >= blocks_ || number == kNone) return kNone;
  Node node = block;
  while (node != kNone && nodes_[node].key != number) node = nodes_[node].also;
  return node;
}

bool BlockHashIndex::contains(const Key& key, Block block) const {
  return node_of(find(key), block) != kNone;
}

void BlockHashIndex::insert(const Key& key, Block block) {
  if (block >= blocks_) throw std::out_of_range("there is no block " + std::to_string(block));
  const Number known = find(key);
  if (node_of(known, block) != kNone) return;
  Node node = block;
  if (nodes_[block].key != kNone) {
    if (free_nodes_.empty()) {
      nodes_.emplace_back();
      free_nodes_.push_back(static_cast<Node>(nodes_.size() - 1));
    }
    node = free_nodes_.back();
  }
  const Number number = known == kNone ? add(key) : known;
  if (node != block) {
    free_nodes_.pop_back();
    Node last = block;
    while (nodes_[last].also != kNone) last = nodes_[last].also;
    nodes_[last].also = node;
    nodes_[node].also = kNone;
  }
  Use& use = uses_[number];
  Place& place = nodes_[node];
  place.block = block;
  place.key = number;
  place.next = kNone;
  place.prev = use.last;
  (use.last == kNone ? use.first : nodes_[use.last].next) = node;
  use.last = node;
  if (++use.copies == 1) ++cached_;
}

void BlockHashIndex::relink(const Place& place, Use& use, Node before, Node behind) {
  (place.prev == kNone ? use.first : nodes_[place.prev].next) = before;
  (place.next == kNone ? use.last : nodes_[place.next].prev) = behind;
}

bool BlockHashIndex::erase(const Key& key, Block block) {
  const Number number = find(key);
  const Node node = node_of(number, block);
  if (node == kNone) return false;
  Use& use = uses_[number];
  relink(nodes_[node], use, nodes_[node].next, nodes_[node].prev);
  Node unused = node;
  if (node != block) {
    Node before = block;
    while (nodes_[before].also != node) before = nodes_[before].also;
    nodes_[before].also = nodes_[node].also;
  } else if (nodes_[block].also != kNone) {
    // The next key is the first one now.
    unused = nodes_[block].also;
    nodes_[block] = nodes_[unused];
    relink(nodes_[block], uses_[nodes_[block].key], block, block);
  }
  nodes_[unused].key = kNone;
  if (unused != block) free_nodes_.push_back(unused);
  if (--use.copies == 0) --cached_;
  drop_if_unused(number);
  return true;
}

void BlockHashIndex::set_has_checkpoint(const Key& key, bool has_checkpoint) {
  Number number = find(key);
  if (number == kNone && has_checkpoint) number = add(key);
  if (number == kNone) return;
  uses_[number].has_checkpoint = has_checkpoint;
  drop_if_unused(number);
}

void BlockHashIndex::clear_checkpoints() {
  for (Number number = 0; number < uses_.size(); ++number) {
    if (!uses_[number].has_checkpoint) continue;
    uses_[number].has_checkpoint = false;
    drop_if_unused(number);
  }
}

void BlockHashIndex::clear() {
  for (Block block = 0; block < blocks_; ++block) {
    while (nodes_[block].key != kNone) {
      // A copy: erasing the last block of a key lets go of its name.
      const Named key = keys_[nodes_[block].key];
      erase({key.bytes, key.hash}, block);
    }
  }
}

}  // namespace statecache
