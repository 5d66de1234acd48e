#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "statecache/checkpoint_copy.h"

namespace statecache {
namespace {

// Adding it to a float of magnitude below 2^22 rounds half to even at the binary point and leaves
// the integer in the low bits.
constexpr float kRoundToInteger = 12582912.0F;  // 1.5 * 2^23

constexpr int kColumns = 256;              // scales held at a time
constexpr int64_t kScratchBytes = 2048;    // rows written through the stack at a time
constexpr int64_t kPageBytes = 64 * 1024;  // of a long row, one tile each

float to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t to_bits(float value) { return std::bit_cast<uint32_t>(value); }

// How a state's type is read and written: as integers, so that every instruction set vectorises it,
// and two 16-bit elements at a time in one 32-bit lane, so that no lanes need to be packed; or
// whole rows by intrinsics. Right for finite values only; what is not finite is reported by the
// store and never loaded.
enum class Access { kElements, kPairs, kRows };

struct Float32 {
  using Element = uint32_t;
  using Scale = float;
  static constexpr Access kAccess = Access::kElements;
  static constexpr Element kMagnitude = 0x7fffffffU;
  static constexpr Element kInfinity = 0x7f800000U;
  [[gnu::always_inline]] static inline float load(uint32_t x) { return to_float(x); }
  [[gnu::always_inline]] static inline uint32_t store(float x) { return to_bits(x); }
  static Scale round_scale(float x) { return x; }
  static float widen_scale(Scale x) { return x; }
};

struct Bfloat16 {
  using Element = uint16_t;
  using Scale = uint16_t;
  static constexpr Access kAccess = Access::kPairs;
  static constexpr Element kMagnitude = 0x7fffU;
  static constexpr Element kInfinity = 0x7f80U;
  [[gnu::always_inline]] static inline float load_low(uint32_t pair) {
    return to_float(pair << 16);
  }
  [[gnu::always_inline]] static inline float load_high(uint32_t pair) {
    return to_float(pair & 0xffff0000U);
  }
  [[gnu::always_inline]] static inline uint32_t round(float x) {
    return to_bits(x) + 0x7fffU + (to_bits(x) >> 16 & 1U);
  }
  [[gnu::always_inline]] static inline uint32_t store_pair(float low, float high) {
    return round(low) >> 16 | (round(high) & 0xffff0000U);
  }
  static float load(uint32_t x) { return load_low(x); }
  static uint32_t store(float x) { return round(x) >> 16; }
  static Scale round_scale(float x) { return static_cast<Scale>(store(x)); }
  static float widen_scale(Scale x) { return load(x); }
};

struct Float16 {
  using Element = uint16_t;
  using Scale = float;
  static constexpr Access kAccess = Access::kPairs;
  static constexpr Element kMagnitude = 0x7fffU;
  static constexpr Element kInfinity = 0x7c00U;
  // From sign and magnitude where a float has them, with float16's exponent.
  [[gnu::always_inline]] static inline float widen(uint32_t sign, uint32_t magnitude) {
    const uint32_t normal = magnitude + 0x38000000U;
    // Taken as 1.m * 2^-14, then without the 1: a subnormal is 0.m * 2^-14.
    const uint32_t subnormal = to_bits(to_float(magnitude + 0x38800000U) - 0x1p-14F);
    return to_float(sign | (magnitude < 0x00800000U ? subnormal : normal));
  }
  [[gnu::always_inline]] static inline float load_low(uint32_t pair) {
    return widen(pair << 16 & 0x80000000U, (pair & 0x7fffU) << 13);
  }
  [[gnu::always_inline]] static inline float load_high(uint32_t pair) {
    return widen(pair & 0x80000000U, pair >> 3 & 0x0fffe000U);
  }
  [[gnu::always_inline]] static inline uint32_t store(float x) {
    const uint32_t sign = to_bits(x) >> 16 & 0x8000U;
    const uint32_t magnitude = to_bits(x) & 0x7fffffffU;
    const uint32_t rounded = (magnitude - 0x37fff001U + (magnitude >> 13 & 1U)) >> 13;
    const uint32_t normal = std::min<uint32_t>(rounded, kInfinity);
    // The unit in the last place of 0.5 is the smallest float16: the addition rounds to it.
    const uint32_t subnormal = to_bits(to_float(magnitude) + 0.5F) - to_bits(0.5F);
    return sign | (magnitude < 0x38800000U ? subnormal : normal);
  }
  [[gnu::always_inline]] static inline uint32_t store_pair(float low, float high) {
    return store(low) | store(high) << 16;
  }
  static float load(uint32_t x) { return load_low(x); }
  static Scale round_scale(float x) { return x; }
  static float widen_scale(Scale x) { return x; }
};

#ifdef __x86_64__
// The compiler does not use the F16C instructions by itself. They heed no denormal flag of MXCSR.
struct HardwareFloat16 : Float16 {
  static constexpr Access kAccess = Access::kRows;
  // nearest_level<true>, but that an integer instruction rounds the quotient.
  [[gnu::target("arch=x86-64-v3")]] static void quantize_row(const uint16_t* from, int8_t* to,
                                                             const float* scale,
                                                             const float* inverse, int columns) {
    for (int k = 0; k < columns; k += 8) {
      const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
      const __m256 by = _mm256_load_ps(inverse + k);
      const __m256 guess = _mm256_mul_ps(x, by);
      const __m256 rest = _mm256_fnmadd_ps(_mm256_load_ps(scale + k), guess, x);
      const __m256i q = _mm256_cvtps_epi32(_mm256_fmadd_ps(rest, by, guess));
      const __m128i words =
          _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + k), _mm_packs_epi16(words, words));
    }
  }
  [[gnu::target("arch=x86-64-v3")]] static void dequantize_row(const int8_t* from, uint16_t* to,
                                                               const float* scale, int columns) {
    for (int k = 0; k < columns; k += 8) {
      const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + k));
      const __m256 x =
          _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), _mm256_load_ps(scale + k));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k),
                       _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
  }
};
#endif

