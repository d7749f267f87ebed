// plan_copies.h: by which way a GPU would copy the runs of a plan, and why, for `plan --explain --transport cuda`.  Stage: tools.
// Which runs a path has is known with its page tables only. So the path is bound twice, with pages in order and with pages in no order, and
// the runs of a layer are told by their shapes: an allocator gives something between.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

// Of every path, or of those between two ranks, for a request of `tokens` of which decode wants `range`. Paths with the same answer are told
// together.  @pre range within tokens    @error as cuda_is_built
Expected<std::string> explain_copies(const Plan& plan, std::int64_t tokens, TokenRange range,
                                     const std::optional<std::pair<Rank, Rank>>& only);

}  // namespace kvloom
