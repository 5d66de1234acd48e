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

// Which kernel is chosen: that of a tuned shape, the general one by 16-byte accesses, or the
// general one for any alignment.
enum class General { kTuned, kWide, kNarrow };
General quantizing(const CheckpointCopy& copy);
General dequantizing(const CheckpointCopy& copy);

}  // namespace statecache::testing

#endif  // STATECACHE_TESTS_EMULATED_LAUNCH_H_
