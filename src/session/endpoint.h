// endpoint.h: what the two kinds of endpoints share: their settings, what an engine's rank tells of its memory, plans made once, the pulse of a
// connection.  Stage: stream.  An endpoint joins the pure books (source_book.h, target_book.h) to control sockets, a transport and a clock:
// source_endpoint.h for a prefill rank, target_endpoint.h for a decode rank.
// Thread: an endpoint belongs to one, as its transport does; endpoint_thread.h gives it one of its own.
#pragma once

#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/cache_memory.h"
#include "kvloom/session/message.h"
#include "kvloom/session/session.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

Instant monotonic_now();  // CLOCK_MONOTONIC

struct EndpointOptions {
  std::string name;  // for people: "prefill-3@host"
  SessionLimits limits;
  std::chrono::nanoseconds heartbeat = std::chrono::milliseconds(250);  // a ping to each peer with open transfers, this often
  std::chrono::nanoseconds silence = std::chrono::seconds(1);           // of a peer with open transfers: then it is lost
  std::function<Instant()> clock = monotonic_now;
};

// @error invalid_argument: a name of over kMaxName bytes, times that are none
Expected<void> check_options(const EndpointOptions& options);

// The memory of one rank under one geometry: what `Side` says that it holds, in regions of its transport.  A value; the regions outlive it.
struct LocalCache {
  std::shared_ptr<const Side> side;  // shared with the plans made of it; never changed
  Rank rank;
  std::vector<RegionId> regions;
  std::vector<Bytes> lengths;         // [regions]
  std::vector<PlacedTensor> tensors;  // parts name indices of `regions`
  CacheMemory memory;                 // of `tensors`

  // @error as CacheMemory::make
  static Expected<LocalCache> make(std::shared_ptr<const Side> side, Rank rank, std::span<const Region* const> regions,
                                   std::vector<PlacedTensor> tensors);
};

// The page table of one group of a request.
struct CacheTable {
  std::vector<PageId> pages;
  std::int64_t pool_pages = 0;
};

// Sides as peers told them, each decoded once; equal ones are one object.  Bounded: the eldest are forgotten.
class KnownSides {
 public:
  Expected<std::shared_ptr<const Side>> find(const std::vector<std::uint8_t>& bytes);

 private:
  static constexpr std::size_t kMost = 256;
  std::map<std::string, std::shared_ptr<const Side>> sides_;  // by their bytes
  std::list<std::string> order_;
};

struct KnownPlan {
  std::shared_ptr<const Plan> plan;  // shared by all transfers between the two sides
  PlanDigest digest;
};

// Plans by their sides, each compiled once; where a rule cuts the request's length, once for each length.  Bounded as KnownSides.
class KnownPlans {
 public:
  // @error as compile; exhausted: as compile_read
  Expected<KnownPlan> find(const std::shared_ptr<const Side>& source, const std::shared_ptr<const Side>& target,
                           std::int64_t total);

 private:
  static constexpr std::size_t kMost = 1024;
  using Key = std::tuple<std::shared_ptr<const Side>, std::shared_ptr<const Side>, std::int64_t>;
  std::map<Key, KnownPlan> plans_;
  std::list<Key> order_;
};

// Whether a peer still lives, asked only while it is needed.
class Pulse {
 public:
  // `needed`: transfers are open with it
  void need(bool needed, Instant now);
  void heard(Instant now) { heard_ = now; }
  // The thread did not run for a while: what the peer may have said meanwhile is not heard yet.
  void forgive(Instant now) { heard_ = now; }
  bool is_due(Instant now, std::chrono::nanoseconds heartbeat);  // true: send a ping now
  bool is_lost(Instant now, std::chrono::nanoseconds silence) const { return needed_ && now - heard_ >= silence; }

 private:
  bool needed_ = false;
  Instant heard_{}, pinged_{};
};

// One poll of an endpoint: a step, and where nothing happened a sleep and one more. What happened is moved from `happened` to the end of `events`.
template <class Event, class Step, class Sleep>
bool poll_once(std::vector<Event>& happened, std::vector<Event>& events, bool may_sleep, Step step, Sleep sleep) {
  bool did = step();
  if (!did && happened.empty() && may_sleep) {
    sleep();
    did = step();
  }
  did = did || !happened.empty();
  events.insert(events.end(), std::make_move_iterator(happened.begin()), std::make_move_iterator(happened.end()));
  happened.clear();
  return did;
}

// Messages of one control socket that are read in one step; then the transport, the timers and other sockets have their turn.
inline constexpr int kMessagesAStep = 256;

// Sleeps until one of the descriptors is readable or the time has come.
void wait_readable(std::span<const int> fds, std::chrono::nanoseconds at_most);

}  // namespace kvloom
