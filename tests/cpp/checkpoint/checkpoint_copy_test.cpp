#include "statecache/checkpoint_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

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

// Runs `call` as it is, then with denormals flushed to zero as torch.set_flush_denormal does.
template <typename Call>
void with_and_without_denormals(const Call& call) {
  call();
#ifdef __x86_64__
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);
  call();
  _mm_setcsr(before);
#endif
}

// Element `index` becomes the 16-bit pattern, in a float followed by other bits.
void put_pattern(Pools& pools, size_t index, StateType type, uint32_t pattern) {
  const uint32_t wide = pattern << 16 | (pattern * 40503U & 0xffffU);
  const auto narrow = static_cast<uint16_t>(pattern);
  if (type == StateType::kFloat32) {
    std::memcpy(&pools.active[index * 4], &wide, 4);
  } else {
    std::memcpy(&pools.active[index * 2], &narrow, 2);
  }
}

// A column for each largest value in [2, 4), in it every value from 2^-6 up, so down to a level of
// 1/2; the others are these times powers of two.
TEST(CheckpointCopy, EveryFloat16QuotientIsExact) {
  const StateType type = StateType::kFloat16;
  Pools source({1, 1, 8192, 1024, type}, 1);
  for (uint32_t row = 0; row < 8192; ++row) {
    for (uint32_t k = 0; k < 1024; ++k) {
      put_pattern(source, row * 1024 + k, type, std::min(0x2400 + row, 0x4000 + k));
    }
  }
  const std::vector<int64_t> slots{0};
  std::vector<int32_t> report;
  Pools expected = source;
  quantize_tiles(InstructionSet::kBaseline, expected.copy(slots, slots, report), 0, 1);
  for (const InstructionSet set : supported_sets()) {
    Pools pools = source;
    quantize_tiles(set, pools.copy(slots, slots, report), 0, 1);
    EXPECT_TRUE(pools.quantized == expected.quantized);
  }
}

class Patterns : public ::testing::TestWithParam<StateType> {};

// All 65,536, a column for those that share the upper six bits: in float16 sign and exponent.
TEST_P(Patterns, AreStoredAlike) {
  const StateType type = GetParam();
  Pools source({1, 1, 1024, 64, type}, 1);
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const size_t index = pattern % 1024 * 64 + pattern / 1024;
    put_pattern(source, index, type, pattern);
    if (!std::isfinite(testing::get(source.active, index, type))) source.put_active(index, 0);
  }
  Pools expected = source;
  const std::vector<int64_t> slots{0};
  std::vector<int32_t> expected_report;
  quantize_tiles(InstructionSet::kBaseline, expected.copy(slots, slots, expected_report), 0, 1);
  for (size_t i = 0; type == StateType::kFloat16 && i < 65536; ++i) {
    const float scale = testing::get(expected.scale, i % 64, StateType::kFloat32);
    ASSERT_EQ(static_cast<int8_t>(expected.quantized[i]),
              static_cast<int8_t>(std::nearbyint(testing::get(source.active, i, type) / scale)));
  }
  for (const InstructionSet set : supported_sets()) {
    with_and_without_denormals([&] {
      Pools pools = source;
      std::vector<int32_t> report;
      quantize_tiles(set, pools.copy(slots, slots, report), 0, 1);
      EXPECT_EQ(report, expected_report);
      EXPECT_EQ(pools.quantized, expected.quantized);
      EXPECT_EQ(pools.scale, expected.scale);
    });
  }
}

TEST_P(Patterns, ThatAreNotFiniteAreReported) {
  const StateType type = GetParam();
  const std::vector<int64_t> slots{0};
  int seen = 0;
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    Pools pools({1, 1, 8, 8, type}, 1);
    put_pattern(pools, 27, type, pattern);
    if (std::isfinite(testing::get(pools.active, 27, type))) continue;
    ++seen;
    for (const InstructionSet set : supported_sets()) {
      std::vector<int32_t> report;
      quantize_tiles(set, pools.copy(slots, slots, report), 0, 1);
      ASSERT_EQ(report[0], kStored | kNonFinite) << pattern;
    }
  }
  EXPECT_EQ(seen, type == StateType::kFloat16 ? 2048 : 256);
}

// Levels times scales that give each finite float16, each midpoint between two, and the floats
// beside it: all roundings, and the overflow to Inf. float16 is also held to the compiler's.
TEST_P(Patterns, AreLoadedAlike) {
  const StateType type = GetParam();
  const StateType scale_type =
      type == StateType::kBfloat16 ? StateType::kBfloat16 : StateType::kFloat32;
  const int heads = 4 * 0x7c00 / 256;
  Pools source({1, heads, 8, 256, type}, 1);
  for (uint32_t i = 0; i < 4 * 0x7c00; ++i) {
    const auto bits = static_cast<uint16_t>(i / 4);
    const auto x = static_cast<float>(std::bit_cast<_Float16>(bits));
    const float next =
        bits == 0x7bff
            ? 65536.0F
            : static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits + 1)));
    const float middle = (x + next) / 2;
    const float scales[4] = {x, middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e6F)};
    testing::put(source.scale, i, scale_type, scales[i % 4]);
  }
  const int8_t levels[8] = {1, -1, 127, -127, 3, 0, -85, 64};
  for (size_t i = 0; i < source.quantized.size(); ++i) {
    source.quantized[i] = static_cast<std::byte>(levels[i / 256 % 8]);
  }
  const std::vector<int64_t> slots{0};
  std::vector<int32_t> report;
  Pools expected = source;
  dequantize_tiles(InstructionSet::kBaseline, expected.copy(slots, slots, report), 0, heads);
  for (size_t i = 0; type == StateType::kFloat16 && i < source.quantized.size(); ++i) {
    const float scale = testing::get(source.scale, i / 2048 * 256 + i % 256, scale_type);
    const auto x = static_cast<_Float16>(static_cast<float>(levels[i / 256 % 8]) * scale);
    uint16_t got = 0;
    std::memcpy(&got, &expected.active[i * 2], 2);
    ASSERT_EQ(got, std::bit_cast<uint16_t>(x)) << static_cast<int>(levels[i / 256 % 8]) << scale;
  }
  for (const InstructionSet set : supported_sets()) {
    with_and_without_denormals([&] {
      Pools pools = source;
      dequantize_tiles(set, pools.copy(slots, slots, report), 0, heads);
      EXPECT_EQ(pools.active, expected.active);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Patterns, ::testing::ValuesIn(kTypes));

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
    copy.shapes[0] = {row, row, row};
    copy.shape_count = 1;
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
