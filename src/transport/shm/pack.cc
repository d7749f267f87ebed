#include "kvloom/transport/shm/pack.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace kvloom::shm {
namespace {

std::uint8_t shift_of(std::uint64_t bits) {
  return bits == 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(std::min<int>(std::countr_zero(bits), kMostShift));
}

bool fits(std::int64_t units) {
  return units >= std::numeric_limits<std::int32_t>::min() && units <= std::numeric_limits<std::int32_t>::max();
}

}  // namespace

PackSlot pack_runs(const Run& base, std::span<const Run> runs) {
  PackSlot slot = {};
  std::array<std::int64_t, kPacked> source, target;  // distances, bytes
  std::uint64_t source_bits = 0, target_bits = 0;
  std::size_t count = 0;
  for (; count < std::min(runs.size(), kPacked) && is_same_kind(base, runs[count]); ++count) {
    source[count] = (runs[count].source_offset - base.source_offset).value;
    target[count] = (runs[count].target_offset - base.target_offset).value;
    source_bits |= static_cast<std::uint64_t>(source[count]);
    target_bits |= static_cast<std::uint64_t>(target[count]);
  }
  slot.source_shift = shift_of(source_bits);
  slot.target_shift = shift_of(target_bits);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t from = source[i] >> slot.source_shift, to = target[i] >> slot.target_shift;  // exact: no bit is lost
    if (!fits(from) || !fits(to)) break;
    slot.distances[i] = {static_cast<std::int32_t>(from), static_cast<std::int32_t>(to)};
    ++slot.count;
  }
  return slot;
}

}  // namespace kvloom::shm
