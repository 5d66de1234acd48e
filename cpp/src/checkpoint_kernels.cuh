#ifndef STATECACHE_CHECKPOINT_KERNELS_CUH_
#define STATECACHE_CHECKPOINT_KERNELS_CUH_

#include <cstdint>
#include <cstring>

// The tests compile this file for the CPU, against an emulator of what it uses of CUDA.
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "cuda_emulator.h"
#endif

#include "statecache/checkpoint_copy.h"

namespace statecache::kernels {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr unsigned kAllLanes = 0xffffffffU;

template <typename Two>
__device__ __forceinline__ uint32_t bits_of(const Two& two) {
  static_assert(sizeof two == 4);
  uint32_t bits = 0;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}

// One state type: a 32-bit word holds one float or two 16-bit elements.
template <StateType kType>
struct Element {
  static constexpr int kBytes = kType == StateType::kFloat32 ? 4 : 2;
  static constexpr int kPerWord = 4 / kBytes;
  static constexpr int kScaleBytes = kType == StateType::kBfloat16 ? 2 : 4;
  static constexpr uint32_t kMagnitude = kBytes == 4 ? 0x7fffffffU : 0x7fff7fffU;

  // Element `i` of a word.
  static __device__ __forceinline__ float load(uint32_t word, int i) {
    if constexpr (kType == StateType::kFloat32) {
      return __uint_as_float(word);
    } else if constexpr (kType == StateType::kBfloat16) {
      return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000U);
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * i))));
    }
  }
  // Two at a time: a GPU of compute capability 10 has no fast way for one.
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (kType == StateType::kFloat32) {
      return __float_as_uint(low);
    } else if constexpr (kType == StateType::kBfloat16) {
      return bits_of(__floats2bfloat162_rn(low, high));
    } else {
      return bits_of(__floats2half2_rn(low, high));
    }
  }
  // Of magnitudes as integers: a NaN is larger than anything.
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (kBytes == 4) {
      return a > b ? a : b;
    } else {
      return __vmaxu2(a, b);
    }
  }
  // The scale of a column as it is stored, widened again.
  static __device__ __forceinline__ float scale_of(float magnitude) {
    const float scale = __fdiv_rn(magnitude < 1e-8F ? 1e-8F : magnitude, 127.0F);
    if constexpr (kScaleBytes == 4) return scale;
    return load(pack(scale, scale), 0);
  }
  static __device__ __forceinline__ bool comes_back_finite(float scale) {
    const float top = __fmul_rn(127.0F, scale);
    const float rounded = load(pack(top, top), 0);
    return (__float_as_uint(rounded) & 0x7f800000U) != 0x7f800000U;
  }
};

// The integer nearest to the quotient x / scale, in the low byte. Markstein's division: `inverse`
// is 1 / scale rounded. See checkpoint_copy_cpu.cpp.
__device__ __forceinline__ uint32_t nearest_level(float x, float scale, float inverse) {
  const float guess = __fmul_rn(x, inverse);
  const float quotient = __fmaf_rn(__fmaf_rn(-scale, guess, x), inverse, guess);
  return __float_as_uint(__fadd_rn(quotient, 12582912.0F));
}

// Low bytes of four words, in order.
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Signed byte `i` of a word as a float, without an integer conversion.
__device__ __forceinline__ float byte_to_float(uint32_t word, int i) {
  const uint32_t bits = __byte_perm(word ^ 0x80808080U, 0x4b000000U, 0x7650U + i);
  return __fadd_rn(__uint_as_float(bits), -8388736.0F);
}

struct Pair {
  int64_t active_slot;
  int64_t checkpoint_slot;

