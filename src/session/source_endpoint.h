// source_endpoint.h: a prefill rank on the network: it listens for grants of any number of decode ranks, and pushes what the engine says is
// ready.  Stage: stream.  Joins a SourceBook to a ControlServer, a Transport and a clock: messages in, posts out.
// Laws (endpoint_test.cc): all of sender.h with real sockets and bytes; what a peer says touches only its own transfers and its own memory.
// Memory: for each open transfer its tables, a grant of each target (8 B a page, and 8 more once it is posted to) and the runs of posts under way (48 B a run); for each
// peer its geometries. All of it is bounded by SessionLimits and SourceBook.
// Thread: one (endpoint.h).  Time: only poll waits.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <variant>
#include <vector>

#include "kvloom/bind/page_table.h"
#include "kvloom/session/connection.h"
#include "kvloom/session/control.h"
#include "kvloom/session/endpoint.h"
#include "kvloom/session/pacer.h"
#include "kvloom/session/progress.h"
#include "kvloom/session/source_book.h"
#include "kvloom/session/telemetry.h"
#include "kvloom/session/wire.h"
#include "kvloom/transport/device_work.h"

namespace kvloom {

struct SourceOptions : EndpointOptions {
  ControlServerOptions control;
  PaceLimits pace;
  // While layers are computed on a device, it is asked this often: half of it is how late a layer leaves, on average. 0: without a pause.
  std::chrono::nanoseconds device_nap = std::chrono::microseconds(5);
};

// What the engine is going to compute.
struct Offer {
  TransferKey key;
  std::chrono::nanoseconds time{};  // from now on; then it has failed
  bool has_payload = false;         // `payload` will be told, and rides with completion
};

// Nobody of ours will read this layer's pages of the transfer any more (pools that use one buffer for several layers).
struct LayerReleased {
  TransferKey key;
  LayerId layer;
};
// The transfer is over, once.
struct SourceEnded {
  TransferKey key;
  Outcome outcome;
  Error why;  // where it did not land: names rank and cause
  Instant at{};
  std::chrono::nanoseconds exposed_tail{};  // landed: from the last `ready` (or the offer) until now
};
// The pages are the engine's again, once, with or after SourceEnded.
struct SourceReleased {
  TransferKey key;
};
using SourceEvent = std::variant<LayerReleased, SourceEnded, SourceReleased>;

class SourceEndpoint {
 public:
  // @pre the transport outlives it, and its address is not needed: this side connects
  // @error as ControlServer::make
  static Expected<std::unique_ptr<SourceEndpoint>> make(SourceOptions options, Transport& transport, LocalCache cache,
                                                        Sinks sinks = {});
  ~SourceEndpoint();

  std::string address() const { return control_->address(); }  // what decode ranks connect to
  Rank rank() const { return cache_.rank; }

  // @error invalid_argument: a key that is in use, or has been; a name of no or too many bytes; a time of none or over kMaxTimeLeft
  Expected<void> offer(const Offer& offer);
  // The pages of the request's tokens so far, of one group (index in Side::groups()); longer ones may follow. Of a transfer that is over: nothing.
  // @error out_of_range: an id outside of the pool; invalid_argument: no such group, a table that takes back what it has said
  Expected<void> set_table(const TransferKey& key, std::int32_t group, CacheTable table);
  // Tokens below `tokens` are computed for this layer, and in the tables; with `after`: will be, once this is done. Work is looked at in the
  // order of being told, as one stream does it. Where it breaks down, the transfer is cancelled with its reason.
  void ready(const TransferKey& key, LayerId layer, std::int64_t tokens, std::shared_ptr<DeviceWork> after = nullptr);
  // @error invalid_argument: over kMaxPayload bytes
  Expected<void> payload(const TransferKey& key, std::vector<std::byte> bytes);
  void cancel(const TransferKey& key, std::string why);

  // Lets things happen; with nothing to do, waits up to `wait` for something, or for `wake` to become readable.
  // Appends what happened.  True if anything did.
  bool poll(std::chrono::nanoseconds wait, std::vector<SourceEvent>& events, int wake = -1);

  std::size_t open() const { return book_.open(); }
  // What was posted so far, and of it delivered.
  struct Counts {
    std::int64_t posts = 0, runs = 0;
    Bytes delivered;
  };
  const Counts& counts() const { return counts_; }
  std::size_t peers() const { return links_.size(); }

