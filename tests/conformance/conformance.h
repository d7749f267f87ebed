// conformance.h: what every transport is held to: the laws of transport.h as test cases.  Stage: carry.  Tests only.
// A transport's own test file names its maker and its abilities:
//   INSTANTIATE_TEST_SUITE_P(Shm, TransportConformance, testing::Values(ConformanceCase{"shm", make_shm_world, abilities}),
//   conformance_name);
// TransportConformance drives all endpoints by hand in one thread; ProcessConformance forks, kills and freezes. Nothing sleeps:
// waits are for events, pipes and pidfds, each with a deadline.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvloom/transport/transport.h"

namespace kvloom {

// Makes endpoints that can reach each other by address. In a ProcessConformance every process has a world of its own.
class ConformanceWorld {
 public:
  ConformanceWorld() = default;
  ConformanceWorld(const ConformanceWorld&) = delete;
  ConformanceWorld& operator=(const ConformanceWorld&) = delete;
  virtual ~ConformanceWorld() = default;
  virtual std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) = 0;
};

struct ConformanceCase {
  std::string name;
  std::function<std::unique_ptr<ConformanceWorld>()> world;
  Abilities abilities;
};
std::string conformance_name(const testing::TestParamInfo<ConformanceCase>& info);
void PrintTo(const ConformanceCase& c, std::ostream* out);

inline constexpr std::chrono::seconds kTestDeadline{20};

std::vector<std::byte> bytes_of(std::string_view text);

// An endpoint and what its polls told.
struct Party {
  std::unique_ptr<Transport> transport;
  std::vector<Event> events;

  bool poll(PollLimit limit = {}) { return transport->poll(limit, events); }
  template <class T>
  std::vector<T> all() const {
    std::vector<T> out;
    for (const Event& event : events) {
      if (const auto* e = std::get_if<T>(&event)) out.push_back(*e);
    }
    return out;
  }
  template <class T>
  std::size_t count() const {
    std::size_t n = 0;
    for (const Event& event : events) n += static_cast<std::size_t>(std::holds_alternative<T>(event));
    return n;
  }
  const Completed* completed(PostId post) const;
  std::string text() const;  // all events, for failures
};

// Polls the sides until `done`, or the deadline. False if it never was.
bool drive(std::vector<Party*> sides, const std::function<bool()>& done);

// Runs as the interface has them, carried out piece by piece: the slow twin.
void copy_slowly(std::span<std::byte> target, std::span<const std::byte> source, std::span<const Run> runs);

void fill(std::span<std::byte> memory, std::uint64_t seed);

// `count` pieces of up to `most` bytes, disjoint on the target, in random order, with gaps between them.
using Runs = std::vector<Run>;  // (inside of a gtest fixture the name Run is taken)
Runs random_runs(std::mt19937_64& random, Bytes source, Bytes target, int count, std::int64_t most);

inline constexpr Tag kTag{77};

// A source and a target that know each other: the target's memory is lent, filled and known by its key, kTag is admitted.
struct ConformancePair {
  Party source;
  Party target;
  PeerId to_target;  // the target, as the source knows it
  PeerId to_source;
  std::vector<std::byte> memory;  // the target's
  Region from;
  Region to;
  RemoteRegion remote;

  // The runs are lent until it is completed, so no temporary.
  Write write(const std::vector<Run>& runs, Tag tag = kTag) const { return {from.id(), remote, tag, runs}; }
  Write write(std::vector<Run>&&, Tag = kTag) const = delete;
  Write write() const { return {from.id(), remote, kTag, {}}; }
  // What the target's memory should be after these runs.
  std::vector<std::byte> after(std::span<const Run> runs) const;
};

class TransportConformance : public testing::TestWithParam<ConformanceCase> {
 protected:
  void SetUp() override { world_ = GetParam().world(); }
  Party side(std::string_view hello = "");
  // Connects a to b; their ids of each other, b's at a first.
  std::pair<PeerId, PeerId> connect(Party& a, Party& b);
  std::unique_ptr<ConformancePair> pair(Bytes source = Bytes(1 << 20), Bytes target = Bytes(1 << 20));

  std::unique_ptr<ConformanceWorld> world_;
};

// For transports between processes, and so between threads as well.
class ProcessConformance : public TransportConformance {};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ProcessConformance);

}  // namespace kvloom
