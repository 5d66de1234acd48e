// Sessions that grow by a point a turn, served through `learned` with its shadows.

#ifndef STATECACHE_TESTS_LEARNED_SESSIONS_H_
#define STATECACHE_TESTS_LEARNED_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "statecache/policies.h"

namespace statecache {

class LearnedSessions {
 public:
  explicit LearnedSessions(int64_t slots)
      : index_(make_index("learned", {.slots = slots})),
        slots_(static_cast<size_t>(slots)),
        paths_(slots_ / 4) {
    while (index_->size() < slots_) serve();
    for (int64_t request = 0; request < slots; ++request) serve();  // until it is steady
  }

  // A prompt of a random session: looked up, resumed, and cached at each point beyond.
  void serve() {
    std::vector<StateId>& path = paths_[random_() % paths_.size()];
    if (path.size() == 16) path.clear();
    path.push_back(++last_);
    depths_.clear();
    for (size_t point = 1; point <= path.size(); ++point) {
      depths_.push_back(static_cast<int64_t>(point) * 8192);
    }
    index_->on_prompt(path, depths_, std::ssize(path) - 1, path);
    depths_offered_ += path.size();
    size_t resident = path.size() - 1;  // how many points the one resumed from is deep
    while (resident > 0 && !index_->contains(path[resident - 1])) --resident;
    const std::optional<StateId> hit =
        resident > 0 ? std::optional(path[resident - 1]) : std::nullopt;
    if (hit) {
      index_->touch(*hit);
      index_->pin(*hit);
    }
    std::optional<StateId> above = hit;
    for (size_t point = resident; point < path.size(); ++point) {
      if (index_->size() >= slots_) index_->evict(1);
      while (above && !index_->contains(*above)) above = hit;
      index_->insert(path[point], depths_[point], above, {}, point + 1 == path.size());
      above = path[point];
    }
    if (hit) index_->unpin(*hit);
  }

  uint64_t depths_offered() const { return depths_offered_; }
  const StateIndex& index() const { return *index_; }

 private:
  std::unique_ptr<StateIndex> index_;
  size_t slots_;
  std::vector<std::vector<StateId>> paths_;
  std::vector<int64_t> depths_;
  StateId last_ = 0;
  uint64_t depths_offered_ = 0;
  std::mt19937_64 random_{7};
};

}  // namespace statecache

#endif  // STATECACHE_TESTS_LEARNED_SESSIONS_H_
