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
#include <span>
#include <string>
#include <vector>

#include "kvloom/transport/transport.h"

namespace kvloom {

// Memory of a test, to be registered.
class ConformanceMemory {
 public:
  ConformanceMemory() = default;
  ConformanceMemory(const ConformanceMemory&) = delete;
  ConformanceMemory& operator=(const ConformanceMemory&) = delete;
  virtual ~ConformanceMemory() = default;
  virtual std::span<std::byte> span() const = 0;  // [length], bytes
};

// Makes endpoints that can reach each other by address, and the memory that they move. The CPU may have no access to that, so the
// cases touch it (and regions from allocate) by put and get only; as defined here these three are for host memory.
// In a ProcessConformance every process has a world of its own, made after the fork. A device that a fork would break can be
// tested too: its ConformanceCase must not touch it, only the world, and each test needs a process of its own (ctest sees to it).
class ConformanceWorld {
 public:
  ConformanceWorld() = default;
  ConformanceWorld(const ConformanceWorld&) = delete;
  ConformanceWorld& operator=(const ConformanceWorld&) = delete;
  virtual ~ConformanceWorld() = default;
  virtual std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) = 0;

  // Of the kind that the transport registers, zeroed before this returns.
  virtual std::unique_ptr<ConformanceMemory> memory(Bytes length);
  // In place before this returns: every copy that begins later reads it, in this process or another.  @pre no more than `to`
  virtual void put(std::span<std::byte> to, std::span<const std::byte> bytes);
  // What is there now. It waits for no copy of the transport, else it would hide one that runs when none should.
  virtual std::vector<std::byte> get(std::span<const std::byte> from);

  // Fills it, and returns what it put.
  std::vector<std::byte> put_random(std::span<std::byte> to, std::uint64_t seed);
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

// Polls the sides until `done`, or the deadline. False if it never was. Copies may run by themselves and be told some polls
// later: whoever awaits an outcome drives, and never counts polls.
bool drive(std::vector<Party*> sides, const std::function<bool()>& done);

// Whether the memory is as it was when nothing was to land any more, and stays so: polls on and reads it again, several times.
bool stands_still(ConformanceWorld& world, std::span<const std::byte> memory, std::span<const std::byte> still,
                  std::vector<Party*> sides);

// Runs as the interface has them, carried out piece by piece: the slow twin.
void copy_slowly(std::span<std::byte> target, std::span<const std::byte> source, std::span<const Run> runs);

void fill(std::span<std::byte> memory, std::uint64_t seed);

// `count` pieces of up to `most` bytes, disjoint on the target, in random order, with gaps between them.
using Runs = std::vector<Run>;  // (inside of a gtest fixture the name Run is taken)
Runs random_runs(std::mt19937_64& random, Bytes source, Bytes target, int count, std::int64_t most);

inline constexpr Tag kTag{77};

// A source and a target that know each other: the target's memory is lent, filled and known by its key, kTag is admitted.
struct ConformancePair {
  explicit ConformancePair(ConformanceWorld& of) : world(of) {}

  ConformanceWorld& world;
  Party source;
  Party target;
  PeerId to_target;  // the target, as the source knows it
  PeerId to_source;
  std::unique_ptr<ConformanceMemory> memory;  // the target's
  std::vector<std::byte> sent;                // what `from` holds
  Region from;
  Region to;
  RemoteRegion remote;

  // The runs are lent until it is completed, so no temporary.
  Write write(const std::vector<Run>& runs, Tag tag = kTag) const { return {from.id(), remote, tag, runs}; }
  Write write(std::vector<Run>&&, Tag = kTag) const = delete;
  Write write() const { return {from.id(), remote, kTag, {}}; }
  // What the target's memory holds now.
  std::vector<std::byte> landed() const { return world.get(memory->span()); }
  // What it should hold after these runs.
  std::vector<std::byte> after(std::span<const Run> runs) const;
};

class TransportConformance : public testing::TestWithParam<ConformanceCase> {
 protected:
  ConformanceWorld& world();  // made when it is first asked for: a ProcessConformance forks before that
  Party side(std::string_view hello = "");
  // Connects a to b; their ids of each other, b's at a first.
  std::pair<PeerId, PeerId> connect(Party& a, Party& b);
  std::unique_ptr<ConformancePair> pair(Bytes source = Bytes(1 << 20), Bytes target = Bytes(1 << 20));

 private:
  std::unique_ptr<ConformanceWorld> world_;
};

// For transports between processes, and so between threads as well.
class ProcessConformance : public TransportConformance {};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ProcessConformance);

}  // namespace kvloom
