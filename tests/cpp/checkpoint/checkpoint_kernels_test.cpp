#include "checkpoint_kernels.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
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
        const uint32_t level = kernels::nearest_level(signed_x, scale, 1.0F / scale);
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
    all.push_back({{1, 2, 24, 40, type}, 0});
    all.push_back({{2, 1, 8, 8, type}, 0});
    all.push_back({{1, 1, 64, 64, type}, 4});  // not aligned: the general path
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Emulated, ::testing::ValuesIn(shapes()));

TEST(Kernels, ReportWhatIsNotFinite) {
  for (const int d_k : {64, 24}) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      Pools pools({1, 1, 64, d_k, StateType::kBfloat16}, 2);
      pools.put_active(5, bad);
      const std::vector<int64_t> slots{0, 1};
      std::vector<int32_t> report;
      testing::quantize_emulated(pools.copy(slots, slots, report));
      EXPECT_EQ(report, (std::vector<int32_t>{kStored | kNonFinite, kStored}));
    }
  }
}

TEST(Kernels, MoveRowsOfAnyLengthAndAlignment) {
  for (const int64_t row : {1, 12, 48, 5000}) {
    std::vector<uint8_t> source(static_cast<size_t>(3 * row));
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 5 + 1);
    std::vector<uint8_t> target(static_cast<size_t>(2 * row));
    const std::vector<int64_t> from{2, -1};
    const std::vector<int64_t> to{1, 0};
    RowCopy copy{};
    copy.source[0] = source.data();
    copy.target[0] = target.data();
    copy.source_slot_stride = copy.target_slot_stride = copy.row_bytes = row;
    copy.source_slot_count = 3;
    copy.target_slot_count = 2;
    copy.source_slots = from.data();
    copy.target_slots = to.data();
    copy.layers = 1;
    copy.listed = 2;
    EXPECT_EQ(testing::copy_emulated(copy), 0);
    std::vector<uint8_t> expected(target.size());
    std::copy_n(&source[static_cast<size_t>(2 * row)], row, &expected[static_cast<size_t>(row)]);
    EXPECT_EQ(target, expected) << row;
  }
}

}  // namespace
}  // namespace statecache
