#ifndef STATECACHE_TESTS_HARD_QUOTIENTS_H_
#define STATECACHE_TESTS_HARD_QUOTIENTS_H_

#include <cstdint>
#include <vector>

namespace statecache::testing {

struct Quotient {
  float x;
  float scale;
};

// The quotients where Markstein's division could differ from a true one in a way that an int8
// notices.
//
// With `inverse` = 1/s rounded, the guess x * inverse is within 1.5 units in the last place of x/s,
// and what the correction step rounds is within 1.5 * 2^-24 units of it. So the two divisions can
// only differ where x/s lies that close to a midpoint of two floats; and that changes the integer
// only if one of these two is a half level h = k + 1/2, that is, if the midpoint is h +- ulp/2.
// Scale x, s and h to integers: 2^23 <= X, S < 2^24 and 128 <= H < 256, the midpoint being
// M = H * 2^17 +- 1. Then X * 2^j = S * M + N for j = 24 or 25, and the distance above means
// |N| <= 3. Modulo 2^17 this says S = -+N, so S = t * 2^17 -+ N for 64 <= t <= 128: few enough to
// visit all. (Below a power of two the spacing halves: M = H * 2^18 - 1 there, j one more.)
inline std::vector<Quotient> hard_quotients() {
  std::vector<Quotient> found;
  for (int64_t h = 128; h < 256; ++h) {
    for (int64_t shift : {17, 18}) {
      for (int64_t side : {-1, 1}) {
        const int64_t midpoint = (h << shift) + side;
        for (int64_t t = 32; t <= 128; ++t) {
          for (int64_t near = -8; near <= 8; ++near) {
            const int64_t s = (t << 17) + near;
            if (s < (1 << 23) || s >= (1 << 24)) continue;
            for (int64_t n = -8; n <= 8; ++n) {
              const int64_t product = s * midpoint + n;
              for (int j : {23, 24, 25, 26}) {
                if (product % (int64_t{1} << j) != 0) continue;
                const int64_t x = product >> j;
                if (x < (1 << 23) || x >= (1 << 24)) continue;
                found.push_back({static_cast<float>(x), static_cast<float>(s)});
              }
            }
          }
        }
      }
    }
  }
  return found;
}

}  // namespace statecache::testing

#endif  // STATECACHE_TESTS_HARD_QUOTIENTS_H_
