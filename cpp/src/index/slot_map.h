#ifndef STATECACHE_SLOT_MAP_H_
#define STATECACHE_SLOT_MAP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace statecache {

// Maps 64-bit ids to 32-bit slots: open addressing with linear probing, at most three quarters
// full, no tombstones. Never iterated, so its order cannot reach a decision.
class SlotMap {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  SlotMap() : cells_(16) {}

  size_t size() const { return size_; }

  // The slot of `id`, or kNone.
  uint32_t find(int64_t id) const {
    for (size_t at = home(id); cells_[at].slot != kNone; at = next(at)) {
      if (cells_[at].id == id) return cells_[at].slot;
    }
    return kNone;
  }

  // `id` must be absent and `slot` not kNone.
  void insert(int64_t id, uint32_t slot) {
    if ((size_ + 1) * 4 > cells_.size() * 3) grow();
    place({id, slot});
    ++size_;
  }

  // `id` must be present. Closes the gap by moving back what was displaced across it.
  void erase(int64_t id) {
    size_t gap = home(id);
    while (cells_[gap].id != id || cells_[gap].slot == kNone) gap = next(gap);
    for (size_t at = next(gap); cells_[at].slot != kNone; at = next(at)) {
      const size_t displaced = (at - home(cells_[at].id)) & mask();
      if (displaced < ((at - gap) & mask())) continue;
      cells_[gap] = cells_[at];
      gap = at;
    }
    cells_[gap] = Cell{};
    --size_;
  }

 private:
  struct Cell {
    int64_t id = 0;
    uint32_t slot = kNone;
  };

  size_t mask() const { return cells_.size() - 1; }
  size_t next(size_t at) const { return (at + 1) & mask(); }

  // Mixes all bits of the id into the low ones (the finaliser of SplitMix64).
  size_t home(int64_t id) const {
    auto x = static_cast<uint64_t>(id);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return static_cast<size_t>(x ^ (x >> 31)) & mask();
  }

  void place(const Cell& cell) {
    size_t at = home(cell.id);
    while (cells_[at].slot != kNone) at = next(at);
    cells_[at] = cell;
  }

  void grow() {
    std::vector<Cell> old(cells_.size() * 2);
    old.swap(cells_);
    for (const Cell& cell : old) {
      if (cell.slot != kNone) place(cell);
    }
  }

  std::vector<Cell> cells_;  // a power of two
  size_t size_ = 0;
};

}  // namespace statecache

#endif  // STATECACHE_SLOT_MAP_H_
