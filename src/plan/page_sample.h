// page_sample.h: how one page of a path is cut into runs, worked out without page tables.  Stage: compile.  For explain; bind
// does not use it.
// Law (check_sample): the runs of a page carry its tokens' bytes, each once.  Where pages lie side by side bind joins further;
// never less.
#pragma once

#include <cstdint>
#include <vector>

#include "kvloom/base/run.h"
#include "kvloom/plan/plan.h"
#include "kvloom/plan/run_template.h"

namespace kvloom {

struct PageSample {
  bool source_page = false;        // whose page it is: that of the side with more tokens a page; the target's if they are equal
  bool whole = false;              // false: the range cuts every page that the path has
  std::int64_t tokens = 0;         // of the path in this page
  std::vector<TokenPiece> pieces;  // one a pair of pages
  std::vector<Run> runs;           // of all pieces, offsets from the start of each piece's two pages
};

// The first page of the path that lies in `range`, whole if there is such a page.  No tokens: the path has nothing in the range.
// @pre path is one of plan's, its group is paged
// @cost O(segments of one page)
PageSample sample_page(const Plan& plan, const Path& path, TokenRange range);

}  // namespace kvloom
