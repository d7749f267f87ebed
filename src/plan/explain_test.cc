#include "kvloom/plan/explain.h"

#include <gtest/gtest.h>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/page_sample.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::side;

Plan plan_of(const CacheShape& shape, const std::string& from, const std::string& to, std::int64_t page = 64) {
  return compile(side(shape, from, page), side(shape, to, page)).value();
}

std::string told(const Plan& plan, std::int32_t source, std::int32_t target, TokenRange range = {1000, 16384}) {
  return explain(plan, Rank(source), Rank(target), range);
}

// ---- law: a sampled page carries its tokens' bytes, each once ----

TEST(PageSample, CarriesItsTokensBytesForEveryListedPair) {
  for (const CacheShape& shape : shapes::all())
    for (const std::string& from : shapes::words())
      for (const std::string& to : shapes::words()) {
        const Plan plan = compile(side(shape, from, 4), side(shape, to, 12), 100).value();
        for (const Path& path : plan.paths()) {
          if (plan.groups()[static_cast<std::size_t>(path.group)].target->kind == GroupKind::state) continue;
          const PageSample sample = sample_page(plan, path, {3, 97});
          std::int64_t bytes = 0;
          for (const auto& run : sample.runs) bytes += run.total().value;
          ASSERT_EQ(bytes, sample.tokens * path.row_bytes) << from << " to " << to;
          ASSERT_EQ(sample.tokens > 0, path.token_count({3, 97}) > 0) << from << " to " << to;
        }
      }
}

// ---- golden sentences ----

// CP splits 78 layers by 10 and 9; tokens [1000, 16384) of rank 1's 64 in 256: the 60 pages 17, 21 ... 253.
TEST(Explain, PageRoundRobinMovesWholePages) {
  EXPECT_EQ(told(plan_of(shapes::mla(78, 576), "cp=8:layers", "dcp=4"), 3, 1), R"(prefill 3 to decode 1, tokens [1000, 16384)
latent: 22118400 B = 10 layers x 576 B a token x 3840 tokens
  who: only prefill 3 holds this part.
  layers 30-39: prefill has 30-39 (cp=8:layers), decode has all 78.
  tokens 64+64/256*inf: prefill has every token, decode has 64 of every 256 from token 64 (dcp=4, stripe = page).
  runs: a page is whole on both sides: 36864 B a run.
)");
}

TEST(Explain, StripeOfOneTokenLeavesRows) {
  EXPECT_EQ(told(plan_of(shapes::mla(78, 576), "cp=8:layers", "dcp=4:stripe=1"), 3, 1),
            R"(prefill 3 to decode 1, tokens [1000, 16384)
latent: 22152960 B = 10 layers x 576 B a token x 3846 tokens
  who: only prefill 3 holds this part.
  layers 30-39: prefill has 30-39 (cp=8:layers), decode has all 78.
  tokens 1+1/4*inf: prefill has every token, decode has 1 of every 4 from token 1 (dcp=4, stripe=1).
  runs: a decode page of 64 tokens meets 4 pages of prefill: 4 runs of 16 pieces of 576 B (step 2304 -> 576); the pieces of one run are one strided copy.
  runs: decode's dcp=4, stripe=1 leaves 1 token side by side on both sides: 576 B.
  runs: pieces of 576 B, below 2048 B, move slowly. Better: a stripe of one page on both sides (no stripe= word) puts 64 tokens side by side instead of 1.
)");
}

CacheShape gqa8() {
  return shapes::made("gqa8", 32,
                      {{"kv", GroupKind::paged, shapes::layer_ids(0, 32), 8, {{"k", 256, 2}, {"v", 256, 2}}, {}, {}}});
}

TEST(Explain, FewerRanksThanHeadsSplitRows) {
  EXPECT_EQ(told(plan_of(gqa8(), "tp=8", "tp=2"), 1, 0), R"(prefill 1 to decode 0, tokens [1000, 16384)
kv: 252051456 B = 32 layers x 512 B a token x 15384 tokens
  who: only prefill 1 holds this part.
  layers 0-31: prefill has all 32, decode has all 32.
  heads 1: prefill has 1 of 8 (tp=8), decode has 0-3 of 8 (tp=2).
  tokens 0+inf: prefill has every token, decode has every token.
  runs: a decode page of 64 tokens meets 1 page of prefill: 2 runs of 64 pieces of 256 B (step 256 -> 1024); the pieces of one run are one strided copy.
  runs: heads split: 1 of decode's 4 heads, 256 B of each token's 1024 B (plane k, v).
  runs: the planes k, v stand apart in a page: runs of their own.
  runs: pieces of 256 B, below 2048 B, move slowly. Better: layout=hnd on both sides keeps a head's tokens together: 16384 B a piece instead of 256.
)");
}

TEST(Explain, ReplicasShareTheSending) {
  EXPECT_EQ(told(plan_of(shapes::mla(78, 576), "tp=8", "dcp=4"), 5, 1), R"(prefill 5 to decode 1, tokens [1000, 16384)
latent: 86261760 B = 39 layers x 576 B a token x 3840 tokens
  who: prefill 0-7 hold the same (8 replicas), decode 1 is consumer 1 of 4, one of 4 that no full round of replicas serves: 78 layers dealt out in turn, 39 to prefill 5 (replica 5).
  layers 1-77/2: prefill has all 78, decode has all 78.
  tokens 64+64/256*inf: prefill has every token, decode has 64 of every 256 from token 64 (dcp=4, stripe = page).
  runs: a page is whole on both sides: 36864 B a run.
)");
}

