#include "kvloom/plan/plan.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/laws.h"
#include "kvloom/plan/oracle.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using shapes::side;

// ---- every listed pair ----

// The words of the source; all words stand on the target's side.
class PlanOfListedPairs : public testing::TestWithParam<std::size_t> {};

TEST_P(PlanOfListedPairs, KeepsEveryLaw) {
  const std::string& from = shapes::words()[GetParam()];
  std::int64_t n = static_cast<std::int64_t>(GetParam());
  for (const CacheShape& shape : shapes::all())
    for (const std::string& to : shapes::words()) {
      ++n;
      const std::int64_t total = 1 + n * 7 % 40, prefix = n % 3 == 0 ? 0 : n * 5 % (total + 1);
      const Side source = side(shape, from, n % 2 == 0 ? 4 : 6), target = side(shape, to, n % 5 < 3 ? 4 : 2);
      const auto plan = compile(source, target, total);
      ASSERT_TRUE(plan) << from << " to " << to << " of " << shape.model() << ": " << plan.error().message;
      ASSERT_TRUE(holds(laws::check_plan(*plan, laws::whole(total, prefix))))
          << from << " to " << to << " of " << shape.model() << ", tokens [" << prefix << ", " << total << ")";
    }
}

INSTANTIATE_TEST_SUITE_P(Words, PlanOfListedPairs, testing::Range<std::size_t>(0, shapes::words().size()));

TEST(Plan, MatchesLayersByIdWhereTheSidesOwnDifferentOnes) {
  const auto shape = [](std::vector<std::int32_t> ids) {
    std::vector<LayerId> layers;
    for (const std::int32_t id : ids) layers.emplace_back(id);
    return shapes::made("some layers", 9, {{"kv", GroupKind::paged, layers, 2, {{"k", 1, 1}}, {}, {}}});
  };
  const CacheShape more = shape({0, 2, 3, 5, 6, 8, 9});
  for (const std::vector<std::int32_t>& ids :
       {std::vector<std::int32_t>{2, 3, 8}, {0, 9}, {5}, {0, 2, 3, 5, 6, 8, 9}, {3, 5, 6, 9}})
    for (const std::string from : {"tp=2", "pp=3", "cp=4:layers", "cp=2,pp=2", "pp=3:1,4,4"})
      for (const std::string to : {"tp=1", "pp=4", "cp=3:layers", "pp=2,tp=2", "pp=2:7,2"}) {
        const auto plan = compile(side(more, from), side(shape(ids), to), 12);
        ASSERT_TRUE(plan) << plan.error().message;
        ASSERT_TRUE(holds(laws::check_plan(*plan, laws::whole(12)))) << from << " to " << to << " of " << ids.size() << " layers";
      }
}

// ---- generated pairs ----

rc::Gen<std::string> any_words(bool cuts_request) {
  return rc::gen::exec([cuts_request] {
    const auto stripe = *rc::gen::element(1, 2, 4);
    const auto cp = *rc::gen::inRange(1, 5), pp = *rc::gen::inRange(1, 4), tp = *rc::gen::element(1, 2, 4, 8);
    std::vector<std::string> rules = {"", ":layers", fmt::format(":interleave={}", stripe)};
    if (cuts_request) rules.insert(rules.end(), {":zigzag", ":blocked"});
    const std::string rule = *rc::gen::elementOf(rules);
    const bool dcp = tp > 1 && rule != ":zigzag" && rule != ":blocked" && *rc::gen::arbitrary<bool>();
    const std::string value =
        rule.substr(0, 2) != ":i" && *rc::gen::arbitrary<bool>() ? ":value" : fmt::format(":stripe={}", stripe);
    return fmt::format("pp={},cp={}{},tp={}{}", pp, cp, rule, tp,
                       dcp ? fmt::format(",dcp={}{}", *rc::gen::element(tp, tp / 2), value) : "");
  });
}

RC_GTEST_PROP(PlanLaw, HoldsForGeneratedPairs, ()) {
  const auto from = *any_words(true), to = *any_words(true);
  const CacheShape shape = *rc::gen::elementOf(shapes::all());
  const auto total = *rc::gen::inRange<std::int64_t>(1, 60), prefix = *rc::gen::inRange<std::int64_t>(0, total + 1);
  const auto plan = compile(side(shape, from, *rc::gen::element(4, 8, 12)), side(shape, to, *rc::gen::element(4, 8, 12)), total);
  if (!plan) RC_FAIL(plan.error().message);
  const auto law = laws::check_plan(*plan, laws::whole(total, prefix));
  if (!law) RC_FAIL(fmt::format("{} to {} of {}: {}", from, to, shape.model(), law.error().message));
}