// The scales of up to kColumns columns, in order; for access by pairs those of the even columns,
// then from kColumns / 2 those of the odd ones.
struct Scales {
  alignas(64) float scale[kColumns];
  alignas(64) float inverse[kColumns];

  template <typename Type>
  static int index(int column) {
    if constexpr (Type::kAccess != Access::kPairs) return column;
    return column / 2 + column % 2 * (kColumns / 2);
  }
};

// The integer nearest to the quotient x / scale, in the low byte, the quotient first rounded to a
// float. With fused multiply-add the division is Markstein's: `inverse` is 1 / scale rounded.
// Scales are at least 1e-8 / 127, so nothing underflows where the integer is not 0. The tests walk
// through the quotients where a last-bit difference could matter.
template <bool kFused>
[[gnu::always_inline]] inline uint32_t nearest_level(float x, float scale, float inverse) {
  float quotient = 0;
  if constexpr (kFused) {
    const float guess = x * inverse;
    quotient = __builtin_fmaf(__builtin_fmaf(-scale, guess, x), inverse, guess);
  } else {
    quotient = x / scale;
  }
  return to_bits(quotient + kRoundToInteger);
}

// Copies whole 16-byte words past the cache when the target allows it: it is not read soon, and the
// lines it replaces need not be fetched.
[[gnu::always_inline]] inline void write_out(void* target, const void* source, int64_t bytes) {
#ifdef __x86_64__
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && bytes % 16 == 0) {
    auto* to = static_cast<__m128i*>(target);
    const auto* from = static_cast<const __m128i*>(source);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(to + i, _mm_load_si128(from + i));
    return;
  }
#endif
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

void finish_writing_out() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

// A hint; the address need not be valid.
[[gnu::always_inline]] inline void prefetch(const void* from, int bytes) {
  const auto at = reinterpret_cast<uintptr_t>(from);
  for (int i = 0; i < bytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(at + static_cast<uintptr_t>(i)), 0, 2);
  }
}

