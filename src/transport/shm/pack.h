// pack.h: several runs in one slot of a ring.  Stage: carry.  Values only.
// Runs of a plan come in rows that differ in nothing but their offsets: pages of one size in any order. After a run that stands whole in a
// slot, up to seven of its kind go into one: only how far they lie from it, in units of the greatest power of two that divides all of
// these distances. A slot costs a cache line between two cores, which is the dearest part of a run (docs/gpu.md).
// Law (pack_test.cc): unpack_run gives what was packed; every slot unpacks to something that can be checked, whatever a peer put there.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kvloom/base/run.h"

namespace kvloom::shm {

inline constexpr std::size_t kPacked = 7;

struct PackSlot {
  struct Distance {
    std::int32_t source, target;
  };

  std::uint32_t kind;         // SlotKind::pack
  std::uint8_t count;         // runs, 1 to kPacked
  std::uint8_t source_shift;  // distances count units of 1 << shift bytes; at most kMostShift
  std::uint8_t target_shift;
  std::uint8_t reserved;  // 0
  std::array<Distance, kPacked> distances;
};
static_assert(sizeof(PackSlot) == 64);

// A distance is below 2^31 units, an offset below 2^46: no sum of them overflows.
inline constexpr std::uint8_t kMostShift = 31;

// As many of the first runs as go into one slot after `base`; count is 0 if the very first does not.  Sets all but `kind`.
// @pre offsets are within regions
PackSlot pack_runs(const Run& base, std::span<const Run> runs);

// Run i of the slot.  @pre is_packed(slot), i < slot.count
constexpr Run unpack_run(const Run& base, const PackSlot& slot, std::size_t i) {
  Run run = base;
  run.source_offset += Bytes(static_cast<std::int64_t>(slot.distances[i].source) * (std::int64_t{1} << slot.source_shift));
  run.target_offset += Bytes(static_cast<std::int64_t>(slot.distances[i].target) * (std::int64_t{1} << slot.target_shift));
  return run;
}

// The numbers of a peer are such as a slot may have.
constexpr bool is_packed(const PackSlot& slot) {
  return slot.count >= 1 && slot.count <= kPacked && slot.source_shift <= kMostShift && slot.target_shift <= kMostShift &&
         slot.reserved == 0;
}

}  // namespace kvloom::shm