  static __device__ __forceinline__ Pair at(const CheckpointCopy& copy, int listed) {
    return {copy.active_slots[listed], copy.checkpoint_slots[listed]};
  }
  __device__ __forceinline__ bool is_valid(const CheckpointCopy& copy) const {
    return active_slot >= 0 && active_slot < copy.active_slot_count && checkpoint_slot >= 0 &&
           checkpoint_slot < copy.checkpoint_slot_count;
  }
  __device__ __forceinline__ char* active(const CheckpointCopy& copy, int layer, int head) const {
    return static_cast<char*>(copy.active[layer]) + active_slot * copy.active_slot_stride +
           head * copy.active_head_stride;
  }
  __device__ __forceinline__ char* quantized(const CheckpointCopy& copy, int layer,
                                             int head) const {
    return static_cast<char*>(copy.quantized) + layer * copy.quantized_layer_stride +
           checkpoint_slot * copy.quantized_slot_stride + head * copy.quantized_head_stride;
  }
  __device__ __forceinline__ char* scale(const CheckpointCopy& copy, int layer, int head) const {
    return static_cast<char*>(copy.scale) + layer * copy.scale_layer_stride +
           checkpoint_slot * copy.scale_slot_stride + head * copy.scale_head_stride;
  }
};

// Among kLanes neighbouring lanes, each with kLanes rows of 16 / kLanes bytes: lane j ends with the
// 16 bytes of row j. `undo` is the inverse.
template <int kLanes>
struct Exchange;

template <>
struct Exchange<2> {
  static __device__ __forceinline__ uint4 apply(const uint32_t (&rows)[2][2], int lane) {
    const bool odd = lane & 1;
    const uint32_t a = __shfl_xor_sync(kAllLanes, odd ? rows[0][0] : rows[1][0], 1);
    const uint32_t b = __shfl_xor_sync(kAllLanes, odd ? rows[0][1] : rows[1][1], 1);
    return odd ? make_uint4(a, b, rows[1][0], rows[1][1])
               : make_uint4(rows[0][0], rows[0][1], a, b);
  }
  static __device__ __forceinline__ void undo(uint4 row, uint32_t (&rows)[2][2], int lane) {
    const bool odd = lane & 1;
    const uint32_t a = __shfl_xor_sync(kAllLanes, odd ? row.x : row.z, 1);
    const uint32_t b = __shfl_xor_sync(kAllLanes, odd ? row.y : row.w, 1);
    rows[0][0] = odd ? a : row.x;
    rows[0][1] = odd ? b : row.y;
    rows[1][0] = odd ? row.z : a;
    rows[1][1] = odd ? row.w : b;
  }
};

template <>
struct Exchange<4> {  // a transposition, its own inverse
  static __device__ __forceinline__ void swap(uint32_t& low, uint32_t& high, int lane, int with) {
    const bool upper = lane & with;
    const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? low : high, with);
    low = upper ? got : low;
    high = upper ? high : got;
  }
  static __device__ __forceinline__ uint4 transpose(uint4 words, int lane) {
    swap(words.x, words.y, lane, 1);
    swap(words.z, words.w, lane, 1);
    swap(words.x, words.z, lane, 2);
    swap(words.y, words.w, lane, 2);
    return words;
  }
  static __device__ __forceinline__ uint4 apply(const uint32_t (&rows)[4][1], int lane) {
    return transpose(make_uint4(rows[0][0], rows[1][0], rows[2][0], rows[3][0]), lane);
  }
  static __device__ __forceinline__ void undo(uint4 row, uint32_t (&rows)[4][1], int lane) {
    const uint4 words = transpose(row, lane);
    rows[0][0] = words.x;
    rows[1][0] = words.y;
    rows[2][0] = words.z;
    rows[3][0] = words.w;
  }
};

// How a block of 256 threads covers 256 bytes of each row of one matrix: a thread holds 16 bytes of
// every kRowStep-th row, all of the tile stays in registers.
template <StateType kType, int kDv, int kDk>
struct Tile {
  using E = Element<kType>;
  static constexpr int kVector = 16 / E::kBytes;  // elements in 16 bytes
  static constexpr int kColumns = 256 / E::kBytes < kDk ? 256 / E::kBytes : kDk;
  static constexpr int kTiles = kDk / kColumns;
  static constexpr int kLanesPerRow = kColumns / kVector;
  static constexpr int kRowStep = kThreads / kLanesPerRow;
  static constexpr int kRows = kDv / kRowStep;  // held by a thread
  static constexpr int kShare = 16 / kVector;   // lanes of one 16-byte int8 access
  static constexpr int kWords = kColumns / E::kPerWord;
  static_assert(kDv % kRowStep == 0 && kRows % kShare == 0 && kRows >= kShare);
  static_assert(kWarp % kLanesPerRow == 0, "a row must not straddle warps");
};

