#include "kvloom/bind/bind.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/bind/laws.h"
#include "kvloom/plan/compile.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using shapes::side;

std::string text_of(const Run& run) {
  const std::string piece = fmt::format("{}->{} {}", run.source_offset.value, run.target_offset.value, run.bytes.value);
  return run.count == 1 ? piece : fmt::format("{} x{} +{}+{}", piece, run.count, run.source_step.value, run.target_step.value);
}

std::vector<std::string> runs_of(BoundPath path) {
  std::vector<std::string> out;
  for (const Run& run : laws::drain(path, 16)) out.push_back(text_of(run));
  return out;
}

PageTable table(const std::vector<std::int64_t>& ids, PageTable::Use use, std::int64_t pool = 1000) {
  std::vector<PageId> pages;
  for (const std::int64_t id : ids) pages.emplace_back(id);
  return PageTable::make(pages, pool, use).value();
}
PageTable source(const std::vector<std::int64_t>& ids) { return table(ids, PageTable::Use::source); }
PageTable target(const std::vector<std::int64_t>& ids) { return table(ids, PageTable::Use::target); }

PageTable identity(std::int64_t pages, PageTable::Use use) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < pages; ++i) ids.push_back(i);
  return table(ids, use, pages);
}

Plan plan_of(const CacheShape& shape, const std::string& from, const std::string& to, std::int64_t total = kUnbounded) {
  auto plan = compile(side(shape, from), side(shape, to), total);
  if (!plan) ADD_FAILURE() << plan.error().message;
  return plan.value();
}

Path path_of(const Plan& plan, std::int32_t from, std::int32_t to, std::int32_t group = 0) {
  const auto path = plan.path(group, Rank(from), Rank(to));
  if (!path) ADD_FAILURE() << "no path " << from << " -> " << to;
  return path.value();
}

using Lines = std::vector<std::string>;

// ---- small tables that a person can check: rows of 10 B, so page p of 4 tokens begins at 40 p ----

TEST(Bind, PagesInNoOrderLeaveTwoByTwo) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  const PageTable from = source({7, 2, 9, 4, 3}), to = target({1, 8, 5, 0, 6});
  const auto bound = bind(plan, path_of(plan, 0, 0), from, to, {0, 20});
  ASSERT_TRUE(bound) << bound.error().message;
  EXPECT_EQ(bound->bytes(), Bytes(200));
  EXPECT_EQ(runs_of(*bound), (Lines{"280->40 40 x2 +-200+280", "360->200 40 x2 +-200+-200", "120->240 40"}));
}

TEST(Bind, NeighboursOnBothSidesAreOneRun) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), source({3, 4, 5}), target({7, 8, 9}), {0, 11}).value()),
            (Lines{"120->280 110"}));
}

TEST(Bind, WhatTouchesIsJoinedBeforeWhatIsEven) {
  // The second chunk of a zigzag rank grows page by page to the size of the first; then both are one run.
  const Plan plan = plan_of(shapes::mla(1, 1), "cp=4:zigzag,page=1", "tp=1,page=1", 19);
  const PageTable from = identity(6, PageTable::Use::source), to = identity(19, PageTable::Use::target);
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 2, 0), from, to, {0, 19}).value()), (Lines{"0->6 3 x2 +3+9"}));
}

TEST(Bind, NeighboursAmongPagesInNoOrderAreJoined) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  const PageTable from = source({9, 1, 4, 20, 21, 22, 7}), to = target({3, 8, 1, 30, 31, 32, 5});
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), from, to, {0, 28}).value()),
            (Lines{"360->120 40 x2 +-320+200", "160->40 40", "800->1200 120", "280->200 40"}));
}

