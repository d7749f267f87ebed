// run.h: the last word of a plan: one two-dimensional strided copy.  Value only.
// bind makes runs, transports carry them; so they stand in base, the only folder that both may include.
#pragma once

#include <cstdint>

#include "kvloom/base/units.h"

namespace kvloom {

// count pieces of `bytes` each: piece i goes from source_offset + i * source_step to target_offset + i * target_step.
// Offsets are from the start of a tensor or region, as the maker says. Steps may be negative (pages in falling order).
// count == 1: the steps are 0.  Pieces of one run never overlap on the target.
struct Run {
  Bytes source_offset;
  Bytes target_offset;
  Bytes bytes;
  std::int64_t count = 1;
  Bytes source_step;
  Bytes target_step;

  friend constexpr bool operator==(const Run&, const Run&) = default;
  constexpr Bytes total() const { return bytes * count; }
};

// They differ in their offsets at most.
constexpr bool is_same_kind(const Run& a, const Run& b) {
  return a.bytes == b.bytes && a.count == b.count && a.source_step == b.source_step && a.target_step == b.target_step;
}

}  // namespace kvloom