TEST(Explain, SaysWhyARankSendsNothing) {
  EXPECT_EQ(told(plan_of(shapes::mla(78, 576), "tp=8", "dcp=4"), 4, 1), R"(prefill 4 to decode 1, tokens [1000, 16384)
latent: nothing. Another replica sends: prefill 0-7 hold the same (8 replicas), decode 1 is consumer 1 of 4, one of 4 that no full round of replicas serves: 78 layers dealt out in turn, none to prefill 4 (replica 4).
)");
  EXPECT_EQ(told(plan_of(gqa8(), "tp=8", "tp=2"), 1, 1), R"(prefill 1 to decode 1, tokens [1000, 16384)
kv: nothing. No head in common: prefill has 1 of 8 (tp=8), decode has 4-7 of 8 (tp=2).
)");
  EXPECT_EQ(told(plan_of(shapes::mla(4), "cp=8:layers", "tp=1"), 7, 0), R"(prefill 7 to decode 0, tokens [1000, 16384)
latent: nothing. No layer in common: prefill has none (cp=8:layers), decode has all 4.
)");
  EXPECT_EQ(told(plan_of(shapes::mla(4), "dcp=2", "dcp=2"), 1, 0), R"(prefill 1 to decode 0, tokens [1000, 16384)
latent: nothing. No token in common: prefill has 64 of every 128 from token 64 (dcp=2, stripe = page), decode has 64 of every 128 from token 0 (dcp=2, stripe = page).
)");
}

TEST(Explain, SumsUpThePlan) {
  EXPECT_EQ(explain(plan_of(shapes::mla(78, 576), "cp=8:layers", "dcp=4"), {0, 16384}),
            R"(8 prefill ranks (cp=8:layers) to 4 decode ranks (dcp=4), tokens [0, 16384): 32 paths
prefill ranks send 84934656 to 94371840 B each (the most is 1.03 of the mean); decode ranks get 184025088 B each
latent: 32 paths, such as prefill 0 to decode 0:
  runs: a page is whole on both sides: 36864 B a run.
)");
}

// ---- single sentences ----

testing::AssertionResult contains(const std::string& text, const std::string& words) {
  return testing::AssertionResult(text.find(words) != std::string::npos) << "'" << words << "' is not in:\n" << text;
}

TEST(Explain, GivesRatesWhereTheRangeHasNoEnd) {
  const std::string text = told(plan_of(shapes::mla(78, 576), "cp=8:layers", "dcp=4"), 3, 1, {});
  EXPECT_TRUE(contains(text, "tokens [0, end)\nlatent: 10 layers x 576 B a token\n"));
}

TEST(Explain, SaysWhatElseCutsRuns) {
  const std::string pages = told(compile(side(gqa8(), "tp=8,page=16"), side(gqa8(), "tp=8,page=128")).value(), 0, 0);
  EXPECT_TRUE(contains(pages, "a decode page of 128 tokens meets 8 pages of prefill: 16 runs of 4096 B."));
  EXPECT_TRUE(contains(pages, "pages of 16 tokens in prefill, of 128 in decode: no run is longer than the smaller."));
  const std::string cpu = told(plan_of(gqa8(), "tp=8,layout=cpu", "tp=8"), 0, 0);
  EXPECT_TRUE(contains(cpu, "prefill keeps the elements of a row apart, 2 B every 128 B (plane k)."));
  EXPECT_TRUE(contains(cpu, "Better: a layout with contiguous content on both sides (layout=nhd or hnd)."));
  const std::string orders = told(plan_of(gqa8(), "tp=2", "tp=2,layout=hnd"), 0, 0);
  EXPECT_TRUE(contains(
      orders, "prefill goes by token, then head, decode by head, then token: one head of one token is 256 B (plane k, v)."));
  EXPECT_TRUE(contains(orders, "Better: one layout= on both sides."));
  const std::string packed = told(plan_of(gqa8(), "tp=8,layout=packed-nhd", "tp=8"), 0, 0);
  EXPECT_TRUE(contains(packed, "prefill's rows of 256 B stand 512 B apart (plane k, v)."));
}

TEST(Explain, SaysWhatAWindowLeaves) {
  const std::string text = told(plan_of(shapes::hybrid(), "tp=1", "tp=1", 4), 0, 0, {0, 100});
  EXPECT_TRUE(contains(text, "Of these only tokens [93, 100): attention reads the last 7."));
  EXPECT_TRUE(contains(text, "a state moves whole") == false);
}

TEST(Explain, SaysWhenThePageTableDecides) {
  const std::string text = told(plan_of(shapes::mla(4, 576), "tp=1", "dcp=4:value"), 0, 2, {0, 1024});
  EXPECT_TRUE(contains(text, "latent: at most 2359296 B"));
  EXPECT_TRUE(contains(text, "decode has the virtual pages v with v mod 4 = 2 (dcp=4:value)."));
}

}  // namespace
}  // namespace kvloom
