#include "kvloom/plan/text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "kvloom/geometry/side_text.h"
#include "kvloom/geometry/text_lines.h"
#include "kvloom/plan/compile.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using shapes::side;

// ---- laws ----

Expected<void> check_side_text(const Side& side) {
  const std::string text = to_string(side);
  const auto read = parse_side(text);
  if (!read) return fail(Code::parse, "{}\n{}", read.error().message, text);
  if (to_string(*read) != text || !(*read == side)) return fail(Code::parse, "another side came back:\n{}", text);
  if (digest(*read) != digest(side) || text.find(digest(side)) == std::string::npos) return fail(Code::parse, "another digest");
  return {};
}

Expected<void> check_plan_text(const Plan& plan) {
  const std::string text = to_string(plan);
  const auto read = parse_plan(text);
  if (!read) return fail(Code::parse, "{}\n{}", read.error().message, text);
  if (to_string(*read) != text || !(read->source() == plan.source()) || !(read->target() == plan.target()) ||
      read->total() != plan.total())
    return fail(Code::parse, "another plan came back:\n{}", text);
  if (digest(*read) != digest(plan) || text.find(digest(plan)) == std::string::npos) return fail(Code::parse, "another digest");
  return {};
}

// ---- a plan that a person can review ----

// Five layers in two stages, the second one shorter; the one head of MLA stands on both tp ranks of a stage, so two replicas
// share the sending. Decode takes tokens in turn, two by two. index_k lives on layers 0, 2, 3: stage 0 has the first two of them.
Plan small_plan() { return compile(side(shapes::dsa(), "cp=2:layers,tp=2"), side(shapes::dsa(), "dcp=2:stripe=2")).value(); }

const char* const kSmallPlan = R"(kvloom plan 1
tokens inf
source
words cp=2:layers,tp=2
page 4
model 5 layers "dsa"
group latent paged layers 0-4 heads 1 planes latent:3:1
  layout page 4 stride 12
  plane latent offset 0 token 3 head 3 bytes 3 content 0 element 1
  parts layers 0+3 3+2
  parts heads 0+1
  parts tokens all
  place 0.0.0 ranks 0-1
  place 1.0.0 ranks 2-3
group index_k paged layers 0,2-3 heads 1 planes keys:2:1,scales:1:1
  layout page 4 stride 12
  plane keys offset 0 token 2 head 2 bytes 2 content 0 element 1
  plane scales offset 8 token 1 head 1 bytes 1 content 0 element 1
  parts layers 0+2 2+1
  parts heads 0+1
  parts tokens all
  place 0.0.0 ranks 0-1
  place 1.0.0 ranks 2-3
target
words dcp=2:stripe=2
page 4
model 5 layers "dsa"
group latent paged layers 0-4 heads 1 planes latent:3:1
  layout page 4 stride 12
  plane latent offset 0 token 3 head 3 bytes 3 content 0 element 1
  parts layers 0+5
  parts heads 0+1
  parts tokens 2 cyclic 2
  place 0.0.0 ranks 0
  place 0.0.1 ranks 1
group index_k paged layers 0,2-3 heads 1 planes keys:2:1,scales:1:1
  layout page 4 stride 12
  plane keys offset 0 token 2 head 2 bytes 2 content 0 element 1
  plane scales offset 8 token 1 head 1 bytes 1 content 0 element 1
  parts layers 0+3
  parts heads 0+1
  parts tokens 2 cyclic 2
  place 0.0.0 ranks 0
  place 0.0.1 ranks 1
meet latent
  layers 0 > 0: 0+3
  layers 1 > 0: 3+2
  heads 0 > 0: 0+1
  tokens 0 > 0: 0+2/4*inf
  tokens 0 > 1: 2+2/4*inf
  senders 0.0.0: 2 replicas, targets 0-1, 2 of them whole, 0 by layers
  senders 1.0.0: 2 replicas, targets 0-1, 2 of them whole, 0 by layers
meet index_k
  layers 0 > 0: 0+2
  layers 1 > 0: 2+1
  heads 0 > 0: 0+1
  tokens 0 > 0: 0+2/4*inf
  tokens 0 > 1: 2+2/4*inf
  senders 0.0.0: 2 replicas, targets 0-1, 2 of them whole, 0 by layers
  senders 1.0.0: 2 replicas, targets 0-1, 2 of them whole, 0 by layers
digest 366dcf678883f272ed78b14148185548
)";

TEST(PlanText, IsReviewable) { EXPECT_EQ(to_string(small_plan()), kSmallPlan); }

// ---- round trips ----

