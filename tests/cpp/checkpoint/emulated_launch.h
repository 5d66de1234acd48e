#ifndef STATECACHE_TESTS_EMULATED_LAUNCH_H_
#define STATECACHE_TESTS_EMULATED_LAUNCH_H_

#include "checkpoint_kernels.cuh"
#include "cuda_emulator.h"
#include "statecache/checkpoint_copy.h"

namespace statecache::testing {

struct EmulatedLauncher {
  template <typename Copy>
  int operator()(void (*kernel)(Copy), dim3 grid, const Copy& copy) const {
    emulator::launch(kernel, grid, kernels::kThreads, copy);
    return 0;
  }
};

inline int quantize_emulated(const CheckpointCopy& copy) {
  return kernels::launch<true>(copy, EmulatedLauncher());
}
inline int dequantize_emulated(const CheckpointCopy& copy) {
  return kernels::launch<false>(copy, EmulatedLauncher());
}
inline int copy_emulated(const RowCopy& copy) { return kernels::launch(copy, EmulatedLauncher()); }

}  // namespace statecache::testing

#endif  // STATECACHE_TESTS_EMULATED_LAUNCH_H_
