#ifndef STATECACHE_CELL_HEAPS_H_
#define STATECACHE_CELL_HEAPS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "statecache/learned_table.h"

namespace statecache {

// Victims by price: worth of a cell * gain of the state, then gain, then last use. States of a cell
// differ in gain alone, so each cell has a heap by (gain, last use) and the lowest price is the
// lowest over the tops. O(log n) to file or take a state, O(cells in use) to find the lowest.
class CellHeaps {
 public:
  using Slot = uint32_t;
  using Cell = LearnedTable::Cell;
  static constexpr Slot kNone = UINT32_MAX;

  // Files `slot`, or moves it where it belongs now.
  void file(Slot slot, Cell cell, double gain, uint64_t last_use);
  void take(Slot slot);  // if it is filed
  void clear();
  // The slot of the lowest price, or kNone. `worth(cell)` is that of a cell.
  template <class Worth>
  Slot lowest(Worth&& worth);

  bool filed(Slot slot) const { return slot < at_.size() && at_[slot] != kNone; }
  bool filed_as(Slot slot, Cell cell, double gain, uint64_t last_use) const;
  uint64_t comparisons() const { return comparisons_; }
  bool in_order() const;  // each heap is one

 private:
  static constexpr size_t kArity = 4;
  static constexpr size_t kWords = (LearnedTable::kCells + 63) / 64;
  struct Entry {
    double gain;
    uint64_t last_use;
    Slot slot;
  };
  using Heap = std::vector<Entry>;

  bool less(const Entry& a, const Entry& b) {
    ++comparisons_;
    return (a.gain < b.gain) | ((a.gain == b.gain) & (a.last_use < b.last_use));
  }
  void sift(Heap& heap, size_t at, const Entry& entry);
  void place(Heap& heap, size_t at, const Entry& entry);

  std::array<Heap, LearnedTable::kCells> heaps_;
  std::array<uint64_t, kWords> used_{};  // a bit for each cell whose heap is not empty
  std::vector<Cell> cell_of_;            // by slot
  std::vector<uint32_t> at_;             // by slot: position in its heap, or kNone
  uint64_t comparisons_ = 0;
};

template <class Worth>
CellHeaps::Slot CellHeaps::lowest(Worth&& worth) {
  const Entry* best = nullptr;
  double best_price = 0;
  for (size_t word = 0; word < kWords; ++word) {
    for (uint64_t bits = used_[word]; bits != 0; bits &= bits - 1) {
      const size_t cell = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
      const Entry& top = heaps_[cell].front();
      const double price = worth(static_cast<Cell>(cell)) * top.gain;
      if (best == nullptr || price < best_price || (price == best_price && less(top, *best))) {
        best = &top;
        best_price = price;
      }
    }
  }
  return best == nullptr ? kNone : best->slot;
}

}  // namespace statecache

#endif  // STATECACHE_CELL_HEAPS_H_
