// cases_test.cc: what broke others, each as a test of plans and bindings.  The numbers are those of the project's list of cases.
// Case 15, regions, stands in region_test.cc; of cases 9 and 12 the part that needs a session stands with the session.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "kvloom/bind/bind.h"
#include "kvloom/bind/laws.h"
#include "kvloom/plan/compile.h"
#include "kvloom/plan/laws.h"
#include "kvloom/plan/wire.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::layer_ids;
using shapes::made;
using shapes::says;
using shapes::side;
using OneRun = Run;  // inside a test, Run is testing::Test's

Plan plan_of(const CacheShape& shape, const std::string& from, const std::string& to, std::int64_t total = kUnbounded) {
  auto plan = compile(side(shape, from), side(shape, to), total);
  if (!plan) ADD_FAILURE() << from << " to " << to << ": " << plan.error().message;
  return plan.value();
}

PageTable table(std::vector<std::int64_t> ids, PageTable::Use use) {
  std::vector<PageId> pages;
  for (const std::int64_t id : ids) pages.emplace_back(id);
  return PageTable::make(pages, *std::max_element(ids.begin(), ids.end()) + 1, use).value();
}

PageTable shuffled(std::int64_t columns, PageTable::Use use, std::uint64_t seed) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(columns));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937_64 random(seed);
  std::shuffle(ids.begin(), ids.end(), random);
  return table(ids, use);
}

std::vector<Run> runs_of(const Plan& plan, std::int32_t group, std::int32_t from, std::int32_t to, const PageTable& source,
                         const PageTable& target, TokenRange range) {
  const auto path = plan.path(group, Rank(from), Rank(to));
  if (!path) return {};
  auto bound = bind(plan, *path, source, target, range);
  if (!bound) ADD_FAILURE() << bound.error().message;
  return laws::drain(bound.value(), 64);
}

// Every law on every byte, with random and with identity tables.
void check_all(const Plan& plan, std::int64_t total, std::int64_t prefix = 0) {
  EXPECT_TRUE(holds(laws::check_plan(plan, laws::whole(total, prefix))));
  EXPECT_TRUE(holds(laws::check_bind(plan, laws::random_tables(plan, total, 1), {prefix, total})));
  EXPECT_TRUE(holds(laws::check_bind(plan, laws::identity_tables(plan, total), {prefix, total})));
}

TEST(Cases, Case01_StripesOfOneTokenAreStridedRunsNotPieces) {
  const Plan plan = plan_of(shapes::mla(24, 576), "tp=1,page=64", "dcp=8:stripe=1,page=64");
  const std::int64_t total = 56000, columns = 875, own = 7000;
  const PageTable source = shuffled(columns, PageTable::Use::source, 1),
                  target = shuffled((own + 63) / 64, PageTable::Use::target, 2);
  std::int64_t pieces = 0, bytes = 0;
  for (std::int32_t rank = 0; rank < 8; ++rank) {
    const auto runs = runs_of(plan, 0, 0, rank, source, target, {0, total});
    EXPECT_LE(runs.size(), static_cast<std::size_t>(columns)) << "a page of the source is one run of 8 tokens";
    for (const auto& run : runs) {
      EXPECT_EQ(run.bytes, Bytes(576));
      EXPECT_EQ(run.source_step, Bytes(8 * 576));
      EXPECT_EQ(run.target_step, Bytes(576));
      pieces += run.count;
      bytes += run.total().value;
    }
  }
  EXPECT_EQ(pieces * 24, 1344000) << "over all ranks; 168,000 a rank";
  EXPECT_EQ(bytes, total * 576);
  // With pages in order a rank's share is one run.
  std::vector<std::int64_t> ids(static_cast<std::size_t>(columns));
  std::iota(ids.begin(), ids.end(), 0);
  const PageTable in_order = table(ids, PageTable::Use::source);
  ids.resize(static_cast<std::size_t>((own + 63) / 64));
  const PageTable target_in_order = table(ids, PageTable::Use::target);
  const auto runs = runs_of(plan, 0, 0, 3, in_order, target_in_order, {0, total});
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].count, own);
}

TEST(Cases, Case02_OneTokenOverABufferIsOneMoreRunNotARunAToken) {
  const Plan plan = plan_of(shapes::mla(1, 576), "tp=1,page=64", "tp=1,page=64");
  const auto path = plan.path(0, Rank(0), Rank(0)).value();
  const PageTable source = shuffled(130, PageTable::Use::source, 3), target = shuffled(130, PageTable::Use::target, 4);
  for (const std::int64_t total : {std::int64_t{128} * 64, std::int64_t{128} * 64 + 1})
    for (const std::size_t room : {std::size_t{2}, std::size_t{64}, std::size_t{63}, std::size_t{1024}}) {
      auto bound = bind(plan, path, source, target, {0, total});
      ASSERT_TRUE(bound);
      EXPECT_LE(laws::drain(*bound, room).size(), 65U) << total << " tokens through a buffer of " << room;
      EXPECT_EQ(bound->bytes(), Bytes(total * 576));
    }
}

