#ifndef STATECACHE_TESTS_CHECKPOINT_POOLS_H_
#define STATECACHE_TESTS_CHECKPOINT_POOLS_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "statecache/checkpoint_copy.h"

namespace statecache::testing {

struct Shape {
  int layers;
  int heads;
  int d_v;
  int d_k;
  StateType type;
};

inline size_t state_bytes(StateType type) { return type == StateType::kFloat32 ? 4 : 2; }
inline size_t scale_bytes(StateType type) { return type == StateType::kBfloat16 ? 2 : 4; }

inline void put(std::vector<std::byte>& bytes, size_t index, StateType type, float x) {
  if (type == StateType::kFloat32) {
    std::memcpy(&bytes[index * 4], &x, 4);
  } else if (type == StateType::kFloat16) {
    const auto half = static_cast<_Float16>(std::clamp(x, -65504.0F, 65504.0F));
    std::memcpy(&bytes[index * 2], &half, 2);
  } else {
    const auto high = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    std::memcpy(&bytes[index * 2], &high, 2);
  }
}

inline float get(const std::vector<std::byte>& bytes, size_t index, StateType type) {
  if (type == StateType::kFloat32) {
    float x = 0;
    std::memcpy(&x, &bytes[index * 4], 4);
    return x;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, &bytes[index * 2], 2);
  if (type == StateType::kFloat16) return static_cast<float>(std::bit_cast<_Float16>(bits));
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// An active pool and a checkpoint pool, each of `slots` slots, in blocks of exactly their size, so
// that AddressSanitizer sees any step outside; `offset` bytes of misalignment in front of each.
class Pools {
 public:
  Pools(Shape shape, int slots, size_t offset = 0) : shape_(shape), slots_(slots), offset_(offset) {
    const size_t matrices = static_cast<size_t>(shape.layers * slots * shape.heads);
    const auto columns = static_cast<size_t>(shape.d_k);
    elements_ = matrices * static_cast<size_t>(shape.d_v) * columns;
    active.resize(offset + elements_ * state_bytes(shape.type));
    quantized.resize(offset + elements_);
    scale.resize(offset + matrices * columns * scale_bytes(shape.type));
  }

  // Normal values of many magnitudes, with columns of zeros, of subnormals and of exact halves.
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto columns = static_cast<size_t>(shape_.d_k);
    std::vector<float> magnitude(columns);
    for (float& m : magnitude) m = std::exp(3 * normal(random));
    for (size_t i = 0; i < elements_; ++i) {
      const size_t column = i % columns;
      float x = normal(random) * magnitude[column];
      if (column == 0) x = 0;
      if (column == 1) x = std::copysign(3e-41F, x);
      if (column == 2) x = std::copysign(2e-7F, x);
      if (column == 3) x = i / columns % static_cast<size_t>(shape_.d_v) == 0 ? 1e4F : x * 1e-3F;
      if (column == 4) x = static_cast<float>(i / columns % 127) + 0.5F;
      if (column == 4 && i / columns % static_cast<size_t>(shape_.d_v) == 0) x = 127;
      put_active(i, x);
    }
  }
  void put_active(size_t index, float x) {
    std::vector<std::byte> element(state_bytes(shape_.type));
    put(element, 0, shape_.type, x);
    std::memcpy(&active[offset_ + index * element.size()], element.data(), element.size());
  }

  CheckpointCopy copy(const std::vector<int64_t>& active_slots,
                      const std::vector<int64_t>& checkpoint_slots, std::vector<int32_t>& report) {
    const int64_t matrix = static_cast<int64_t>(shape_.d_v) * shape_.d_k;
    const auto bytes = static_cast<int64_t>(state_bytes(shape_.type));
    const auto scales = static_cast<int64_t>(scale_bytes(shape_.type));
    CheckpointCopy c{};
    c.active_head_stride = matrix * bytes;
    c.active_slot_stride = shape_.heads * c.active_head_stride;
    c.active_slot_count = slots_;
    for (int l = 0; l < shape_.layers; ++l) {
      c.active[l] = active.data() + offset_ + l * slots_ * c.active_slot_stride;
    }
    c.quantized = quantized.data() + offset_;
    c.quantized_head_stride = matrix;
    c.quantized_slot_stride = shape_.heads * matrix;
    c.quantized_layer_stride = slots_ * c.quantized_slot_stride;
    c.scale = scale.data() + offset_;
    c.scale_head_stride = shape_.d_k * scales;
    c.scale_slot_stride = shape_.heads * c.scale_head_stride;
    c.scale_layer_stride = slots_ * c.scale_slot_stride;
    c.checkpoint_slot_count = slots_;
    c.active_slots = active_slots.data();
    c.checkpoint_slots = checkpoint_slots.data();
    report.assign(active_slots.size(), 0);
    c.report = report.data();
    c.layers = shape_.layers;
    c.listed = static_cast<int32_t>(active_slots.size());
    c.heads = shape_.heads;
    c.d_v = shape_.d_v;
    c.d_k = shape_.d_k;
    c.type = shape_.type;
    return c;
  }

  std::vector<std::byte> active;
  std::vector<std::byte> quantized;
  std::vector<std::byte> scale;

 private:
  Shape shape_;
  int slots_;
  size_t offset_;
  size_t elements_ = 0;
};

}  // namespace statecache::testing

#endif  // STATECACHE_TESTS_CHECKPOINT_POOLS_H_
