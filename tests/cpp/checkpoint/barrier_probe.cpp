// Quantises one state with the emulated kernels, leaving out the barrier named by the first
// argument (-1 for none). ThreadSanitizer must find a race for each barrier left out: a test of the
// tests.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_emulator.h"
#include "emulated_launch.h"
#include "pools.h"

int main(int argc, char** argv) {
  namespace testing = statecache::testing;
  if (argc != 3) {
    std::fputs("usage: barrier_probe BARRIER D_K\n", stderr);
    return 2;
  }
  emulator::left_out_barrier = std::atoi(argv[1]);
  testing::Pools pools({1, 1, 64, std::atoi(argv[2]), statecache::StateType::kBfloat16}, 1);
  pools.fill(3);
  const std::vector<int64_t> slots{0};
  std::vector<int32_t> report;
  return testing::quantize_emulated(pools.copy(slots, slots, report));
}