TEST(Bind, PiecesThatAreEvenOnOneSideOnlyAreNotOneRun) {
  // Tokens 0, 2, 8, 10 of 16: source slots 0, 2, 4, 6, target slots 0, 1, 4, 5.
  const Plan plan = plan_of(shapes::mla(1, 1), "dcp=2:stripe=4,page=8", "dcp=2:stripe=1,page=8");
  const PageTable page = table({0}, PageTable::Use::source, 1);
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), page, page, {0, 16}).value()), (Lines{"0->0 1 x2 +2+1", "4->4 1 x2 +2+1"}));
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 1, 1), page, page, {0, 16}).value()), (Lines{"1->2 1 x2 +2+1", "5->6 1 x2 +2+1"}));
}

TEST(Bind, PagesAtAConstantStepAreOneRun) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), source({1, 3, 5, 7}), target({40, 30, 20, 10}), {0, 16}).value()),
            (Lines{"40->1600 40 x4 +80+-400"}));
}

TEST(Bind, BeginsAtThePrefixAndEndsAtTheTotal) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  // Tokens 3..9: slot 3 of column 0, all of column 1, slots 0 and 1 of column 2.
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), source({0, 5, 2}), target({0, 8, 4}), {3, 10}).value()),
            (Lines{"30->30 10", "200->320 40", "80->160 20"}));
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), source({0, 5, 2}), target({0, 8, 4}), {10, 10}).value()), Lines{});
}

TEST(Bind, PagesOfTwoSizesMeetAtTheSmaller) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=2", "tp=1,page=4");
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), source({5, 0, 9, 8}), target({3, 1}), {0, 8}).value()),
            (Lines{"100->120 20 x2 +-100+20", "180->40 20 x2 +-20+20"}));
}

TEST(Bind, StripesOfOneTokenAreStridedRuns) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "dcp=2:stripe=1,page=4");
  // Rank 1 has tokens 1, 3, 5, 7 in its first page.
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 1), source({2, 6}), target({9}), {0, 8}).value()),
            (Lines{"90->360 10 x2 +20+10", "250->380 10 x2 +20+10"}));
}

TEST(Bind, OwnershipByPageValueReadsTheTable) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "dcp=2:value,page=4");
  const PageTable virtual_pages = target({6, 5, 1, 4});  // 6 and 4 are rank 0's pages 3 and 2; 5 and 1 are rank 1's 2 and 0
  const PageTable whole = source({0, 1, 2, 3});
  const auto zero = bind(plan, path_of(plan, 0, 0), whole, virtual_pages, {0, 15});
  EXPECT_EQ(runs_of(zero.value()), (Lines{"0->120 40", "120->80 30"}));
  EXPECT_EQ(zero->bytes(), Bytes(70));
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 1), whole, virtual_pages, {0, 15}).value()), (Lines{"40->80 40 x2 +40+-80"}));
}

TEST(Bind, OfEightLayerBandsToFourPageStripesIsOneRunAPathAndLayer) {
  const Plan plan = plan_of(shapes::mla(78, 576), "cp=8:layers,page=64", "dcp=4,page=64");
  const std::int64_t pages = 15625, total = pages * 64;
  ASSERT_EQ(plan.paths().size(), 32U);
  const PageTable whole = identity(pages, PageTable::Use::source), part = identity((pages + 3) / 4, PageTable::Use::target);
  for (const Path& path : plan.paths()) {
    auto bound = bind(plan, path, whole, part, {0, total});
    ASSERT_TRUE(bound) << bound.error().message;
    const std::int64_t own = (pages + 3 - path.target.value) / 4;
    EXPECT_EQ(runs_of(*bound), (Lines{fmt::format("{}->0 36864 x{} +147456+36864", path.target.value * 36864, own)}));
  }
}