// Grid: (heads * Tile::kTiles, listed, layers).
template <StateType kType, int kDv, int kDk>
__global__ void __launch_bounds__(kThreads)
    quantize_tile(const __grid_constant__ CheckpointCopy copy) {
  using E = Element<kType>;
  using T = Tile<kType, kDv, kDk>;
  __shared__ uint32_t largest[kWarps][T::kWords];
  __shared__ float scales[T::kColumns];
  __shared__ float inverses[T::kColumns];

  const int tile = static_cast<int>(blockIdx.x) % T::kTiles;
  const int head = static_cast<int>(blockIdx.x) / T::kTiles;
  const int listed = static_cast<int>(blockIdx.y);
  const int layer = static_cast<int>(blockIdx.z);
  const Pair pair = Pair::at(copy, listed);
  if (!pair.is_valid(copy)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int warp = thread / kWarp;
  const int vector = thread % T::kLanesPerRow;
  const int first_row = thread / T::kLanesPerRow;

  const char* from = pair.active(copy, layer, head) + tile * T::kColumns * E::kBytes;
  uint4 held[T::kRows];
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    const int64_t row = i * T::kRowStep + first_row;
    held[i] = __ldcs(reinterpret_cast<const uint4*>(from + row * kDk * E::kBytes) + vector);
  }

  uint4 most = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    most.x = E::larger(most.x, held[i].x & E::kMagnitude);
    most.y = E::larger(most.y, held[i].y & E::kMagnitude);
    most.z = E::larger(most.z, held[i].z & E::kMagnitude);
    most.w = E::larger(most.w, held[i].w & E::kMagnitude);
  }
#pragma unroll
  for (int with = T::kLanesPerRow; with < kWarp; with *= 2) {
    most.x = E::larger(most.x, __shfl_xor_sync(kAllLanes, most.x, with));
    most.y = E::larger(most.y, __shfl_xor_sync(kAllLanes, most.y, with));
    most.z = E::larger(most.z, __shfl_xor_sync(kAllLanes, most.z, with));
    most.w = E::larger(most.w, __shfl_xor_sync(kAllLanes, most.w, with));
  }
  if (lane < T::kLanesPerRow) {
    uint32_t* words = &largest[warp][vector * 4];
    words[0] = most.x;
    words[1] = most.y;
    words[2] = most.z;
    words[3] = most.w;
  }
  __syncthreads();

  if (thread < T::kWords) {
    uint32_t word = largest[0][thread];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) word = E::larger(word, largest[i][thread]);
    char* to = pair.scale(copy, layer, head) + tile * T::kColumns * E::kScaleBytes;
    bool finite = true;
    float scale[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < E::kPerWord; ++i) {
      const int column = thread * E::kPerWord + i;
      scale[i] = E::scale_of(E::load(word, i));
      finite = finite && E::comes_back_finite(scale[i]);
      scales[column] = scale[i];
      inverses[column] = __frcp_rn(scale[i]);
      if constexpr (E::kScaleBytes == 4) reinterpret_cast<float*>(to)[column] = scale[i];
    }
    if constexpr (E::kScaleBytes == 2) {
      reinterpret_cast<uint32_t*>(to)[thread] = E::pack(scale[0], scale[1]);
    }
    if (!finite) atomicOr(copy.report + listed, kNonFinite);
    if (thread == 0 && blockIdx.x == 0 && layer == 0) atomicOr(copy.report + listed, kStored);
  }
  __syncthreads();

  float scale[T::kVector];
  float inverse[T::kVector];
#pragma unroll
  for (int i = 0; i < T::kVector; ++i) {
    scale[i] = scales[vector * T::kVector + i];
    inverse[i] = inverses[vector * T::kVector + i];
  }
  char* to = pair.quantized(copy, layer, head) + tile * T::kColumns;
