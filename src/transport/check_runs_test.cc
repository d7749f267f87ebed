#include "kvloom/transport/check_runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace kvloom {
namespace {

using testing::HasSubstr;
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

using Copy = Run;  // (inside of a test the name Run is gtest's)

// The obvious way: walk every piece.
bool fits(const Run& run, std::int64_t source, std::int64_t target) {
  if (run.bytes.value < 1 || run.count < 1) return false;
  for (std::int64_t i = 0; i < run.count; ++i) {
    const std::int64_t from = (run.source_offset + i * run.source_step).value;
    const std::int64_t to = (run.target_offset + i * run.target_step).value;
    if (from < 0 || from + run.bytes.value > source || to < 0 || to + run.bytes.value > target) return false;
    for (std::int64_t j = 0; j < i; ++j) {
      const std::int64_t other = (run.target_offset + j * run.target_step).value;
      if (to < other + run.bytes.value && other < to + run.bytes.value) return false;
    }
  }
  return true;
}

TEST(CheckRuns, AgreesWithWalkingEveryPiece) {
  std::mt19937_64 random(1);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return Bytes(low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1)));
  };
  int good = 0;
  for (int i = 0; i < 100'000; ++i) {
    const Copy run{draw(-3, 60), draw(-3, 60), draw(0, 12), draw(0, 6).value, draw(-15, 15), draw(-15, 15)};
    const bool ok = check_run(run, Bytes(64), Bytes(64)).has_value();
    ASSERT_EQ(ok, fits(run, 64, 64)) << run.source_offset.value << " " << run.target_offset.value << " " << run.bytes.value << " "
                                     << run.count << " " << run.source_step.value << " " << run.target_step.value;
    const RunBounds bounds(run, Bytes(64), Bytes(64));
    ASSERT_EQ(bounds.hold(run.source_offset, run.target_offset), ok) << run.bytes.value << " " << run.count;
    ASSERT_TRUE(!ok || bounds.total() == run.total());
    good += ok ? 1 : 0;
  }
  EXPECT_GT(good, 3000);
}

TEST(CheckRuns, SaysWhichRunAndWhy) {
  const std::vector<Copy> runs{{Bytes(0), Bytes(0), Bytes(8)}, {Bytes(60), Bytes(0), Bytes(8)}};
  EXPECT_THAT(check_runs(runs, Bytes(64), Bytes(64)).error().message,
              HasSubstr("run 1 of 2: source bytes [60, 68) are outside of the region's [0, 64)"));
}

TEST(CheckRuns, NoNumberOfAPeerOverflows) {
  for (const std::int64_t a : {kHuge, -kHuge, kHuge / 2, std::int64_t{1} << 40}) {
    for (const std::int64_t b : {kHuge, -kHuge, std::int64_t{1} << 40}) {
      EXPECT_FALSE(check_run({Bytes(a), Bytes(0), Bytes(8), 2, Bytes(b), Bytes(8)}, Bytes(64), Bytes(64)));
      EXPECT_FALSE(check_run({Bytes(0), Bytes(a), Bytes(8), 2, Bytes(8), Bytes(b)}, Bytes(64), Bytes(64)));
      EXPECT_FALSE(check_run({Bytes(0), Bytes(0), Bytes(a), b, Bytes(0), Bytes(0)}, Bytes(64), Bytes(64)));
      EXPECT_FALSE(
          RunBounds({Bytes(0), Bytes(0), Bytes(8), 2, Bytes(b), Bytes(8)}, Bytes(64), Bytes(64)).hold(Bytes(a), Bytes(0)));
      EXPECT_FALSE(
          RunBounds({Bytes(0), Bytes(0), Bytes(8), a, Bytes(8), Bytes(b)}, Bytes(64), Bytes(64)).hold(Bytes(0), Bytes(a)));
      EXPECT_FALSE(
          RunBounds({Bytes(0), Bytes(0), Bytes(a), b, Bytes(0), Bytes(0)}, Bytes(64), Bytes(64)).hold(Bytes(0), Bytes(0)));
    }
  }
  EXPECT_EQ(check_run({Bytes(0), Bytes(0), Bytes(1), 64, Bytes(0), Bytes(1)}, Bytes(64), Bytes(64)), Bytes(64));
}

}  // namespace
}  // namespace kvloom