TEST(Bind, CountsIn64BitsBeyond4GiB) {
  // Token 2^33 of 1 B rows in pages of 4096: byte 2^33 of its pool.
  const Plan plan = plan_of(shapes::mla(1, 1), "tp=1,page=4096", "tp=1,page=4096");
  const std::int64_t columns = (std::int64_t{1} << 33) / 4096 + 1, at = (columns - 1) * 4096;
  const PageTable from = identity(columns, PageTable::Use::source), to = identity(columns, PageTable::Use::target);
  EXPECT_EQ(runs_of(bind(plan, path_of(plan, 0, 0), from, to, {at, at + 3}).value()), (Lines{fmt::format("{}->{} 3", at, at)}));
  // Page 2^30 of 36,864 B pages.
  const Plan mla = plan_of(shapes::mla(1, 576), "tp=1,page=64", "tp=1,page=64");
  const std::int64_t page = std::int64_t{1} << 30;
  EXPECT_EQ(runs_of(bind(mla, path_of(mla, 0, 0), table({page}, PageTable::Use::source, page + 1), target({0}), {0, 64}).value()),
            (Lines{fmt::format("{}->0 36864", page * 36864)}));
}

TEST(Bind, OfAMillionTokensFarOutIsAsTheOracleSays) {
  // Tokens around 2^33 with a table whose leading columns name no page.
  const Plan plan = plan_of(shapes::mla(1, 2), "tp=1,page=65536", "dcp=3:stripe=4,page=65536");
  const std::int64_t total = (std::int64_t{1} << 33) + 100, prefix = total - 60;
  std::vector<PageId> from(static_cast<std::size_t>(total / 65536 + 1), kNoPage),
      to(static_cast<std::size_t>(total / (3 * 65536) + 1), kNoPage);
  from.back() = PageId(1);
  from[from.size() - 2] = PageId(0);
  to.back() = PageId(0);
  const laws::RequestTables tables{{{PageTable::make(from, 2, PageTable::Use::source).value()}},
                                   {std::vector<PageTable>(3, PageTable::make(to, 1, PageTable::Use::target).value())}};
  EXPECT_TRUE(holds(laws::check_bind(plan, tables, {prefix, total})));
}

// ---- refusals ----

TEST(Bind, RefusesTablesThatDoNotReach) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "dcp=2,page=4");
  const Path path = path_of(plan, 0, 1);
  EXPECT_TRUE(
      says(bind(plan, path, source({0, 1, 2}), target({0, 1}), {0, 16}),
           "prefill rank 0 group latent: token 15 stands in column 3 (pages of 4 tokens), but the page table has 3 columns"));
  EXPECT_TRUE(
      says(bind(plan, path, source({0, 1, 2, 3}), target({0}), {0, 16}),
           "decode rank 1 group latent: token 15 stands in column 1 (pages of 4 tokens), but the page table has 1 columns"));
  EXPECT_TRUE(bind(plan, path, source({0, 1, 2, 3}), target({0}), {0, 12})) << "tokens 12 to 15 are not wanted";
}

TEST(Bind, RefusesAGapOnlyWhereATokenNeedsIt) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1,page=4", "tp=1,page=4");
  const Path path = path_of(plan, 0, 0);
  EXPECT_TRUE(bind(plan, path, source({-1, 1, 2}), target({-1, 1, 2}), {4, 12}));
  EXPECT_TRUE(says(bind(plan, path, source({-1, 1, 2}), target({0, 1, 2}), {3, 12}),
                   "prefill rank 0 group latent: column 0 names no page, but tokens 3 to 11 need it"));
  EXPECT_TRUE(says(bind(plan, path, source({0, 1, 2}), target({0, -1, 2}), {0, 12}),
                   "decode rank 0 group latent: column 1 names no page"));
}