// Lengths that nobody could walk, and up to 64 ranks a side: the laws by arithmetic, and element by element in places.
RC_GTEST_PROP(PlanLaw, HoldsAtAnyLength, ()) {
  const auto rule = [] {
    const auto stripe = *rc::gen::element(1, 3, 16, 64, 96, 128);
    const auto ranks = *rc::gen::element(1, 2, 3, 4, 5, 8, 16, 64);
    return *rc::gen::element(
        fmt::format("dcp={}:stripe={},page={}", ranks, stripe, stripe * 4), fmt::format("dcp={},page={}", ranks, stripe),
        fmt::format("cp={}:interleave={},page={}", ranks, stripe, stripe), fmt::format("cp={}:zigzag", ranks),
        fmt::format("cp={}:blocked", ranks), fmt::format("cp={}:layers", ranks));
  };
  const std::string from = rule(), to = rule();
  const auto bits = *rc::gen::inRange(0, 41);
  const auto total = 1 + (*rc::gen::arbitrary<std::uint32_t>() * std::int64_t{4099} & ((std::int64_t{1} << bits) - 1));
  const auto place = [&](double part) { return static_cast<std::int64_t>(static_cast<double>(total) * part); };
  const auto prefix = place(*rc::gen::inRange(0, 101) / 100.0);
  std::vector<std::int64_t> near;
  for (int i = 0; i < 4; ++i) near.push_back(place(*rc::gen::inRange(0, 1000) / 1000.0));
  const CacheShape shape = shapes::mla(2, 3);
  const auto plan = compile(side(shape, from, 64), side(shape, to, 64), total);
  if (!plan) RC_FAIL(plan.error().message);
  const auto law = laws::check_plan(*plan, laws::sampled(total, prefix, near));
  if (!law) RC_FAIL(fmt::format("{} to {}, tokens [{}, {}): {}", from, to, prefix, total, law.error().message));
}

TEST(Plan, OfZigzagCostsTheSameAtAnyLength) {
  // Chunks of 2^37 + 1 and 2^38 + 1 tokens have no factor in common.
  const std::int64_t total = (std::int64_t{1} << 40) + 1;
  for (const char* to : {"cp=2:zigzag", "dcp=7:stripe=1", "dcp=4096,page=1048576"}) {
    const auto plan = compile(side(shapes::mla(1), "cp=4:zigzag"), side(shapes::mla(1), to), total);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_TRUE(holds(laws::check_conserving(*plan, laws::sampled(total, total / 3, {}))));
  }
}

TEST(Plan, OfAnyLengthIsOnePlan) {
  const CacheShape shape = shapes::mla(78, 576);
  const auto plan = compile(side(shape, "cp=8:layers", 64), side(shape, "dcp=4", 64));
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->paths().size(), 32U);
  for (const Path& path : plan->paths()) EXPECT_EQ(path.tokens.size(), 1U);  // one family: CP layer split to DCP page
  for (const std::int64_t total : {std::int64_t{1}, std::int64_t{1000}, std::int64_t{1} << 40})
    for (const std::int64_t prefix : {std::int64_t{0}, total / 2, total})
      EXPECT_TRUE(holds(laws::check_plan(*plan, laws::sampled(total, prefix, {}))));
}

// ---- the choice among replicas ----

TEST(Plan, ReplicasShareTheSending) {
  for (const char* from : {"cp=2", "cp=3", "cp=4", "cp=5", "tp=8", "tp=4,dcp=2:stripe=1", "pp=2,cp=3"})
    for (const char* to : {"tp=1", "tp=2", "tp=3", "tp=7", "dcp=3", "pp=2", "pp=2,tp=2", "pp=2:4,1", "pp=3:3,1,1", "pp=3:0,1,4",
                           "pp=2:4,1,tp=3"}) {
      const auto plan = compile(side(shapes::mla(), from), side(shapes::mla(), to), 40);
      ASSERT_TRUE(plan) << plan.error().message;
      EXPECT_TRUE(holds(laws::check_total(*plan, laws::whole(40)))) << from << " to " << to;
      EXPECT_TRUE(holds(laws::check_balanced(*plan))) << from << " to " << to;
    }
}

TEST(Plan, EachReplicaServesConsumersWholeWhereItCan) {
  const auto plan = compile(side(shapes::mla(), "cp=2"), side(shapes::mla(), "tp=4"));
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->paths().size(), 4U);  // not 8
}

// ---- refusals ----

Expected<Plan> plan_of(const CacheShape& source, const std::string& from, const CacheShape& target, const std::string& to,
                       std::int64_t total = kUnbounded) {
  return compile(side(source, from), side(target, to), total);
}

CacheShape one_group(std::vector<PlaneShape> planes, std::int32_t heads = 1, GroupKind kind = GroupKind::paged) {
  return shapes::made("one", 2, {{"kv", kind, shapes::layer_ids(0, 2), heads, std::move(planes), {}, {}}});
}

