#include "statecache/policies.h"

#include <array>
#include <stdexcept>
#include <string>

#include "policy_factories.h"

namespace statecache {

namespace {

constexpr std::array kPolicies = {
    PolicySpec{"gds", make_gds},
    PolicySpec{"lru", make_lru},
    PolicySpec{"learned", make_learned},
    PolicySpec{"gds-tips", make_gds_tips},
};

}  // namespace

std::span<const PolicySpec> policies() { return kPolicies; }

std::unique_ptr<StateIndex> make_index(std::string_view policy, const PolicyOptions& options) {
  std::string known;
  for (const PolicySpec& spec : policies()) {
    if (spec.name == policy) return spec.make(options);
    known += (known.empty() ? "" : ", ") + std::string(spec.name);
  }
  throw std::invalid_argument("unknown policy '" + std::string(policy) + "': use " + known);
}

}  // namespace statecache