TEST(Bind, RefusesRangesThatAreNone) {
  const Plan plan = plan_of(shapes::mla(1, 10), "tp=1", "tp=1");
  const Path path = path_of(plan, 0, 0);
  const auto with = [&](std::int64_t begin, std::int64_t end) {
    return bind(plan, path, source({0}), target({0}), {begin, end});
  };
  EXPECT_TRUE(says(with(-1, 4), "token range [-1, 4): the prefix must be 0 or more and not beyond the tokens"));
  EXPECT_TRUE(says(with(5, 4), "token range [5, 4)"));
  EXPECT_TRUE(says(with(0, kUnbounded), "token range [0, "));
  const Plan zigzag = plan_of(shapes::mla(1, 10), "cp=2:zigzag", "tp=1", 8);
  EXPECT_TRUE(says(bind(zigzag, path_of(zigzag, 0, 0), source({0}), target({0, 1, 2}), {0, 9}),
                   "token range [0, 9) of a plan for 8 tokens: compile a plan for this length"));
}

TEST(Bind, RefusesPoolsWhoseOffsetsDoNotFit) {
  const Plan plan = plan_of(shapes::mla(1, 576), "tp=1,page=64", "tp=1,page=64");
  const std::int64_t pool = std::int64_t{1} << 50;
  EXPECT_TRUE(says(bind(plan, path_of(plan, 0, 0), table({0}, PageTable::Use::source, pool), target({0}), {0, 64}),
                   "prefill rank 0 group latent: a pool of 1125899906842624 pages of 36864 B does not fit 63 bits"));
}

// ---- windows and states ----

TEST(Bind, OfAWindowMovesItsTailOnly) {
  const Plan plan = plan_of(shapes::hybrid(), "tp=1,page=4", "tp=1,page=4");
  const auto bytes = [&](std::int32_t group, std::int64_t prefix, std::int64_t total) {
    const PageTable from = identity(20, PageTable::Use::source), to = identity(20, PageTable::Use::target);
    return bind(plan, path_of(plan, 0, 0, group), from, to, {prefix, total}).value().bytes().value / 4;  // rows of 2 heads x 2 B
  };
  EXPECT_EQ(bytes(0, 0, 40), 40);
  EXPECT_EQ(bytes(1, 0, 40), 7);
  EXPECT_EQ(bytes(1, 36, 40), 4);
  EXPECT_EQ(bytes(1, 0, 5), 5);
  EXPECT_EQ(bytes(2, 0, 44), 4);  // chunks of 10: tokens 40 to 43
  EXPECT_EQ(bytes(2, 0, 40), 0);  // the next token begins a chunk
  EXPECT_EQ(bytes(2, 42, 44), 2);
}

TEST(Bind, OfAStateIsOneRowWhateverTheRange) {
  const Plan plan = plan_of(shapes::stateful(), "tp=4", "tp=2");
  const Path path = path_of(plan, 1, 0, 1);  // heads 6 to 11 of the target's 0 to 11
  const PageTable from = source({5}), to = target({3});
  const auto bound = bind(plan, path, from, to, {1000, 1000000});
  ASSERT_TRUE(bound) << bound.error().message;
  EXPECT_EQ(runs_of(*bound), (Lines{"120->150 6", "126->174 18"}));  // rows of 6 x 4 B and 12 x 4 B: conv, then ssm
}

// ---- planes that are tensors of their own ----

TEST(Bind, RefusesAPoolThatReachesIntoThePlaneBehindIt) {
  const CacheShape shape = shapes::gqa(1, 1);  // k and v of 2 B
  const auto apart = [&](std::int64_t offset) {
    Side out = side(shape, "tp=1,page=4");
    const std::vector<PlaneLayout> planes = {{"k", 0, 2, 2, 2, 0, 1}, {"v", offset, 2, 2, 2, 0, 1}};
    EXPECT_TRUE(out.set_layout("kv", PageLayout::planes(1, 4, 8, planes).value()));
    return out;
  };
  const auto bind_pool = [&](const Side& from, std::int64_t pool) {
    const Plan plan = compile(from, side(shape, "tp=1,page=4")).value();
    const PageTable source = table({0}, PageTable::Use::source, pool), target = identity(1, PageTable::Use::target);
    return bind(plan, path_of(plan, 0, 0), source, target, {0, 4}).map([](const BoundPath& path) { return path.bytes(); });
  };
  EXPECT_EQ(bind_pool(apart(80), 10).value(), Bytes(16));
  EXPECT_TRUE(says(bind_pool(apart(80), 11),
                   "prefill rank 0 group kv: a pool of 11 pages of 8 B reaches into the plane that begins 80 B after the first: "
                   "lay it out for 11 pages"));
}