TEST(Plan, RefusesAGroupThatTheSourceHasNot) {
  EXPECT_TRUE(says(plan_of(shapes::drafted(), "tp=2,draft:none", shapes::drafted(), "tp=2"),
                   "decode has the cache group draft, prefill has not: say draft:none for decode, or give prefill that group"));
  EXPECT_TRUE(plan_of(shapes::drafted(), "tp=2,draft:none", shapes::drafted(), "tp=2,draft:none"));
  EXPECT_TRUE(plan_of(shapes::drafted(), "tp=2", shapes::drafted(), "tp=2,draft:none")) << "what decode wants not is not sent";
}

TEST(Plan, RefusesRowsThatDiffer) {
  const auto with = [](std::vector<PlaneShape> from, std::vector<PlaneShape> to) {
    return plan_of(one_group(std::move(from)), "tp=1", one_group(std::move(to)), "tp=1");
  };
  EXPECT_TRUE(says(with({{"k", 1152, 1}}, {{"k", 656, 1}}),
                   "group kv: prefill rows hold k of 1152 B where decode rows hold k of 656 B; use one KV dtype"));
  EXPECT_TRUE(says(with({{"k", 8, 1}}, {{"v", 8, 1}}), "prefill rows hold k of 8 B where decode rows hold v of 8 B"));
  EXPECT_TRUE(says(with({{"k", 8, 1}}, {{"k", 8, 1}, {"v", 8, 1}}), "prefill rows have 1 planes, decode rows 2"));
  EXPECT_TRUE(says(with({{"k", 8, 1}}, {{"k", 8, 2}}), "elements of 1 B in prefill, of 2 B in decode"));
  EXPECT_TRUE(
      says(plan_of(one_group({{"k", 8, 1}}, 4), "tp=1", one_group({{"k", 8, 1}}, 8), "tp=1"), "prefill has 4 heads, decode 8"));
  EXPECT_TRUE(says(plan_of(one_group({{"k", 8, 1}}, 4, GroupKind::state), "tp=1", one_group({{"k", 8, 1}}, 4), "tp=1"),
                   "one side keeps it in pages, the other as a state per request"));
}

TEST(Plan, RefusesALayerThatNoSourceHolds) {
  EXPECT_TRUE(says(plan_of(shapes::mla(4), "tp=1", shapes::mla(5), "tp=1"),
                   "group latent: decode wants layer 4, which no prefill rank holds"));
  EXPECT_TRUE(plan_of(shapes::mla(5), "pp=2", shapes::mla(4), "pp=2"));
}

TEST(Plan, RefusesToCutALengthThatItDoesNotKnow) {
  for (const char* words : {"cp=2:zigzag", "cp=2:blocked"}) {
    EXPECT_TRUE(says(plan_of(shapes::mla(), words, shapes::mla(), "tp=1"),
                     "zigzag and blocked cut the request's length: compile with the number of tokens"));
    EXPECT_TRUE(says(plan_of(shapes::mla(), "tp=1", shapes::mla(), words), "compile with the number of tokens"));
  }
}

TEST(Plan, RefusesTokensThatAreNone) {
  for (const std::int64_t total : {std::int64_t{0}, std::int64_t{-1}, INT64_MIN})
    EXPECT_TRUE(says(plan_of(shapes::mla(), "tp=1", shapes::mla(), "tp=1", total),
                     fmt::format("tokens={}: a plan needs at least 1 token", total)));
}

TEST(Plan, RefusesMoreMeetingsThanItCanHold) {
  EXPECT_TRUE(says(plan_of(shapes::mla(1), "dcp=4096", shapes::mla(1), "dcp=4096:stripe=2"),
                   "group latent: 16777216 parts meet on one axis, over the limit of 1048576: use fewer ranks"));
  // Few ranks, but stripes of 1,048,573 (a prime) and 1,048,576 tokens, which meet in a million ways.
  EXPECT_FALSE(plan_of(shapes::mla(1), "dcp=2,page=1048573", shapes::mla(1), "dcp=2,page=1048576"));
}

// The laws find what is wrong: without that they would prove nothing.
TEST(PlanLaw, FindsAPlanThatIsNotForThisRequest) {
  const auto plan = compile(side(shapes::mla(), "cp=2:blocked"), side(shapes::mla(), "tp=1"), 40);
  ASSERT_TRUE(plan);
  EXPECT_TRUE(says(laws::check_faithful(*plan, laws::whole(20)),
                   "faithful: path 0 -> 0 of group latent carries token 10, which its prefill rank has not"));
  EXPECT_TRUE(says(laws::check_total(*plan, laws::whole(60)),
                   "total: decode rank 0, group latent layer 0 token 40 head 0: on 0 paths, wanted 1"));
  EXPECT_TRUE(says(laws::check_conserving(*plan, laws::whole(60)), "the paths of tokens [0, 60) have 400 bytes, wanted 600"));
}

}  // namespace
}  // namespace kvloom