TEST(PlanText, ReadsBackForEveryListedPair) {
  std::int64_t n = 0;
  for (const CacheShape& shape : shapes::all())
    for (const std::string& from : shapes::words()) {
      const std::string& to = shapes::words()[static_cast<std::size_t>(n * 7) % shapes::words().size()];
      ++n;
      const auto plan = compile(side(shape, from, n % 2 == 0 ? 4 : 6), side(shape, to, n % 5 < 3 ? 4 : 2), 1 + n * 7 % 40);
      ASSERT_TRUE(plan) << from << " to " << to << ": " << plan.error().message;
      ASSERT_TRUE(holds(check_plan_text(*plan))) << from << " to " << to;
      ASSERT_TRUE(holds(check_side_text(plan->source()))) << from;
    }
}

Side generated_side(const CacheShape& shape) {
  const auto& words = shapes::words();
  std::string text = words[*rc::gen::inRange<std::size_t>(0, words.size())];
  const CacheGroup& group = shape.groups().back();
  if (*rc::gen::arbitrary<bool>())
    text += "," + group.name + ":" + *rc::gen::element<std::string>("replicated", "rank=0", "layout=hnd");
  if (*rc::gen::arbitrary<bool>())
    text += *rc::gen::element<std::string>(",layout=packed-nhd", ",layout=cpu", ",page_stride=4096");
  Side out = side(shape, text, *rc::gen::element(4, 12));
  if (*rc::gen::arbitrary<bool>()) {  // strides that no word says
    const GroupSide& first = out.groups().front();
    std::vector<PlaneLayout> planes = first.layout.planes();
    const std::int64_t gap = *rc::gen::inRange(0, 100);
    for (PlaneLayout& plane : planes) plane.offset += gap;
    auto layout = PageLayout::planes(first.layout.heads(), first.layout.page_tokens(), first.layout.page_stride() + gap, planes);
    RC_ASSERT(out.set_layout(first.name, layout.value()).has_value());
  }
  return out;
}

RC_GTEST_PROP(PlanText, ReadsBackWhateverTheSides, ()) {
  const auto shapes = shapes::all();
  const CacheShape& shape = shapes[*rc::gen::inRange<std::size_t>(0, shapes.size())];
  const Side source = generated_side(shape), target = generated_side(shape);
  const auto plan = compile(source, target, *rc::gen::inRange<std::int64_t>(1, std::int64_t{1} << 40));
  if (!plan) RC_DISCARD("no plan");
  const auto law = check_plan_text(*plan);
  if (!law) RC_FAIL(law.error().message);
}

TEST(SideText, KeepsAnyModelName) {
  for (const std::string& name :
       {std::string("a \"b\" \\ c"), std::string("two\nlines\x7f\0x1", 13), std::string("模型"), std::string()}) {
    auto shape = CacheShape::make(name, 2, shapes::mla(2).groups());
    EXPECT_TRUE(holds(check_side_text(side(*shape, "tp=2")))) << name;
  }
}

TEST(SideText, LeavesNotesToPeople) {
  auto groups = shapes::mla(2).groups();
  groups[0].note = "64 heads";
  const Side noted = side(CacheShape::make("mla", 2, groups).value(), "tp=2");
  EXPECT_EQ(digest(noted), digest(side(shapes::mla(2), "tp=2")));
}

TEST(SideText, SaysWhichGroupsAreAbsent) {
  const Side less = side(shapes::drafted(), "tp=2,draft:none");
  EXPECT_NE(to_string(less).find("planes k:1:1,v:1:1\n  absent\n"), std::string::npos);
  EXPECT_TRUE(holds(check_side_text(less)));
}

TEST(SideText, ListsEvenRunsAsRanges) {
  const std::vector<std::int32_t> layers = {0, 1, 2, 6, 10, 14, 17, 19, 20};
  EXPECT_EQ(list_text(layers), "0-2,6-14/4,17,19-20");
  EXPECT_EQ(list_text({}), "none");
}

// ---- tampering ----

// Lines that are read; all others follow from them.
bool carries_values(std::string_view line) {
  for (const std::string_view start : {"tokens ", "words ", "page ", "model ", "group ", "  layout ", "  plane "})
    if (line.substr(0, start.size()) == start) return true;
  return false;
}

std::string other_digit(std::string line) {
  const std::size_t at = line.find_last_of("0123456789");
  if (at == std::string::npos) return line + "x";
  line[at] = line[at] == '9' ? '8' : static_cast<char>(line[at] + 1);
  return line;
}

std::string with_line(const std::vector<TextLine>& lines, std::size_t number, const std::string& text) {
  std::string out;
  for (const TextLine& line : lines) out += (line.number == number ? text : std::string(line.text)) + "\n";
  return out;
}

TEST(PlanText, RefusesEveryTamperedLineAndNamesIt) {
  const std::string text = to_string(small_plan());
  const auto lines = split_lines(text);
  for (const TextLine& line : lines)
    for (const std::string& changed :
         {other_digit(std::string(line.text)), std::string(line.text) + " ", "x" + std::string(line.text), std::string()}) {
      const auto read = parse_plan(with_line(lines, line.number, changed));
      ASSERT_FALSE(read) << line.number << ": " << changed;
      EXPECT_TRUE(says(read, carries_values(line.text) ? "line " : fmt::format("line {}: ", line.number))) << changed;
    }
}

