#include "emulated_launch.h"

#include "checkpoint_kernels.cuh"
#include "cuda_emulator.h"

namespace statecache::testing {
namespace {

struct Run {
  template <typename Copy>
  int operator()(void (*kernel)(Copy), dim3 grid, const Copy& copy) const {
    emulator::launch(kernel, grid, kernels::kThreads, copy);
    return 0;
  }
};

// Runs nothing, keeps which kernel was chosen.
struct Choose {
  const void** kernel;
  int operator()(void (*chosen)(CheckpointCopy), dim3, const CheckpointCopy&) const {
    *kernel = reinterpret_cast<const void*>(chosen);
    return 0;
  }
};

using Kernel = void (*)(CheckpointCopy);

template <bool kStore>
bool is_general(const CheckpointCopy& copy, Kernel float32, Kernel float16, Kernel bfloat16) {
  const void* chosen = nullptr;
  kernels::launch<kStore>(copy, Choose{&chosen});
  const Kernel general = copy.type == StateType::kFloat32   ? float32
                         : copy.type == StateType::kFloat16 ? float16
                                                            : bfloat16;
  return chosen == reinterpret_cast<const void*>(general);
}

}  // namespace

uint32_t nearest_level_emulated(float x, float scale) {
  return kernels::nearest_level(x, scale, 1.0F / scale);
}

int quantize_emulated(const CheckpointCopy& copy) { return kernels::launch<true>(copy, Run()); }
int dequantize_emulated(const CheckpointCopy& copy) { return kernels::launch<false>(copy, Run()); }
int copy_emulated(const RowCopy& copy) { return kernels::launch(copy, Run()); }

bool quantizes_by_general_kernel(const CheckpointCopy& copy) {
  return is_general<true>(copy, kernels::quantize_general<StateType::kFloat32>,
                          kernels::quantize_general<StateType::kFloat16>,
                          kernels::quantize_general<StateType::kBfloat16>);
}

bool dequantizes_by_general_kernel(const CheckpointCopy& copy) {
  return is_general<false>(copy, kernels::dequantize_general<StateType::kFloat32>,
                           kernels::dequantize_general<StateType::kFloat16>,
                           kernels::dequantize_general<StateType::kBfloat16>);
}

}  // namespace statecache::testing
