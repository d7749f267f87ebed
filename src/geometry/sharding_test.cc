#include "kvloom/geometry/sharding.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;

Sharding parsed(const std::string& text) {
  const auto made = Sharding::parse(text);
  EXPECT_TRUE(made) << made.error().message;
  return made.value();
}

TEST(Sharding, ReadsEveryAxisWord) {
  const Sharding tp = parsed("tp=8,dcp=4");
  EXPECT_EQ(tp.tp(), 8);
  EXPECT_EQ(tp.dcp(), 4);
  EXPECT_EQ(tp.dcp_stripe(), 0);  // a page
  EXPECT_EQ(tp.ranks(), 8);       // dcp ranks are tp ranks
  EXPECT_EQ(parsed("dcp=4").tp(), 4);
  EXPECT_EQ(parsed("dcp=8:stripe=1").dcp_stripe(), 1);
  EXPECT_TRUE(parsed("dcp=8:value").dcp_by_value());
  EXPECT_EQ(parsed("cp=8").cp_rule(), CpRule::replicated);
  EXPECT_EQ(parsed("cp=8:replicated").cp_rule(), CpRule::replicated);
  EXPECT_EQ(parsed("cp=8:layers").cp_rule(), CpRule::layers);
  EXPECT_EQ(parsed("cp=4:zigzag").cp_rule(), CpRule::zigzag);
  EXPECT_EQ(parsed("cp=4:blocked").cp_rule(), CpRule::blocked);
  EXPECT_EQ(parsed("cp=4:interleave=16").cp_rule(), CpRule::interleave);
  EXPECT_EQ(parsed("cp=4:interleave=16").cp_stripe(), 16);
  EXPECT_EQ(parsed("pp=4").pp(), 4);
  EXPECT_TRUE(parsed("pp=4").pp_layers().empty());
  EXPECT_EQ(parsed("pp=4:20,20,20,18,tp=2").pp_layers(), (std::vector<std::int64_t>{20, 20, 20, 18}));
  EXPECT_EQ(parsed("tp=2,pp=3:0,5,0").pp_layers(), (std::vector<std::int64_t>{0, 5, 0}));  // stages may hold nothing
  EXPECT_EQ(parsed("pp=2,cp=3:layers,tp=4").ranks(), 24);
}

TEST(Sharding, ReadsEveryPageWord) {
  const Sharding side = parsed("tp=2,page=64,layout=hnd,page_stride=8448");
  EXPECT_EQ(side.pages().page_tokens, 64);
  EXPECT_EQ(side.pages().order, PageOrder::hnd);
  EXPECT_EQ(side.pages().page_stride, 8448);
  for (const auto& [word, order] : std::vector<std::pair<std::string, PageOrder>>{{"nhd", PageOrder::nhd},
                                                                                  {"hnd", PageOrder::hnd},
                                                                                  {"packed-nhd", PageOrder::packed_nhd},
                                                                                  {"packed-hnd", PageOrder::packed_hnd},
                                                                                  {"cpu", PageOrder::cpu},
                                                                                  {"mla", PageOrder::nhd},
                                                                                  {"dsa-index", PageOrder::nhd}})
    EXPECT_EQ(parsed("layout=" + word).pages().order, order) << word;
}

TEST(Sharding, ReadsEveryGroupWord) {
  const auto words = [](const std::string& text) { return parsed("dcp=4," + text).groups().at("draft"); };
  EXPECT_EQ(words("draft:replicated").holders, GroupWords::Holders::replicated);
  EXPECT_EQ(words("draft:none").holders, GroupWords::Holders::none);
  EXPECT_EQ(words("draft:rank=3").holders, GroupWords::Holders::one_rank);
  EXPECT_EQ(words("draft:rank=3").rank, 3);
  EXPECT_EQ(words("draft:rank=0").rank, 0);
  EXPECT_EQ(words("draft:stripe=2").stripe, 2);
  EXPECT_TRUE(words("draft:value").by_value);
  EXPECT_EQ(words("draft:page=16").pages.page_tokens, 16);
  EXPECT_EQ(words("draft:layout=hnd").pages.order, PageOrder::hnd);
  EXPECT_EQ(words("draft:page_stride=4096").pages.page_stride, 4096);
  EXPECT_EQ(words("draft:strides=4096/2/64/1").pages.strides, (Strides{4096, 2, 64, 1}));
  const GroupWords both = words("draft:page=16,draft:replicated");
  EXPECT_EQ(both.pages.page_tokens, 16);
  EXPECT_EQ(both.holders, GroupWords::Holders::replicated);
}

