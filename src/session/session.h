// session.h: words that both ends of a transfer share.  Stage: stream.  Values only.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/plan/plan.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

// A moment of this process's own clock, which runs evenly and means nothing elsewhere.
using Instant = std::chrono::nanoseconds;
inline constexpr Instant kNever = Instant::max();

// A process that we talk with, as whoever drives the machine names it. One that comes back after a restart has another name.
using PartnerId = Id<struct PartnerTag, std::uint64_t>;

enum class Outcome : std::uint8_t { landed, failed, cancelled };
const char* to_string(Outcome outcome);

// How long things may take, and how much may be under way.  All durations are this process's own.
struct SessionLimits {
  std::chrono::nanoseconds resend = std::chrono::milliseconds(200);  // unanswered grants, cancels
  std::chrono::nanoseconds grace =
      std::chrono::seconds(1);                 // for peers to fall silent by themselves, after a transfer has failed
  Bytes in_flight_per_path = Bytes(64 << 20);  // posted and not completed, to one target rank
  // While posts are under way, smaller ones wait to be joined. Not said: 256 KiB, and at an endpoint what join_below says of its transport.
  std::optional<Bytes> join;
  int joining_posts = 2;  // ... from this many on
};

// Posts of at least this many bytes go alone: what a post costs beside its bytes is a twentieth of them or less. Smaller ones wait while others
// are under way, and join.
Bytes join_below(const Cost& cost);

// Which source ranks a target rank grants: those that have a path to it; and of those that have none to anybody, every n-th, so that each
// source rank is told by somebody, if only that it has nothing to send.
std::vector<Rank> granted_sources(const Plan& plan, Rank target);
// The same, seen from the source: who will grant it.
std::vector<Rank> granting_targets(const Plan& plan, Rank source);

}  // namespace kvloom
