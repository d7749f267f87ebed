#include "kvloom/geometry/page_layout.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;

CacheGroup group(std::vector<PlaneShape> planes, std::int32_t heads = 1) {
  return {"kv", GroupKind::paged, {LayerId(0)}, heads, std::move(planes), {}, {}};
}

// check_page_layout: every byte of (slot, head, plane) stands somewhere in the page, no two at one place; payload counts them.
Expected<void> check_page_layout(const PageLayout& layout) {
  std::set<std::int64_t> bytes;
  for (const PlaneLayout& plane : layout.planes())
    for (std::int64_t slot = 0; slot < layout.page_tokens(); ++slot)
      for (std::int64_t head = 0; head < layout.heads(); ++head)
        for (std::int64_t byte = 0; byte < plane.bytes; ++byte) {
          const std::int64_t content =
              plane.content_stride == 0 ? byte : byte / plane.element_bytes * plane.content_stride + byte % plane.element_bytes;
          const std::int64_t at = plane.offset + slot * plane.token_stride + head * plane.head_stride + content;
          if (at != plane.at(slot, head, byte))
            return fail(Code::invalid_argument, "at({}, {}, {}) is not {}", slot, head, byte, at);
          if (at < 0 || at >= layout.page_stride())
            return fail(Code::invalid_argument, "byte {} of a page of {}", at, layout.page_stride());
          if (!bytes.insert(at).second) return fail(Code::invalid_argument, "byte {} is used twice", at);
        }
  if (static_cast<std::int64_t>(bytes.size()) != layout.payload())
    return fail(Code::invalid_argument, "payload {}", layout.payload());
  return {};
}

PageLayout made(PageOrder order, const CacheGroup& of, std::int64_t heads, std::int64_t tokens, std::int64_t stride = 0) {
  return PageLayout::make(order, of, heads, tokens, stride).value();
}

TEST(PageLayout, NamedOrdersAreTheOnesThatEnginesUse) {
  const CacheGroup kv = group({{"k", 256, 2}, {"v", 256, 2}}, 8);
  // [offset, token stride, head stride, content stride] of k and v; 16 tokens, 2 heads.
  const auto strides = [&](PageOrder order) {
    std::vector<std::vector<std::int64_t>> out;
    const PageLayout layout = made(order, kv, 2, 16);
    EXPECT_EQ(layout.page_stride(), 16 * 2 * 512);
    for (const PlaneLayout& plane : layout.planes())
      out.push_back({plane.offset, plane.token_stride, plane.head_stride, plane.content_stride});
    return out;
  };
  using Rows = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(strides(PageOrder::nhd), (Rows{{0, 512, 256, 0}, {8192, 512, 256, 0}}));
  EXPECT_EQ(strides(PageOrder::hnd), (Rows{{0, 256, 4096, 0}, {8192, 256, 4096, 0}}));
  EXPECT_EQ(strides(PageOrder::packed_nhd), (Rows{{0, 1024, 512, 0}, {256, 1024, 512, 0}}));
  EXPECT_EQ(strides(PageOrder::packed_hnd), (Rows{{0, 512, 8192, 0}, {256, 512, 8192, 0}}));
  EXPECT_EQ(strides(PageOrder::cpu), (Rows{{0, 2, 8192, 32}, {4096, 256, 8192, 0}}));  // k: 128 elements of 2 B, 16 tokens apart
}

TEST(PageLayout, TheIndexPageIsAllKeysThenAllScales) {
  const PageLayout page = made(PageOrder::nhd, group({{"keys", 128, 1}, {"scales", 4, 4}}), 1, 64);
  EXPECT_EQ(page.page_stride(), 8448);
  EXPECT_EQ(page.planes()[0].at(63, 0, 127), 63 * 128 + 127);
  EXPECT_EQ(page.planes()[1].at(0, 0, 0), 8192);
  EXPECT_EQ(page.planes()[1].at(5, 0, 3), 8192 + 5 * 4 + 3);
}

TEST(PageLayout, TakesAnyStrides) {
  const CacheGroup kv = group({{"k", 4, 2}, {"v", 4, 2}}, 2);
  // [blocks, content, heads, tokens]: content outermost within the block: element stride 2 heads x 8 tokens x 2 B.
  const auto transposed = PageLayout::strided(kv, 2, 8, 128, 16, 2, 32);
  ASSERT_TRUE(transposed) << transposed.error().message;
  EXPECT_TRUE(shapes::holds(check_page_layout(*transposed)));
  EXPECT_EQ(transposed->planes()[1].at(3, 1, 2), 2 * 32 + 3 * 2 + 16 + 32);
  const auto dense = PageLayout::strided(kv, 2, 8, 128, 8, 16, 2);
  ASSERT_TRUE(dense) << dense.error().message;
  EXPECT_EQ(*dense, made(PageOrder::packed_nhd, kv, 2, 8));
}

