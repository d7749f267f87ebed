// session_measure.h: what sessions cost beside the bytes: for `kvloom bench`.  Stage: tools.
#pragma once

#include <vector>

#include "kvloom/tools/plan_measure.h"

namespace kvloom {

// Medians of `repeats` rounds of each.  @error as endpoints and transports
Expected<std::vector<BenchRow>> measure_sessions(int repeats);

}  // namespace kvloom
