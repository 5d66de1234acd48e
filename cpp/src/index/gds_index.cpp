#include "gds_index.h"

#include "policy_factories.h"

namespace statecache {

std::unique_ptr<StateIndex> make_gds(const PolicyOptions& options) {
  return std::make_unique<GdsIndex>(options.cost);
}

}  // namespace statecache
