#include "kvloom/bind/region.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

namespace kvloom {
namespace {

Run run_of(std::int64_t s, std::int64_t t, std::int64_t bytes, std::int64_t count = 1, std::int64_t ss = 0, std::int64_t ts = 0) {
  return {Bytes(s), Bytes(t), Bytes(bytes), count, Bytes(ss), Bytes(ts)};
}

TensorRegions parts_of(std::vector<std::int64_t> lengths) {
  std::vector<TensorPart> parts;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    parts.push_back({Bytes(begin), Bytes(lengths[i]), static_cast<std::int32_t>(i), Bytes(0)});
    begin += lengths[i];
  }
  return TensorRegions::make(parts).value();
}

// Every byte of the runs keeps its place, and no run leaves its region.
void check_place(const std::vector<Run>& runs, const TensorRegions& source, const TensorRegions& target) {
  std::vector<PlacedRun> out;
  ASSERT_TRUE(place(runs, source, target, out));
  std::map<std::int64_t, std::int64_t> wanted, got;  // target byte -> source byte, in tensors
  for (const Run& run : runs)
    for (std::int64_t i = 0; i < run.count; ++i)
      for (std::int64_t x = 0; x < run.bytes.value; ++x)
        wanted[run.target_offset.value + i * run.target_step.value + x] = run.source_offset.value + i * run.source_step.value + x;
  for (const PlacedRun& placed : out) {
    const TensorPart& from = source.parts()[static_cast<std::size_t>(placed.source_region)];
    const TensorPart& to = target.parts()[static_cast<std::size_t>(placed.target_region)];
    for (std::int64_t i = 0; i < placed.run.count; ++i)
      for (std::int64_t x = 0; x < placed.run.bytes.value; ++x) {
        const std::int64_t s = placed.run.source_offset.value + i * placed.run.source_step.value + x;
        const std::int64_t t = placed.run.target_offset.value + i * placed.run.target_step.value + x;
        ASSERT_TRUE(s >= 0 && s < from.length.value && t >= 0 && t < to.length.value) << "a run left its region";
        got[t + to.begin.value] = s + from.begin.value;
      }
  }
  ASSERT_EQ(got, wanted);
}

RC_GTEST_PROP(RegionLaw, CutsAtBordersAndKeepsEveryByte, ()) {
  const auto lengths = [] { return *rc::gen::container<std::vector<std::int64_t>>(4, rc::gen::inRange<std::int64_t>(20, 90)); };
  const auto source = parts_of(lengths()), target = parts_of(lengths());
  std::vector<Run> runs;
  const auto bytes = *rc::gen::inRange<std::int64_t>(1, 12), count = *rc::gen::inRange<std::int64_t>(1, 5);
  const auto step = bytes + *rc::gen::inRange<std::int64_t>(0, 3);
  const bool falling = *rc::gen::arbitrary<bool>();
  runs.push_back(run_of(*rc::gen::inRange<std::int64_t>(0, 10) + (falling ? (count - 1) * step : 0),
                        *rc::gen::inRange<std::int64_t>(0, 10), bytes, count,
                        count == 1 ? 0
                        : falling  ? -step
                                   : step,
                        count == 1 ? 0 : step));
  check_place(runs, source, target);
}

// CASES 15: a page that straddled two registered regions moved 127 of its 128 parts.
TEST(Cases, Case15_NoRunCrossesARegionAndNoPartOfAPageIsLost) {
  constexpr std::int64_t kPage = 41984, kRegion = std::int64_t{2} << 30;
  const auto source = parts_of({kRegion, kRegion, kRegion});
  const auto target = TensorRegions::whole(Bytes(3 * kRegion));
  const std::int64_t straddling = kRegion / kPage;  // this page begins in region 0 and ends in region 1
  ASSERT_LT(straddling * kPage, kRegion);
  ASSERT_GT((straddling + 1) * kPage, kRegion);
  std::vector<PlacedRun> out;
  const auto run = run_of((straddling - 1) * kPage, 0, kPage, 3, kPage, 2 * kPage);
  ASSERT_TRUE(place(std::span(&run, 1), source, target, out));
  Bytes sum;
  for (const PlacedRun& placed : out) {
    sum += placed.run.total();
    const Bytes end = placed.run.source_offset + placed.run.source_step * (placed.run.count - 1) + placed.run.bytes;
    EXPECT_LE(end.value, kRegion) << "inside region " << placed.source_region;
  }
  EXPECT_EQ(sum.value, 3 * kPage) << "every part of every page";
  EXPECT_EQ(out.size(), 4U) << "one page before, two parts of the page that straddles, one page after";
}

TEST(Region, RefusesWhatNoRegionHoldsWithTheValues) {
  std::vector<PlacedRun> out;
  const auto words = [&](const auto& run, const TensorRegions& source, const TensorRegions& target) {
    return place(std::span(&run, 1), source, target, out).error().message;
  };
  const auto big = TensorRegions::whole(Bytes(1000));
  EXPECT_EQ(words(run_of(90, 0, 20), TensorRegions::whole(Bytes(100)), big),
            "source bytes [90, 110) reach past region 0, which ends at 100, and no region goes on there");
  EXPECT_EQ(words(run_of(0, 100, 8), big, TensorRegions::whole(Bytes(100))), "target bytes [100, 108) lie in no region");
  const auto gap = TensorRegions::make({{Bytes(0), Bytes(100), 3, Bytes(0)}, {Bytes(110), Bytes(100), 4, Bytes(0)}}).value();
  EXPECT_EQ(words(run_of(95, 0, 20), gap, big),
            "source bytes [95, 115) reach past region 3, which ends at 100, and no region goes on there");
  EXPECT_TRUE(out.empty()) << "nothing is appended when something is refused";
}

TEST(Region, RefusesPartsThatOverlapOrHoldNothing) {
  EXPECT_FALSE(TensorRegions::make({}));
  EXPECT_NE(TensorRegions::make({{Bytes(0), Bytes(0), 1, Bytes(0)}}).error().message.find("region 1: 0 bytes"),
            std::string::npos);
  EXPECT_EQ(TensorRegions::make({{Bytes(0), Bytes(10), 1, Bytes(0)}, {Bytes(9), Bytes(10), 2, Bytes(0)}}).error().message,
            "regions 1 and 2 both hold byte 9 of a tensor");
}

}  // namespace
}  // namespace kvloom
