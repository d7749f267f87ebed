// coverage.h: what a target is owed and what has come.  Stage: land.  A transfer is done when covered bytes are expected bytes from every
// source, layer by layer; both numbers come from the plan, never from counting messages.
// Value, no clock, no thread. Law: complete() holds exactly when every owed byte has been told as landed, once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom {

// One layer of one cache group: the smallest thing that a decode step waits for.
struct CacheLayer {
  std::int32_t group = 0;  // index in the plan
  LayerId layer;
  friend constexpr auto operator<=>(const CacheLayer&, const CacheLayer&) = default;
};

// What one source owes of one layer.
struct Owed {
  Rank source;
  CacheLayer layer;
  Bytes bytes;
};

class Coverage {
 public:
  Coverage() = default;
  // Debts of the same source and layer add up; those of 0 bytes are none.  @error invalid_argument: negative bytes, a sum over 63 bits
  static Expected<Coverage> make(const std::vector<Owed>& owed);

  // A source's bytes of a layer are visible.
  // @error out_of_range (scope transfer): from a source that owes none, or more than it owes; nothing is counted then
  Expected<void> landed(Rank source, CacheLayer layer, Bytes bytes);

  Bytes expected() const { return expected_; }
  Bytes covered() const { return covered_; }
  bool complete() const { return covered_ == expected_; }
  bool complete(CacheLayer layer) const;
  // For people: "prefill rank 3: 2 layers, 1024 B" for each source that still owes; empty when complete.
  std::string missing() const;

 private:
  std::map<std::pair<CacheLayer, Rank>, Bytes> open_;  // still owed; entries go when they reach 0
  std::map<std::pair<CacheLayer, Rank>, Bytes> owed_;
  Bytes expected_, covered_;
};

}  // namespace kvloom
