// Laws of strided sets: each function against plain enumeration.
#include "kvloom/geometry/strided_set.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

namespace kvloom {
namespace {

constexpr std::int64_t kHorizon = 700;

std::set<std::int64_t> enumerate(const StridedSet& set, std::int64_t limit = kHorizon) {
  std::set<std::int64_t> out;
  if (set.length() == kUnbounded) {
    for (std::int64_t i = set.start(); i < limit; ++i) out.insert(i);
    return out;
  }
  for (std::int64_t k = 0; k < set.count() && set.start() + k * set.stride() < limit; ++k)
    for (std::int64_t i = 0; i < set.inner_count(); ++i)
      for (std::int64_t x = 0; x < set.length(); ++x) out.insert(set.start() + k * set.stride() + i * set.inner_stride() + x);
  out.erase(out.lower_bound(limit), out.end());
  return out;
}

// Every index once, in a and in b, and one constant step in the positions of both along each level.
void check_intersect(const StridedSet& a, const StridedSet& b) {
  const auto in_a = enumerate(a), in_b = enumerate(b);
  std::set<std::int64_t> wanted, got;
  for (const auto i : in_a)
    if (in_b.count(i) != 0) wanted.insert(i);
  std::size_t total = 0;
  std::int64_t last = -1;
  for (const StridedSet& family : intersect(a, b)) {
    const auto members = enumerate(family);
    total += members.size();
    got.insert(members.begin(), members.end());
    ASSERT_LT(last, family.start()) << "sorted by start";
    last = family.start();
    for (const StridedSet* side : {&a, &b}) {
      const auto at = [&](std::int64_t k, std::int64_t i) {
        return side->count_below(family.start() + k * family.stride() + i * family.inner_stride());
      };
      for (std::int64_t k = 0; k < std::min<std::int64_t>(family.count(), 4); ++k)
        for (std::int64_t i = 0; i < std::min<std::int64_t>(family.inner_count(), 4); ++i)
          ASSERT_EQ(at(k, i),
                    at(0, 0) + k * (at(family.count() > 1, 0) - at(0, 0)) + i * (at(0, family.inner_count() > 1) - at(0, 0)));
    }
  }
  ASSERT_EQ(got, wanted) << to_string(a) << " meets " << to_string(b) << " as " << to_string(intersect(a, b));
  ASSERT_EQ(total, got.size()) << "each once";
}

rc::Gen<StridedSet> flat_set() {
  return rc::gen::exec([] {
    const auto length = *rc::gen::inRange<std::int64_t>(1, 40);
    const auto gap = *rc::gen::inRange<std::int64_t>(0, 40);
    const auto start = *rc::gen::inRange<std::int64_t>(0, 90);
    const auto count =
        *rc::gen::weightedOneOf<std::int64_t>({{2, rc::gen::just(kUnbounded)}, {3, rc::gen::inRange<std::int64_t>(0, 12)}});
    return StridedSet::make(start, length, length + gap, count).value();
  });
}

rc::Gen<StridedSet> nested_set() {
  return rc::gen::exec([] {
    const auto length = *rc::gen::inRange<std::int64_t>(1, 6);
    const auto inner_stride = length + *rc::gen::inRange<std::int64_t>(0, 6);
    const auto inner_count = *rc::gen::inRange<std::int64_t>(1, 5);
    const auto span = (inner_count - 1) * inner_stride + length;
    const auto count =
        *rc::gen::weightedOneOf<std::int64_t>({{2, rc::gen::just(kUnbounded)}, {3, rc::gen::inRange<std::int64_t>(1, 9)}});
    return StridedSet::make(*rc::gen::inRange<std::int64_t>(0, 50), length, inner_stride, inner_count,
                            span + *rc::gen::inRange<std::int64_t>(0, 20), count)
        .value();
  });
}

RC_GTEST_PROP(StridedSetLaw, CountsBelowLikeEnumeration, ()) {
  const auto set = *nested_set();
  const auto members = enumerate(set);
  for (std::int64_t i = 0; i < kHorizon; i += 3) {
    RC_ASSERT(set.count_below(i) == static_cast<std::int64_t>(std::distance(members.begin(), members.lower_bound(i))));
    RC_ASSERT(set.contains(i) == (members.count(i) != 0));
  }
}

RC_GTEST_PROP(StridedSetLaw, PrintsWhatItParses, ()) {
  const auto set = *nested_set();
  RC_ASSERT(StridedSet::parse(to_string(set)).value() == set);
}

RC_GTEST_PROP(StridedSetLaw, ClipsLikeEnumeration, ()) {
  const auto set = *nested_set();
  const auto begin = *rc::gen::inRange<std::int64_t>(0, 300);
  const auto end =
      *rc::gen::weightedOneOf<std::int64_t>({{3, rc::gen::inRange<std::int64_t>(0, 400)}, {1, rc::gen::just(kUnbounded)}});
  std::set<std::int64_t> wanted, got;
  for (const auto i : enumerate(set))
    if (i >= begin && i < end) wanted.insert(i);
  std::size_t total = 0;
  const auto families = clip(set, begin, end);
  for (const StridedSet& family : families) {
    const auto members = enumerate(family);
    total += members.size();
    got.insert(members.begin(), members.end());
  }
  RC_ASSERT(got == wanted);
  RC_ASSERT(total == got.size());
  RC_ASSERT(families.size() <= 7U);
}

RC_GTEST_PROP(StridedSetLaw, MeetsLikeEnumeration, ()) { check_intersect(*flat_set(), *flat_set()); }

TEST(StridedSet, MeetsWhereEverySmallCaseSaysSo) {
  for (std::int64_t la = 1; la <= 6; ++la)
    for (std::int64_t sa = la; sa <= 8; ++sa)
      for (std::int64_t lb = 1; lb <= 4; ++lb)
        for (std::int64_t sb = lb; sb <= 9; ++sb)
          for (const std::int64_t count : {std::int64_t{1}, std::int64_t{3}, kUnbounded}) {
            check_intersect(StridedSet::make(2, la, sa, kUnbounded).value(), StridedSet::make(5, lb, sb, count).value());
            check_intersect(StridedSet::make(7, la, sa, count).value(), StridedSet::make(0, lb, sb, kUnbounded).value());
          }
}

TEST(StridedSet, IsCanonicalFromBirth) {
  EXPECT_EQ(StridedSet::make(0, 4, 4, kUnbounded).value(), StridedSet::all());
  EXPECT_EQ(StridedSet::make(8, 4, 4, 5).value(), StridedSet::interval(8, 28));
  EXPECT_EQ(StridedSet::make(0, 1, 1, 8, 32, 3).value(), StridedSet::make(0, 8, 32, 3).value());
  EXPECT_EQ(StridedSet::make(3, 1, 4, 8, 99, 1).value(), StridedSet::make(3, 1, 4, 8).value());
  EXPECT_EQ(StridedSet::make(5, 0, 9, 3).value(), StridedSet::none());
}

TEST(StridedSet, RefusesWhatOverlapsOrDoesNotFit) {
  EXPECT_NE(StridedSet::make(0, 8, 4, 2).error().message.find("blocks overlap"), std::string::npos);
  EXPECT_NE(StridedSet::make(0, 8, 4, 2, 100, 2).error().message.find("segments overlap"), std::string::npos);
  EXPECT_NE(StridedSet::make(-1, 8, 8, 2).error().message.find("negative"), std::string::npos);
  EXPECT_NE(StridedSet::make(0, 1, kUnbounded / 2, 4).error().message.find("63 bits"), std::string::npos);
  for (const char* text : {"", "3", "3+", "3+4/5", "a+1", "1+2/3*4x", "0+4/-8*2", "0+1/2*3/4*5/6*7"})
    EXPECT_FALSE(StridedSet::parse(text)) << text;
}

TEST(StridedSet, MeetsInOneFamilyWhereStripesNestWholly) {
  // CP layer split (all tokens) to a page of DCP: one family; page stripes of 8 ranks against pages of 4 ranks: one.
  const auto stripe = [](std::int64_t length, std::int64_t ranks, std::int64_t rank) {
    return StridedSet::make(rank * length, length, ranks * length, kUnbounded).value();
  };
  EXPECT_EQ(to_string(intersect(StridedSet::all(), stripe(64, 4, 3))), "192+64/256*inf");
  EXPECT_EQ(to_string(intersect(stripe(64, 8, 7), stripe(64, 4, 3))), "448+64/512*inf");
  EXPECT_EQ(to_string(intersect(stripe(64, 4, 1), stripe(1, 8, 2))), "66+1/8*8/256*inf");
  EXPECT_EQ(to_string(intersect(stripe(64, 8, 7), stripe(64, 4, 2))), "none");
}

TEST(StridedSet, MeetsTheSameAtTwoToTheForty) {
  const auto a = StridedSet::make(0, 16, 96, kUnbounded).value();
  const auto b = StridedSet::make(128, 64, 256, kUnbounded).value();
  const std::int64_t far = std::int64_t{1} << 40;
  std::int64_t sum = 0;
  for (const StridedSet& family : intersect(a, b)) sum += family.count_in(0, far);
  // lcm(96, 256) = 768 tokens: enumerate one period far away.
  const std::int64_t base = far / 768 * 768;
  std::int64_t counted = 0, said = 0;
  for (std::int64_t i = base; i < base + 768; ++i) counted += a.contains(i) && b.contains(i);
  for (const StridedSet& family : intersect(a, b)) said += family.count_in(base, base + 768);
  EXPECT_EQ(said, counted);
  EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(far) / 768 * static_cast<double>(counted), 1000);
}

}  // namespace
}  // namespace kvloom