TEST(PageLayout, PadsPages) {
  const PageLayout page = made(PageOrder::nhd, group({{"latent", 656, 1}}), 1, 64, 65536);
  EXPECT_EQ(page.page_stride(), 65536);
  EXPECT_EQ(page.payload(), 41984);
}

TEST(PageLayout, RefusesWhatCannotBe) {
  const CacheGroup mla = group({{"latent", 576, 1}});
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, mla, 1, 0), "page=0 tokens: from 1 to 1048576"));
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, mla, 1, -5), "page=-5 tokens"));
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, mla, 1, (1 << 20) + 1), "page=1048577 tokens"));
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, mla, 0, 64), "a page layout of 0 heads"));
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, mla, 1, 64, 36863),
                   "page_stride=36863 is below the page of 36864 B (64 tokens x 1 heads x 576 B)"));
  EXPECT_TRUE(says(PageLayout::make(PageOrder::nhd, group({{"latent", std::int64_t{1} << 50, 1}}), 1 << 10, 1 << 10),
                   "does not fit 63 bits"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 64, {}), "needs a plane"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 64, {{"k", 0, 8, 0, 16, 0, 1}}), "are used twice"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 64, {{"k", 0, 16, 0, 16, 0, 1}, {"v", 48, 1, 0, 1, 0, 1}}), "are used twice"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 60, {{"k", 0, 16, 0, 16, 0, 1}}), "plane k reaches byte 64 of a page of 60 B"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 64, {{"k", 0, 16, 0, 16, 0, 3}}), "elements divide the bytes"));
  EXPECT_TRUE(says(PageLayout::planes(1, 4, 64, {{"k", -1, 16, 0, 15, 0, 1}}), "must be positive"));
  EXPECT_TRUE(
      says(PageLayout::planes(2, 4, 64, {{"k", 0, 16, std::int64_t{1} << 62, 16, 0, 1}}), "page_stride must be at least that"));
  EXPECT_TRUE(says(parse_page_order("ndh"), "unknown layout 'ndh': nhd, hnd, packed-nhd, packed-hnd, cpu, mla or dsa-index"));
}

// Strides of another's words can be anything: said, not overflowed.
TEST(PageLayout, RefusesStridesWhoseProductsOverflow) {
  const CacheGroup wide = group({{"k", std::int64_t{1} << 30, 1}, {"v", 1, 1}});
  EXPECT_FALSE(PageLayout::strided(wide, 1, 1, std::int64_t{1} << 40, 1, 1, std::int64_t{1} << 40));
  EXPECT_FALSE(PageLayout::planes(1, 4, 64, {{"k", INT64_MAX - 8, 16, 0, 16, 0, 1}}));
}

TEST(PageLayout, KnowsEachOrderByItsName) {
  for (const PageOrder order : {PageOrder::nhd, PageOrder::hnd, PageOrder::packed_nhd, PageOrder::packed_hnd, PageOrder::cpu})
    EXPECT_EQ(parse_page_order(to_string(order)).value(), order);
}

RC_GTEST_PROP(PageLayoutLaw, GivesEachByteItsOwnPlace, ()) {
  const auto element = *rc::gen::element<std::int64_t>(1, 2, 4);
  const auto planes = *rc::gen::inRange(1, 4);
  std::vector<PlaneShape> shape;
  for (int i = 0; i < planes; ++i)
    shape.push_back({fmt::format("p{}", i), element * *rc::gen::inRange<std::int64_t>(1, 5), element});
  const auto heads = *rc::gen::inRange<std::int64_t>(1, 5), tokens = *rc::gen::inRange<std::int64_t>(1, 17);
  const auto order =
      *rc::gen::element(PageOrder::nhd, PageOrder::hnd, PageOrder::packed_nhd, PageOrder::packed_hnd, PageOrder::cpu);
  const auto law = check_page_layout(made(order, group(shape, 8), heads, tokens));
  if (!law) RC_FAIL(law.error().message);
}

}  // namespace
}  // namespace kvloom
