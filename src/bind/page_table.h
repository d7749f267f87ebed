// page_table.h: which page holds a request's n-th page of tokens.  Stage: bind.  Part of the sentence: "a byte in a region of a rank".
// Values, valid from birth: every entry is a page of the pool, and a target names no page twice.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom {

// An entry that stands for no page: the leading columns of a sliding window, a prefix that was never allocated.
inline constexpr PageId kNoPage{-1};

class PageTable {
 public:
  enum class Use : std::uint8_t {
    source,  // read only: an entry may be named twice
    target,  // written: each page at most once
  };

  // `pool_pages`: ids are below it. For token rule `value`, ids and pool count virtual pages, those of all ranks together.
  // @error out_of_range: an id outside of the pool, with column and id; invalid_argument: a target page in two columns, with both
  // @cost O(entries)
  static Expected<PageTable> make(std::vector<PageId> pages, std::int64_t pool_pages, Use use);

  std::span<const PageId> pages() const { return pages_; }
  std::int64_t pool_pages() const { return pool_pages_; }
  bool has_gaps() const { return has_gaps_; }  // names kNoPage somewhere

  friend bool operator==(const PageTable&, const PageTable&) = default;

 private:
  std::vector<PageId> pages_;
  std::int64_t pool_pages_ = 0;
  bool has_gaps_ = false;
};

}  // namespace kvloom
