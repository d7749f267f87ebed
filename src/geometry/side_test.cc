#include "kvloom/geometry/side.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <tuple>

#include "kvloom/plan/oracle.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;
using shapes::side;

// check_side: what a Side has worked out is what the words say, element by element, and a rank's n-th token stands at column
// n / page, slot n mod page.
Expected<void> check_side(const Side& side, std::int64_t total) {
  const Oracle oracle(side, total);
  for (std::size_t g = 0; g < side.groups().size(); ++g) {
    const GroupSide& group = side.groups()[g];
    std::map<std::int64_t, std::tuple<std::int32_t, std::int32_t, std::int32_t>> parts_of_sign;
    std::map<std::int64_t, std::int32_t> replicas;
    for (std::int32_t r = 0; r < side.ranks(); ++r) {
      const Place& place = group.places[static_cast<std::size_t>(r)];
      const auto refuse = [&](const std::string& what) {
        return fail(Code::invalid_argument, "rank {} group {}: {}", r, group.name, what);
      };
      const std::int64_t sign = oracle.sign(g, Rank(r));
      if (place.holds != (sign >= 0)) return refuse("holds");
      if (!place.holds) continue;
      const auto parts = std::tuple(place.layers, place.heads, place.tokens);
      if (parts_of_sign.emplace(sign, parts).first->second != parts) return refuse("two replicas of different parts");
      if (place.replica != replicas[sign]++) return refuse(fmt::format("replica {}", place.replica));
      const StridedSet& layers = group.layer_parts[static_cast<std::size_t>(place.layers)];
      for (std::size_t l = 0; l < group.layers.size(); ++l)
        if (layers.contains(static_cast<std::int64_t>(l)) != oracle.holds_layer(g, Rank(r), group.layers[l]))
          return refuse(fmt::format("layer {}", group.layers[l].value));
      for (std::int64_t h = 0; h < group.heads; ++h)
        if (group.head_parts[static_cast<std::size_t>(place.heads)].contains(h) != oracle.holds_head(g, Rank(r), h))
          return refuse(fmt::format("head {}", h));
      if (group.kind == GroupKind::state || oracle.by_value(g)) continue;
      const StridedSet tokens = group.tokens.part(place.tokens, total);
      std::int64_t n = 0;
      for (std::int64_t t = 0; t < total; ++t) {
        const bool holds = oracle.holds_token(g, Rank(r), t, 0);
        if (tokens.contains(t) != holds) return refuse(fmt::format("token {}", t));
        if (tokens.count_below(t) != n || oracle.count_tokens(g, Rank(r), 0, t) != n)
          return refuse(fmt::format("token {} is not the {}-th", t, n));
        if (!holds) continue;
        const std::int64_t page = group.layout.page_tokens();
        if (oracle.spot(g, Rank(r), t) != Oracle::Spot{n / page, n % page})
          return refuse(fmt::format("token {} stands elsewhere", t));
        ++n;
      }
    }
  }
  return {};
}

TEST(Side, IsWhatItsWordsSayForEveryListedShape) {
  for (const CacheShape& shape : shapes::all())
    for (const std::string& words : shapes::words())
      for (const std::int64_t total : {1, 3, 40})
        for (const std::int64_t page : {2, 4, 6})
          ASSERT_TRUE(shapes::holds(check_side(side(shape, words, page), total)))
              << words << " of " << shape.model() << ", " << total << " tokens";
}

TEST(Side, GroupWordsOverrideTheSides) {
  for (const char* words : {"tp=4,draft:replicated", "pp=2,tp=2,draft:rank=2", "dcp=4,draft:none",
                            "dcp=4:stripe=2,draft:stripe=1", "dcp=4:value,draft:stripe=2", "dcp=2,draft:value",
                            "cp=3:layers,draft:rank=0", "dcp=2,draft:page=8", "cp=4:zigzag,draft:replicated"})
    EXPECT_TRUE(shapes::holds(check_side(side(shapes::drafted(), words), 40))) << words;
  const Side none = side(shapes::drafted(), "dcp=4,draft:none");
  EXPECT_EQ(none.groups().size(), 1U);
  EXPECT_EQ(none.find("draft"), nullptr);
  const Side strided = side(shapes::drafted(), "dcp=4:value,draft:stripe=2");
  EXPECT_EQ(strided.find("draft")->tokens.rule, TokenRule::cyclic) << "the group's own word counts more than the side's";
  EXPECT_EQ(strided.find("kv")->tokens.rule, TokenRule::value);
  EXPECT_EQ(side(shapes::drafted(), "tp=2,page=8,draft:page=2,draft:layout=hnd").find("draft")->layout.page_tokens(), 2);
  const Side one = side(shapes::drafted(), "tp=2,pp=2,draft:rank=3");
  EXPECT_FALSE(one.find("draft")->places[0].holds);
  EXPECT_TRUE(one.find("draft")->places[3].holds);
}

