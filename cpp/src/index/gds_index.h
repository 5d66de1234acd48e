#ifndef STATECACHE_GDS_INDEX_H_
#define STATECACHE_GDS_INDEX_H_

#include <string_view>

#include "tree_index.h"

namespace statecache {

// The policy `gds`, GreedyDual-Size over the tree of prefix points: a state's gain is what it costs
// to compute from the nearest shallower state.
class GdsIndex final : public TreeIndex {
 public:
  explicit GdsIndex(CostModel cost) : TreeIndex(cost) {}
  std::string_view policy() const override { return "gds"; }
};

}  // namespace statecache

#endif  // STATECACHE_GDS_INDEX_H_
