// pacer.h: when a post may go.  Stage: stream.  A pure value: posts in, posts out, one at a time; it stands between the senders
// of one source rank, which say what may be read, and the transport.
// Three limits hold a post back: bytes in flight to all partners, bytes in flight to one (so a slow or frozen target does not
// fill the first limit and hold up the others), and a rate (so moving a cache disturbs neither prefill nor decode).
//   rate: a token bucket, counted in whole 1e-9 bytes, so that `deadline` is exact and nothing drifts.
//   turn: of the partners that wait, the one that was served least goes next; one that comes (back) starts level with who is
//         served now, with no credit for having been away. Start-time fair queueing (Goyal, Vin, Cheng 1996). Not deficit round
//         robin: a post may be 64 quanta long or empty, and here there is no quantum to choose, nor rounds to walk until a long
//         post has saved up its turn.
//   Whose turn it is keeps it until the post fits: small posts never starve a large one. A partner at its own limit has no turn.
// Laws (pacer_test.cc, generated): nothing is lost, doubled or overtaken by what came after it to the same partner; in flight is
// at most the limit, or one larger post; what goes in any time t is at most burst + rate t + the largest post; what goes to two
// partners while both may have a turn differs by at most twice the largest post, from a common start by one; `deadline` is exact.
// Thread: whoever calls.  Time: passed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "kvloom/session/message.h"
#include "kvloom/session/sender.h"
#include "kvloom/session/session.h"

namespace kvloom {

struct PaceLimits {
  Bytes in_flight = Bytes(256 << 20);      // gone and not over, all partners together
  Bytes in_flight_each = Bytes(64 << 20);  // ... to one partner: four must be slow before a fifth waits for them
  std::int64_t bytes_per_second = 0;       // 0: no limit
  Bytes burst = Bytes(4 << 20);            // goes at once after a pause: the depth of the bucket
};

// A Post of a Sender that waits for its turn.
struct Paced {
  PartnerId to;
  TransferKey key;
  SendId id;
  Bytes bytes;
  Instant pushed{};
  friend bool operator==(const Paced&, const Paced&) = default;
};

class Pacer {
 public:
  using Limits = PaceLimits;

  // @pre no limit is negative
  explicit Pacer(PaceLimits limits = {});

  // @pre post.bytes is not negative    @cost O(log partners), as all below but `drop`
  void push(Paced post);

  // The post that goes now, if one may; call it until it gives none. A post of 0 bytes goes as soon as it has its turn; one that
  // is larger than a limit in flight goes when nothing is in flight there; one larger than the burst goes when the bucket is
  // full, and leaves it in debt.
  std::optional<Paced> next(Instant now);

  // A post that `next` gave is over, delivered or not.  @pre it went to `to` with as many bytes, and was not told before
  void done(PartnerId to, Bytes bytes);

  // Takes out what waits and need not go any more, in the order in which it was pushed to a partner.  @cost O(what waits there)
  std::vector<Paced> drop(PartnerId to, const TransferKey& key);
  std::vector<Paced> drop(const TransferKey& key);
  std::vector<Paced> drop(PartnerId to);  // it is gone, its turn is forgotten; what is in flight is still told by `done`

  // From when on the rate lets the next post go: until something is pushed, done or dropped, next(t) gives a post exactly from
  // t = deadline() on, where t is no earlier than the last `now`.  kNever: nothing waits for time, but for `done` or `push`.
  Instant deadline() const;

  std::size_t waiting() const { return waiting_; }
  Bytes in_flight() const { return in_flight_; }
  const PaceLimits& limits() const { return limits_; }

 private:
  // (served, since when it stands there, who): the least has the turn.
  using Place = std::tuple<Wide, std::uint64_t, PartnerId>;
  struct Partner {
    std::deque<Paced> posts;
    Bytes in_flight;
    Wide served = 0;             // bytes, from a start that all partners share
    std::optional<Place> place;  // in order_
  };
  using Partners = std::map<PartnerId, Partner>;

  bool may_have_turn(const Partner& partner) const;
  void place(Partners::iterator at);
  std::vector<Paced> take(Partners::iterator at, const std::function<bool(const Paced&)>& which);
  const Paced* turn() const;
  bool fits(Bytes bytes) const;
  Wide wanted(Bytes bytes) const;
  void refill(Instant now);

  PaceLimits limits_;
  Partners partners_;      // that wait, have bytes in flight, or were served more than others
  std::set<Place> order_;  // those that may have a turn
  Wide clock_ = 0;         // how much the last one that had a turn was served before
  std::uint64_t places_ = 0;
  std::size_t waiting_ = 0;
  Bytes in_flight_;
  Wide level_ = 0;  // of the bucket, 1e-9 bytes; below zero: in debt
  Instant filled_{};
};

}  // namespace kvloom