struct Pair {
  int64_t listed;
  int64_t active_slot;
  int64_t checkpoint_slot;
  int layer;
  int head;

  Pair(const CheckpointCopy& copy, int64_t tile)
      : listed(tile / copy.heads % copy.listed),
        active_slot(copy.active_slots[listed]),
        checkpoint_slot(copy.checkpoint_slots[listed]),
        layer(static_cast<int>(tile / copy.heads / copy.listed)),
        head(static_cast<int>(tile % copy.heads)) {}

  bool is_valid(const CheckpointCopy& copy) const {
    return active_slot >= 0 && active_slot < copy.active_slot_count && checkpoint_slot >= 0 &&
           checkpoint_slot < copy.checkpoint_slot_count;
  }
  std::byte* active(const CheckpointCopy& copy) const {
    return static_cast<std::byte*>(copy.active[layer]) + active_slot * copy.active_slot_stride +
           head * copy.active_head_stride;
  }
  std::byte* quantized(const CheckpointCopy& copy) const {
    return static_cast<std::byte*>(copy.quantized) + layer * copy.quantized_layer_stride +
           checkpoint_slot * copy.quantized_slot_stride + head * copy.quantized_head_stride;
  }
  std::byte* scale(const CheckpointCopy& copy) const {
    return static_cast<std::byte*>(copy.scale) + layer * copy.scale_layer_stride +
           checkpoint_slot * copy.scale_slot_stride + head * copy.scale_head_stride;
  }
};

// Largest magnitudes of `columns` columns of a matrix of rows of d_k elements, as bits.
template <typename Type>
[[gnu::always_inline]] inline void find_largest(const typename Type::Element* __restrict matrix,
                                                typename Type::Element* __restrict largest,
                                                int columns, int d_v, int d_k) {
  using Element = typename Type::Element;
  for (int k = 0; k < columns; ++k) largest[k] = 0;
  int row = 0;
  for (; row + 4 <= d_v; row += 4) {
    const Element* __restrict at = matrix + static_cast<int64_t>(row) * d_k;
    for (int k = 0; k < columns; ++k) {
      const Element a = std::max<Element>(at[k] & Type::kMagnitude, at[k + d_k] & Type::kMagnitude);
      const Element b =
          std::max<Element>(at[k + 2 * d_k] & Type::kMagnitude, at[k + 3 * d_k] & Type::kMagnitude);
      largest[k] = std::max(largest[k], std::max(a, b));
    }
  }
  for (; row < d_v; ++row) {
    const Element* __restrict at = matrix + static_cast<int64_t>(row) * d_k;
    for (int k = 0; k < columns; ++k) {
      largest[k] = std::max<Element>(largest[k], at[k] & Type::kMagnitude);
    }
  }
}

template <typename Type, bool kFused>
[[gnu::always_inline]] inline void quantize_row(const typename Type::Element* __restrict from,
                                                int8_t* __restrict to, const Scales& by,
                                                int columns) {
  const float* __restrict scale = by.scale;
  const float* __restrict inverse = by.inverse;
  if constexpr (Type::kAccess == Access::kRows) {
    Type::quantize_row(from, to, scale, inverse, columns);
  } else if constexpr (Type::kAccess == Access::kElements) {
    for (int k = 0; k < columns; ++k) {
      to[k] = static_cast<int8_t>(nearest_level<kFused>(Type::load(from[k]), scale[k], inverse[k]));
    }
  } else {
    for (int k = 0; k < columns / 2; ++k) {
      uint32_t pair = 0;
      std::memcpy(&pair, from + 2 * k, sizeof(pair));
      const uint32_t low = nearest_level<kFused>(Type::load_low(pair), scale[k], inverse[k]);
      const uint32_t high = nearest_level<kFused>(Type::load_high(pair), scale[k + kColumns / 2],
                                                  inverse[k + kColumns / 2]);
      const auto levels = static_cast<uint16_t>((low & 0xffU) | high << 8);
      std::memcpy(to + 2 * k, &levels, sizeof(levels));
    }
  }
}

