#include "kvloom/bind/page_table.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;

std::vector<PageId> pages(std::initializer_list<std::int64_t> ids) {
  std::vector<PageId> out;
  for (const std::int64_t id : ids) out.emplace_back(id);
  return out;
}

constexpr auto kSource = PageTable::Use::source;
constexpr auto kTarget = PageTable::Use::target;

TEST(PageTable, KeepsThePagesInTheirColumns) {
  const PageTable table = PageTable::make(pages({4, 0, 2}), 5, kTarget).value();
  EXPECT_EQ(std::vector<PageId>(table.pages().begin(), table.pages().end()), pages({4, 0, 2}));
  EXPECT_EQ(table.pool_pages(), 5);
  EXPECT_FALSE(table.has_gaps());
  EXPECT_TRUE(PageTable::make({}, 0, kTarget));
}

TEST(PageTable, MayNameNoPage) {
  const PageTable table = PageTable::make({kNoPage, kNoPage, PageId(0)}, 1, kTarget).value();  // twice no page is no page twice
  EXPECT_TRUE(table.has_gaps());
}

TEST(PageTable, RefusesAPageOutsideItsPool) {
  EXPECT_TRUE(says(PageTable::make(pages({0, 7, 8}), 8, kSource), "column 2 names page 8, but the pool has 8 pages (0 to 7)"));
  EXPECT_TRUE(says(PageTable::make(pages({0, -2}), 8, kSource), "column 1 names page -2"));
  EXPECT_TRUE(says(PageTable::make(pages({0}), 0, kSource), "column 0 names page 0, but the pool has 0 pages"));
  EXPECT_TRUE(says(PageTable::make({}, -1, kSource), "a pool of -1 pages"));
}

TEST(PageTable, RefusesATargetPageThatIsNamedTwice) {
  EXPECT_TRUE(says(PageTable::make(pages({3, 1, 5, 1, 3}), 8, kTarget),
                   "page 1 stands in columns 1 and 3; a page that is written may be named once"));
  EXPECT_TRUE(PageTable::make(pages({3, 1, 5, 1, 3}), 8, kSource)) << "shared prefixes are read twice";
  // A pool far larger than the table is looked through another way.
  const std::int64_t pool = std::int64_t{1} << 50;
  EXPECT_TRUE(says(PageTable::make(pages({pool - 1, 1, pool - 1}), pool, kTarget), "stands in columns 0 and 2"));
  EXPECT_TRUE(PageTable::make(pages({pool - 1, 1, pool - 2}), pool, kTarget));
}

}  // namespace
}  // namespace kvloom
