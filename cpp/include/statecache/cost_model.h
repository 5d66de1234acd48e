#ifndef STATECACHE_COST_MODEL_H_
#define STATECACHE_COST_MODEL_H_

#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace statecache {

// Deepest prefix point a state may have, in tokens. Squares of depths then fit in int64.
inline constexpr int64_t kMaxDepth = (int64_t{1} << 31) - 1;

// Time to compute the states between two prefix points, in the unit of the fit (seconds where the
// coefficients were fitted to seconds; only linear:quadratic matters for the order of eviction).
//
//   cost(a, b) = linear * (b - a) + quadratic * (b * b - a * a) / 2e5
//
// The defaults are the fit FlashState published for GLM-5.3-Flash.
class CostModel {
 public:
  static constexpr double kDefaultLinear = 1.862e-5;
  static constexpr double kDefaultQuadratic = 3.33e-6;

  static constexpr double kMaxCost = 1e280;

  CostModel() = default;

  // Throws std::invalid_argument unless both coefficients are finite and >= 0, at least one is
  // above 0, and the deepest possible state costs at most kMaxCost: a watermark that has grown by
  // that much at each of 1e18 evictions is still finite.
  CostModel(double linear, double quadratic) : linear_(linear), quadratic_(quadratic) {
    if (!std::isfinite(linear) || !std::isfinite(quadratic)) {
      throw std::invalid_argument("cost coefficients must be finite numbers");
    }
    if (linear < 0 || quadratic < 0) {
      throw std::invalid_argument("cost coefficients must not be negative");
    }
    if (linear == 0 && quadratic == 0) {
      throw std::invalid_argument("cost coefficients must not both be 0");
    }
    if (!(cost(0, kMaxDepth) <= kMaxCost)) {
      throw std::invalid_argument("cost coefficients are too large: a deep state costs over 1e280");
    }
  }

  double linear() const { return linear_; }
  double quadratic() const { return quadratic_; }

  // Cost of computing (from_depth, to_depth]; 0 <= from_depth <= to_depth <= kMaxDepth.
  // The differences are integers and each operation rounds once, so that every build and the
  // Python reference agree bit for bit. Compile with -ffp-contract=off.
  double cost(int64_t from_depth, int64_t to_depth) const {
    const auto tokens = static_cast<double>(to_depth - from_depth);
    const auto squares = static_cast<double>(to_depth * to_depth - from_depth * from_depth);
    return linear_ * tokens + quadratic_ * squares / 2e5;
  }

 private:
  double linear_ = kDefaultLinear;
  double quadratic_ = kDefaultQuadratic;
};

}  // namespace statecache

#endif  // STATECACHE_COST_MODEL_H_
