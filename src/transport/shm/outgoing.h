// outgoing.h: the source side of one shm connection.  Stage: carry.
// Operations wait in order, are put into our outbox as slots while there is room (so a batch of any size passes through a ring of
// any size), and end with the peer's answer, in the same order. Thread: the transport's.
#pragma once

#include <deque>
#include <memory>
#include <unordered_set>
#include <vector>

#include "kvloom/transport/open_tags.h"
#include "kvloom/transport/shm/device.h"
#include "kvloom/transport/shm/outbox.h"
#include "kvloom/transport/shm/socket.h"
#include "kvloom/transport/transport.h"

namespace kvloom::shm {

struct Operation {
  PostId post;
  Tag tag;
  RegionId source;
  RegionId target;
  std::span<const Run> runs;       // of a write: lent until it is completed
  std::vector<std::byte> payload;  // of a notice
  Bytes total;                     // what the peer has to vouch for
  std::shared_ptr<LocalMemory>
      memory;  // of a write's source. Owners: the region, and the open writes that read it.  Null: this is a notice
  std::uint64_t parts_put = 0;  // runs, or slots of payload
  std::uint64_t base = 0;       // the run that stood whole in a slot last
  bool begun = false;

  bool is_notice() const { return memory == nullptr; }
  std::uint64_t parts() const { return is_notice() ? (payload.size() + kSlotBytes - 1) / kSlotBytes : runs.size(); }
};

class Outgoing {
 public:
  Outgoing(PeerId peer, OutboxView ours, std::vector<Event>& events) : peer_(peer), ours_(ours), events_(events) {}

  // The peer's outbox: from now on pump and collect work.
  void attach(OutboxView theirs) { theirs_ = theirs; }

  // Both take a turn in the order of their tag: after refuse, what is posted with this tag is refused as well, until all of it is
  // completed.
  void post(Operation operation);
  void refuse(PostId post, Tag tag, Error error);

  void withdraw(RegionId region) { withdrawn_.push_back(region); }

  // @error the peer broke the protocol: it answered what was not asked, or vouches for the wrong count
  Expected<bool> collect();               // answers into events
  Expected<bool> pump(const Fd& socket);  // operations into the outbox, their memory over the socket

  // There are answers, or half of the ring is free for what waits: worth waking up for.
  Expected<bool> has_work() const;
  // The socket is full: what is offered next waits until it can be written to.
  bool is_blocked() const { return blocked_; }
  // An operation is part of the way through the ring.
  bool underway() const { return put_ - collected_ < open_.size() && open_[put_ - collected_].begun; }

  // Ends everything that is open.
  void fail_all(const Error& reason);

 private:
  struct Refused {
    PostId post;
    Tag tag;
    Error error;
  };

  Expected<std::uint64_t> room() const;
  Expected<bool> put(Operation& operation, const Fd& socket);
  Sent offer(const Operation& operation, const Fd& socket);
  void put_head(const Operation& operation);
  void put_runs(Operation& operation);
  void put_payload(Operation& operation);
  Sent say(const Fd& socket, const Message& message, std::span<const std::byte> tail, const Fd* fd);
  bool send_withdrawals(const Fd& socket);
  void publish() { ours_.header().produced.store(produced_); }
  void complete(PostId post, Tag tag, Expected<Bytes> delivered);

  const PeerId peer_;
  OutboxView ours_;
  OutboxView theirs_;
  std::vector<Event>& events_;
  std::deque<Operation> open_;   // posted and unanswered; open_[0] is operation number collected_ of this connection
  std::uint64_t collected_ = 0;  // operations answered
  std::uint64_t put_ = 0;        // operations that stand wholly in the outbox
  std::uint64_t produced_ = 0;   // slots
  std::vector<Refused> refused_;
  OpenTags tags_;
  std::unordered_set<std::uint64_t> offered_;
  std::size_t offering_ = 0;  // messages of the offer that is being sent
  bool blocked_ = false;
  std::vector<RegionId> withdrawn_;  // to be told once no open write reads them
};

}  // namespace kvloom::shm