TEST(Side, PlacesTokensByTheFormulaOfVllm) {
  // Page 64, 4 ranks, stripe 16: token 100 is in stripe 6, so on rank 2, the second stripe that rank has: slot 16 + 100 mod 16.
  const Side dcp = side(shapes::mla(1), "dcp=4:stripe=16,page=64");
  const Oracle oracle(dcp, 1000);
  EXPECT_TRUE(oracle.holds_token(0, Rank(2), 100, 0));
  EXPECT_EQ(oracle.spot(0, Rank(2), 100), (Oracle::Spot{0, 20}));
  EXPECT_EQ(oracle.spot(0, Rank(2), 256 + 100), (Oracle::Spot{1, 20}));
  EXPECT_EQ(dcp.groups()[0].tokens.part(2, kUnbounded).count_below(256 + 100), 64 + 20);
  // Page round robin: page 5 of 4 ranks is rank 1's second.
  const Side pages = side(shapes::mla(1), "dcp=4,page=64");
  EXPECT_EQ(pages.groups()[0].tokens.stripe, 64);
  EXPECT_EQ(Oracle(pages, 1000).spot(0, Rank(1), 5 * 64 + 7), (Oracle::Spot{1, 7}));
}

TEST(Side, SplitsLayersWithTheLongerBlocksFirst) {
  const Side split = side(shapes::mla(78), "cp=8:layers");
  std::vector<std::int64_t> sizes;
  for (const StridedSet& part : split.groups()[0].layer_parts) sizes.push_back(part.size());
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{10, 10, 10, 10, 10, 10, 9, 9}));
  const Side few = side(shapes::mla(2), "cp=4:layers");  // more ranks than layers
  EXPECT_EQ(few.groups()[0].layer_parts[1], StridedSet::interval(1, 2));
  EXPECT_TRUE(few.groups()[0].layer_parts[2].empty());
  EXPECT_TRUE(few.groups()[0].layer_parts[3].empty());
  const Side given = side(shapes::drafted(), "pp=3:2,0,1");
  EXPECT_EQ(given.find("kv")->layer_parts, (std::vector<StridedSet>{StridedSet::interval(0, 2), {}, StridedSet::interval(2, 3)}));
  EXPECT_EQ(given.find("draft")->layer_parts, (std::vector<StridedSet>{{}, {}, StridedSet::interval(0, 1)}))
      << "with the last layers";
}

TEST(Side, RefusesWordsThatDoNotFitTheModel) {
  const auto make = [](const CacheShape& shape, const std::string& words) {
    return Side::make(shape, Sharding::parse(words).value(), 64);
  };
  EXPECT_TRUE(says(make(shapes::gqa(8), "tp=3"),
                   "tp=3 does not divide 8 heads of group kv; 1, 2, 4, 8, 16, ... do\n"
                   "  tp=3\n"
                   "  ^^^^"));
  EXPECT_TRUE(says(make(shapes::gqa(8), "pp=2,tp=6,dcp=2"),
                   "tp=6 with dcp=2 does not divide 8 heads of group kv; 2, 4, 8, 16, 32, ... do"));
  EXPECT_TRUE(says(make(shapes::gqa(8), "tp=12"), "tp=12 does not divide 8 heads"));
  EXPECT_TRUE(says(make(shapes::mla(), "pp=2:3,3"), "the pp stages hold 6 layers, but mla has 5"));
  EXPECT_TRUE(says(make(shapes::mla(), "draft:none"), "mla has no cache group 'draft': it has latent"));
  EXPECT_TRUE(says(make(shapes::dsa(), "draft:none"), "it has latent, index_k"));
  EXPECT_TRUE(says(make(shapes::drafted(), "tp=2,draft:rank=2"), "rank=2 of 2 ranks: 0 to 1"));
  EXPECT_TRUE(
      says(make(shapes::mla(), "dcp=4:stripe=3,page=64"), "stripe=3 does not divide the page of 64 tokens of group latent"));
  EXPECT_TRUE(says(make(shapes::mla(), "cp=4:interleave=128"), "stripe=128 does not divide the page of 64 tokens"));
  EXPECT_TRUE(
      says(make(shapes::mla(), "page_stride=100"), "page_stride=100 is below the page of 128 B (64 tokens x 1 heads x 2 B)"));
  EXPECT_TRUE(says(make(shapes::stateful(), "ssm:page=4"), "group ssm is a state per request: it has no pages of tokens"));
  EXPECT_TRUE(says(Side::make(shapes::mla(), Sharding::parse("tp=1").value(), 0), "page=0 tokens: from 1 to"));
  EXPECT_TRUE(says(make(shapes::mla(), "cp=2:interleave=1,latent:value"),
                   "latent:value and cp:interleave would both choose the token's rank\n"
                   "  cp=2:interleave=1,latent:value\n"
                   "                    ^^^^^^^^^^^^"));
}

