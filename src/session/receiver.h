// receiver.h: one attempt at one transfer, at one target rank, as a pure state machine: events in, actions out.  Stage: stream.
//
//   open ──all bytes and every `last`──► landed
//   open ──a source failed, cancel, deadline, nonsense──► ending ──all sources quiet──► failed | cancelled
//                                                          ending ──grace over──► quarantined ──all quiet──► failed | cancelled
//
// A source is quiet once nothing of it can land any more: it said so (Quiesced), or the transport refuses it (revoke, fence).
// Laws (receiver_test.cc, sim/): (I1) Release comes only when every source is finished or quiet; (I2) Publish in order, each layer once, after
// all its bytes; (I4) exactly one End, by time + grace; exactly one Release, not before End.
// Thread: whoever calls.  Time: passed in.
#pragma once

#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kvloom/landing/coverage.h"
#include "kvloom/session/edge.h"
#include "kvloom/session/message.h"
#include "kvloom/session/progress.h"
#include "kvloom/session/session.h"

namespace kvloom {

// What the engine wants of whom.
struct ReceiverJob {
  TransferKey key;
  Rank rank;                         // ours
  std::shared_ptr<const Plan> plan;  // shared by all transfers between the two sides
  PlanDigest digest;                 // digest_of(*plan), worked out once for all of them
  GeometryId geometry;               // ours, as the sources know it
  TokenRange range;                  // [prefix, total)
  std::vector<GrantTable> tables;    // [groups of the plan]
  std::vector<PartnerId> sources;    // [source ranks], each another one
  Tag first_tag;                     // source rank s writes under first_tag + s; never used before
  std::chrono::nanoseconds time{};   // from now on; then it has failed
  bool can_revoke = false;           // of the transport: Abilities
  SessionLimits limits;
};

class Receiver {
 public:
  enum class State : std::uint8_t { open, ending, quarantined, landed, failed, cancelled };
  enum class On : std::uint8_t { begin, accepted, progress, failed, quiesced, gone, cut_off, cancel, time };
  static std::span<const Edge<State, On>> edges();

  // ---- events ----
  struct Begin {};
  struct SourceAccepted {
    Rank source;
  };
  struct SourceProgress {
    Rank source;
    Progress progress;
  };  // a notice of the transport under the source's tag
  struct SourceFailed {
    Rank source;
    Error why;
  };
  struct SourceQuiesced {
    Rank source;
  };
  struct SourceGone {
    Rank source;
    Error why;
  };  // the control connection is lost, or the peer is seen dead: it may still write
  struct SourceCutOff {
    Rank source;
  };  // nothing of it can land any more: fenced, or its process has ended
  struct CancelAsked {
    std::string why;
  };               // by the engine
  struct Time {};  // `deadline()` has come
  using Event = std::variant<Begin, SourceAccepted, SourceProgress, SourceFailed, SourceQuiesced, SourceGone, SourceCutOff,
                             CancelAsked, Time>;

  // ---- actions, to be done in this order ----
  struct Admit {
    Rank source;
    Tag tag;
  };  // before the grant goes out
  struct SendGrant {
    Rank source;
    Grant grant;
  };
  struct SendCancel {
    Rank source;
    Cancel cancel;
  };
  struct Revoke {
    Rank source;
    Tag tag;
  };  // where the transport can: after it nothing lands under the tag
  struct FenceOff {
    Rank source;
  };  // answered by SourceCutOff, when and if it worked
  struct Publish {
    LayerId layer;
  };
  struct End {
    Outcome outcome;
    Error why;
    std::vector<std::pair<Rank, std::vector<std::byte>>> payloads;
  };
  struct Release {};  // the pages are the engine's again; landed: with what it asked for
  using Action = std::variant<Admit, SendGrant, SendCancel, Revoke, FenceOff, Publish, End, Release>;

  // @error invalid_argument: tables or sources that are not the plan's; overflow: bytes over 63 bits
  static Expected<Receiver> make(ReceiverJob job);

  // @pre Begin first, once
  void advance(const Event& event, Instant now, std::vector<Action>& actions, EdgeCounts* counts = nullptr);

  State state() const { return state_; }
  bool terminal() const { return released_; }
  Instant deadline() const { return timer_; }  // when Time is due; kNever
  const TransferKey& key() const { return job_.key; }
  const ReceiverJob& job() const { return job_; }
  std::optional<Rank> source_of(Tag tag) const;
  Bytes covered() const { return coverage_.covered(); }
  Bytes expected() const { return coverage_.expected(); }

 private:
  struct Source {
    Rank rank;
    bool accepted = false, finished = false, quiet = false, asked = false;  // asked: to be fenced
    std::vector<std::byte> payload;
  };
  explicit Receiver(ReceiverJob job) : job_(std::move(job)) {}
  Expected<void> owe();
  Source* find(Rank rank);
  void begin();
  void progress(Source& source, const Progress& progress);
  void publish();
  void land_if_done();
  void end(Outcome outcome, Error why);
  void settle();
  void tell_end();
  void release();
  void time();
  Grant grant(const Source& source) const;

  ReceiverJob job_;
  State state_ = State::open;
  std::vector<Source> sources_;  // those that are granted
  Coverage coverage_;
  std::vector<bool> pooled_;  // [groups]: the source rule is `value`: which rank has a page is known there only
  std::vector<std::pair<LayerId, std::vector<CacheLayer>>> layers_;  // ours, ascending
  std::size_t published_ = 0;
  Instant end_by_ = kNever, grace_end_ = kNever, resend_at_ = kNever, timer_ = kNever;
  Outcome outcome_ = Outcome::failed;
  Error why_;
  bool ended_ = false, released_ = false;

  // Of the call that is running.
  Instant now_{};
  std::vector<Action>* actions_ = nullptr;
};

const char* to_string(Receiver::State state);
const char* to_string(Receiver::On on);

}  // namespace kvloom