TEST(Cases, Case03_APeerWithOtherRowWidthsIsRefusedAndOthersGoOn) {
  const auto shape = [](std::int64_t latent, std::int64_t index) {
    return made("two widths", 24,
                {{"latent", GroupKind::paged, layer_ids(0, 24), 1, {{"latent", latent, 1}}, {}, {}},
                 {"index_k", GroupKind::paged, layer_ids(0, 10), 1, {{"key", index, 1}}, {}, {}}});
  };
  const Side ours = side(shape(576, 128), "cp=4:layers", 64);
  EXPECT_TRUE(says(
      compile(ours, side(shape(656, 128), "dcp=2", 64)),
      "group latent: prefill rows hold latent of 576 B where decode rows hold latent of 656 B; use one KV dtype on both sides"));
  EXPECT_TRUE(says(compile(ours, side(shape(576, 576), "dcp=2", 64)),
                   "group index_k: prefill rows hold key of 128 B where decode rows hold key of 576 B"));
  const auto good = compile(ours, side(shape(576, 128), "dcp=2", 64));
  ASSERT_TRUE(good) << good.error().message;
  EXPECT_TRUE(holds(laws::check_plan(*good, laws::whole(300))));
  EXPECT_EQ(good->path(1, Rank(0), Rank(1))->row_bytes, 128) << "each group has its own width";
  EXPECT_EQ(good->path(0, Rank(0), Rank(1))->row_bytes, 576);
}

TEST(Cases, Case04_FewerKvHeadsThanRanksEachRankGetsItsOwnHead) {
  const std::vector<std::tuple<std::int32_t, std::string, std::string>> pairs = {{2, "tp=1", "tp=4"},  {2, "tp=4", "tp=1"},
                                                                                 {4, "tp=4", "tp=8"},  {4, "tp=8", "tp=4"},
                                                                                 {8, "tp=8", "tp=16"}, {8, "tp=16", "tp=8"}};
  for (const auto& [heads, from, to] : pairs) {
    SCOPED_TRACE(fmt::format("{} heads {} to {}", heads, from, to));
    const Plan plan = plan_of(shapes::gqa(heads), from, to);
    check_all(plan, 21, 3);
    const std::int32_t ranks = plan.target().ranks();
    for (const Path& path : plan.paths()) {
      if (ranks < heads) continue;  // vLLM: rank r of R has head r * heads / R
      EXPECT_EQ(to_string(path.heads), fmt::format("{}+1", path.target.value * heads / ranks))
          << path.source.value << " to " << path.target.value;
    }
  }
}

TEST(Cases, Case05_ADraftLayerOnOneSideOnlyIsMatchedByGroupAndId) {
  // Prefill keeps a draft layer, decode none: three layers arrive, each in its own K and V.
  const Plan plan = plan_of(shapes::drafted(), "tp=2,layout=packed-hnd", "tp=1,draft:none");
  check_all(plan, 19);
  std::set<std::int32_t> ids;
  for (const Path& path : plan.paths())
    for (const LayerId layer : plan.layer_ids(path)) ids.insert(layer.value);
  EXPECT_EQ(ids, (std::set<std::int32_t>{0, 1, 2}));
  // The other way round decode would wait for ever: refused, with the way out.
  EXPECT_TRUE(
      says(compile(side(shapes::drafted(), "tp=2,draft:none"), side(shapes::drafted(), "tp=1")), "say draft:none for decode"));
  check_all(plan_of(shapes::drafted(), "tp=2", "dcp=2,draft:replicated"), 19);
}

TEST(Cases, Case06_IndexKPagesHoldAllKeysThenAllScales) {
  const CacheShape shape =
      made("dsa", 1, {{"index_k", GroupKind::paged, layer_ids(0, 1), 1, {{"keys", 128, 1}, {"scales", 4, 4}}, {}, {}}});
  // Of 116 tokens the second block begins at 58: there token 63 is slot 5 of page 1; decode has it in slot 63 of page 2.
  const Plan plan = plan_of(shape, "cp=2:blocked,page=64", "tp=1,page=64", 116);
  const PageTable source = table({1}, PageTable::Use::source), target = table({2, 0}, PageTable::Use::target);
  const auto runs = runs_of(plan, 0, 1, 0, source, target, {63, 64});
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs[0], (OneRun{Bytes(8448 + 5 * 128), Bytes(2 * 8448 + 63 * 128), Bytes(128), 1, Bytes(0), Bytes(0)}));
  EXPECT_EQ(runs[1], (OneRun{Bytes(8448 + 8192 + 5 * 4), Bytes(2 * 8448 + 8192 + 63 * 4), Bytes(4), 1, Bytes(0), Bytes(0)}));
  check_all(plan, 116);  // and no neighbour is touched
}

