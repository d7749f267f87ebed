// compile.h: two sides in, a plan out.  Stage: compile.  Part of the sentence: "a plan is the map between two such layouts".
// Groups are matched by name and their layers by global id, never by position. What cannot be done is refused here, with the reason,
// never at transfer time; every plan that is returned has been proven to cover each wanted byte exactly once (plan/verify.h).
#pragma once

#include <memory>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

// `total`: the request's tokens, needed where a side cuts its length (zigzag, blocked); kUnbounded: a plan for any length.
// @error unsupported: a group, layer, plane or head count that the source has not as the target wants it; a rule that needs the total;
//        more than 2^20 meetings or families on an axis; a total over 2^60. The message names group and values and says what can be done.
// @cost O(parts x parts) an axis and O(ranks x ranks) bits where replicas exist; independent of `total`. No page, no table.
Expected<Plan> compile(std::shared_ptr<const Side> source, std::shared_ptr<const Side> target, std::int64_t total = kUnbounded);
// Copies both sides into the plan.
Expected<Plan> compile(const Side& source, const Side& target, std::int64_t total = kUnbounded);

}  // namespace kvloom
