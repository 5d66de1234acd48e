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

template <bool kStore, StateType kType, int kVector>
bool is_chosen(const CheckpointCopy& copy) {
  const void* chosen = nullptr;
  kernels::launch<kStore>(copy, Choose{&chosen});
  void (*general)(CheckpointCopy) = kernels::dequantize_general<kType, kVector>;
  if constexpr (kStore) general = kernels::quantize_general<kType, kVector>;
  return chosen == reinterpret_cast<const void*>(general);
}

template <bool kStore, int kVector>
bool is_general(const CheckpointCopy& copy) {
  switch (copy.type) {
    case StateType::kFloat32:
      return is_chosen<kStore, StateType::kFloat32, kVector>(copy);
    case StateType::kFloat16:
      return is_chosen<kStore, StateType::kFloat16, kVector>(copy);
    case StateType::kBfloat16:
      break;
  }
  return is_chosen<kStore, StateType::kBfloat16, kVector>(copy);
}

}  // namespace

uint32_t nearest_level_emulated(float x, float scale) {
  return kernels::nearest_level(x, scale, 1.0F / scale);
}

int quantize_emulated(const CheckpointCopy& copy) { return kernels::launch<true>(copy, Run()); }
int dequantize_emulated(const CheckpointCopy& copy) { return kernels::launch<false>(copy, Run()); }
int copy_emulated(const RowCopy& copy) { return kernels::launch(copy, Run()); }

General quantizing(const CheckpointCopy& copy) {
  if (is_general<true, 8>(copy)) return General::kWide;
  return is_general<true, 2>(copy) ? General::kNarrow : General::kTuned;
}

General dequantizing(const CheckpointCopy& copy) {
  if (is_general<false, 8>(copy)) return General::kWide;
  return is_general<false, 2>(copy) ? General::kNarrow : General::kTuned;
}

}  // namespace statecache::testing
