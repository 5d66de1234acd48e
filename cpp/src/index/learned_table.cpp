#include "learned_table.h"

#include <algorithm>

namespace statecache {

namespace {

constexpr int kAgeBuckets = LearnedTable::kAgeBuckets;
using Row = std::array<double, kAgeBuckets>;

constexpr std::array<double, LearnedTable::kRoles> kRolePriors = {1.0, 0.3, 0.3, 0.05, 0.05, 0.05};

// For each age the best ratio of chance to time, over all ages to stop at. `rates` are the chances
// of being resumed by one request. Ratios are compared by multiplication and divided once.
void gittins(const Row& rates, double* index) {
  Row kept, resumed, waited;
  for (int b = 0; b < kAgeBuckets; ++b) {
    double left = 1.0 - rates[b];
    for (int square = 0; square < std::max(1, b); ++square) left *= left;  // ^ width of the bucket
    kept[b] = left;
    resumed[b] = 1.0 - left;
    waited[b] = (1.0 - left) / rates[b];
  }
  for (int b = 0; b < kAgeBuckets; ++b) {
    double alive = 1, chance = 0, time = 0, best_chance = 0, best_time = 1;
    for (int j = b; j < kAgeBuckets; ++j) {
      chance += alive * resumed[j];
      time += alive * waited[j];
      alive *= kept[j];
      if (chance * best_time > best_chance * time) {
        best_chance = chance;
        best_time = time;
      }
      if (alive < 1e-6) break;
    }
    index[b] = best_chance / best_time;
  }
}

}  // namespace

void LearnedTable::expose(const std::array<uint32_t, kClassBuckets>& states) {
  std::array<uint64_t, kRoles * kAgeBuckets> of_role{};
  for (size_t bucket = 0; bucket < kClassBuckets; ++bucket) {
    if (states[bucket] == 0) continue;
    exposure_[bucket] += static_cast<double>(uint64_t{kEvery} * states[bucket]);
    of_role[role_bucket(static_cast<ClassBucket>(bucket))] += states[bucket];
  }
  for (size_t bucket = 0; bucket < of_role.size(); ++bucket) {
    role_exposure_[bucket] += static_cast<double>(kEvery * of_role[bucket]);
  }
}

void LearnedTable::hit(ClassBucket bucket) {
  role_hits_[role_bucket(bucket)] += 1;
  hits_[bucket] += 1;
}

void LearnedTable::fade() {
  for (double& count : role_hits_) count *= kFading;
  for (double& count : role_exposure_) count *= kFading;
  for (double& count : hits_) count *= kFading;
  for (double& count : exposure_) count *= kFading;
}

void LearnedTable::rebuild() {
  for (int role = 0; role < kRoles; ++role) {
    Row of_role;
    for (int b = 0; b < kAgeBuckets; ++b) {
      const double prior = 0.25 / static_cast<double>(b == 0 ? 1 : 1 << b) * kRolePriors[role];
      const size_t bucket = static_cast<size_t>(role * kAgeBuckets + b);
      of_role[b] = (role_hits_[bucket] + 0.5) / (role_exposure_[bucket] + 0.5 / prior);
    }
    const double* unseen = nullptr;  // the index of kinds of which nothing has been seen
    for (int kind = 0; kind < kKinds; ++kind) {
      const size_t first = static_cast<size_t>((role * kKinds + kind) * kAgeBuckets);
      bool seen = false;
      Row rates;
      for (int b = 0; b < kAgeBuckets; ++b) {
        const double hits = hits_[first + b], exposure = exposure_[first + b];
        seen = seen || hits > 0 || exposure > 0;
        rates[b] = std::min(0.999, (hits + 1) / (exposure + 1 / of_role[b]));
      }
      std::copy(rates.begin(), rates.end(), &rates_[first]);
      if (!seen && unseen != nullptr) {
        std::copy_n(unseen, kAgeBuckets, &index_[first]);
        continue;
      }
      gittins(rates, &index_[first]);
      if (!seen) unseen = &index_[first];
    }
  }
}

}  // namespace statecache
