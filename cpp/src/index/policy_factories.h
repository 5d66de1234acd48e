#ifndef STATECACHE_POLICY_FACTORIES_H_
#define STATECACHE_POLICY_FACTORIES_H_

#include <memory>

#include "statecache/policies.h"
#include "statecache/state_index.h"

namespace statecache {

// One for each row of the table, defined in the file of its policy.
std::unique_ptr<StateIndex> make_gds(const PolicyOptions& options);
std::unique_ptr<StateIndex> make_gds_tips(const PolicyOptions& options);
std::unique_ptr<StateIndex> make_lru(const PolicyOptions& options);
std::unique_ptr<StateIndex> make_learned(const PolicyOptions& options);

}  // namespace statecache

#endif  // STATECACHE_POLICY_FACTORIES_H_
