#ifndef STATECACHE_BUCKET_HEAPS_H_
#define STATECACHE_BUCKET_HEAPS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "learned_table.h"

namespace statecache {

// Victims by rank: the index of their bucket * their gain; equal ones by gain, then by last use.
// States of a bucket differ in gain alone, so each bucket has a heap by (gain, last use) and the
// lowest rank is the lowest over the tops. States whose rank is not that of a bucket have a heap of
// their own, by (rank, gain, last use). O(log n) to update or remove a state, O(buckets in use) to
// find the lowest.
class BucketHeaps {
 public:
  using Slot = uint32_t;
  using ClassBucket = LearnedTable::ClassBucket;
  static constexpr Slot kNone = UINT32_MAX;
  static constexpr ClassBucket kByRank =
      LearnedTable::kClassBuckets;  // the heap beside the buckets

  // Adds `slot`, or moves it where it belongs now. Its key is its rank in kByRank, else its gain.
  void update(Slot slot, ClassBucket bucket, double key, double gain, uint64_t last_use);
  void remove(Slot slot);  // if it is there
  void clear();
  // The slot of the lowest rank, or kNone. `index_of(bucket)` gives the index of a bucket.
  template <class Index>
  Slot lowest(Index&& index_of);

  bool contains(Slot slot) const { return slot < at_.size() && at_[slot] != kNone; }
  // Whether it is there, as these say.
  bool holds(Slot slot, ClassBucket bucket, double key, double gain, uint64_t last_use) const;
  uint64_t comparisons() const { return comparisons_; }
  bool in_order() const;  // each heap is one

 private:
  static constexpr size_t kArity = 4;
  static constexpr size_t kHeaps = LearnedTable::kClassBuckets + 1;
  static constexpr size_t kWords = (kHeaps + 63) / 64;
  struct Entry {
    double key;
    double gain;
    uint64_t last_use;
    Slot slot;
  };
  using Heap = std::vector<Entry>;

  static bool before(const Entry& a, const Entry& b) {  // of equal rank
    return (a.gain < b.gain) | ((a.gain == b.gain) & (a.last_use < b.last_use));
  }
  bool less(const Entry& a, const Entry& b) {
    ++comparisons_;
    return (a.key < b.key) | ((a.key == b.key) & before(a, b));
  }
  void sift(Heap& heap, size_t at, const Entry& entry);
  void place(Heap& heap, size_t at, const Entry& entry);

  std::array<Heap, kHeaps> heaps_;
  std::array<uint64_t, kWords> used_{};  // a bit for each bucket whose heap is not empty
  std::vector<ClassBucket> bucket_of_;   // by slot
  std::vector<uint32_t> at_;             // by slot: position in its heap, or kNone
  uint64_t comparisons_ = 0;
};

template <class Index>
BucketHeaps::Slot BucketHeaps::lowest(Index&& index_of) {
  const Entry* best = nullptr;
  double lowest_rank = 0;
  for (size_t word = 0; word < kWords; ++word) {
    for (uint64_t bits = used_[word]; bits != 0; bits &= bits - 1) {
      const size_t bucket = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
      const Entry& top = heaps_[bucket].front();
      const double rank =
          bucket == kByRank ? top.key : index_of(static_cast<ClassBucket>(bucket)) * top.key;
      if (best == nullptr || rank < lowest_rank || (rank == lowest_rank && before(top, *best))) {
        best = &top;
        lowest_rank = rank;
      }
    }
  }
  return best == nullptr ? kNone : best->slot;
}

}  // namespace statecache

#endif  // STATECACHE_BUCKET_HEAPS_H_
