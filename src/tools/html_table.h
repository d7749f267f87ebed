// html_table.h: the paths of a plan as an HTML table.  Stage: tools.  It is the picture's text alternative, and where its script
// reads what it says: each row carries its path's layers (a list for each lane of the bands), tokens and groups as data attributes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvloom/plan/plan.h"
#include "kvloom/tools/measure.h"

namespace kvloom {

// What the matrix shows of a path: its bytes, or (not counted) those of one token.
std::int64_t path_weight(const MeasuredPath& path, bool counted);

// `main`: the group whose tokens are drawn.  `lanes`: 1, or one for each group of the plan.
std::string path_table(const Plan& plan, const std::vector<MeasuredPath>& paths, bool counted, std::int32_t main,
                       std::size_t lanes);

}  // namespace kvloom
