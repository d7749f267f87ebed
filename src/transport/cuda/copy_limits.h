// copy_limits.h: how much a GPU may be given to copy, and how: what keeps the computation beside it undisturbed.  Stage: carry.  Values only:
// no CUDA is needed to name them (tools/transport_words.h).
#pragma once

#include "kvloom/base/units.h"

namespace kvloom::cuda {

inline constexpr Bytes kLeastInFlight{1 << 20}, kMostInFlight{std::int64_t{64} << 30};
inline constexpr int kMostBlocks = 1024;

struct CopyLimits {
  Bytes in_flight{256 << 20};  // of one peer: how long a drain takes, 0.7 ms over NVLink
  int blocks = 8;              // of the copy kernel, of 1024 threads: on H200 8 move 350 GB/s, all SMs 366
  int priority = 0;            // of its streams; lower goes first, as CUDA has it

  friend bool operator==(const CopyLimits&, const CopyLimits&) = default;
};

}  // namespace kvloom::cuda
