// target_book.h: all transfers of one target rank: which message, notice or loss is for which Receiver.  Stage: stream.  Pure.
// It believes a source rank only what its own partner says, under the tag that this partner was granted: nobody speaks for another.
// Thread: whoever calls.  Time: passed in.
#pragma once

#include <map>
#include <set>
#include <variant>
#include <vector>

#include "kvloom/session/receiver.h"
#include "kvloom/session/source_book.h"

namespace kvloom {

class TargetBook {
 public:
  struct Keyed {
    TransferKey key;
    PartnerId source;         // of actions that name a source rank
    Receiver::Action action;  // but SendGrant and SendCancel, which have become messages
  };
  using Action = std::variant<SendTo, Keyed>;

  explicit TargetBook(EdgeCounts* counts = nullptr) : counts_(counts) {}

  // Grants every source. `job.first_tag` is chosen here.  @error invalid_argument: the key is in use; what Receiver::make refuses
  Expected<void> begin(ReceiverJob job, Instant now, std::vector<Action>& actions);
  void message(PartnerId from, const Message& message, Instant now, std::vector<Action>& actions);
  // A notice of the transport, from the partner that it belongs to.
  void notice(PartnerId from, Tag tag, std::span<const std::byte> payload, Instant now, std::vector<Action>& actions);
  void gone(PartnerId partner, const Error& why, Instant now, std::vector<Action>& actions);
  // Nothing of this partner can land any more, whatever it does.
  void cut_off(PartnerId partner, Instant now, std::vector<Action>& actions);
  void cancel(const TransferKey& key, std::string why, Instant now, std::vector<Action>& actions);
  void time(Instant now, std::vector<Action>& actions);

  Instant deadline() const;
  std::size_t open() const { return receivers_.size(); }
  const Receiver* find(const TransferKey& key) const;

 private:
  using At = std::map<TransferKey, Receiver>::iterator;
  void step(At at, const Receiver::Event& event, Instant now, std::vector<Action>& actions);
  template <class Make>
  void each_of(PartnerId partner, Instant now, std::vector<Action>& actions, Make make);

  EdgeCounts* counts_;
  std::map<TransferKey, Receiver> receivers_;
  std::map<Tag, TransferKey> first_tags_;
  std::set<std::pair<Instant, TransferKey>> timers_;  // of receivers_
  std::uint64_t next_tag_ = 1;
};

}  // namespace kvloom
