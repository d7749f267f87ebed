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

// The same for runs that differ in their offsets alone: what does not depend on these is worked out once.
class RunBounds {
 public:
  RunBounds() = default;  // holds nothing
  // Of a run like this one, wherever it begins; holds nothing if there is no place for it.
  RunBounds(const Run& run, Bytes source_length, Bytes target_length);

  // Whether check_run would take such a run at these offsets.
  bool hold(Bytes source_offset, Bytes target_offset) const {
    return source_.has(source_offset.value) && target_.has(target_offset.value);
  }
  bool are_of(const Run& run) const { return is_same_kind(run, like_); }
  Bytes total() const { return total_; }  // of each such run

 private:
  struct Offsets {
    std::int64_t first = 0;
    std::uint64_t count = 0;
    bool has(std::int64_t offset) const { return static_cast<std::uint64_t>(offset) - static_cast<std::uint64_t>(first) < count; }
  };
  static Offsets offsets(Bytes step, const Run& run, Bytes length);

  Run like_;
  Offsets source_, target_;
  Bytes total_;
};

// The sum over runs; an error names the run by its index.
Expected<Bytes> check_runs(std::span<const Run> runs, Bytes source_length, Bytes target_length);

}  // namespace kvloom