template <typename Type>
[[gnu::always_inline]] inline void dequantize_row(const int8_t* __restrict from,
                                                  typename Type::Element* __restrict to,
                                                  const Scales& by, int columns) {
  const float* __restrict scale = by.scale;
  if constexpr (Type::kAccess == Access::kRows) {
    Type::dequantize_row(from, to, scale, columns);
  } else if constexpr (Type::kAccess == Access::kElements) {
    for (int k = 0; k < columns; ++k) to[k] = Type::store(static_cast<float>(from[k]) * scale[k]);
  } else {
    for (int k = 0; k < columns / 2; ++k) {
      uint16_t levels = 0;
      std::memcpy(&levels, from + 2 * k, sizeof(levels));
      const int32_t low = static_cast<int32_t>(static_cast<uint32_t>(levels) << 24) >> 24;
      const int32_t high = static_cast<int32_t>(static_cast<uint32_t>(levels) << 16) >> 24;
      const uint32_t pair = Type::store_pair(static_cast<float>(low) * scale[k],
                                             static_cast<float>(high) * scale[k + kColumns / 2]);
      std::memcpy(to + 2 * k, &pair, sizeof(pair));
    }
  }
}

// Columns [begin, begin + columns) of one matrix. Returns whether all of them can come back finite.
template <typename Type, bool kFused>
[[gnu::always_inline]] inline bool quantize_columns(const CheckpointCopy& copy, const Pair& pair,
                                                    int begin, int columns) {
  using Element = typename Type::Element;
  alignas(64) Element largest[kColumns];
  alignas(64) int8_t scratch[kScratchBytes];
  Scales by;

  const int d_k = copy.d_k;
  const auto* from = reinterpret_cast<const Element*>(pair.active(copy)) + begin;
  auto* to = reinterpret_cast<int8_t*>(pair.quantized(copy)) + begin;
  auto* scale_out = reinterpret_cast<typename Type::Scale*>(pair.scale(copy)) + begin;

  find_largest<Type>(from, largest, columns, copy.d_v, d_k);
  bool finite = true;
  for (int k = 0; k < columns; ++k) {
    const float magnitude = Type::load(largest[k]);
    scale_out[k] = Type::round_scale((magnitude < 1e-8F ? 1e-8F : magnitude) / 127.0F);
    const float scale = Type::widen_scale(scale_out[k]);
    by.scale[Scales::index<Type>(k)] = scale;
    by.inverse[Scales::index<Type>(k)] = 1.0F / scale;
    finite &= largest[k] < Type::kInfinity && Type::store(127.0F * scale) < Type::kInfinity;
  }

  const int row_bytes = columns * static_cast<int>(sizeof(Element));
  const int step = columns == d_k ? static_cast<int>(kScratchBytes) / columns : 1;
  for (int row = 0; row < copy.d_v; row += step) {
    const int rows = std::min(step, copy.d_v - row);
    for (int i = 0; i < rows; ++i) {
      quantize_row<Type, kFused>(from + static_cast<int64_t>(row + i) * d_k, scratch + i * columns,
                                 by, columns);
    }
    // Most often the next head of this slot, which is what comes next: fetch it while computing.
    prefetch(from + static_cast<int64_t>(row + copy.d_v) * d_k, rows * row_bytes);
    write_out(to + static_cast<int64_t>(row) * d_k, scratch, static_cast<int64_t>(rows) * columns);
  }
  return finite;
}

