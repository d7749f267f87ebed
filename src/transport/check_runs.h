// check_runs.h: may these runs be carried between two regions?  Stage: carry.  Values only.  Law: check_run against walking every
// piece (test). Both ends use it: the source to refuse with words, the target because the numbers of a peer are hostile.
#pragma once

#include <span>

#include "kvloom/base/error.h"
#include "kvloom/base/run.h"

namespace kvloom {

// How many bytes the run moves.
// @post every piece lies inside both regions; pieces do not overlap on the target; no product overflowed    @cost O(1), whatever
// the count
// @error out_of_range, invalid_argument (bytes or count below 1, overlapping pieces), overflow: with the offending values
Expected<Bytes> check_run(const Run& run, Bytes source_length, Bytes target_length);

// The sum over runs; an error names the run by its index.
Expected<Bytes> check_runs(std::span<const Run> runs, Bytes source_length, Bytes target_length);

}  // namespace kvloom