#pragma unroll
  for (int i = 0; i < T::kRows; i += T::kShare) {
    uint32_t rows[T::kShare][T::kVector / 4];
#pragma unroll
    for (int j = 0; j < T::kShare; ++j) {
      const uint32_t words[4] = {held[i + j].x, held[i + j].y, held[i + j].z, held[i + j].w};
      uint32_t levels[T::kVector];
#pragma unroll
      for (int k = 0; k < T::kVector; ++k) {
        levels[k] =
            nearest_level(E::load(words[k / E::kPerWord], k % E::kPerWord), scale[k], inverse[k]);
      }
#pragma unroll
      for (int k = 0; k < T::kVector; k += 4) {
        rows[j][k / 4] = pack_bytes(levels[k], levels[k + 1], levels[k + 2], levels[k + 3]);
      }
    }
    const uint4 out = Exchange<T::kShare>::apply(rows, lane);
    const int64_t row = (i + vector % T::kShare) * T::kRowStep + first_row;
    __stcs(reinterpret_cast<uint4*>(to + row * kDk) + vector / T::kShare, out);
  }
}

// Grid: (heads * Tile::kTiles, listed, layers).
template <StateType kType, int kDv, int kDk>
__global__ void __launch_bounds__(kThreads)
    dequantize_tile(const __grid_constant__ CheckpointCopy copy) {
  using E = Element<kType>;
  using T = Tile<kType, kDv, kDk>;
  const int tile = static_cast<int>(blockIdx.x) % T::kTiles;
  const int head = static_cast<int>(blockIdx.x) / T::kTiles;
  const int layer = static_cast<int>(blockIdx.z);
  const Pair pair = Pair::at(copy, static_cast<int>(blockIdx.y));
  if (!pair.is_valid(copy)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int vector = thread % T::kLanesPerRow;
  const int first_row = thread / T::kLanesPerRow;

  const char* from = pair.quantized(copy, layer, head) + tile * T::kColumns;
  uint4 held[T::kRows / T::kShare];
#pragma unroll
  for (int i = 0; i < T::kRows; i += T::kShare) {
    const int64_t row = (i + vector % T::kShare) * T::kRowStep + first_row;
    held[i / T::kShare] =
        __ldcs(reinterpret_cast<const uint4*>(from + row * kDk) + vector / T::kShare);
  }

  const char* scales = pair.scale(copy, layer, head) + tile * T::kColumns * E::kScaleBytes;
  constexpr int kScaleWords = T::kVector * E::kScaleBytes / 4;
  float scale[T::kVector];
#pragma unroll
  for (int i = 0; i < kScaleWords; i += 4) {
    const uint4 four = reinterpret_cast<const uint4*>(scales)[vector * (kScaleWords / 4) + i / 4];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (E::kScaleBytes == 4) {
        scale[i + j] = __uint_as_float(words[j]);
      } else {
        scale[2 * (i + j)] = E::load(words[j], 0);
        scale[2 * (i + j) + 1] = E::load(words[j], 1);
      }
    }
  }

  char* to = pair.active(copy, layer, head) + tile * T::kColumns * E::kBytes;
#pragma unroll
  for (int i = 0; i < T::kRows; i += T::kShare) {
    uint32_t rows[T::kShare][T::kVector / 4];
    Exchange<T::kShare>::undo(held[i / T::kShare], rows, lane);
#pragma unroll
    for (int j = 0; j < T::kShare; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float x[2] = {0, 0};
#pragma unroll
        for (int m = 0; m < E::kPerWord; ++m) {
          const int column = k * E::kPerWord + m;
          x[m] = __fmul_rn(byte_to_float(rows[j][column / 4], column % 4), scale[column]);
        }
        words[k] = E::pack(x[0], x[1]);
      }
      const int64_t row = (i + j) * T::kRowStep + first_row;
      __stcs(reinterpret_cast<uint4*>(to + row * kDk * E::kBytes) + vector,
             make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// The general path: any d_v, any d_k that is a multiple of 8, any alignment. A thread has kVector
// neighbouring columns of the 32 of a tile: 8, in accesses of 16 bytes, where all is aligned, else
// 2, element by element. It has kRows rows in flight. Grid: (heads * tiles of 32 columns, listed,
// layers).
inline constexpr int kGeneralColumns = 32;

template <StateType kType, int kVector>
struct General {
  using E = Element<kType>;
  static_assert(kVector == 8 || kVector == 2);
  static constexpr int kLanes = kGeneralColumns / kVector;  // of a row of the tile
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr bool kWide = kVector == 8;
  static constexpr int kWords = kWide ? kVector / E::kPerWord : kVector;
  static constexpr int kRows = kWords == 8 ? 2 : 4;

  // Neighbouring elements, as `element` reads them.
  static __device__ __forceinline__ void read(const char* from, uint32_t (&words)[kWords]) {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = four.x;
        words[i + 1] = four.y;
        words[i + 2] = four.z;
        words[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (E::kBytes == 4) {
          words[i] = reinterpret_cast<const uint32_t*>(from)[i];
        } else {
          words[i] = reinterpret_cast<const uint16_t*>(from)[i];
        }
      }
    }
  }
  static __device__ __forceinline__ float element(const uint32_t (&words)[kWords], int i) {
    return kWide ? E::load(words[i / E::kPerWord], i % E::kPerWord) : E::load(words[i], 0);
  }
  static __device__ __forceinline__ void write(char* to, const float (&x)[kVector]) {
    if constexpr (kWide) {
      uint32_t words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int at = i * E::kPerWord;
        words[i] = E::pack(x[at], x[at + E::kPerWord - 1]);
      }
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(to)[i / 4] =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (E::kBytes == 4) {
          reinterpret_cast<uint32_t*>(to)[i] = E::pack(x[i], 0);
        } else {
          reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(E::pack(x[i], 0));
        }
      }
    }
  }
};

