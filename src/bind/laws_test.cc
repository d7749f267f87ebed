#include "kvloom/bind/laws.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/plan/compile.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::side;

// ---- every listed pair, with one of the shapes each ----

class BindOfListedPairs : public testing::TestWithParam<std::size_t> {};

TEST_P(BindOfListedPairs, KeepsEveryLaw) {
  static const std::vector<std::string> orders = {"nhd", "hnd", "packed-nhd", "packed-hnd", "cpu"};
  const std::string& from = shapes::words()[GetParam()];
  std::size_t n = GetParam();
  for (const std::string& to : shapes::words()) {
    n += 3;
    const auto shapes_of = shapes::all();
    const CacheShape& shape = shapes_of[n % shapes_of.size()];
    const std::int64_t total = 1 + static_cast<std::int64_t>(n) * 7 % 40,
                       prefix = n % 3 == 0 ? 0 : static_cast<std::int64_t>(n) * 5 % (total + 1);
    const std::string from_words = from + ",layout=" + orders[n % 5], to_words = to + ",layout=" + orders[n / 5 % 5];
    const Side source = side(shape, from_words, n % 2 == 0 ? 4 : 6), target = side(shape, to_words, n % 5 < 3 ? 4 : 2);
    const auto plan = compile(source, target, total);
    ASSERT_TRUE(plan) << from << " to " << to << " of " << shape.model() << ": " << plan.error().message;
    const auto what = [&] { return from_words + " to " + to_words + " of " + shape.model(); };
    ASSERT_TRUE(holds(laws::check_bind(*plan, laws::random_tables(*plan, total, n), {prefix, total})))
        << what() << ", random tables, seed " << n;
    ASSERT_TRUE(holds(laws::check_bind(*plan, laws::identity_tables(*plan, total), {prefix, total})))
        << what() << ", identity tables";
  }
}

INSTANTIATE_TEST_SUITE_P(Words, BindOfListedPairs, testing::Range<std::size_t>(0, shapes::words().size()));

// ---- generated pairs ----

// Token rules of every kind, with pages and stripes that fit each other or do not: words and page.
rc::Gen<std::pair<std::string, std::int64_t>> token_rule() {
  return rc::gen::exec([] {
    const auto stripe = *rc::gen::inRange<std::int64_t>(1, 7);
    const auto page = stripe * *rc::gen::inRange<std::int64_t>(1, 17);
    const auto ranks = *rc::gen::inRange(1, 6);
    const std::vector<std::string> words = {fmt::format("dcp={}:stripe={}", ranks, stripe),
                                            fmt::format("cp={}:interleave={}", ranks, stripe),
                                            fmt::format("dcp={}", ranks),
                                            fmt::format("dcp={}:value", ranks),
                                            fmt::format("cp={}:zigzag", ranks),
                                            fmt::format("cp={}:blocked", ranks),
                                            fmt::format("cp={}", ranks)};
    return std::pair(words[*rc::gen::inRange<std::size_t>(0, words.size())], page);
  });
}

void check_generated(const CacheShape& shape, const std::pair<std::string, std::int64_t>& from,
                     const std::pair<std::string, std::int64_t>& to, std::int64_t total, std::int64_t prefix, bool identity) {
  const auto plan = compile(side(shape, from.first, from.second), side(shape, to.first, to.second), total);
  if (!plan) RC_FAIL(plan.error().message);
  const auto law = laws::check_bind(*plan, identity ? laws::identity_tables(*plan, total) : laws::random_tables(*plan, total, 7),
                                    {prefix, total});
  if (!law)
    RC_FAIL(fmt::format("{} page {} to {} page {}: {}", from.first, from.second, to.first, to.second, law.error().message));
}

RC_GTEST_PROP(BindLaw, HoldsForGeneratedTokenRules, ()) {
  const auto from = *token_rule(), to = *token_rule();
  const auto total = *rc::gen::inRange<std::int64_t>(1, 200), prefix = *rc::gen::inRange<std::int64_t>(0, total + 1);
  check_generated(shapes::mla(1, 1), from, to, total, prefix, *rc::gen::arbitrary<bool>());
}

// Heads, planes and orders, with token rules that cut pages.
rc::Gen<std::pair<std::string, std::int64_t>> layout_rule() {
  return rc::gen::exec([] {
    static const std::vector<std::string> orders = {"nhd", "hnd", "packed-nhd", "packed-hnd", "cpu"};
    const auto page = *rc::gen::element<std::int64_t>(1, 2, 3, 4, 8);
    const auto heads = *rc::gen::element<std::string>("tp=1", "tp=2", "tp=4", "tp=8", "dcp=2:stripe=1", "tp=4,dcp=2:stripe=1");
    return std::pair(fmt::format("{},layout={}", heads, *rc::gen::elementOf(orders)), page);
  });
}

RC_GTEST_PROP(BindLaw, HoldsForGeneratedLayouts, ()) {
  const auto from = *layout_rule(), to = *layout_rule();
  const auto element = *rc::gen::element<std::int64_t>(1, 2), k_elements = *rc::gen::inRange<std::int64_t>(1, 4);
  const std::vector<PlaneShape> planes = {{"k", element * k_elements, element}, {"v", element, element}};
  const auto heads = *rc::gen::element(1, 2, 4);
  const CacheShape shape = shapes::made("layouts", 1, {{"kv", GroupKind::paged, shapes::layer_ids(0, 1), heads, planes, {}, {}}});
  const auto total = *rc::gen::inRange<std::int64_t>(1, 30), prefix = *rc::gen::inRange<std::int64_t>(0, total + 1);
  check_generated(shape, from, to, total, prefix, *rc::gen::arbitrary<bool>());
}

}  // namespace
}  // namespace kvloom
