// simulate.h: the session code under a virtual clock, with everything that can go wrong.  Drives src/session as it is.
// A schedule is a small cluster drawn from a seed: geometries, requests, chunk sizes, prefixes, and faults of the network, the transport, the
// processes, their clocks and their engines. After each event the invariants are checked on real bytes:
//   I1 no write lands in a page after its release         I2 no layer is published before all its bytes are there
//   I3 no source page is reused while a run may read it   I4 every transfer ends on both sides, once, within its time
//   I5 after the last transfer every pool is full again
// and two more: without faults everything lands; where only posts fail, nobody has to wait for his time to end to learn it.
// Same seed, same schedule, same events: nothing here reads a clock, a thread or a hash of an address.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvloom/session/edge.h"

namespace kvloom {

struct SimulateJob {
  std::uint64_t seed = 1;
  std::int64_t first = 0;  // schedules [first, first + count)
  std::int64_t count = 1000;
  bool trace = false;                // keep the events of each schedule that breaks something
  std::size_t most_violations = 10;  // then stop
};

struct Violation {
  std::int64_t schedule = 0;
  std::string what;                 // the invariant and the values
  std::vector<std::string> events;  // with trace: what happened, after the faults that do not matter were left out
};

struct SimulateReport {
  std::int64_t schedules = 0;
  std::int64_t transfers = 0;
  std::map<std::string, std::int64_t> outcomes;  // of receivers
  std::map<std::string, std::int64_t> faults;    // injected, by kind
  EdgeCounts receiver_edges, sender_edges;       // walked, by index of Receiver::edges() and Sender::edges()
  std::vector<Violation> violations;
};

SimulateReport simulate(const SimulateJob& job);

}  // namespace kvloom
