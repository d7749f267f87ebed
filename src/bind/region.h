// region.h: where the bytes of a rank's tensor of (group, layer) lie in registered memory.  Stage: bind.
// Part of the sentence: "... to a byte in a region of a rank".  Values only: regions are indices here, addresses are the transport's.
// Engines register a pool as several regions (a limit of the network card, several allocations). A run must lie in one region on each
// side, so runs are cut where two regions touch; a run that reaches memory which no region holds is refused, never shortened.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/run.h"

namespace kvloom {

// Tensor bytes [begin, begin + length) are region bytes [region_offset, region_offset + length).
struct TensorPart {
  Bytes begin, length;
  std::int32_t region = 0;  // the caller's index
  Bytes region_offset;

  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

class TensorRegions {
 public:
  // @error invalid_argument: no part, a negative or empty one, or two that overlap, with their numbers
  static Expected<TensorRegions> make(std::vector<TensorPart> parts);
  // The whole tensor, `length` bytes, in one region.
  static TensorRegions whole(Bytes length, std::int32_t region = 0, Bytes region_offset = Bytes(0));

  std::span<const TensorPart> parts() const { return parts_; }
  // The part that holds `offset`; nullptr if none does.
  const TensorPart* find(Bytes offset) const;

 private:
  std::vector<TensorPart> parts_;  // ascending, disjoint, not empty
};

// A run between one region and one region: offsets from their starts.
struct PlacedRun {
  std::int32_t source_region = 0, target_region = 0;
  Run run;

  friend bool operator==(const PlacedRun&, const PlacedRun&) = default;
};

// Appends `runs` (offsets from the tensors' starts), cut at the borders of regions.
// @error out_of_range: a piece that lies outside of every region, or reaches from one past its end to where no region goes on; with side,
//        offsets and the region's end. Nothing is appended then.
Expected<void> place(std::span<const Run> runs, const TensorRegions& source, const TensorRegions& target,
                     std::vector<PlacedRun>& out);

}  // namespace kvloom
