#include "kvloom/bind/page_table.h"

#include <algorithm>
#include <numeric>

namespace kvloom {
namespace {

// The first column whose page stands in an earlier one; -1 if there is none.
std::int64_t first_repeat_by_bits(const std::vector<PageId>& pages, std::int64_t pool_pages) {
  std::vector<bool> seen(static_cast<std::size_t>(pool_pages), false);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] == kNoPage) continue;
    auto bit = seen[static_cast<std::size_t>(pages[i].value)];
    if (bit) return static_cast<std::int64_t>(i);
    bit = true;
  }
  return -1;
}

std::int64_t first_repeat_by_sorting(const std::vector<PageId>& pages) {
  std::vector<std::size_t> order(pages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return pages[a] < pages[b]; });
  std::int64_t first = -1;
  for (std::size_t i = 1; i < order.size(); ++i) {
    const bool repeat = pages[order[i]] == pages[order[i - 1]] && pages[order[i]] != kNoPage;
    if (repeat && (first < 0 || static_cast<std::int64_t>(order[i]) < first)) first = static_cast<std::int64_t>(order[i]);
  }
  return first;
}

}  // namespace

Expected<PageTable> PageTable::make(std::vector<PageId> pages, std::int64_t pool_pages, Use use) {
  if (pool_pages < 0) return fail(Code::invalid_argument, "a pool of {} pages", pool_pages);
  PageTable table;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] == kNoPage) {
      table.has_gaps_ = true;
      continue;
    }
    if (pages[i].value < 0 || pages[i].value >= pool_pages)
      return fail(Code::out_of_range, "page table: column {} names page {}, but the pool has {} pages (0 to {})", i,
                  pages[i].value, pool_pages, pool_pages - 1);
  }
  if (use == Use::target) {
    const bool dense = pool_pages <= 64 * static_cast<std::int64_t>(pages.size()) + (1 << 16);
    const std::int64_t repeat = dense ? first_repeat_by_bits(pages, pool_pages) : first_repeat_by_sorting(pages);
    if (repeat >= 0) {
      const PageId page = pages[static_cast<std::size_t>(repeat)];
      return fail(Code::invalid_argument,
                  "page table: page {} stands in columns {} and {}; a page that is written may be named once", page.value,
                  std::find(pages.begin(), pages.end(), page) - pages.begin(), repeat);
    }
  }
  table.pages_ = std::move(pages);
  table.pool_pages_ = pool_pages;
  return table;
}

}  // namespace kvloom