// Neighbouring levels: four in a word, or one.
template <int kVector>
struct Levels {
  static constexpr bool kWide = kVector == 8;
  static constexpr int kWords = kWide ? kVector / 4 : kVector;

  static __device__ __forceinline__ void read(const char* from, uint32_t (&words)[kWords]) {
    if constexpr (kWide) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[0] = two.x;
      words[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) words[i] = static_cast<uint8_t>(from[i]);
    }
  }
  static __device__ __forceinline__ float element(const uint32_t (&words)[kWords], int i) {
    return kWide ? byte_to_float(words[i / 4], i % 4) : byte_to_float(words[i], 0);
  }
  static __device__ __forceinline__ void write(char* to, const uint32_t (&levels)[kVector]) {
    if constexpr (kWide) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_bytes(levels[0], levels[1], levels[2], levels[3]),
                     pack_bytes(levels[4], levels[5], levels[6], levels[7]));
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[i] = static_cast<char>(levels[i]);
    }
  }
};

// The rows that a thread has in flight, from `begin` on; those from `end` on are left as they are.
template <typename Elements, int kStep, int kRows, int kWords>
__device__ __forceinline__ void read_rows(const char* from, int64_t row_bytes, int begin, int end,
                                          uint32_t (&held)[kRows][kWords]) {
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = begin + j * kStep;
    if (row < end) Elements::read(from + row * row_bytes, held[j]);
  }
}

template <StateType kType>
inline constexpr StateType kScaleType =
    kType == StateType::kBfloat16 ? StateType::kBfloat16 : StateType::kFloat32;

