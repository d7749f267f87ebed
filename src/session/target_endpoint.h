// target_endpoint.h: a decode rank on the network: it asks any number of prefill ranks for a request's cache, and tells the engine what has
// landed.  Stage: stream.  Joins a TargetBook to a ControlClient for each prefill rank, a Transport and a clock: grants out, layers in.
// It may have several geometries on the same memory: a decode group changes its sharding between two requests with nobody restarted.
// Laws (endpoint_test.cc): all of receiver.h with real sockets and bytes.
// Memory: for each open transfer its tables, what is owed of each (source, layer), and up to 64 KiB of payload from each source.
// Thread: one (endpoint.h).  Time: only poll waits.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "kvloom/session/connection.h"
#include "kvloom/session/control.h"
#include "kvloom/session/endpoint.h"
#include "kvloom/session/target_book.h"
#include "kvloom/session/telemetry.h"
#include "kvloom/session/wire.h"
#include "kvloom/transport/device_work.h"

namespace kvloom {

struct TargetOptions : EndpointOptions {
  std::optional<CurveKeys> keys;
  Bytes copy_bytes;  // that one poll lands, where the target copies; 0: as the transport likes it (Abilities::copy_a_poll)
};

// Where a prefill rank listens.
struct SourceAddress {
  std::string address;
  std::string server_key;  // with CURVE keys: its public one
  friend auto operator<=>(const SourceAddress&, const SourceAddress&) = default;
};

// What the engine wants.
struct Want {
  TransferKey key;
  GeometryId geometry;
  std::vector<SourceAddress> sources;  // [prefill ranks]
  TokenRange range;                    // [prefix, total)
  std::vector<CacheTable> tables;      // [groups of our side]; may be empty for groups that the source has not
  std::chrono::nanoseconds time{};     // from now on; then it has failed
  std::shared_ptr<LayerGate> gate;     // shared with the stream that waits there; may be none
};

// All bytes of this layer, and of all layers of ours before it, are there and visible.
struct LayerLanded {
  TransferKey key;
  LayerId layer;
};
struct TargetEnded {
  TransferKey key;
  Outcome outcome;
  Error why;                                                      // where it did not land: names rank and cause
  std::vector<std::pair<Rank, std::vector<std::byte>>> payloads;  // landed: from each prefill rank that sent one
  Bytes bytes;                                                    // that landed
  Instant at{};
};
// The pages are the engine's again, once. After TargetEnded, or later: until then they are in quarantine.
struct TargetReleased {
  TransferKey key;
};
using TargetEvent = std::variant<LayerLanded, TargetEnded, TargetReleased>;

class TargetEndpoint {
 public:
  // @pre the transport outlives it and can be connected to
  // @error invalid_argument: a transport without an address, keys that are none
  static Expected<std::unique_ptr<TargetEndpoint>> make(TargetOptions options, Transport& transport, Sinks sinks = {});
  ~TargetEndpoint();

  // From now on transfers may land there.
  // @error as Transport::export_region; invalid_argument: more regions or tensors than can be told to a peer (connection.h)
  Expected<GeometryId> describe(LocalCache cache);
  // No transfer begins there any more.
  void forget(GeometryId geometry) { geometries_.erase(geometry); }

  // Connects to whom it has to, compiles the plan, grants. All that goes wrong later is told by TargetEnded.
  // @error invalid_argument: a key that is in use, a geometry that is not described, a token range or table that is none, no or too many
  // sources, more pages or tables than go in a grant (message.h)
  Expected<void> begin(Want want);
  // The pages stay where they are until TargetReleased.
  void cancel(const TransferKey& key, std::string why);

  // As SourceEndpoint::poll.
  bool poll(std::chrono::nanoseconds wait, std::vector<TargetEvent>& events, int wake = -1);

  std::size_t open() const { return book_.open() + waiting_.size(); }
  // Bytes that have landed so far; of a transfer that is not open: nothing.
  Bytes covered(const TransferKey& key) const;