// The whole message: sentence, text, marker.
TEST(Sharding, ErrorsPointAtTheWord) {
  EXPECT_EQ(Sharding::parse("tp=8,cp=4:zigzog,page=64").error().message,
            "unknown rule 'zigzog' of cp: layers, zigzag, blocked, interleave=S or replicated\n"
            "  tp=8,cp=4:zigzog,page=64\n"
            "            ^^^^^^");
  EXPECT_EQ(Sharding::parse("tp=8,dcp=3").error().message,
            "dcp=3 does not divide tp=8: dcp ranks are tp ranks (dcp rank = tp rank mod dcp)\n"
            "  tp=8,dcp=3\n"
            "       ^^^^^");
  EXPECT_EQ(Sharding::parse("tp=0").error().message,
            "tp=0 must be 1 or more\n"
            "  tp=0\n"
            "     ^");
}

TEST(Sharding, RefusesEveryWrongWord) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"", "empty sharding word"},
      {"tp=2,", "empty sharding word"},
      {"tp=2,,pp=2", "empty sharding word"},
      {"tensor=8", "unknown sharding word 'tensor'"},
      {"8", "unknown sharding word '8'"},
      {"tp", "unknown sharding word 'tp'"},
      {"tp=2,20", "unknown sharding word '20'"},
      {"tp=", "tp wants a whole number, not ''"},
      {"tp=eight", "tp wants a whole number, not 'eight'"},
      {"tp=8x", "tp wants a whole number, not '8x'"},
      {"tp= 8", "tp wants a whole number, not ' 8'"},
      {"tp=2.5", "tp wants a whole number, not '2.5'"},
      {"tp=-1", "tp=-1 must be 1 or more"},
      {"cp=0:layers", "cp=0 must be 1 or more"},
      {"pp=4097", "pp=4097 is too large: at most 4096"},
      {"tp=99999999999999999999", "tp=99999999999999999999 is too large"},
      {"tp=64,cp=64,pp=2", "8192 ranks are too many: at most 4096"},
      {"tp=8:layers", "tp takes no rule"},
      {"tp=8,tp=4", "tp is said twice"},
      {"dcp=4:strip=1", "unknown rule 'strip=1' of dcp: stripe=S or value"},
      {"dcp=4:stripe", "unknown rule 'stripe' of dcp"},
      {"dcp=4:stripe=0", "stripe=0 must be 1 or more"},
      {"cp=4:interleave", "unknown rule 'interleave' of cp"},
      {"cp=4:interleave=x", "interleave wants a whole number, not 'x'"},
      {"pp=3:20,20", "pp=3 stages, but 2 of them are given layers"},
      {"pp=2:20,20,20", "pp=2 stages, but 3 of them are given layers"},
      {"pp=2:,20", "layers of a stage wants a whole number, not ''"},
      {"page=64:x", "page takes no rule"},
      {"page=0", "page=0 must be 1 or more"},
      {"page=1048577", "page=1048577 is too large: at most 1048576"},
      {"layout=hdn", "unknown layout 'hdn': nhd, hnd, packed-nhd"},
      {"dcp=2,cp=2:zigzag", "would both cut the tokens"},
      {"dcp=2,cp=2:blocked", "would both cut the tokens"},
      {"dcp=2:value,cp=2:interleave=1", "would both choose the token's rank"},
      {"dcp=2:stripe=2,cp=2:interleave=1", "dcp stripe=2 and cp interleave=1 must be one number"},
      {":replicated", "a group word begins with the group's name"},
      {"draft:maybe", "unknown group word 'maybe': replicated, none, rank=R"},
      {"draft:", "unknown group word ''"},
      {"draft:tp=4", "unknown group word 'tp=4'"},
      {"draft:rank=4096", "rank=4096 is too large"},
      {"draft:strides=1/2/3", "strides=BLOCK/HEAD/TOKEN/CONTENT wants four numbers"},
      {"draft:strides=1/2/3/4/5", "strides=BLOCK/HEAD/TOKEN/CONTENT wants four numbers"},
      {"draft:strides=1/2/3/0", "stride=0 must be 1 or more"},
      {"strides=1/2/3/4", "unknown sharding word 'strides'"},
  };
  for (const auto& [text, words] : wrong) {
    const auto made = Sharding::parse(text);
    EXPECT_TRUE(says(made, words)) << text;
    EXPECT_TRUE(says(made, "^")) << text;
  }
}

// A later word must not silently undo an earlier one.
TEST(Sharding, RefusesWordsThatAreSaidTwiceOrContradictEachOther) {
  for (const char* text :
       {"page=64,page=16", "layout=nhd,layout=hnd", "page_stride=64,page_stride=128", "draft:replicated,draft:none",
        "draft:rank=1,draft:rank=2", "draft:page=4,draft:page=8", "dcp=4,draft:stripe=1,draft:stripe=2",
        "dcp=4,draft:stripe=1,draft:value", "draft:strides=8/1/1/1,draft:strides=8/1/1/1"})
    EXPECT_FALSE(Sharding::parse(text)) << text << " is read as " << to_string(*Sharding::parse(text));
}