template <StateType kType, int kVector>
__global__ void __launch_bounds__(kThreads)
    quantize_general(const __grid_constant__ CheckpointCopy copy) {
  using E = Element<kType>;
  using G = General<kType, kVector>;
  __shared__ uint32_t largest[kWarps][kGeneralColumns];
  __shared__ float scales[kGeneralColumns];

  const int tiles = (copy.d_k + kGeneralColumns - 1) / kGeneralColumns;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int listed = static_cast<int>(blockIdx.y);
  const int layer = static_cast<int>(blockIdx.z);
  const Pair pair = Pair::at(copy, listed);
  if (!pair.is_valid(copy)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int local = thread % G::kLanes * kVector;
  const int column = tile * kGeneralColumns + local;
  const int first_row = thread / G::kLanes;
  const bool inside = column < copy.d_k;
  const char* from = pair.active(copy, layer, head) + static_cast<int64_t>(column) * E::kBytes;
  const int64_t row_bytes = static_cast<int64_t>(copy.d_k) * E::kBytes;

  // Magnitudes of floats order as their bits do, NaN above all.
  uint32_t most[kVector] = {};
  for (int begin = first_row; inside && begin < copy.d_v; begin += G::kRows * G::kRowStep) {
    uint32_t held[G::kRows][G::kWords] = {};
    read_rows<G, G::kRowStep>(from, row_bytes, begin, copy.d_v, held);
#pragma unroll
    for (int j = 0; j < G::kRows; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint32_t magnitude = __float_as_uint(G::element(held[j], i)) & 0x7fffffffU;
        most[i] = magnitude > most[i] ? magnitude : most[i];
      }
    }
  }
#pragma unroll
  for (int with = G::kLanes; with < kWarp; with *= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, most[i], with);
      most[i] = other > most[i] ? other : most[i];
    }
  }
  if (thread % kWarp < G::kLanes) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest[thread / kWarp][local + i] = most[i];
  }
  __syncthreads();

  if (thread < kGeneralColumns && tile * kGeneralColumns + thread < copy.d_k) {
    uint32_t magnitude = largest[0][thread];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      const uint32_t other = largest[i][thread];
      magnitude = other > magnitude ? other : magnitude;
    }
    const float scale = E::scale_of(__uint_as_float(magnitude));
    scales[thread] = scale;
    char* to = pair.scale(copy, layer, head);
    const int at = tile * kGeneralColumns + thread;
    if constexpr (E::kScaleBytes == 4) {
      reinterpret_cast<float*>(to)[at] = scale;
    } else {
      reinterpret_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(E::pack(scale, 0));
    }
    if (!E::comes_back_finite(scale)) atomicOr(copy.report + listed, kNonFinite);
    if (thread == 0 && blockIdx.x == 0 && layer == 0) atomicOr(copy.report + listed, kStored);
  }
  __syncthreads();

  if (!inside) return;
  float scale[kVector];
  float inverse[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    scale[i] = scales[local + i];
    inverse[i] = __frcp_rn(scale[i]);
  }
  char* to = pair.quantized(copy, layer, head) + column;
  for (int begin = first_row; begin < copy.d_v; begin += G::kRows * G::kRowStep) {
    uint32_t held[G::kRows][G::kWords] = {};
    read_rows<G, G::kRowStep>(from, row_bytes, begin, copy.d_v, held);
#pragma unroll
    for (int j = 0; j < G::kRows; ++j) {
      const int row = begin + j * G::kRowStep;
      if (row >= copy.d_v) break;
      uint32_t levels[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        levels[i] = nearest_level(G::element(held[j], i), scale[i], inverse[i]);
      }
      Levels<kVector>::write(to + static_cast<int64_t>(row) * copy.d_k, levels);
    }
  }
}

