#include <cuda_runtime.h>

#include "checkpoint_kernels.cuh"
#include "statecache/checkpoint_copy.h"

namespace statecache {
namespace {

struct Launcher {
  cudaStream_t stream;

  template <typename Copy>
  int operator()(void (*kernel)(Copy), dim3 grid, const Copy& copy) const {
    kernel<<<grid, kernels::kThreads, 0, stream>>>(copy);
    return static_cast<int>(cudaGetLastError());
  }
};

Launcher on(void* stream) { return {static_cast<cudaStream_t>(stream)}; }

}  // namespace

int quantize_cuda(const CheckpointCopy& copy, void* stream) {
  return kernels::launch<true>(copy, on(stream));
}

int dequantize_cuda(const CheckpointCopy& copy, void* stream) {
  return kernels::launch<false>(copy, on(stream));
}

int copy_cuda(const RowCopy& copy, void* stream) { return kernels::launch(copy, on(stream)); }

const char* cuda_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace statecache
