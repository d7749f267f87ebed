// run_template.h: the runs by which one stretch of tokens moves from a page to a page.  Stage: compile.
// Part of the sentence: "... cut into the fewest strided runs".  Values only: page-relative offsets, no page ids, no addresses.
// A piece of tokens spans up to four dimensions (planes and heads, tokens, repeats, content elements). Dimensions that continue each
// other on both sides join; the longest one left becomes the run's count, the others become runs of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "kvloom/base/run.h"
#include "kvloom/geometry/page_layout.h"

namespace kvloom {

// `count` stretches of `length` tokens that lie in one page on each side: slots source_slot + i * source_step ..., target likewise.
struct TokenPiece {
  std::int64_t source_slot = 0, target_slot = 0;
  std::int64_t length = 0;
  std::int64_t count = 1;
  std::int64_t source_step = 0, target_step = 0;  // slots; 0 where count is 1

  friend bool operator==(const TokenPiece&, const TokenPiece&) = default;
};

// Heads of a path as each side counts its own.
struct HeadSlice {
  std::int64_t source_first = 0, target_first = 0, count = 1;
};

// Appends the piece's runs, sorted by source offset, offsets from the start of the page on each side.
// @pre both layouts have the same planes (names and bytes); slots and heads within them
// @post the pieces of the runs are exactly the bytes of (tokens of the piece) x (heads) x (planes), each once (check_template)
void expand(const PageLayout& source, const PageLayout& target, const HeadSlice& heads, const TokenPiece& piece,
            std::vector<Run>& out);

}  // namespace kvloom
