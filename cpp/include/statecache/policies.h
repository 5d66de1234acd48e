#ifndef STATECACHE_POLICIES_H_
#define STATECACHE_POLICIES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "statecache/cost_model.h"
#include "statecache/state_index.h"

namespace statecache {

// What an index is made from. A policy ignores what it has no use for.
struct PolicyOptions {
  CostModel cost = {};
  std::optional<int64_t> slots = {};  // how many states the cache holds, where that is known
  int64_t ghosts = 4096;              // how many evicted states are remembered
};

struct PolicySpec {
  std::string_view name;
  // Throws std::invalid_argument for options that the policy cannot use.
  std::unique_ptr<StateIndex> (*make)(const PolicyOptions& options);
};

// The table of eviction policies: a new one is a file of its own and a row here.
std::span<const PolicySpec> policies();

// An empty index of the policy of this name. Throws std::invalid_argument, listing the names of the
// table, for any other.
std::unique_ptr<StateIndex> make_index(std::string_view policy, const PolicyOptions& options = {});

}  // namespace statecache

#endif  // STATECACHE_POLICIES_H_
