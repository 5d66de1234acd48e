#include "statecache/cell_heaps.h"

#include <algorithm>

namespace statecache {

void CellHeaps::file(Slot slot, Cell cell, double gain, uint64_t last_use) {
  if (filed_as(slot, cell, gain, last_use)) return;
  if (slot >= at_.size()) {
    at_.resize(slot + 1, kNone);
    cell_of_.resize(slot + 1);
  }
  if (at_[slot] != kNone && cell_of_[slot] != cell) take(slot);
  Heap& heap = heaps_[cell];
  const Entry entry{gain, last_use, slot};
  if (at_[slot] != kNone) {
    sift(heap, at_[slot], entry);
    return;
  }
  used_[cell / 64] |= uint64_t{1} << (cell % 64);
  cell_of_[slot] = cell;
  heap.push_back(entry);
  sift(heap, heap.size() - 1, entry);
}

void CellHeaps::take(Slot slot) {
  if (!filed(slot)) return;
  const Cell cell = cell_of_[slot];
  Heap& heap = heaps_[cell];
  const size_t at = at_[slot];
  const Entry last = heap.back();
  heap.pop_back();
  at_[slot] = kNone;
  if (heap.empty()) {
    used_[cell / 64] &= ~(uint64_t{1} << (cell % 64));
  } else if (at < heap.size()) {
    sift(heap, at, last);
  }
}

void CellHeaps::clear() {
  for (Heap& heap : heaps_) heap.clear();
  used_.fill(0);
  std::fill(at_.begin(), at_.end(), kNone);
}

bool CellHeaps::filed_as(Slot slot, Cell cell, double gain, uint64_t last_use) const {
  if (!filed(slot) || cell_of_[slot] != cell) return false;
  const Entry& entry = heaps_[cell][at_[slot]];
  return entry.slot == slot && entry.gain == gain && entry.last_use == last_use;
}

bool CellHeaps::in_order() const {
  for (const Heap& heap : heaps_) {
    for (size_t at = 1; at < heap.size(); ++at) {
      const Entry &above = heap[(at - 1) / kArity], &entry = heap[at];
      if (entry.gain < above.gain) return false;
      if (entry.gain == above.gain && entry.last_use < above.last_use) return false;
    }
  }
  return true;
}

void CellHeaps::sift(Heap& heap, size_t at, const Entry& entry) {
  while (at > 0) {
    const size_t above = (at - 1) / kArity;
    if (!less(entry, heap[above])) break;
    place(heap, at, heap[above]);
    at = above;
  }
  for (;;) {
    const size_t first = at * kArity + 1;
    if (first >= heap.size()) break;
    const size_t end = std::min(first + kArity, heap.size());
    size_t lowest = first;
    for (size_t child = first + 1; child < end; ++child) {
      if (less(heap[child], heap[lowest])) lowest = child;
    }
    if (!less(heap[lowest], entry)) break;
    place(heap, at, heap[lowest]);
    at = lowest;
  }
  place(heap, at, entry);
}

void CellHeaps::place(Heap& heap, size_t at, const Entry& entry) {
  heap[at] = entry;
  at_[entry.slot] = static_cast<uint32_t>(at);
}

}  // namespace statecache
