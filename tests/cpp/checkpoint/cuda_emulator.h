#ifndef STATECACHE_TESTS_CUDA_EMULATOR_H_
#define STATECACHE_TESTS_CUDA_EMULATOR_H_

// Runs CUDA kernel source on the CPU: a thread for each CUDA thread of a block, the blocks of a
// grid one after the other. Barriers and shuffles are real ones, so a sanitizer sees the memory
// accesses and the ordering that the kernel really asks for. Holds what our kernels use of CUDA, no
// more.

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // one block at a time

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  explicit dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

inline thread_local dim3 threadIdx;
inline thread_local dim3 blockIdx;
inline thread_local dim3 gridDim;

namespace emulator {

inline constexpr unsigned kWarpSize = 32;

// Two buffers by turns: a lane writes to one while slower lanes may still read the other.
struct Warp {
  std::barrier<> barrier{kWarpSize};
  std::array<std::array<uint32_t, kWarpSize>, 2> sent{};
};

struct Block {
  explicit Block(unsigned threads) : barrier(threads), warps(threads / kWarpSize) {}
  std::barrier<> barrier;
  std::vector<Warp> warps;
};

inline thread_local Block* block = nullptr;
inline thread_local int barriers_passed = 0;
inline thread_local unsigned shuffles = 0;

// Leave out one __syncthreads(), counted from 0 within a block: for tests of the tests.
inline constexpr int kNone = -1;
inline std::atomic<int> left_out_barrier = kNone;

// Threads must be a multiple of the warp size. Whole blocks may return early, single threads not
// before the last barrier.
template <typename Copy>
void launch(void (*kernel)(Copy), dim3 grid, unsigned threads, const Copy& copy) {
  Block shared(threads);
  std::barrier next_block(threads);
  std::vector<std::jthread> running;
  for (unsigned thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      block = &shared;
      threadIdx = dim3(thread, 0, 0);
      gridDim = grid;
      for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
          for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y, z);
            barriers_passed = 0;
            kernel(copy);
            next_block.arrive_and_wait();
          }
        }
      }
    });
  }
}

}  // namespace emulator

inline void __syncthreads() {
  if (emulator::barriers_passed++ == emulator::left_out_barrier.load(std::memory_order_relaxed)) {
    return;
  }
  emulator::block->barrier.arrive_and_wait();
}

inline uint32_t __shfl_xor_sync(unsigned lanes, uint32_t value, int mask) {
  if (lanes != 0xffffffffU) {
    std::fputs("a shuffle names lanes it does not wait for: this emulator runs all 32\n", stderr);
    std::abort();
  }
  emulator::Warp& warp = emulator::block->warps[threadIdx.x / emulator::kWarpSize];
  const unsigned lane = threadIdx.x % emulator::kWarpSize;
  auto& sent = warp.sent[emulator::shuffles++ % 2];
  sent[lane] = value;
  warp.barrier.arrive_and_wait();
  return sent[lane ^ static_cast<unsigned>(mask)];
}

inline int32_t atomicOr(int32_t* target, int32_t bits) {
  return std::atomic_ref(*target).fetch_or(bits, std::memory_order_relaxed);
}

template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0F / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffU, b & 0xffffU) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned from = selector >> (4 * i) & 7U;
    result |= static_cast<uint32_t>(bytes >> (8 * from) & 0xffU) << (8 * i);
  }
  return result;
}

inline _Float16 __ushort_as_half(unsigned short bits) { return std::bit_cast<_Float16>(bits); }
inline float __half2float(_Float16 x) { return static_cast<float>(x); }
struct __half2 {
  _Float16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) {
  return {static_cast<_Float16>(x), static_cast<_Float16>(y)};
}

struct __nv_bfloat162 {
  uint16_t x, y;
};
inline uint16_t bfloat16_bits_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {bfloat16_bits_rn(x), bfloat16_bits_rn(y)};
}

#endif  // STATECACHE_TESTS_CUDA_EMULATOR_H_
