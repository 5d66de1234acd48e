#ifndef STATECACHE_LEARNED_TABLE_H_
#define STATECACHE_LEARNED_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace statecache {

// What `learned` has seen: how often states of a kind and age are resumed, and what to expect.
// Doubles in a fixed order of operations, without functions of the C library, so that every build
// and the Python reference agree bit for bit. Compile with -ffp-contract=off.
class LearnedTable {
 public:
  static constexpr int kAgeBuckets = 16;  // below 2 requests, then by powers of two
  static constexpr int kRoles = 6;
  static constexpr int kKinds = 16;
  static constexpr size_t kClassBuckets = kRoles * kKinds * kAgeBuckets;
  static constexpr uint32_t kEvery = 16;  // requests between two counts of exposure
  static constexpr double kFading =
      0.9726549474122855;        // of what was seen by then: halves in 400 requests
  using ClassBucket = uint16_t;  // (role * kKinds + kind) * kAgeBuckets + that of age

  LearnedTable() { rebuild(); }

  // States, by bucket, that kEvery requests could have resumed.
  void expose(const std::array<uint32_t, kClassBuckets>& states);
  // A state that was resumed, or would have been.
  void hit(ClassBucket bucket);
  // What was seen counts less from here on.
  void fade();
  // Brings index() up to date.
  void rebuild();
  // The chance that one request resumes a state, as of the last rebuild.
  double rate(ClassBucket bucket) const { return rates_[bucket]; }
  // How much a state is worth keeping for each unit of its gain, as of the last rebuild.
  double index(ClassBucket bucket) const { return index_[bucket]; }

 private:
  static size_t role_bucket(ClassBucket bucket) {
    return static_cast<size_t>(bucket / (kKinds * kAgeBuckets) * kAgeBuckets +
                               bucket % kAgeBuckets);
  }

  std::array<double, kRoles * kAgeBuckets> role_hits_{}, role_exposure_{};
  std::array<double, kClassBuckets> hits_{}, exposure_{}, rates_{}, index_{};
};

}  // namespace statecache

#endif  // STATECACHE_LEARNED_TABLE_H_