template <StateType kType, int kVector>
__global__ void __launch_bounds__(kThreads)
    dequantize_general(const __grid_constant__ CheckpointCopy copy) {
  using G = General<kType, kVector>;
  using S = General<kScaleType<kType>, kVector>;
  using L = Levels<kVector>;
  const int tiles = (copy.d_k + kGeneralColumns - 1) / kGeneralColumns;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int layer = static_cast<int>(blockIdx.z);
  const Pair pair = Pair::at(copy, static_cast<int>(blockIdx.y));
  if (!pair.is_valid(copy)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = tile * kGeneralColumns + thread % G::kLanes * kVector;
  if (column >= copy.d_k) return;

  uint32_t scales[S::kWords];
  S::read(pair.scale(copy, layer, head) + column * Element<kType>::kScaleBytes, scales);
  const char* from = pair.quantized(copy, layer, head) + column;
  char* to = pair.active(copy, layer, head) + column * Element<kType>::kBytes;
  const int64_t row_bytes = static_cast<int64_t>(copy.d_k) * Element<kType>::kBytes;
  for (int begin = thread / G::kLanes; begin < copy.d_v; begin += G::kRows * G::kRowStep) {
    uint32_t held[G::kRows][L::kWords] = {};
    read_rows<L, G::kRowStep>(from, copy.d_k, begin, copy.d_v, held);
#pragma unroll
    for (int j = 0; j < G::kRows; ++j) {
      const int row = begin + j * G::kRowStep;
      if (row >= copy.d_v) break;
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[i] = __fmul_rn(L::element(held[j], i), S::element(scales, i));
      }
      G::write(to + row * row_bytes, x);
    }
  }
}

// A row by words: what lies before the first whole word of the target and after the last one goes
// by bytes, in the first block. Source and target are equally far from a whole word. A thread has
// kRowLoads words in flight.
inline constexpr int kRowLoads = 4;

template <typename Word>
__device__ __forceinline__ void copy_row(const char* from, char* to, int64_t bytes) {
  constexpr auto kWordBytes = static_cast<int64_t>(sizeof(Word));
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kWordBytes);
  int64_t head = past == 0 ? 0 : kWordBytes - past;
  if (head > bytes) head = bytes;
  const int64_t words = (bytes - head) / kWordBytes;
  const int64_t tail = head + words * kWordBytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0) {
    if (thread < head) to[thread] = from[thread];
    if (tail + thread < bytes) to[tail + thread] = from[tail + thread];
  }
  const auto* source = reinterpret_cast<const Word*>(from + head);
  auto* target = reinterpret_cast<Word*>(to + head);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kRowLoads;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kRowLoads + thread;
       begin < words; begin += step) {
    Word held[kRowLoads] = {};
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int64_t at = begin + i * kThreads;
      if (at < words) held[i] = __ldcs(source + at);
    }
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int64_t at = begin + i * kThreads;
      if (at < words) __stcs(target + at, held[i]);
    }
  }
}

// Grid: (blocks of the longest row, listed, layers).
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ RowCopy copy) {
  const int layer = static_cast<int>(blockIdx.z);
  const int64_t source_slot = copy.source_slots[blockIdx.y];
  const int64_t target_slot = copy.target_slots[blockIdx.y];
  if (source_slot < 0 || source_slot >= copy.source_slot_count || target_slot < 0 ||
      target_slot >= copy.target_slot_count) {
    return;
  }
  if (copy.report != nullptr && layer == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    atomicOr(copy.report + blockIdx.y, kStored);
  }
  const RowShape& shape = copy.shapes[copy.shape[layer]];
  const char* from =
      static_cast<const char*>(copy.source[layer]) + source_slot * shape.source_slot_stride;
  char* to = static_cast<char*>(copy.target[layer]) + target_slot * shape.target_slot_stride;
  const auto apart = reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to);
  if (apart % 16 == 0) {
    copy_row<uint4>(from, to, shape.row_bytes);
  } else if (apart % 4 == 0) {
    copy_row<uint32_t>(from, to, shape.row_bytes);
  } else if (apart % 2 == 0) {
    copy_row<uint16_t>(from, to, shape.row_bytes);
  } else {
    copy_row<uint8_t>(from, to, shape.row_bytes);
  }
}

// Everything below chooses a kernel and its grid. `Launcher` runs one:
// int operator()(kernel, dim3 grid, const Copy&).

inline bool is_aligned(const CheckpointCopy& copy) {
  uint64_t bits = static_cast<uint64_t>(copy.active_slot_stride | copy.active_head_stride |
                                        copy.quantized_layer_stride | copy.quantized_slot_stride |
                                        copy.quantized_head_stride | copy.scale_layer_stride |
                                        copy.scale_slot_stride | copy.scale_head_stride) |
                  reinterpret_cast<uintptr_t>(copy.quantized) |
                  reinterpret_cast<uintptr_t>(copy.scale);
  for (int l = 0; l < copy.layers; ++l) bits |= reinterpret_cast<uintptr_t>(copy.active[l]);
  return bits % 16 == 0;
}