TEST(Cases, Case07_HeadsMajorPagesOfTwoSizesKeepTheirHeadsApart) {
  const Plan plan = plan_of(shapes::gqa(2), "tp=1,layout=hnd,page=16", "tp=1,layout=hnd,page=64");
  check_all(plan, 150, 7);
  // Page 1 of 16 tokens goes to slots 16 to 31 of each head.
  const PageTable source = table({0, 1}, PageTable::Use::source), target = table({0}, PageTable::Use::target);
  const auto runs = runs_of(plan, 0, 0, 0, source, target, {16, 32});
  ASSERT_EQ(runs.size(), 1U);  // k head 0, k head 1, v head 0, v head 1: 32 B each
  EXPECT_EQ(runs[0], (OneRun{Bytes(128), Bytes(32), Bytes(32), 4, Bytes(32), Bytes(128)}));
}

TEST(Cases, Case08_ASideThatCountsOneTokenMoreIsAlignedByTokens) {
  for (const std::string to : {"tp=1", "dcp=2:stripe=1", "dcp=2"}) {
    const Plan plan = plan_of(shapes::mla(1, 2), "tp=1,page=4", to + ",page=4");
    const std::int64_t total = 5 * 4;
    const auto exact = laws::random_tables(plan, total, 9);
    for (std::int32_t rank = 0; rank < plan.target().ranks(); ++rank) {
      const auto& target = exact.target[0][static_cast<std::size_t>(rank)];
      const auto with = [&](const PageTable& source) { return runs_of(plan, 0, 0, rank, source, target, {0, total}); };
      std::vector<PageId> longer(exact.source[0][0].pages().begin(), exact.source[0][0].pages().end());
      longer.emplace_back(77);  // first token, or lookahead
      EXPECT_EQ(with(PageTable::make(longer, 78, PageTable::Use::source).value()), with(exact.source[0][0]));
    }
    EXPECT_TRUE(holds(laws::check_bind(plan, exact, {0, total})));
    EXPECT_TRUE(holds(laws::check_bind(plan, laws::random_tables(plan, total + 1, 9), {0, total})));
  }
}

TEST(Cases, Case09_LayersOfTwoGeometriesHaveOffsetsOfTheirOwn) {
  const CacheShape shape = made("two geometries", 4,
                                {{"full", GroupKind::paged, {LayerId(0), LayerId(2)}, 2, {{"k", 2, 1}, {"v", 2, 1}}, {}, {}},
                                 {"wide", GroupKind::paged, {LayerId(1), LayerId(3)}, 1, {{"latent", 5, 1}}, {}, {}}});
  const Plan plan = plan_of(shape, "tp=2,wide:page=8", "pp=2,full:page=2,full:layout=hnd");
  check_all(plan, 33, 5);
  std::set<std::pair<std::int32_t, std::int32_t>> group_layers;
  for (const Path& path : plan.paths())
    for (const LayerId layer : plan.layer_ids(path)) group_layers.emplace(path.group, layer.value);
  EXPECT_EQ(group_layers, (std::set<std::pair<std::int32_t, std::int32_t>>{{0, 0}, {0, 2}, {1, 1}, {1, 3}}))
      << "no cache is left out";
}

TEST(Cases, Case10_PipelineStagesAreMatchedByLayerId) {
  check_all(plan_of(shapes::mla(5), "pp=2", "pp=1"), 13);
  const CacheShape shape = made("drafted", 6,
                                {{"kv", GroupKind::paged, layer_ids(0, 6), 1, {{"k", 2, 1}}, {}, {}},
                                 {"draft", GroupKind::paged, layer_ids(6, 7), 1, {{"k", 2, 1}}, {}, {}}});
  const Plan plan = plan_of(shape, "pp=4", "pp=2");  // stages of 2, 2, 1, 1 + draft to stages of 3, 3 + draft
  check_all(plan, 13);
  const auto ids = [&](std::int32_t group, std::int32_t from, std::int32_t to) {
    const auto path = plan.path(group, Rank(from), Rank(to));
    return path ? plan.layer_ids(*path) : std::vector<LayerId>();
  };
  EXPECT_EQ(ids(0, 0, 0), layer_ids(0, 2));
  EXPECT_EQ(ids(0, 1, 0), layer_ids(2, 3));
  EXPECT_EQ(ids(0, 1, 1), layer_ids(3, 4));
  EXPECT_EQ(ids(0, 2, 1), layer_ids(4, 5));
  EXPECT_EQ(ids(0, 3, 1), layer_ids(5, 6));
  EXPECT_EQ(ids(1, 3, 1), layer_ids(6, 7));
  EXPECT_EQ(ids(1, 2, 1), layer_ids(0, 0));
}