template <typename Type>
[[gnu::always_inline]] inline void dequantize_columns(const CheckpointCopy& copy, const Pair& pair,
                                                      int begin, int columns) {
  using Element = typename Type::Element;
  alignas(64) Element scratch[kScratchBytes / sizeof(Element)];
  Scales by;

  const int d_k = copy.d_k;
  const auto* from = reinterpret_cast<const int8_t*>(pair.quantized(copy)) + begin;
  auto* to = reinterpret_cast<Element*>(pair.active(copy)) + begin;
  const auto* scale_in = reinterpret_cast<const typename Type::Scale*>(pair.scale(copy)) + begin;
  for (int k = 0; k < columns; ++k) {
    by.scale[Scales::index<Type>(k)] = Type::widen_scale(scale_in[k]);
  }

  const int row_bytes = columns * static_cast<int>(sizeof(Element));
  const int step = columns == d_k ? static_cast<int>(kScratchBytes) / row_bytes : 1;
  for (int row = 0; row < copy.d_v; row += step) {
    const int rows = std::min(step, copy.d_v - row);
    for (int i = 0; i < rows; ++i) {
      dequantize_row<Type>(from + static_cast<int64_t>(row + i) * d_k, scratch + i * columns, by,
                           columns);
    }
    write_out(to + static_cast<int64_t>(row) * d_k, scratch,
              static_cast<int64_t>(rows) * row_bytes);
  }
}

template <typename Type, bool kFused>
[[gnu::always_inline]] inline void quantize_range(const CheckpointCopy& copy, int64_t first,
                                                  int64_t last) {
  for (int64_t tile = first; tile < last; ++tile) {
    const Pair pair(copy, tile);
    if (!pair.is_valid(copy)) continue;
    bool finite = true;
    for (int k = 0; k < copy.d_k; k += kColumns) {
      finite &= quantize_columns<Type, kFused>(copy, pair, k, std::min(kColumns, copy.d_k - k));
    }
    const bool reports = pair.layer == 0 && pair.head == 0;
    const int32_t news = (reports ? kStored : 0) | (finite ? 0 : kNonFinite);
    if (news != 0) {
      std::atomic_ref(copy.report[pair.listed]).fetch_or(news, std::memory_order_relaxed);
    }
  }
  finish_writing_out();
}

template <typename Type>
[[gnu::always_inline]] inline void dequantize_range(const CheckpointCopy& copy, int64_t first,
                                                    int64_t last) {
  for (int64_t tile = first; tile < last; ++tile) {
    const Pair pair(copy, tile);
    if (!pair.is_valid(copy)) continue;
    for (int k = 0; k < copy.d_k; k += kColumns) {
      dequantize_columns<Type>(copy, pair, k, std::min(kColumns, copy.d_k - k));
    }
  }
  finish_writing_out();
}

template <typename Half, bool kFused>
[[gnu::always_inline]] inline void quantize_any(const CheckpointCopy& copy, int64_t first,
                                                int64_t last) {
  switch (copy.type) {
    case StateType::kFloat32:
      return quantize_range<Float32, kFused>(copy, first, last);
    case StateType::kFloat16:
      return quantize_range<Half, kFused>(copy, first, last);
    case StateType::kBfloat16:
      return quantize_range<Bfloat16, kFused>(copy, first, last);
  }
}

template <typename Half>
[[gnu::always_inline]] inline void dequantize_any(const CheckpointCopy& copy, int64_t first,
                                                  int64_t last) {
  switch (copy.type) {
    case StateType::kFloat32:
      return dequantize_range<Float32>(copy, first, last);
    case StateType::kFloat16:
      return dequantize_range<Half>(copy, first, last);
    case StateType::kBfloat16:
      return dequantize_range<Bfloat16>(copy, first, last);
  }
}

#ifdef __FP_FAST_FMAF
constexpr bool kBaselineFused = true;
#else
constexpr bool kBaselineFused = false;
#endif

void quantize_baseline(const CheckpointCopy& copy, int64_t first, int64_t last) {
  quantize_any<Float16, kBaselineFused>(copy, first, last);
}
void dequantize_baseline(const CheckpointCopy& copy, int64_t first, int64_t last) {
  dequantize_any<Float16>(copy, first, last);
}

#ifdef __x86_64__
[[gnu::target("arch=x86-64-v3")]] void quantize_avx2(const CheckpointCopy& copy, int64_t first,
                                                     int64_t last) {
  quantize_any<HardwareFloat16, true>(copy, first, last);
}
[[gnu::target("arch=x86-64-v3")]] void dequantize_avx2(const CheckpointCopy& copy, int64_t first,
                                                       int64_t last) {
  dequantize_any<HardwareFloat16>(copy, first, last);
}
[[gnu::target("arch=x86-64-v4")]] void quantize_avx512(const CheckpointCopy& copy, int64_t first,
                                                       int64_t last) {
  quantize_any<HardwareFloat16, true>(copy, first, last);
}
[[gnu::target("arch=x86-64-v4")]] void dequantize_avx512(const CheckpointCopy& copy, int64_t first,
                                                         int64_t last) {
  dequantize_any<HardwareFloat16>(copy, first, last);
}
#endif