template <bool kStore, StateType kType, int kDv, int kDk, typename Launcher>
int launch_tile(const CheckpointCopy& copy, const Launcher& launcher) {
  const dim3 grid(static_cast<unsigned>(copy.heads * Tile<kType, kDv, kDk>::kTiles),
                  static_cast<unsigned>(copy.listed), static_cast<unsigned>(copy.layers));
  if constexpr (kStore) {
    return launcher(quantize_tile<kType, kDv, kDk>, grid, copy);
  } else {
    return launcher(dequantize_tile<kType, kDv, kDk>, grid, copy);
  }
}

template <bool kStore, StateType kType, int kVector, typename Launcher>
int launch_general(const CheckpointCopy& copy, const Launcher& launcher) {
  const int tiles = (copy.d_k + kGeneralColumns - 1) / kGeneralColumns;
  const dim3 grid(static_cast<unsigned>(copy.heads * tiles), static_cast<unsigned>(copy.listed),
                  static_cast<unsigned>(copy.layers));
  if constexpr (kStore) {
    return launcher(quantize_general<kType, kVector>, grid, copy);
  } else {
    return launcher(dequantize_general<kType, kVector>, grid, copy);
  }
}

// `copy` is aligned.
template <bool kStore, StateType kType, int kDv, typename Launcher>
int launch_for_rows(const CheckpointCopy& copy, const Launcher& launcher) {
  if (copy.d_k == 64) return launch_tile<kStore, kType, kDv, 64>(copy, launcher);
  if (copy.d_k == 128) return launch_tile<kStore, kType, kDv, 128>(copy, launcher);
  if (copy.d_k == 256) return launch_tile<kStore, kType, kDv, 256>(copy, launcher);
  return launch_general<kStore, kType, 8>(copy, launcher);
}

template <bool kStore, StateType kType, typename Launcher>
int launch_for_type(const CheckpointCopy& copy, const Launcher& launcher) {
  if (is_aligned(copy)) {
    if (copy.d_v == 64) return launch_for_rows<kStore, kType, 64>(copy, launcher);
    if (copy.d_v == 128) return launch_for_rows<kStore, kType, 128>(copy, launcher);
    if (copy.d_v == 256) return launch_for_rows<kStore, kType, 256>(copy, launcher);
    return launch_general<kStore, kType, 8>(copy, launcher);
  }
  return launch_general<kStore, kType, 2>(copy, launcher);
}

template <bool kStore, typename Launcher>
int launch(const CheckpointCopy& copy, const Launcher& launcher) {
  if (copy.layers == 0 || copy.listed == 0 || copy.heads == 0) return 0;
  switch (copy.type) {
    case StateType::kFloat32:
      break;
    case StateType::kFloat16:
      return launch_for_type<kStore, StateType::kFloat16>(copy, launcher);
    case StateType::kBfloat16:
      return launch_for_type<kStore, StateType::kBfloat16>(copy, launcher);
  }
  return launch_for_type<kStore, StateType::kFloat32>(copy, launcher);
}

template <typename Launcher>
int launch(const RowCopy& copy, const Launcher& launcher) {
  const int64_t longest = longest_row(copy);
  if (copy.layers == 0 || copy.listed == 0 || longest == 0) return 0;
  constexpr int64_t kBlockBytes = int64_t{kThreads} * kRowLoads * 16;
  const int64_t blocks = (longest + kBlockBytes - 1) / kBlockBytes;
  const dim3 grid(static_cast<unsigned>(blocks < 64 ? blocks : 64),
                  static_cast<unsigned>(copy.listed), static_cast<unsigned>(copy.layers));
  return launcher(copy_rows, grid, copy);
}

}  // namespace statecache::kernels

#endif  // STATECACHE_CHECKPOINT_KERNELS_CUH_