// ---- templates ----

RC_GTEST_PROP(TemplateLaw, MovesEachByteOnce, ()) {
  const auto element = *rc::gen::element<std::int64_t>(1, 2);
  const std::vector<PlaneShape> planes = {
      {"k", element * *rc::gen::inRange<std::int64_t>(1, 4), element}, {"v", 2 * element, element}, {"s", 1, 1}};
  const CacheGroup group{"kv", GroupKind::paged, {LayerId(0)}, 8, planes, {}, {}};
  const auto layout = [&](std::int64_t heads, std::int64_t tokens) {
    const auto order =
        *rc::gen::element(PageOrder::nhd, PageOrder::hnd, PageOrder::packed_nhd, PageOrder::packed_hnd, PageOrder::cpu);
    const PageLayout tight = PageLayout::make(order, group, heads, tokens).value();
    return PageLayout::make(order, group, heads, tokens, tight.page_stride() + *rc::gen::inRange<std::int64_t>(0, 3)).value();
  };
  const auto source_heads = *rc::gen::inRange<std::int64_t>(1, 5), target_heads = *rc::gen::inRange<std::int64_t>(1, 5);
  const auto length = *rc::gen::inRange<std::int64_t>(1, 5), count = *rc::gen::inRange<std::int64_t>(1, 4);
  TokenPiece piece{*rc::gen::inRange<std::int64_t>(0, 3), *rc::gen::inRange<std::int64_t>(0, 3), length, count, 0, 0};
  if (count > 1) {
    piece.source_step = length + *rc::gen::inRange<std::int64_t>(0, 3);
    piece.target_step = length + *rc::gen::inRange<std::int64_t>(0, 3);
  }
  const auto last = [&](std::int64_t slot, std::int64_t step) { return slot + (count - 1) * step + length; };
  HeadSlice heads;
  heads.count = *rc::gen::inRange<std::int64_t>(1, std::min(source_heads, target_heads) + 1);
  heads.source_first = *rc::gen::inRange<std::int64_t>(0, source_heads - heads.count + 1);
  heads.target_first = *rc::gen::inRange<std::int64_t>(0, target_heads - heads.count + 1);
  const PageLayout from =
      layout(source_heads, last(piece.source_slot, piece.source_step) + *rc::gen::inRange<std::int64_t>(0, 3));
  const PageLayout to = layout(target_heads, last(piece.target_slot, piece.target_step) + *rc::gen::inRange<std::int64_t>(0, 3));
  const auto law = laws::check_template(from, to, heads, piece);
  if (!law) RC_FAIL(law.error().message);
}

TEST(Template, AWholePageOfOneLayoutIsOneRun) {
  const CacheGroup group{"kv", GroupKind::paged, {LayerId(0)}, 8, {{"k", 256, 2}, {"v", 256, 2}}, {}, {}};
  for (const PageOrder order : {PageOrder::nhd, PageOrder::hnd, PageOrder::packed_nhd, PageOrder::packed_hnd, PageOrder::cpu}) {
    const PageLayout layout = PageLayout::make(order, group, 8, 16).value();
    std::vector<kvloom::Run> runs;  // inside a test, Run is testing::Test's
    expand(layout, layout, {0, 0, 8}, {0, 0, 16, 1, 0, 0}, runs);
    ASSERT_EQ(runs.size(), 1U) << to_string(order);
    EXPECT_EQ(text_of(runs[0]), "0->0 65536");
  }
}

}  // namespace
}  // namespace kvloom