InstructionSet best_supported() {
  if (is_supported(InstructionSet::kAvx512)) return InstructionSet::kAvx512;
  return is_supported(InstructionSet::kAvx2) ? InstructionSet::kAvx2 : InstructionSet::kBaseline;
}

int64_t pages(const RowCopy& copy) { return (longest_row(copy) + kPageBytes - 1) / kPageBytes; }

}  // namespace

int64_t tile_count(const CheckpointCopy& copy) {
  return static_cast<int64_t>(copy.layers) * copy.listed * copy.heads;
}

int64_t tile_count(const RowCopy& copy) {
  return static_cast<int64_t>(copy.layers) * copy.listed * pages(copy);
}

bool is_supported(InstructionSet set) {
#ifdef __x86_64__
  if (set == InstructionSet::kAvx512) return __builtin_cpu_supports("x86-64-v4") != 0;
  if (set == InstructionSet::kAvx2) return __builtin_cpu_supports("x86-64-v3") != 0;
#endif
  return set == InstructionSet::kBaseline;
}

void quantize_tiles(InstructionSet set, const CheckpointCopy& copy, int64_t first, int64_t last) {
#ifdef __x86_64__
  if (set == InstructionSet::kAvx512) return quantize_avx512(copy, first, last);
  if (set == InstructionSet::kAvx2) return quantize_avx2(copy, first, last);
#endif
  static_cast<void>(set);
  quantize_baseline(copy, first, last);
}

void dequantize_tiles(InstructionSet set, const CheckpointCopy& copy, int64_t first, int64_t last) {
#ifdef __x86_64__
  if (set == InstructionSet::kAvx512) return dequantize_avx512(copy, first, last);
  if (set == InstructionSet::kAvx2) return dequantize_avx2(copy, first, last);
#endif
  static_cast<void>(set);
  dequantize_baseline(copy, first, last);
}

void quantize_tiles(const CheckpointCopy& copy, int64_t first, int64_t last) {
  quantize_tiles(best_supported(), copy, first, last);
}

void dequantize_tiles(const CheckpointCopy& copy, int64_t first, int64_t last) {
  dequantize_tiles(best_supported(), copy, first, last);
}

void copy_tiles(const RowCopy& copy, int64_t first, int64_t last) {
  const int64_t pages_a_row = pages(copy);
  for (int64_t tile = first; tile < last; ++tile) {
    const int64_t page = tile % pages_a_row;
    const int64_t listed = tile / pages_a_row % copy.listed;
    const auto layer = static_cast<size_t>(tile / pages_a_row / copy.listed);
    const RowShape& shape = copy.shapes[copy.shape[layer]];
    const int64_t begin = page * kPageBytes;
    const int64_t source_slot = copy.source_slots[listed];
    const int64_t target_slot = copy.target_slots[listed];
    if (source_slot < 0 || source_slot >= copy.source_slot_count || target_slot < 0 ||
        target_slot >= copy.target_slot_count) {
      continue;
    }
    if (copy.report != nullptr && layer == 0 && page == 0) {
      std::atomic_ref(copy.report[listed]).fetch_or(kStored, std::memory_order_relaxed);
    }
    if (begin >= shape.row_bytes) continue;
    std::memcpy(static_cast<std::byte*>(copy.target[layer]) +
                    target_slot * shape.target_slot_stride + begin,
                static_cast<const std::byte*>(copy.source[layer]) +
                    source_slot * shape.source_slot_stride + begin,
                static_cast<size_t>(std::min(kPageBytes, shape.row_bytes - begin)));
  }
}

}  // namespace statecache
