#include "kvloom/landing/coverage.h"

#include <gtest/gtest.h>

namespace kvloom {
namespace {

constexpr CacheLayer layer(std::int32_t id) { return {0, LayerId(id)}; }

TEST(Coverage, IsCompleteOnlyWhenEveryOwedByteHasLanded) {
  auto coverage =
      Coverage::make({{Rank(0), layer(3), Bytes(100)}, {Rank(1), layer(3), Bytes(50)}, {Rank(1), layer(4), Bytes(8)}}).value();
  EXPECT_EQ(coverage.expected(), Bytes(158));
  ASSERT_TRUE(coverage.landed(Rank(0), layer(3), Bytes(60)));
  EXPECT_FALSE(coverage.complete(layer(3)));
  ASSERT_TRUE(coverage.landed(Rank(0), layer(3), Bytes(40)));
  EXPECT_FALSE(coverage.complete(layer(3))) << "rank 1 still owes";
  ASSERT_TRUE(coverage.landed(Rank(1), layer(3), Bytes(50)));
  EXPECT_TRUE(coverage.complete(layer(3)));
  EXPECT_FALSE(coverage.complete());
  EXPECT_EQ(coverage.missing(), "prefill rank 1: 1 layers, 8 B");
  ASSERT_TRUE(coverage.landed(Rank(1), layer(4), Bytes(8)));
  EXPECT_TRUE(coverage.complete());
  EXPECT_EQ(coverage.missing(), "");
}

// CASES 21 in small: a source that says success after one page of many is not believed.
TEST(Coverage, NeverTakesAWordForABytes) {
  auto coverage = Coverage::make({{Rank(0), layer(0), Bytes(4453)}}).value();
  ASSERT_TRUE(coverage.landed(Rank(0), layer(0), Bytes(1)));
  EXPECT_FALSE(coverage.complete());
  EXPECT_EQ(coverage.covered(), Bytes(1));
}

TEST(Coverage, RefusesBytesThatNobodyOwesAndCountsNothingOfThem) {
  auto coverage = Coverage::make({{Rank(2), layer(7), Bytes(10)}}).value();
  EXPECT_EQ(coverage.landed(Rank(3), layer(7), Bytes(1)).error().message,
            "prefill rank 3 says that 1 B of group 0 layer 7 landed, but it owes 0 B, 0 of them still");
  EXPECT_EQ(coverage.landed(Rank(2), layer(7), Bytes(11)).error().message,
            "prefill rank 2 says that 11 B of group 0 layer 7 landed, but it owes 10 B, 10 of them still");
  ASSERT_TRUE(coverage.landed(Rank(2), layer(7), Bytes(10)));
  EXPECT_FALSE(coverage.landed(Rank(2), layer(7), Bytes(1))) << "a doubled notice";
  EXPECT_EQ(coverage.covered(), Bytes(10));
}

// CASES 13: more ranks than layers leaves ranks with nothing to send; nobody waits for them.
TEST(Coverage, WaitsForNobodyWhoOwesNothing) {
  const auto coverage = Coverage::make({{Rank(0), layer(0), Bytes(0)}, {Rank(1), layer(0), Bytes(0)}}).value();
  EXPECT_TRUE(coverage.complete());
}

TEST(Coverage, RefusesDebtsThatCanNotBe) {
  EXPECT_EQ(Coverage::make({{Rank(0), layer(0), Bytes(-1)}}).error().message, "prefill rank 0 owes -1 B");
  EXPECT_EQ(Coverage::make({{Rank(0), layer(0), Bytes(INT64_MAX)}, {Rank(1), layer(0), Bytes(1)}}).error().code, Code::overflow);
}

}  // namespace
}  // namespace kvloom