TEST(Cases, Case11_PagesWhoseSizesHaveLittleInCommonMeet) {
  // 17 and 34 kernel blocks of 16 tokens to a page, and sizes that do not divide each other at all.
  check_all(plan_of(shapes::gqa(2, 1), "tp=1,page=272", "tp=2,page=544"), 1200, 33);
  check_all(plan_of(shapes::gqa(2, 1), "tp=2,page=544", "tp=1,page=272"), 1200, 33);
  check_all(plan_of(shapes::mla(1, 2), "tp=1,page=17", "dcp=2:stripe=2,page=34"), 700, 5);
  check_all(plan_of(shapes::mla(1, 2), "dcp=3,page=15", "dcp=2,page=14"), 500, 1);
}

TEST(Cases, Case12_EveryListedPairMovesTheSameInChunks) {
  const CacheShape shape = shapes::dsa();  // no windows: what is wanted of a chunk is the chunk
  std::size_t n = 0;
  for (const std::string& from : shapes::words())
    for (const std::string& to : shapes::words()) {
      if (++n % 4 != 0) continue;
      const std::int64_t total = 20 + static_cast<std::int64_t>(n % 17);
      const Plan plan = plan_of(shape, from, to, total);
      const auto tables = laws::random_tables(plan, total, n);
      // Each chunk writes its own tokens, each byte once, and nothing else: together they are the request.
      for (std::int64_t begin = 0; begin < total; begin += 7)
        ASSERT_TRUE(holds(laws::check_bind(plan, tables, {begin, std::min(total, begin + 7)})))
            << from << " to " << to << ", chunk at " << begin;
    }
}

TEST(Cases, Case13_RanksWithoutLayersHaveNoPathAndNobodyMissesOne) {
  const Plan plan = plan_of(shapes::mla(2), "cp=4:layers", "pp=3,tp=2");
  check_all(plan, 17);
  for (const Path& path : plan.paths()) {
    EXPECT_LT(path.source.value, 2);
    EXPECT_LT(path.target.value, 4);  // the third stage has no layer either
  }
  check_all(plan_of(shapes::mla(2), "pp=3,tp=2", "cp=4:layers"), 17);
}

TEST(Cases, Case14_DecodeMayBeSmallerThanPrefillAndPiecesTravelAsAPlan) {
  for (const char* to : {"tp=1", "tp=2", "tp=4"}) check_all(plan_of(shapes::gqa(8), "tp=8", to), 21, 2);
  // 15,000 pieces: what travels is the plan, a few kB, not a list of them.
  const Plan plan = plan_of(shapes::mla(78, 576), "cp=8:layers,page=64", "dcp=4,page=64");
  EXPECT_LT(encode(plan).size(), 4096U);
  const PageTable source = shuffled(15000, PageTable::Use::source, 5), target = shuffled(3750, PageTable::Use::target, 6);
  std::int64_t pieces = 0;
  for (std::int32_t rank = 0; rank < 4; ++rank)
    for (const auto& run : runs_of(plan, 0, 0, rank, source, target, {0, 15000 * 64})) pieces += run.total().value / 36864;
  EXPECT_EQ(pieces, 15000);
}

TEST(Cases, Case16_EachGroupHasSendersOfItsOwn) {
  // An MLA target model, replicated over TP, with an MHA draft, cut by heads.
  const CacheShape shape = made("mla with mha draft", 3,
                                {{"latent", GroupKind::paged, layer_ids(0, 3), 1, {{"latent", 3, 1}}, {}, {}},
                                 {"draft", GroupKind::paged, layer_ids(3, 4), 8, {{"k", 1, 1}, {"v", 1, 1}}, {}, {}}});
  const auto sources = [](const Plan& plan, std::int32_t group, std::int32_t target) {
    std::set<std::int32_t> out;
    for (const Path& path : plan.paths())
      if (path.group == group && path.target.value == target) out.insert(path.source.value);
    return out;
  };
  const Plan plan = plan_of(shape, "tp=8", "tp=4");
  check_all(plan, 13);
  std::set<std::int32_t> of_latent;
  for (std::int32_t target = 0; target < 4; ++target) {
    of_latent.merge(sources(plan, 0, target));
    EXPECT_EQ(sources(plan, 1, target), (std::set<std::int32_t>{2 * target, 2 * target + 1})) << "only these have the heads";
  }
  EXPECT_EQ(of_latent.size(), 8U) << "12 (consumer, layer) units over 8 replicas: all of them send";
  check_all(plan_of(shape, "tp=4", "tp=8"), 13);
}

}  // namespace
}  // namespace kvloom
