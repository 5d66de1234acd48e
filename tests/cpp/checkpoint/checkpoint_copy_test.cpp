#include "statecache/checkpoint_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "hard_quotients.h"
#include "pools.h"

namespace statecache {
namespace {

using testing::Pools;
using testing::Shape;

constexpr InstructionSet kSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2,
                                    InstructionSet::kAvx512};
constexpr StateType kTypes[] = {StateType::kFloat32, StateType::kFloat16, StateType::kBfloat16};

std::vector<InstructionSet> supported_sets() {
  std::vector<InstructionSet> sets;
  std::copy_if(std::begin(kSets), std::end(kSets), std::back_inserter(sets), is_supported);
  return sets;
}

TEST(CheckpointCopy, OneColumnByHand) {
  // amax 254 -> scale 2; the quotients 63.5, 0.5, 1.5 and 2.5 round to the even neighbour.
  const float column[8] = {254, -254, 127, 1, 3, -3, 5, 0};
  const int expected[8] = {127, -127, 64, 0, 2, -2, 2, 0};
  for (const InstructionSet set : supported_sets()) {
    Pools pools({1, 1, 8, 8, StateType::kFloat32}, 1);
    for (size_t i = 0; i < 64; ++i) pools.put_active(i, column[i / 8]);
    const std::vector<int64_t> slots{0};
    std::vector<int32_t> report;
    const CheckpointCopy copy = pools.copy(slots, slots, report);
    quantize_tiles(set, copy, 0, tile_count(copy));
    EXPECT_EQ(report[0], kStored);
    for (size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(static_cast<int8_t>(pools.quantized[i]), expected[i / 8]);
    }
    EXPECT_EQ(testing::get(pools.scale, 0, StateType::kFloat32), 2.0F);
  }
}

TEST(CheckpointCopy, DivisionIsExactWhereItIsHardest) {
  const std::vector<testing::Quotient> hard = testing::hard_quotients();
  ASSERT_GT(hard.size(), 1000U);
  for (const InstructionSet set : supported_sets()) {
    int used = 0;
    for (const testing::Quotient& quotient : hard) {
      const float largest = quotient.scale * 127.0F;
      if (largest / 127.0F != quotient.scale) continue;
      Pools pools({1, 1, 16, 8, StateType::kFloat32}, 1);
      for (size_t row = 0; row < 16; ++row) {
        // Row 0 makes the scale, the others are the quotient times powers of two.
        const float x = std::ldexp(quotient.x, static_cast<int>(row) - 9);
        const float value = row == 0 ? largest : std::min(x, largest);
        for (size_t k = 0; k < 8; ++k) pools.put_active(row * 8 + k, value);
      }
      const std::vector<int64_t> slots{0};
      std::vector<int32_t> report;
      const CheckpointCopy copy = pools.copy(slots, slots, report);
      quantize_tiles(set, copy, 0, 1);
      for (size_t i = 0; i < 128; ++i) {
        const float x = testing::get(pools.active, i, StateType::kFloat32);
        ASSERT_EQ(static_cast<int8_t>(pools.quantized[i]),
                  static_cast<int8_t>(std::nearbyint(x / quotient.scale)))
            << x << " / " << quotient.scale;
      }
      ++used;
    }
    EXPECT_GT(used, 1000);
  }
}

// Half-precision conversions of the CPU code, all values of a float16 against the compiler's.
TEST(CheckpointCopy, EveryFloat16IsReadAndWrittenExactly) {
  for (const InstructionSet set : supported_sets()) {
    for (uint32_t high = 0; high < 0x7c00; high += 64) {
      // One row of 64 values, each alone in its column: q is 127 and comes back as itself, or as
      // what 127 * scale rounds to.
      Pools pools({1, 1, 8, 64, StateType::kFloat16}, 2);
      for (uint32_t k = 0; k < 64; ++k) {
        const auto bits = static_cast<uint16_t>((high + k) | (k % 2 << 15));
        pools.put_active(k, static_cast<float>(std::bit_cast<_Float16>(bits)));
      }
      const std::vector<int64_t> from{0};
      const std::vector<int64_t> to{1};
      std::vector<int32_t> report;
      const CheckpointCopy store = pools.copy(from, from, report);
      quantize_tiles(set, store, 0, 1);
      ASSERT_EQ(report[0], kStored);
      dequantize_tiles(set, pools.copy(to, from, report), 0, 1);
      for (uint32_t k = 0; k < 64; ++k) {
        const float scale = testing::get(pools.scale, k, StateType::kFloat32);
        const float x = testing::get(pools.active, k, StateType::kFloat16);
        ASSERT_EQ(scale, std::max(std::fabs(x), 1e-8F) / 127.0F);
        const auto level = static_cast<int8_t>(pools.quantized[k]);
        ASSERT_EQ(level, x == 0 ? 0 : std::copysign(127, x));
        const auto expected = static_cast<float>(static_cast<_Float16>(level * scale));
        ASSERT_EQ(testing::get(pools.active, 8 * 64 + k, StateType::kFloat16), expected);
      }
    }
  }
}

class Sets : public ::testing::TestWithParam<Shape> {};

TEST_P(Sets, GiveTheSameBits) {
  const Shape shape = GetParam();
  const std::vector<int64_t> active_slots{2, 0, -1, 1};
  const std::vector<int64_t> checkpoint_slots{0, 1, 2, -1};
  const std::vector<int64_t> back_slots{0, 1, 2, -1};
  Pools expected(shape, 3);
  for (const InstructionSet set : supported_sets()) {
    Pools pools(shape, 3);
    pools.fill(7);
    std::vector<int32_t> report;
    CheckpointCopy copy = pools.copy(active_slots, checkpoint_slots, report);
    // In two parts, as threads share it.
    quantize_tiles(set, copy, 1, tile_count(copy));
    quantize_tiles(set, copy, 0, 1);
    EXPECT_EQ(report, (std::vector<int32_t>{kStored, kStored, 0, 0}));
    copy = pools.copy(back_slots, checkpoint_slots, report);
    dequantize_tiles(set, copy, 0, tile_count(copy));
    if (set == InstructionSet::kBaseline) expected = pools;
    EXPECT_EQ(pools.quantized, expected.quantized);
    EXPECT_EQ(pools.scale, expected.scale);
    EXPECT_EQ(pools.active, expected.active);
  }
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const StateType type : kTypes) {
    for (const auto& [heads, d_v, d_k] :
         {std::tuple{1, 8, 8}, {2, 24, 40}, {3, 64, 64}, {1, 128, 128}, {2, 17, 264}}) {
      all.push_back({2, heads, d_v, d_k, type});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Sets, ::testing::ValuesIn(shapes()));

TEST(CheckpointCopy, SlotsBeyondAPoolAreSkipped) {
  Pools pools({1, 1, 8, 8, StateType::kFloat32}, 2);
  pools.fill(1);
  const std::vector<int64_t> active_slots{2, 0};
  const std::vector<int64_t> checkpoint_slots{0, 2};
  std::vector<int32_t> report;
  const CheckpointCopy copy = pools.copy(active_slots, checkpoint_slots, report);
  quantize_tiles(copy, 0, tile_count(copy));
  EXPECT_EQ(report, (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(pools.quantized, std::vector<std::byte>(2 * 64));
}

TEST(RowCopy, MovesListedRowsOfAnyLength) {
  for (const int64_t row : {1, 3, 64, 70000}) {
    std::vector<uint8_t> source(static_cast<size_t>(2 * 3 * row));
    for (size_t i = 0; i < source.size(); ++i)
      source[i] = static_cast<uint8_t>(i * 7 + i / 256 + 1);
    std::vector<uint8_t> target(static_cast<size_t>(2 * 2 * row));
    const std::vector<int64_t> from{2, -1, 0, 3};
    const std::vector<int64_t> to{1, 0, -1, 0};
    RowCopy copy{};
    for (int64_t l = 0; l < 2; ++l) {
      copy.source[l] = source.data() + l * 3 * row;
      copy.target[l] = target.data() + l * 2 * row;
    }
    copy.source_slot_stride = copy.target_slot_stride = copy.row_bytes = row;
    copy.source_slot_count = 3;
    copy.target_slot_count = 2;
    copy.source_slots = from.data();
    copy.target_slots = to.data();
    copy.layers = 2;
    copy.listed = 4;
    copy_tiles(copy, 0, tile_count(copy));
    std::vector<uint8_t> expected(target.size());
    std::copy_n(&source[static_cast<size_t>(2 * row)], row, &expected[static_cast<size_t>(row)]);
    std::copy_n(&source[static_cast<size_t>(5 * row)], row,
                &expected[static_cast<size_t>(3 * row)]);
    EXPECT_EQ(target, expected) << row;
  }
}

}  // namespace
}  // namespace statecache