TEST(Side, TakesALayoutOnlyIfItFitsTheGroup) {
  Side made = side(shapes::gqa(2), "tp=2,page=4");
  const CacheGroup& group = made.shape().groups()[0];
  EXPECT_TRUE(made.set_layout("kv", PageLayout::make(PageOrder::hnd, group, 1, 16, 1024).value()));
  EXPECT_EQ(made.find("kv")->layout.page_stride(), 1024);
  EXPECT_TRUE(says(made.set_layout("latent", made.find("kv")->layout), "no cache group 'latent'"));
  EXPECT_TRUE(says(made.set_layout("kv", PageLayout::make(PageOrder::hnd, group, 2, 16).value()),
                   "a layout of 2 heads, but each rank holds 1"));
  auto planes = made.find("kv")->layout.planes();
  std::swap(planes[0], planes[1]);
  EXPECT_FALSE(made.set_layout("kv", PageLayout::planes(1, 16, 1024, planes).value())) << "k where v is looked for";
  Side striped = side(shapes::mla(1), "dcp=2:stripe=4,page=8");
  EXPECT_TRUE(says(striped.set_layout("latent", PageLayout::make(PageOrder::nhd, striped.shape().groups()[0], 1, 6).value()),
                   "stripe=4 does not divide the page of 6 tokens"));
  Side by_page = side(shapes::mla(1), "dcp=2,page=8");  // a page in turn, whatever its size
  EXPECT_TRUE(by_page.set_layout("latent", PageLayout::make(PageOrder::nhd, by_page.shape().groups()[0], 1, 6).value()));
  EXPECT_EQ(by_page.groups()[0].tokens.stripe, 6);
}

TEST(Side, CutsAStatePerRequestByAllTpRanks) {
  const Side made = side(shapes::stateful(), "tp=4,dcp=2");  // 24 heads of state, 2 of attention
  const GroupSide &kv = *made.find("kv"), &ssm = *made.find("ssm");
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    EXPECT_EQ(kv.head_parts[static_cast<std::size_t>(kv.places[at].heads)], StridedSet::interval(rank / 2, rank / 2 + 1));
    EXPECT_EQ(ssm.head_parts[static_cast<std::size_t>(ssm.places[at].heads)], StridedSet::interval(6 * rank, 6 * rank + 6));
    EXPECT_EQ(ssm.places[at].replica, 0);
  }
}

TEST(Side, CountsBytesPerToken) {
  EXPECT_DOUBLE_EQ(side(shapes::mla(78, 576), "tp=1").bytes_per_token(Rank(0)), 78 * 576);
  EXPECT_DOUBLE_EQ(side(shapes::mla(78, 576), "tp=8,dcp=4").bytes_per_token(Rank(5)), 78 * 576 / 4.0);
  EXPECT_DOUBLE_EQ(side(shapes::mla(78, 576), "cp=8:layers").bytes_per_token(Rank(7)), 9 * 576);
  EXPECT_DOUBLE_EQ(side(shapes::gqa(8), "tp=16").bytes_per_token(Rank(0)), 3 * 4);
  EXPECT_DOUBLE_EQ(side(shapes::stateful(), "tp=2").bytes_per_token(Rank(0)), 2 * 4);  // the states are not per token
}

RC_GTEST_PROP(SideLaw, IsWhatItsWordsSay, ()) {
  const auto stripe = *rc::gen::inRange<std::int64_t>(1, 9), page = stripe * *rc::gen::inRange<std::int64_t>(1, 5);
  const auto cp = *rc::gen::inRange(1, 7), pp = *rc::gen::inRange(1, 5), tp = *rc::gen::element(1, 2, 4, 8);
  const auto rule = *rc::gen::element<std::string>("", ":layers", ":zigzag", ":blocked", fmt::format(":interleave={}", stripe));
  const std::string dcp = tp > 1 && rule != ":zigzag" && rule != ":blocked" && *rc::gen::arbitrary<bool>()
                              ? fmt::format(",dcp={}:stripe={}", tp / 2, stripe)
                              : "";
  const auto total = *rc::gen::inRange<std::int64_t>(1, 150);
  const auto words = fmt::format("pp={},cp={}{},tp={}{}", pp, cp, rule, tp, dcp);
  const auto law = check_side(side(*rc::gen::element(shapes::drafted(), shapes::gqa(8), shapes::stateful()), words, page), total);
  if (!law) RC_FAIL(words + ": " + law.error().message);
}

}  // namespace
}  // namespace kvloom
