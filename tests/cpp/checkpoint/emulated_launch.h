#ifndef STATECACHE_TESTS_EMULATED_LAUNCH_H_
#define STATECACHE_TESTS_EMULATED_LAUNCH_H_

// The kernels' source on the emulator of CUDA, compiled once for all programs that run it.

#include <cstdint>

#include "statecache/checkpoint_copy.h"

namespace statecache::testing {

// The kernels' level of x at `scale`, in the low byte.
uint32_t nearest_level_emulated(float x, float scale);

// As in CUDA: choose a kernel and its grid, run it, return 0.
int quantize_emulated(const CheckpointCopy& copy);
int dequantize_emulated(const CheckpointCopy& copy);
int copy_emulated(const RowCopy& copy);

// Whether the kernel for any shape and alignment would be chosen, not one for a tuned shape.
bool quantizes_by_general_kernel(const CheckpointCopy& copy);
bool dequantizes_by_general_kernel(const CheckpointCopy& copy);

}  // namespace statecache::testing

#endif  // STATECACHE_TESTS_EMULATED_LAUNCH_H_
