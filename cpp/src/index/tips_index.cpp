#include <cmath>
#include <string_view>

#include "policy_factories.h"
#include "tree_index.h"

namespace statecache {

namespace {

// The policy `gds-tips`: as `gds`, with the square root of the gain, and none for a state in the
// middle of a path: one state is directly below it, which again has others below.
class TipsIndex final : public TreeIndex {
 public:
  explicit TipsIndex(CostModel cost) : TreeIndex(cost) {}
  std::string_view policy() const override { return "gds-tips"; }

 private:
  double gain_of(Slot slot) const override {
    return in_the_middle(slot) ? 0 : std::sqrt(TreeIndex::gain_of(slot));
  }

  void children_changed(Slot slot) override {
    regain(slot);
    regain(node_at(slot).parent);
  }

  bool in_the_middle(Slot slot) const {
    const Slot child = node_at(slot).first_child;
    return child != kNone && node_at(child).next_sibling == kNone &&
           node_at(child).first_child != kNone;
  }
};

}  // namespace

std::unique_ptr<StateIndex> make_gds_tips(const PolicyOptions& options) {
  return std::make_unique<TipsIndex>(options.cost);
}

}  // namespace statecache
