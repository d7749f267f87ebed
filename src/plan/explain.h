// explain.h: why a plan is as it is, in plain sentences.  Stage: compile.  For people: words may change, numbers are worked
// out, not canned. For each path: who sends and why it; why these layers, heads and tokens (by the rules' words); how long the
// runs are and what cuts them. Where pieces come out short, it says what to change.
#pragma once

#include <string>

#include "kvloom/plan/plan.h"

namespace kvloom {

// Pieces below this lose streaming stores on a CPU and much of a copy engine's speed on a GPU (docs/measurements).
inline constexpr std::int64_t kShortPiece = 2048;  // bytes

// All that `source` sends to `target` for the tokens of `range`, group by group; where it sends nothing, why not.
// @pre ranks of the plan; 0 <= range.begin <= range.end; range.end may be kUnbounded: then no totals are given
std::string explain(const Plan& plan, Rank source, Rank target, TokenRange range);

// The whole plan: bytes, balance over ranks, and for each group how its pages move.
std::string explain(const Plan& plan, TokenRange range);

}  // namespace kvloom
