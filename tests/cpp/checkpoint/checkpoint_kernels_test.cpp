#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "emulated_launch.h"
#include "hard_quotients.h"
#include "pools.h"
#include "statecache/checkpoint_copy.h"

// The source of the CUDA kernels, run on the CPU, against the CPU code.

namespace statecache {
namespace {

using testing::Pools;
using testing::Shape;

TEST(Kernels, DivisionIsExactWhereItIsHardest) {
  for (const testing::Quotient& quotient : testing::hard_quotients()) {
    for (int power = -9; power <= 7; ++power) {
      const float x = std::ldexp(quotient.x, power);
      if (x / quotient.scale > 127.49F) continue;
      for (const float signed_x : {x, -x}) {
        const float scale = quotient.scale;
        const uint32_t level = testing::nearest_level_emulated(signed_x, scale);
        ASSERT_EQ(static_cast<int8_t>(level), static_cast<int8_t>(std::nearbyint(signed_x / scale)))
            << signed_x << " / " << scale;
      }
    }
  }
}

class Emulated : public ::testing::TestWithParam<std::tuple<Shape, size_t>> {};

TEST_P(Emulated, AgreesWithTheCpu) {
  const auto& [shape, offset] = GetParam();
  // Two slots listed, one pair skipped.
  const std::vector<int64_t> active_slots{1, -1, 0};
  const std::vector<int64_t> checkpoint_slots{0, 1, 2};
  const std::vector<int64_t> back_slots{2, 1, -1};
  Pools emulated(shape, 3, offset);
  emulated.fill(11);
  Pools expected = emulated;
  std::vector<int32_t> report;
  std::vector<int32_t> expected_report;

  CheckpointCopy copy = expected.copy(active_slots, checkpoint_slots, expected_report);
  quantize_tiles(copy, 0, tile_count(copy));
  EXPECT_EQ(testing::quantize_emulated(emulated.copy(active_slots, checkpoint_slots, report)), 0);
  EXPECT_EQ(report, expected_report);
  EXPECT_EQ(report, (std::vector<int32_t>{kStored, 0, kStored}));
  EXPECT_EQ(emulated.quantized, expected.quantized);
  EXPECT_EQ(emulated.scale, expected.scale);

  copy = expected.copy(back_slots, checkpoint_slots, expected_report);
  dequantize_tiles(copy, 0, tile_count(copy));
  EXPECT_EQ(testing::dequantize_emulated(emulated.copy(back_slots, checkpoint_slots, report)), 0);
  EXPECT_EQ(emulated.active, expected.active);
}

std::vector<std::tuple<Shape, size_t>> shapes() {
  std::vector<std::tuple<Shape, size_t>> all;
  for (const StateType type : {StateType::kFloat32, StateType::kFloat16, StateType::kBfloat16}) {
    for (const int d_v : {64, 128, 256}) {
      for (const int d_k : {64, 128, 256}) all.push_back({{1, 1, d_v, d_k, type}, 0});
    }
    all.push_back({{2, 2, 64, 64, type}, 0});
    // The general path: aligned, of fewer and more rows than it has in flight, and not aligned.
    all.push_back({{1, 2, 24, 40, type}, 0});
    all.push_back({{2, 1, 8, 8, type}, 0});
    all.push_back({{1, 1, 264, 72, type}, 0});
    all.push_back({{1, 1, 64, 64, type}, 4});
    all.push_back({{1, 1, 80, 24, type}, 4});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Emulated, ::testing::ValuesIn(shapes()));

constexpr StateType kTypes[] = {StateType::kFloat32, StateType::kFloat16, StateType::kBfloat16};

// Element `index` becomes these bits of its type.
void put_bits(Pools& pools, size_t index, StateType type, uint32_t bits) {
  std::memcpy(&pools.active[index * testing::state_bytes(type)], &bits, testing::state_bytes(type));
}

TEST(Kernels, ReportWhatIsNotFinite) {
  const uint32_t infinite[3] = {0x7f800000U, 0x7c00U, 0x7f80U};
  const uint32_t sign[3] = {0x80000000U, 0x8000U, 0x8000U};
  for (const StateType type : kTypes) {
    const auto t = static_cast<size_t>(type);
    const uint32_t quiet = infinite[t] | infinite[t] >> 1;  // the highest bit of the fraction too
    for (const uint32_t bits : {infinite[t], infinite[t] | sign[t], quiet, quiet | sign[t],
                                infinite[t] | 1U, infinite[t] | sign[t] | 1U}) {
      for (const size_t d_k : {64U, 24U}) {
        for (const size_t index : {size_t{5}, 64 * d_k - 1}) {
          Pools pools({1, 1, 64, static_cast<int>(d_k), type}, 2);
          put_bits(pools, index, type, bits);
          const std::vector<int64_t> slots{0, 1};
          std::vector<int32_t> report;
          testing::quantize_emulated(pools.copy(slots, slots, report));
          ASSERT_EQ(report, (std::vector<int32_t>{kStored | kNonFinite, kStored})) << bits;
        }
      }
    }
  }
}

// The scale of the largest float32 and bfloat16 rounds up, and 127 of it overflow. That of a
// float16 state is a float, much finer than the state.
TEST(Kernels, ReportTheLargestValuesOnlyIfTheyComeBackInfinite) {
  const uint32_t largest[3] = {0x7f7fffffU, 0x7bffU, 0x7f7fU};
  const uint32_t minus_half[3] = {0xfeffffffU, 0xf7ffU, 0xfeffU};
  const std::vector<int64_t> slots{0};
  for (const StateType type : kTypes) {
    const auto t = static_cast<size_t>(type);
    for (const int d_k : {64, 24}) {
      Pools emulated({1, 1, 64, d_k, type}, 1);
      for (size_t row = 0; row < 64; ++row) {
        put_bits(emulated, row * static_cast<size_t>(d_k), type, largest[t]);
        put_bits(emulated, row * static_cast<size_t>(d_k) + 1, type, minus_half[t]);
      }
      Pools expected = emulated;
      std::vector<int32_t> report;
      std::vector<int32_t> expected_report;
      const CheckpointCopy copy = expected.copy(slots, slots, expected_report);
      quantize_tiles(copy, 0, tile_count(copy));
      testing::quantize_emulated(emulated.copy(slots, slots, report));
      EXPECT_EQ(report[0], type == StateType::kFloat16 ? kStored : kStored | kNonFinite);
      EXPECT_EQ(report, expected_report);
      EXPECT_EQ(emulated.quantized, expected.quantized);
      EXPECT_EQ(emulated.scale, expected.scale);
      dequantize_tiles(copy, 0, tile_count(copy));
      testing::dequantize_emulated(emulated.copy(slots, slots, report));
      EXPECT_EQ(emulated.active, expected.active);
    }
  }
}

TEST(Kernels, SkipSlotsBeyondTheirPool) {
  const std::vector<int64_t> active_slots{1, 3, INT64_MAX, 0, 2};
  const std::vector<int64_t> checkpoint_slots{0, 1, 2, 3, INT64_MIN};
  for (const int d_k : {64, 24}) {
    Pools emulated({1, 1, 64, d_k, StateType::kBfloat16}, 3);
    emulated.fill(2);
    Pools expected = emulated;
    std::vector<int32_t> report;
    std::vector<int32_t> only;
    const std::vector<int64_t> active_slot{1};
    const std::vector<int64_t> zero{0};
    const CheckpointCopy copy = expected.copy(active_slot, zero, only);
    quantize_tiles(copy, 0, tile_count(copy));
    testing::quantize_emulated(emulated.copy(active_slots, checkpoint_slots, report));
    EXPECT_EQ(report, (std::vector<int32_t>{kStored, 0, 0, 0, 0}));
    EXPECT_EQ(emulated.quantized, expected.quantized);
    dequantize_tiles(copy, 0, tile_count(copy));
    testing::dequantize_emulated(emulated.copy(active_slots, checkpoint_slots, report));
    EXPECT_EQ(emulated.active, expected.active);
  }
}

// What a launch may be misaligned by, one at a time.
enum class Item {
  kNothing,
  kActiveFirstLayer,
  kActiveLastLayer,
  kActiveSlot,
  kActiveHead,
  kQuantized,
  kQuantizedLayer,
  kQuantizedSlot,
  kQuantizedHead,
  kScale,
  kScaleLayer,
  kScaleSlot,
  kScaleHead,
};
constexpr int kItems = 13;

// Two layers, slots and heads of 64 x 64, all 16-byte aligned but the address or stride of one
// item, which is off by one element.
class Spaced {
 public:
  Spaced(StateType type, Item item) : type_(type), item_(item) {
    const size_t state = testing::state_bytes(type);
    for (std::vector<std::byte>& layer : active) layer.resize(kElements * state + kRoom);
    quantized.resize(2 * kElements + kRoom);
    scale.resize(2 * kElements / 64 * testing::scale_bytes(type) + kRoom);
    for (size_t l = 0; l < 2; ++l) {
      // Any bits but those of large exponents.
      for (size_t i = 0; i < active[l].size(); ++i) {
        active[l][i] = static_cast<std::byte>((i * 37 + l * 11) % 56);
      }
    }
  }

  CheckpointCopy copy() {
    const auto state = static_cast<int64_t>(testing::state_bytes(type_));
    const auto scales = static_cast<int64_t>(testing::scale_bytes(type_));
    CheckpointCopy c{};
    c.active_head_stride = 64 * 64 * state + off(Item::kActiveHead, state);
    c.active_slot_stride = twice(c.active_head_stride) + off(Item::kActiveSlot, state);
    c.active[0] = active[0].data() + off(Item::kActiveFirstLayer, state);
    c.active[1] = active[1].data() + off(Item::kActiveLastLayer, state);
    c.quantized = quantized.data() + off(Item::kQuantized, 1);
    c.quantized_head_stride = 64 * 64 + off(Item::kQuantizedHead, 1);
    c.quantized_slot_stride = twice(c.quantized_head_stride) + off(Item::kQuantizedSlot, 1);
    c.quantized_layer_stride = twice(c.quantized_slot_stride) + off(Item::kQuantizedLayer, 1);
    c.scale = scale.data() + off(Item::kScale, scales);
    c.scale_head_stride = 64 * scales + off(Item::kScaleHead, scales);
    c.scale_slot_stride = twice(c.scale_head_stride) + off(Item::kScaleSlot, scales);
    c.scale_layer_stride = twice(c.scale_slot_stride) + off(Item::kScaleLayer, scales);
    c.active_slot_count = c.checkpoint_slot_count = 2;
    c.active_slots = &slot;
    c.checkpoint_slots = &slot;
    c.report = &report;
    c.listed = 1;
    c.layers = c.heads = 2;
    c.d_v = c.d_k = 64;
    c.type = type_;
    return c;
  }

  std::vector<std::byte> active[2];
  std::vector<std::byte> quantized;
  std::vector<std::byte> scale;
  int64_t slot = 1;
  int32_t report = 0;

 private:
  static constexpr size_t kElements = 2 * 2 * 64 * 64;  // of a layer
  static constexpr size_t kRoom = 256;
  int64_t off(Item item, int64_t bytes) const { return item == item_ ? bytes : 0; }
  static int64_t twice(int64_t stride) { return (2 * stride + 15) / 16 * 16; }

  StateType type_;
  Item item_;
};

class Aligned : public ::testing::TestWithParam<StateType> {};

TEST_P(Aligned, OrElseTheGeneralKernelIsTaken) {
  for (int i = 0; i < kItems; ++i) {
    SCOPED_TRACE(i);
    Spaced emulated(GetParam(), static_cast<Item>(i));
    Spaced expected = emulated;
    const bool aligned = i == 0;
    const auto expected_kernel = aligned ? testing::General::kTuned : testing::General::kNarrow;
    EXPECT_EQ(testing::quantizing(emulated.copy()), expected_kernel);
    EXPECT_EQ(testing::dequantizing(emulated.copy()), expected_kernel);
    CheckpointCopy shorter = emulated.copy();
    shorter.d_v = 56;
    const auto general = aligned ? testing::General::kWide : testing::General::kNarrow;
    EXPECT_EQ(testing::quantizing(shorter), general);
    EXPECT_EQ(testing::dequantizing(shorter), general);

    const CheckpointCopy copy = expected.copy();
    quantize_tiles(copy, 0, tile_count(copy));
    testing::quantize_emulated(emulated.copy());
    EXPECT_EQ(emulated.report, kStored);
    EXPECT_EQ(emulated.quantized, expected.quantized);
    EXPECT_EQ(emulated.scale, expected.scale);
    dequantize_tiles(copy, 0, tile_count(copy));
    testing::dequantize_emulated(emulated.copy());
    for (size_t l = 0; l < 2; ++l) EXPECT_EQ(emulated.active[l], expected.active[l]);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Aligned, ::testing::ValuesIn(kTypes));

// Rows of several lengths and distances, each `off` bytes from a whole word in source and target.
struct MixedRows {
  static constexpr int64_t kLengths[] = {1, 12, 48, 15, 4096 * 4 + 7, 0, 100};
  static constexpr int kSlots = 3;

  MixedRows(int64_t source_off, int64_t target_off) {
    for (const int64_t length : kLengths) {
      const int64_t source_stride = length + 3 + source_off;
      const int64_t target_stride = length + 5;
      const auto l = static_cast<size_t>(copy.layers++);
      sources.emplace_back(static_cast<size_t>(kSlots * source_stride + source_off));
      targets.emplace_back(static_cast<size_t>(kSlots * target_stride + target_off));
      for (size_t i = 0; i < sources[l].size(); ++i) {
        sources[l][i] = static_cast<uint8_t>(i * 5 + l + i / 251 + 1);
      }
      copy.shapes[l] = {source_stride, target_stride, length};
      copy.shape[l] = static_cast<uint8_t>(l);
      offsets = {source_off, target_off};
    }
    copy.shape_count = copy.layers;
    copy.source_slot_count = copy.target_slot_count = kSlots;
    copy.listed = 4;
  }

  const RowCopy& listed(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
    for (size_t l = 0; l < sources.size(); ++l) {
      copy.source[l] = sources[l].data() + offsets[0];
      copy.target[l] = targets[l].data() + offsets[1];
    }
    copy.source_slots = from.data();
    copy.target_slots = to.data();
    report.assign(from.size(), 0);
    copy.report = report.data();
    return copy;
  }

  RowCopy copy{};
  std::array<int64_t, 2> offsets{};
  std::vector<std::vector<uint8_t>> sources;
  std::vector<std::vector<uint8_t>> targets;
  std::vector<int32_t> report;
};

TEST(Kernels, MoveRowsOfAnyLengthAndAlignment) {
  const std::vector<int64_t> from{2, -1, 0, 3};
  const std::vector<int64_t> to{1, 0, 2, 0};
  using Offsets = std::pair<int64_t, int64_t>;
  for (const auto& [source_off, target_off] : {Offsets{0, 0}, {1, 0}, {2, 0}, {9, 3}}) {
    MixedRows emulated(source_off, target_off);
    EXPECT_EQ(testing::copy_emulated(emulated.listed(from, to)), 0);
    EXPECT_EQ(emulated.report, (std::vector<int32_t>{kStored, 0, kStored, 0}));
    MixedRows by_hand(source_off, target_off);
    for (size_t l = 0; l < by_hand.sources.size(); ++l) {
      const RowShape& shape = by_hand.copy.shapes[l];
      for (const size_t pair : {0U, 2U}) {
        std::copy_n(&by_hand.sources[l][0] + source_off + from[pair] * shape.source_slot_stride,
                    shape.row_bytes,
                    &by_hand.targets[l][0] + target_off + to[pair] * shape.target_slot_stride);
      }
    }
    EXPECT_EQ(emulated.targets, by_hand.targets) << source_off << ' ' << target_off;
    MixedRows on_cpu(source_off, target_off);
    const RowCopy& copy = on_cpu.listed(from, to);
    copy_tiles(copy, 0, tile_count(copy));
    EXPECT_EQ(on_cpu.targets, by_hand.targets);
    EXPECT_EQ(on_cpu.report, emulated.report);
  }
}

// Equally misaligned source and target: by 16-byte words, but for a head and a tail.
TEST(Kernels, MoveRowsThatLieEquallyFarFromAWord) {
  const std::vector<int64_t> slot{0};
  for (const size_t off : {0U, 1U, 8U, 15U}) {
    for (const int64_t length : {5, 16, 40, 20000}) {
      struct alignas(16) Row {
        uint8_t bytes[20048];
      };
      Row source{};
      Row target{};
      for (size_t i = 0; i < sizeof source.bytes; ++i) {
        source.bytes[i] = static_cast<uint8_t>(i * 7 + i / 256 + 1);
      }
      RowCopy copy{};
      copy.source[0] = source.bytes + off;
      copy.target[0] = target.bytes + off;
      copy.shapes[0] = {length, length, length};
      copy.shape_count = copy.layers = copy.listed = 1;
      copy.source_slot_count = copy.target_slot_count = 1;
      copy.source_slots = copy.target_slots = slot.data();
      testing::copy_emulated(copy);
      Row expected{};
      std::copy_n(source.bytes + off, length, expected.bytes + off);
      EXPECT_EQ(std::memcmp(target.bytes, expected.bytes, sizeof target.bytes), 0)
          << off << ' ' << length;
    }
  }
}

}  // namespace
}  // namespace statecache