 private:
  // A decode rank's memory under one of its geometries.
  struct RemoteCache {
    std::shared_ptr<const Side> side;
    Rank rank;
    std::vector<RemoteRegion> regions;
    CacheMemory memory;
  };
  // A connection.
  struct Granted {
    Instant until{};                                // then it is over, whatever happens
    std::map<Rank, std::vector<PageTable>> tables;  // of each target rank [groups of the plan]; made with the first post
  };
  struct Link {
    PartnerId partner;
    Route route;
    ConnectionToken token;
    std::string name;
    PeerId peer;
    Pulse pulse;
    bool warm = false;                                       // its transport knows our regions
    std::map<GeometryId, Expected<RemoteCache>> geometries;  // or why it was refused
    std::map<TransferKey, Granted> granted;                  // that are not over
    std::deque<Message> unsaid;                              // that were not taken: said again, in order
  };
  struct Transfer {
    std::vector<PageTable> tables;  // [groups of the side]; empty until told
    Instant last_ready{};
  };
  // A Post under way: writes, then a notice behind them.
  struct OpenPost {
    TransferKey key;
    SendId id;
    PartnerId to;
    Telemetry::Post post;
    std::size_t open = 0;  // of the transport's operations
    std::optional<Error> error;
    Bytes written;
    std::vector<std::vector<Run>> runs;  // lent to the transport
  };
  struct Pending {  // ready, once `after` is done
    TransferKey key;
    LayerId layer;
    std::int64_t tokens = 0;
    std::shared_ptr<DeviceWork> after;  // shared with whoever made it
  };
  struct Done {  // to be told to the book, not from inside of what it said
    TransferKey key;
    SendId id;
    Expected<void> delivered;
  };

  SourceEndpoint(SourceOptions options, Transport& transport, LocalCache cache, Sinks sinks,
                 std::unique_ptr<ControlServer> control);

  bool step();
  bool read_control();
  bool read_transport();
  bool read_device();
  bool tell_done();
  bool let_posts_go();
  void tick();
  Instant deadline() const;

  void said(const Route& from, const Said& what);
  void told(const Route& from, const Told& told);
  void hello(const Route& from, const ConnectionToken& token, const Hello& hello);
  void geometry(Link& link, Geometry geometry);
  Expected<RemoteCache> read_geometry(const Link& link, Geometry& geometry);
  void message(Link& link, const Message& message);
  void grant(Link& link, const Grant& grant);
  Expected<void> learn_plan(const Link& link, const Grant& grant);
  void warm_up(Link& link, const Grant& grant);
  void lose(PartnerId partner, const Error& why);
  void say(Link& link, const Message& message);
  bool send(const Link& link, const Message& message);
  void tell(const Route& to, const ConnectionToken& token, decltype(Told::what) what);

  void obey(std::vector<SourceBook::Action>& actions);
  void obey(const TransferKey& key, Sender::Action& action);
  void queue(const TransferKey& key, Sender::Post post);
  void drop_posts(const TransferKey& key, std::optional<PartnerId> to, const char* why);
  void post(const TransferKey& key, const Sender::Post& post);
  Expected<void> write_all(const Sender::Post& post, const Transfer& transfer, Link& link, std::uint64_t number);
  Expected<Bytes> write_part(const Sender::Post& post, const PostPart& part, const Transfer& transfer,
                             const std::vector<PageTable>& targets, const RemoteCache& remote, std::uint64_t number);
  void write_runs(const RemoteCache& remote, Tag tag, std::uint64_t number);
  void notify(PeerId peer, Tag tag, Progress progress, std::uint64_t number);
  Expected<const std::vector<PageTable>*> tables_of(Link& link, const TransferKey& key, const Grant& grant);
  void completed(const Completed& completed);
  void finish(std::uint64_t number);

  template <class... Args>
  static Error lost(fmt::format_string<Args...> how, Args&&... args) {
    return {Code::unavailable, Scope::peer, fmt::format(how, std::forward<Args>(args)...)};
  }
  void note_sent(bool taken);
  Link* find(PartnerId partner);
  Instant now() const { return options_.clock(); }

  SourceOptions options_;
  Transport& transport_;
  LocalCache cache_;
  Telemetry telemetry_;
  std::vector<std::uint8_t> side_bytes_;
  std::uint64_t incarnation_;
  std::unique_ptr<ControlServer> control_;
  MessageEncoder encoder_;
  SourceBook book_;
  Pacer pacer_;
  KnownSides sides_;
  KnownPlans plans_;
  std::map<Route, Link> links_;
  std::map<PartnerId, Link*> partners_;  // into links_
  std::map<PeerId, Link*> peers_;        // into links_
  std::map<TransferKey, Transfer> transfers_;
  std::map<std::pair<TransferKey, SendId>, Sender::Post> waiting_;
  std::uint64_t next_partner_ = 1, next_open_ = 1;
  std::unordered_map<std::uint64_t, OpenPost> open_;             // by our own number
  std::unordered_map<std::uint64_t, std::uint64_t> operations_;  // PostId to the number of its OpenPost
  std::deque<Pending> pending_;
  std::vector<Done> done_;
  Counts counts_;
  std::vector<Event> heard_;  // of the transport, being read
  std::vector<Run> scratch_;
  std::vector<PlacedRun> placed_;
  std::vector<std::vector<Run>> spare_;
  std::vector<SourceEvent> happened_;  // for the next poll to tell
  bool sent_ = false;
  Instant stepped_{}, pulses_at_{};
};

}  // namespace kvloom
