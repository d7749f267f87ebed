// sender.h: one attempt at one transfer, at one source rank, as a pure state machine: events in, actions out.  Stage: stream.
//
//   waiting ──first grant──► open ──every target has its last byte──► landed
//      │                      │──cancel, deadline, a target is lost──► ending ──no post is open──► failed | cancelled
//      └──cancel, deadline──► failed | cancelled
//
// Grants (of the targets) and readiness (of the engine's forward pass) come in any order; what is both granted and ready is posted. Each target
// rank has a link of its own, so one that is slow or lost costs its own bytes only:
//   absent ──grant──► open ──`last` delivered──► done
//              open ──cancelled, failed, late──► stopping ──no post is open──► stopped
// Laws (sender_test.cc, sim/): (I3) ReleaseLayer and Release come only when no open post reads the pages; (I4) exactly one End, one Release;
// each wanted token of each layer is posted once to each target; Cancel is answered by Quiesced, always.
// Thread: whoever calls.  Time: passed in.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "kvloom/landing/coverage.h"
#include "kvloom/session/edge.h"
#include "kvloom/session/message.h"
#include "kvloom/session/session.h"

namespace kvloom {

struct SenderJob {
  TransferKey key;
  Rank rank;                        // ours
  std::chrono::nanoseconds time{};  // from now on; then it has failed
  bool has_payload = false;         // `last` waits for Payload
  SessionLimits limits;
};

// Tokens of one layer that go out together.  For a state: the one row.
struct PostPart {
  CacheLayer layer;
  TokenRange chunk;
  friend bool operator==(const PostPart&, const PostPart&) = default;
};

using SendId = Id<struct SendTag, std::uint64_t>;  // a Post of one sender; ascending

class Sender {
 public:
  enum class State : std::uint8_t { waiting, open, ending, landed, failed, cancelled };
  enum class On : std::uint8_t { granted, ready, payload, posted, cancel_from, gone, cancel, time };
  static std::span<const Edge<State, On>> edges();

  // ---- events ----
  struct Granted {
    PartnerId from;
    std::shared_ptr<const Grant> grant;
    std::shared_ptr<const Plan> plan;  // @pre the grant's digest is this one's
    Instant arrived = kNever;          // when its time began to run; kNever: now
  };
  struct Ready {
    LayerId layer;
    std::int64_t tokens = 0;
  };  // tokens below this one are computed for this layer, and its pages are known
  struct Payload {
    std::vector<std::byte> bytes;
  };  // what rides with completion
  struct Posted {
    SendId id;
    Expected<void> delivered;
  };  // the Post is over: all its bytes are vouched for, or why not
  struct CancelFrom {
    PartnerId from;
    Rank target;
    std::string why;
  };
  struct Gone {
    PartnerId partner;
    Error why;
  };  // the connection is lost or the process has ended
  struct CancelAsked {
    std::string why;
  };  // by the engine: preempted, evicted
  struct Time {};
  using Event = std::variant<Granted, Ready, Payload, Posted, CancelFrom, Gone, CancelAsked, Time>;

  // ---- actions ----
  struct SendAccepted {
    PartnerId to;
  };
  struct SendFailed {
    PartnerId to;
    Error why;
  };
  struct SendQuiesced {
    PartnerId to;
  };
  // Bind each part with the tables of now, write, and then notify with all of it in one Progress; answered by Posted, once.
  struct Post {
    SendId id;
    PartnerId to;
    Rank target;
    std::shared_ptr<const Grant> grant;
    std::shared_ptr<const Plan> plan;
    std::vector<PostPart> parts;
    bool last = false;
    std::vector<std::byte> payload;  // only with last
    Bytes bytes;                     // of all parts; rule `value`: at most
  };
  struct FenceOff {
    PartnerId partner;
  };  // posts to it hang after a failure: end them
  struct ReleaseLayer {
    LayerId layer;
  };  // nobody of ours will read it any more; each of our layers, once; those that nobody is sent as soon as all have granted
  struct End {
    Outcome outcome;
    Error why;
  };
  struct Release {};  // no page is read any more
  using Action = std::variant<SendAccepted, SendFailed, SendQuiesced, Post, FenceOff, ReleaseLayer, End, Release>;

  Sender(SenderJob job, Instant now);

  void advance(const Event& event, Instant now, std::vector<Action>& actions, EdgeCounts* counts = nullptr);

  State state() const { return state_; }
  bool terminal() const { return state_ == State::landed || state_ == State::failed || state_ == State::cancelled; }
  Instant deadline() const { return timer_; }
  const SenderJob& job() const { return job_; }

 private:
  // One layer of one path.
  struct Lane {
    CacheLayer layer;
    TokenRange left;         // what the target wants of it and is not posted yet
    std::int64_t total = 0;  // tokens of the request
    std::int64_t row_bytes = 0;
    std::span<const StridedSet> tokens;
    bool state = false;      // a state per request: one row, when all tokens are there
    std::int64_t ready = 0;  // tokens of its layer that are computed
  };
  struct Link {
    enum class At : std::uint8_t { open, stopping, done, stopped };
    At at = At::open;
    PartnerId partner;
    std::shared_ptr<const Grant> grant;
    std::vector<Lane> lanes;
    std::map<LayerId, int> unposted, reading;  // of a layer: lanes that are not wholly posted; open posts
    std::size_t open_lanes = 0;                // not wholly posted
    Instant end_by = kNever, fence_at = kNever;
    Bytes in_flight;
    int posts = 0;
    bool last_posted = false, last_delivered = false;
    bool quiesce = false;  // it waits for our Quiesced
    Error why;
  };
  struct OpenPost {
    Rank target;
    Bytes bytes;
    bool last = false;
    std::vector<LayerId> layers;
  };

  void granted(const Granted& event);
  void open_link(const Granted& event);
  void ready(const Ready& event);
  void posted(const Posted& event);
  void cancel_from(const CancelFrom& event);
  void refuse_grant(const CancelFrom& event);
  void gone(const Gone& event);
  void time();
  void stop(Link& link, const Error& why, bool tell);
  void fail_all(Outcome outcome, const Error& why);
  void pump(Rank target, Link& link);
  std::vector<PostPart> gather(const Link& link, Bytes room, Bytes& bytes) const;
  void commit(Link& link, const std::vector<PostPart>& parts);
  void stopped(Link& link);
  void settle();
  void finish(State state);
  void release_layers();
  void release_layer_if_done(LayerId layer);
  bool over(Rank target) const;
  std::string missing() const;
  static std::int64_t ready_to(const Lane& lane);

  SenderJob job_;
  State state_ = State::waiting;
  std::shared_ptr<const Plan> plan_;  // of the first grant
  PlanDigest digest_;
  std::vector<Rank> expected_;  // target ranks that will grant
  std::map<Rank, Link> links_;
  std::map<std::pair<Rank, PartnerId>, std::string> refused_;  // cancelled before they had granted: the grant will be refused
  std::map<LayerId, std::int64_t> watermarks_;
  std::optional<std::vector<std::byte>> payload_;
  std::map<SendId, OpenPost> posts_;
  std::set<LayerId> kept_;           // our layers that are not released yet
  std::vector<LayerId> maybe_done_;  // of them, those that this event may have ended
  bool all_granted_ = false;         // every target that will; from then on layers are released
  std::uint64_t next_post_ = 1;
  Instant end_by_, timer_ = kNever;
  std::optional<Outcome> outcome_;  // of what went wrong first
  Error why_;

  std::vector<Action>* actions_ = nullptr;
  Instant now_{};
};

const char* to_string(Sender::State state);
const char* to_string(Sender::On on);

}  // namespace kvloom