TEST(Sharding, OneRankCutsNothingByWhateverRule) {
  EXPECT_EQ(parsed("cp=1:zigzag"), parsed("tp=1"));
  EXPECT_EQ(parsed("dcp=1:value,tp=2"), parsed("tp=2"));
  EXPECT_EQ(to_string(parsed("cp=1:interleave=4,dcp=1")), "tp=1");
  EXPECT_EQ(to_string(parsed("tp=4,dcp=4")), "dcp=4");
  EXPECT_EQ(to_string(parsed("dcp=4,tp=8")), "tp=8,dcp=4");
}

TEST(Sharding, PrintsItsWordsInOneOrder) {
  EXPECT_EQ(to_string(parsed("page=64,dcp=4,tp=8,pp=2:40,38,cp=2:layers,draft:replicated")),
            "pp=2:40,38,cp=2:layers,tp=8,dcp=4,page=64,draft:replicated");
  EXPECT_EQ(to_string(Sharding::replicated(3)), "cp=3");
  EXPECT_EQ(Sharding::replicated(3), parsed("cp=3"));
  EXPECT_EQ(to_string(Sharding::replicated(1)), "tp=1");
}

rc::Gen<std::string> word_list() {
  return rc::gen::exec([] {
    std::vector<std::string> words;
    const auto maybe = [] { return *rc::gen::arbitrary<bool>(); };
    const auto number = [](std::int64_t most) { return *rc::gen::inRange<std::int64_t>(1, most + 1); };
    const std::int64_t dcp = number(4);
    if (maybe()) words.push_back(fmt::format("tp={}", dcp * number(3)));
    words.push_back(fmt::format("dcp={}{}", dcp, *rc::gen::element<std::string>("", ":stripe=2", ":value")));
    if (maybe()) words.push_back(fmt::format("cp={}{}", number(4), *rc::gen::element<std::string>("", ":layers", ":replicated")));
    if (maybe()) {
      std::string pp = fmt::format("pp={}", number(4));
      const std::int64_t stages = pp.back() - '0';
      if (maybe())
        for (std::int64_t i = 0; i < stages; ++i) pp += fmt::format("{}{}", i == 0 ? ':' : ',', number(30) - 1);
      words.push_back(pp);
    }
    if (maybe()) words.push_back(fmt::format("page={}", number(64)));
    if (maybe())
      words.push_back(
          fmt::format("layout={}", *rc::gen::element<std::string>("nhd", "hnd", "packed-nhd", "packed-hnd", "cpu", "mla")));
    if (maybe()) words.push_back(fmt::format("page_stride={}", number(100000)));
    for (const char* group : {"draft", "index_k"}) {
      if (maybe())
        words.push_back(fmt::format("{}:{}", group, *rc::gen::element<std::string>("replicated", "none", "rank=0", "rank=2")));
      if (maybe()) words.push_back(fmt::format("{}:{}", group, *rc::gen::element<std::string>("stripe=1", "value")));
      if (maybe()) words.push_back(fmt::format("{}:page={}", group, number(64)));
      if (maybe()) words.push_back(fmt::format("{}:layout=hnd", group));
      if (maybe())
        words.push_back(fmt::format("{}:strides={}/{}/{}/{}", group, number(9999), number(99), number(999), number(9)));
    }
    for (std::size_t i = words.size(); i > 1; --i)
      std::swap(words[i - 1], words[static_cast<std::size_t>(*rc::gen::inRange<std::size_t>(0, i))]);
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
    return text;
  });
}

RC_GTEST_PROP(ShardingLaw, ParsesWhatItPrints, ()) {
  const std::string text = *word_list();
  const auto made = Sharding::parse(text);
  if (!made) RC_FAIL(made.error().message);
  const auto again = Sharding::parse(to_string(*made));
  if (!again) RC_FAIL(again.error().message);
  RC_ASSERT(*again == *made);
  RC_ASSERT(to_string(*again) == to_string(*made));
}

RC_GTEST_PROP(ShardingLaw, SurvivesAnyText, ()) {
  const std::string text = *rc::gen::container<std::string>(rc::gen::elementOf(std::string("tpdc=:,/0189 layersintgvoukx_-")));
  const auto made = Sharding::parse(text);
  if (made) RC_ASSERT(Sharding::parse(to_string(*made)).value() == *made);
}

}  // namespace
}  // namespace kvloom