TEST(PlanText, RefusesALineMoreOrLess) {
  const std::string text = to_string(small_plan());
  const auto lines = split_lines(text);
  for (const TextLine& line : lines) {
    const auto begin = static_cast<std::size_t>(line.text.data() - text.data());
    std::string less = text, more = text;
    less.erase(begin, line.text.size() + 1);
    more.insert(begin, std::string(line.text) + "\n");
    EXPECT_FALSE(parse_plan(less)) << line.number;
    EXPECT_FALSE(parse_plan(more)) << line.number;
  }
  EXPECT_TRUE(
      says(parse_plan(text + "more\n"), fmt::format("line {}: found 'more', expected the end of the text", lines.size() + 1)));
  EXPECT_TRUE(says(parse_plan(text.substr(0, text.size() - 1)), "found no end of the line"));
}

TEST(PlanText, RefusesEveryPrefix) {
  const std::string text = to_string(small_plan());
  for (std::size_t size = 0; size < text.size(); ++size) EXPECT_FALSE(parse_plan(std::string_view(text).substr(0, size))) << size;
}

// ---- the words of errors ----

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(PlanText, SaysWhatWasFoundAndExpected) {
  const std::string text = kSmallPlan;
  EXPECT_TRUE(says(parse_plan(replaced(text, "tokens 0 > 1: 2+2/4*inf", "tokens 0 > 1: 2+2/8*inf")),
                   "line 50: found '  tokens 0 > 1: 2+2/8*inf', expected '  tokens 0 > 1: 2+2/4*inf'"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "kvloom plan 1", "kvloom plan 2")),
                   "line 1: found 'kvloom plan 2', expected 'kvloom plan 1'"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "tokens inf", "tokens -1")),
                   "line 2: found 'tokens -1', expected 'tokens inf' or 'tokens N'"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "cp=2:layers", "cp=0:layers")), "line 4: cp=0 must be 1 or more"));
  EXPECT_TRUE(
      says(parse_plan(replaced(text, "heads 1 ", "heads one ")), "line 7: found 'group latent paged layers 0-4 heads one "));
  EXPECT_TRUE(says(parse_plan(replaced(text, "heads 1 ", "heads one ")), "expected a number from 0 to 65536 at column 37"));
  EXPECT_TRUE(
      says(parse_plan(replaced(text, "stride 12", "stride 11")), "line 8: plane latent reaches byte 12 of a page of 11 B"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "planes latent:3:1", "planes latent:4:1")),
                   "line 8: group latent: the planes of its layout"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "\x6b", "\x01")), R"(line 1: found '\x01vloom plan 1')"));
}

// One value of the small plan made too large, and what says so.
TEST(PlanText, BoundsWhatItReadsBeforeItWorks) {
  const std::string text = kSmallPlan, group = "group latent paged layers 0-4 heads 1 planes latent:3:1";
  const auto with = [&](const std::string& line) { return parse_plan(replaced(text, group, line)); };
  EXPECT_TRUE(says(with("group latent paged layers 0-2000000000 heads 1 planes latent:3:1"), "expected at most 65536 layers"));
  EXPECT_TRUE(says(with("group latent paged layers 0-4 heads 99999999 planes latent:3:1"), "expected a number from 0 to 65536"));
  std::string planes, groups;
  for (int i = 0; i < 20; ++i) planes += fmt::format(",p{}:1:1", i);
  for (int i = 0; i < 70; ++i) groups += fmt::format("group g{} paged layers 0 heads 1 planes k:1:1\n", i);
  EXPECT_TRUE(says(with(group + planes), "expected at most 16 planes"));
  EXPECT_TRUE(says(with(groups + group), "expected at most 64 groups"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "cp=2:layers,tp=2", "cp=4097:layers")), "cp=4097 is too large: at most 4096"));
  EXPECT_TRUE(says(parse_plan(replaced(text, "layout page 4", "layout page 1048577")),
                   "over the limit of 1048576 for a side that is read"));
  EXPECT_TRUE(
      says(parse_plan(replaced(text, "\npage 4\n", "\npage 1048576\n")), "over the limit of 1048576 for a side that is read"));
  EXPECT_TRUE(says(parse_plan(std::string(kMaxTextBytes + 1, 'a')), "at most 4194304 are read"));
  const Side many = side(shapes::dsa(), "cp=4096");
  EXPECT_TRUE(says(compile_read(std::make_shared<const Side>(many), std::make_shared<const Side>(many), kUnbounded),
                   "a plan of 4096 x 4096 ranks and 2 groups: at most 131072 pairs"));
}

}  // namespace
}  // namespace kvloom
