// wire.h: a plan as bytes that another process may trust after decode.  Stage: compile.  Schema: plan.fbs (FlatBuffers).
// The bytes hold what a plan follows from (two sides, the total) and the digest of what it should come to; decode compiles it
// again.
// Law (check_plan_wire): decode(encode(plan)) prints as plan does; any other bytes give the same plan or an error, never
// another plan.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

inline constexpr std::size_t kMaxWireBytes = std::size_t{1} << 20;  // of a plan that is read
inline constexpr std::uint32_t kWireVersion = 1;

// @pre the plan is within the limits of geometry/side_values.h, else nobody will read it
std::vector<std::uint8_t> encode(const Plan& plan);

// @error parse: not such bytes, cut short, pointing outside of themselves, or a digest that differs; unsupported: another
//        version; exhausted: too much of anything; what compile and the factories refuse
Expected<Plan> decode(std::span<const std::uint8_t> bytes);

// One side alone, as bytes: what a rank tells of itself, once to each peer.
// Law: decode_side(encode_side(side)) == side.
// @pre as encode
std::vector<std::uint8_t> encode_side(const Side& side);
// @error as decode, but for the digest: there is none
Expected<Side> decode_side(std::span<const std::uint8_t> bytes);

}  // namespace kvloom
