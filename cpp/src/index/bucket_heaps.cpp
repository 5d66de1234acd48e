#include "bucket_heaps.h"

#include <algorithm>

namespace statecache {

void BucketHeaps::update(Slot slot, ClassBucket bucket, double key, double gain,
                         uint64_t last_use) {
  if (holds(slot, bucket, key, gain, last_use)) return;
  if (slot >= at_.size()) {
    at_.resize(slot + 1, kNone);
    bucket_of_.resize(slot + 1);
  }
  if (at_[slot] != kNone && bucket_of_[slot] != bucket) remove(slot);
  Heap& heap = heaps_[bucket];
  const Entry entry{key, gain, last_use, slot};
  if (at_[slot] != kNone) {
    sift(heap, at_[slot], entry);
    return;
  }
  used_[bucket / 64] |= uint64_t{1} << (bucket % 64);
  bucket_of_[slot] = bucket;
  heap.push_back(entry);
  sift(heap, heap.size() - 1, entry);
}

void BucketHeaps::remove(Slot slot) {
  if (!contains(slot)) return;
  const ClassBucket bucket = bucket_of_[slot];
  Heap& heap = heaps_[bucket];
  const size_t at = at_[slot];
  const Entry last = heap.back();
  heap.pop_back();
  at_[slot] = kNone;
  if (heap.empty()) {
    used_[bucket / 64] &= ~(uint64_t{1} << (bucket % 64));
  } else if (at < heap.size()) {
    sift(heap, at, last);
  }
}

void BucketHeaps::clear() {
  for (Heap& heap : heaps_) heap.clear();
  used_.fill(0);
  std::fill(at_.begin(), at_.end(), kNone);
}

bool BucketHeaps::holds(Slot slot, ClassBucket bucket, double key, double gain,
                        uint64_t last_use) const {
  if (!contains(slot) || bucket_of_[slot] != bucket) return false;
  const Entry& entry = heaps_[bucket][at_[slot]];
  return entry.slot == slot && entry.key == key && entry.gain == gain && entry.last_use == last_use;
}

bool BucketHeaps::in_order() const {
  for (const Heap& heap : heaps_) {
    for (size_t at = 1; at < heap.size(); ++at) {
      const Entry &above = heap[(at - 1) / kArity], &entry = heap[at];
      if (entry.key < above.key) return false;
      if (entry.key == above.key && before(entry, above)) return false;
    }
  }
  return true;
}

void BucketHeaps::sift(Heap& heap, size_t at, const Entry& entry) {
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

void BucketHeaps::place(Heap& heap, size_t at, const Entry& entry) {
  heap[at] = entry;
  at_[entry.slot] = static_cast<uint32_t>(at);
}

}  // namespace statecache