 private:
  // A connection to one prefill rank, or the wish for one.
  struct Link {
    enum class At : std::uint8_t { idle, greeting, up };
    At at = At::idle;
    SourceAddress address;
    std::unique_ptr<ControlClient> socket;
    ConnectionToken token;
    PartnerId partner;
    Pulse pulse;
    Instant hello_at{};
    Instant used{};
    std::string why_not = "no answer";  // of greeting: for the error of who waits
    std::shared_ptr<const Side> side;   // from its Welcome
    Rank rank;
    std::optional<PeerId> peer;
    std::set<GeometryId> told;
    std::set<TransferKey> transfers;  // that are open with it
    std::string name() const { return fmt::format("prefill rank {} at {}", rank.value, address.address); }
  };
  struct Described {
    LocalCache cache;
    std::vector<std::uint8_t> side;
    std::vector<RegionKey> keys;
  };
  struct Waiting {  // for its sources to be connected
    Want want;
    Instant begun{}, until{};
  };

  TargetEndpoint(TargetOptions options, Transport& transport, Sinks sinks);

  bool step();
  bool read_control();
  bool read_transport();
  void tick();
  Instant deadline() const;

  Expected<Link*> link_to(const SourceAddress& address);
  void greet(Link& link);
  void said(Link& link, const Said& what);
  void told(Link& link, const Told& told);
  void welcome(Link& link, const Welcome& welcome);
  void complete(Link& link);
  void lose(Link& link, const Error& why);
  void peer_down(PeerId peer, const Error& why);
  bool tell(Link& link, decltype(Told::what) what);
  bool note_sent(bool taken);
  bool tell_geometry(Link& link, GeometryId id);

  void start_waiting();
  Expected<bool> try_start(const Want& want, Instant until);
  Expected<std::shared_ptr<const Side>> source_side(const Want& want);
  Expected<void> try_begin(Want want);
  static Expected<void> check_range(const Want& want);
  static Expected<void> check_tables(const Want& want, const Side& side);
  Expected<void> check_geometry(const Described& described, GeometryId id) const;
  static Expected<void> check_memory(const LocalCache& cache, const Plan& plan);
  ReceiverJob job_of(const Want& want, const LocalCache& cache, const KnownPlan& plan, Instant until);
  void refuse(const Want& want, const Error& why);
  bool is_met(const Want& want) const;
  void fail_waiting(const TransferKey& key, Outcome outcome, Error why);
  std::string missing(const Want& want) const;
  bool is_wanted(const Link& link) const;

  void obey(std::vector<TargetBook::Action>& actions);
  void obey(const TransferKey& key, PartnerId source, Receiver::Action& action);
  void over(const TransferKey& key);
  void open_gate(const TransferKey& key);

  Instant now() const { return options_.clock(); }

  TargetOptions options_;
  Transport& transport_;
  Telemetry telemetry_;
  std::uint64_t incarnation_;
  ControlContext context_;
  MessageEncoder encoder_;
  TargetBook book_;
  KnownSides sides_;
  KnownPlans plans_;
  std::map<GeometryId, Described> geometries_;
  std::map<SourceAddress, Link> links_;
  std::map<PartnerId, Link*> partners_;  // of links that are up; into links_
  std::map<PeerId, PartnerId> peers_;    // also of connections that are lost, until nothing of them can land
  std::map<TransferKey, Waiting> waiting_;
  std::map<TransferKey, Bytes> owed_;                        // of those that the book has
  std::map<TransferKey, std::shared_ptr<LayerGate>> gates_;  // of those that have not ended
  bool sent_ = false;
  bool changed_ = false;  // what waits may begin now
  bool untold_ = false;   // a geometry was not taken by its socket: to be told again
  std::uint64_t next_partner_ = 1;
  std::uint32_t next_geometry_ = 1;
  std::vector<Event> heard_;
  std::vector<TargetEvent> happened_;
  Instant stepped_{}, pulses_at_{};
};

}  // namespace kvloom
