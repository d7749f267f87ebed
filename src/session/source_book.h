// source_book.h: all transfers of one source rank: which event is for which Sender, what to do with grants that come before the engine has
// offered anything, and what to answer about transfers that are over.  Stage: stream.  Pure, as its senders are.
// Bounded: at most kEarly grants of together kEarlyPages pages wait for an offer, each as long as it gave time, and of one partner a share of
// both; the last kRemembered transfers that ended are remembered, so that a late grant or cancel of theirs is answered and never served.
// Thread: whoever calls.  Time: passed in.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <variant>
#include <vector>

#include "kvloom/session/sender.h"

namespace kvloom {

struct SendTo {
  PartnerId to;
  Message message;
};

class SourceBook {
 public:
  static constexpr std::size_t kEarly = 4096;
  static constexpr std::size_t kEarlyPages = std::size_t{1} << 24;  // 128 MiB of page ids
  static constexpr std::size_t kShare = 8;  // of both an eighth for one partner; one grant of any size it may always have
  static constexpr std::size_t kRemembered = 65536;
  static constexpr std::size_t kPlans = 1024;

  struct Keyed {
    TransferKey key;
    Sender::Action action;  // but SendAccepted, SendFailed and SendQuiesced, which have become messages
  };
  using Action = std::variant<SendTo, Keyed>;

  explicit SourceBook(Rank rank, EdgeCounts* counts = nullptr) : rank_(rank), counts_(counts) {}

  // From now on grants may name this plan.  A plan is known once for each pair of geometries, however many partners use it; the last
  // kPlans are.
  void know(std::shared_ptr<const Plan> plan, const PlanDigest& digest);

  // The engine is going to compute this transfer's cache.  @error invalid_argument: the key is in use, or has been
  Expected<void> offer(SenderJob job, Instant now, std::vector<Action>& actions);
  // An event of one transfer; of one that is over: nothing.
  void tell(const TransferKey& key, const Sender::Event& event, Instant now, std::vector<Action>& actions);
  void message(PartnerId from, const Message& message, Instant now, std::vector<Action>& actions);
  // The transfer can't be: the two sides do not fit. Offered later, it is over at once. But where somebody has granted it, that was a stranger.
  void unfit(const TransferKey& key, const std::string& why, Instant now, std::vector<Action>& actions);
  void gone(PartnerId partner, const Error& why, Instant now, std::vector<Action>& actions);
  void time(Instant now, std::vector<Action>& actions);

  Instant deadline() const;
  std::size_t open() const { return senders_.size(); }
  std::size_t early() const { return early_room_.grants; }

 private:
  struct Early {
    PartnerId from;
    std::shared_ptr<const Grant> grant;
    std::shared_ptr<const Plan> plan;
    Instant arrived;
    Instant until() const { return arrived + grant->time_left; }
    std::size_t pages() const;
  };
  void step(std::map<TransferKey, Sender>::iterator at, const Sender::Event& event, Instant now, std::vector<Action>& actions);
  void grant(PartnerId from, const Grant& grant, Instant now, std::vector<Action>& actions);
  void cancel(PartnerId from, const Cancel& cancel, Instant now, std::vector<Action>& actions);
  Expected<void> check_room(const Early& grant) const;
  void keep_early(std::vector<Early>& early, Early grant);
  template <class Over>
  void erase_early(std::vector<Early>& early, Over over);
  void forget_early(const Early& grant);
  void remember(const TransferKey& key, Error why);
  struct Left {
    PartnerId from;
    Cancel cancel;
    std::shared_ptr<const Grant> grant;  // without its pages; null: none has come
  };
  Left* cancelled_before(PartnerId from, const TransferKey& key, Rank target);
  void remember_cancel(PartnerId from, const Cancel& cancel, std::shared_ptr<const Grant> grant);
  static std::shared_ptr<const Grant> without_pages(const Grant& grant);
  Message failed(const TransferKey& key, Code code, std::string why) const;

  Rank rank_;
  EdgeCounts* counts_;
  std::map<PlanDigest, std::shared_ptr<const Plan>> plans_;
  std::deque<PlanDigest> plans_order_;
  std::map<TransferKey, Sender> senders_;
  std::map<TransferKey, std::vector<Early>> early_;
  struct Room {
    std::size_t grants = 0, pages = 0;
  };
  Room early_room_;                         // taken by all of early_
  std::map<PartnerId, Room> partner_room_;  // and by each partner's
  std::multiset<Instant> early_until_;
  std::set<std::pair<Instant, TransferKey>> timers_;  // of senders_
  std::map<TransferKey, Error> ended_;                // and why
  std::deque<TransferKey> ended_order_;
  // Targets that cancelled what was not offered yet: a grant of theirs that was overtaken by the cancel must not come to life. Their grants
  // are kept, since they say which ranks take part: a sender whose targets have all left is over as soon as it is offered.
  std::map<TransferKey, std::vector<Left>> cancelled_;
  std::deque<TransferKey> cancelled_order_;   // one for each entry, the eldest first
  std::map<TransferKey, std::string> unfit_;  // refused before they were offered, and why
  std::deque<TransferKey> unfit_order_;
};

}  // namespace kvloom
