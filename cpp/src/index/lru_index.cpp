#include <optional>
#include <string_view>

#include "policy_factories.h"
#include "tree_index.h"

namespace statecache {

namespace {

// The policy `lru`: every gain is 0, so the tie rule, least recently used first, decides.
class LruIndex final : public TreeIndex {
 public:
  LruIndex() : TreeIndex(std::nullopt) {}
  std::string_view policy() const override { return "lru"; }
};

}  // namespace

std::unique_ptr<StateIndex> make_lru(const PolicyOptions&) { return std::make_unique<LruIndex>(); }

}  // namespace statecache
