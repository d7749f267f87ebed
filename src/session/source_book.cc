#include "kvloom/session/source_book.h"

#include <algorithm>

namespace kvloom {
namespace {

// The first value of a key stays; of more than `most` keys the eldest goes. `order`: the map's keys, the eldest first.
template <class Map>
void keep_latest(Map& map, std::deque<typename Map::key_type>& order, const typename Map::key_type& key,
                 typename Map::mapped_type value, std::size_t most) {
  if (!map.emplace(key, std::move(value)).second) return;
  order.push_back(key);
  if (order.size() <= most) return;
  map.erase(order.front());
  order.pop_front();
}

}  // namespace

void SourceBook::know(std::shared_ptr<const Plan> plan, const PlanDigest& digest) {
  keep_latest(plans_, plans_order_, digest, std::move(plan), kPlans);
}

Message SourceBook::failed(const TransferKey& key, Code code, std::string why) const {
  if (why.size() > kMaxReason) why.resize(kMaxReason);
  return Failed{key, rank_, code, std::move(why)};
}

Expected<void> SourceBook::offer(SenderJob job, Instant now, std::vector<Action>& actions) {
  if (senders_.contains(job.key) || ended_.contains(job.key))
    return fail(Code::invalid_argument, "transfer {} has been offered before: another attempt needs another epoch",
                to_string(job.key));
  const TransferKey key = job.key;
  const auto at = senders_.emplace(key, Sender(std::move(job), now)).first;
  timers_.emplace(at->second.deadline(), key);
  const auto cancelled = cancelled_.find(key);
  const std::vector<Left> left = cancelled == cancelled_.end() ? std::vector<Left>{} : cancelled->second;
  for (const auto& [from, cancel, grant] : left) tell(key, Sender::CancelFrom{from, cancel.target, cancel.reason}, now, actions);
  const auto early = early_.find(key);
  const std::vector<Early> grants = early == early_.end() ? std::vector<Early>{} : std::move(early->second);
  if (early != early_.end()) early_.erase(early);
  for (const Early& grant : grants) forget_early(grant);
  for (const Early& grant : grants) tell(key, Sender::Granted{grant.from, grant.grant, grant.plan, grant.arrived}, now, actions);
  // After those that live: one that has left under another plan must not stand in their way.
  for (const auto& [from, cancel, grant] : left)
    if (const auto plan = grant == nullptr ? plans_.end() : plans_.find(grant->digest); plan != plans_.end())
      tell(key, Sender::Granted{from, grant, plan->second, now}, now, actions);
  if (const auto told = unfit_.find(key); told != unfit_.end()) unfit(key, told->second, now, actions);
  return {};
}

void SourceBook::tell(const TransferKey& key, const Sender::Event& event, Instant now, std::vector<Action>& actions) {
  if (const auto at = senders_.find(key); at != senders_.end()) step(at, event, now, actions);
}

void SourceBook::step(std::map<TransferKey, Sender>::iterator at, const Sender::Event& event, Instant now,
                      std::vector<Action>& actions) {
  std::vector<Sender::Action> mine;
  const TransferKey& key = at->first;
  const Instant before = at->second.deadline();
  at->second.advance(event, now, mine, counts_);
  if (const Instant due = at->second.terminal() ? kNever : at->second.deadline(); due != before) {
    timers_.erase({before, key});
    if (due != kNever) timers_.emplace(due, key);
  }
  Error why;
  for (Sender::Action& action : mine) {
    if (const auto* end = std::get_if<Sender::End>(&action)) why = end->why;
    if (const auto* accepted = std::get_if<Sender::SendAccepted>(&action))
      actions.emplace_back(SendTo{accepted->to, Accepted{key, rank_}});
    else if (const auto* failed_to = std::get_if<Sender::SendFailed>(&action))
      actions.emplace_back(SendTo{failed_to->to, failed(key, failed_to->why.code, failed_to->why.message)});
    else if (const auto* quiesced = std::get_if<Sender::SendQuiesced>(&action))
      actions.emplace_back(SendTo{quiesced->to, Quiesced{key, rank_}});
    else
      actions.emplace_back(Keyed{key, std::move(action)});
  }
  if (!at->second.terminal()) return;
  remember(key, std::move(why));
  senders_.erase(at);
}

std::size_t SourceBook::Early::pages() const {
  std::size_t out = 0;
  for (const GrantTable& table : grant->tables) out += table.pages.size();
  return out;
}

Expected<void> SourceBook::check_room(const Early& grant) const {
  const auto refuse = [](std::size_t count, const char* what, const char* whose) {
    return fail(Code::exhausted, "{} {} {} wait here for transfers that nobody has offered, the most", count, what, whose);
  };
  const std::size_t pages = grant.pages();
  if (early_room_.grants >= kEarly) return refuse(early_room_.grants, "grants", "of all decode ranks");
  if (early_room_.pages + pages > kEarlyPages) return refuse(early_room_.pages, "pages of grants", "of all decode ranks");
  const auto taken = partner_room_.find(grant.from);
  if (taken == partner_room_.end()) return {};
  if (taken->second.grants >= kEarly / kShare) return refuse(taken->second.grants, "grants", "of this decode rank");
  if (taken->second.pages + pages > kEarlyPages / kShare)
    return refuse(taken->second.pages, "pages of grants", "of this decode rank");
  return {};
}

void SourceBook::keep_early(std::vector<Early>& early, Early grant) {
  for (Room* room : {&early_room_, &partner_room_[grant.from]}) {
    ++room->grants;
    room->pages += grant.pages();
  }
  early_until_.insert(grant.until());
  early.push_back(std::move(grant));
}

void SourceBook::forget_early(const Early& grant) {
  const auto partner = partner_room_.find(grant.from);
  for (Room* room : {&early_room_, &partner->second}) {
    --room->grants;
    room->pages -= grant.pages();
  }
  if (partner->second.grants == 0) partner_room_.erase(partner);
  early_until_.erase(early_until_.find(grant.until()));
}

template <class Over>
void SourceBook::erase_early(std::vector<Early>& early, Over over) {
  std::erase_if(early, [&](const Early& grant) {
    if (!over(grant)) return false;
    forget_early(grant);
    return true;
  });
}

void SourceBook::remember(const TransferKey& key, Error why) {
  keep_latest(ended_, ended_order_, key, std::move(why), kRemembered);
}

void SourceBook::message(PartnerId from, const Message& message, Instant now, std::vector<Action>& actions) {
  if (const auto* granted = std::get_if<Grant>(&message)) grant(from, *granted, now, actions);
  if (const auto* cancelled = std::get_if<Cancel>(&message)) cancel(from, *cancelled, now, actions);
  // What only sources say is nothing to a source.
}

void SourceBook::grant(PartnerId from, const Grant& grant, Instant now, std::vector<Action>& actions) {
  const auto refuse = [&](Code code, std::string why) {
    actions.emplace_back(SendTo{from, failed(grant.key, code, std::move(why))});
  };
  if (const auto over = ended_.find(grant.key); over != ended_.end())
    return over->second.message.empty() ? refuse(Code::unavailable, "this transfer is over here")
                                        : refuse(over->second.code, over->second.message);
  const auto plan = plans_.find(grant.digest);
  if (plan == plans_.end()) return refuse(Code::unsupported, "the geometry is not known here: send it first");
  if (grant.tables.size() != plan->second->groups().size() || grant.target.value >= plan->second->target().ranks())
    return refuse(Code::invalid_argument,
                  fmt::format("{} page tables of rank {} do not fit the plan", grant.tables.size(), grant.target.value));
  for (const GrantTable& table : grant.tables)
    if (const auto valid = PageTable::make(table.pages, table.pool_pages, PageTable::Use::target); !valid)
      return refuse(valid.error().code, valid.error().message);
  const auto kept = std::make_shared<const Grant>(grant);
  if (const auto at = senders_.find(grant.key); at != senders_.end())
    return step(at, Sender::Granted{from, kept, plan->second, now}, now, actions);
  if (Left* before = cancelled_before(from, grant.key, grant.target)) {
    if (before->grant == nullptr) before->grant = without_pages(grant);
    actions.emplace_back(SendTo{from, Quiesced{grant.key, rank_}});
    return;
  }
  std::vector<Early>& early = early_[grant.key];
  for (const Early& before : early)
    if (before.from == from && before.grant->target == grant.target) {
      if (before.grant->tag != grant.tag)
        return refuse(Code::invalid_argument,
                      fmt::format("decode rank {} has granted this before, otherwise", grant.target.value));
      // sent again
      actions.emplace_back(SendTo{from, Accepted{grant.key, rank_}});
      return;
    }
  Early waits{from, kept, plan->second, now};
  if (const auto room = check_room(waits); !room) {
    if (early.empty()) early_.erase(grant.key);
    return refuse(room.error().code, room.error().message);
  }
  keep_early(early, std::move(waits));
  actions.emplace_back(SendTo{from, Accepted{grant.key, rank_}});
}

void SourceBook::cancel(PartnerId from, const Cancel& cancel, Instant now, std::vector<Action>& actions) {
  if (cancel.whole) {
    unfit(cancel.key, fmt::format("decode rank {}: {}", cancel.target.value, cancel.reason), now, actions);
    actions.emplace_back(SendTo{from, Quiesced{cancel.key, rank_}});
    return;
  }
  if (const auto at = senders_.find(cancel.key); at != senders_.end())
    return step(at, Sender::CancelFrom{from, cancel.target, cancel.reason}, now, actions);
  std::shared_ptr<const Grant> grant;
  if (const auto early = early_.find(cancel.key); early != early_.end()) {
    erase_early(early->second, [&](const Early& e) {
      if (e.from != from || e.grant->target != cancel.target) return false;
      grant = without_pages(*e.grant);
      return true;
    });
    if (early->second.empty()) early_.erase(early);
  }
  if (!ended_.contains(cancel.key)) remember_cancel(from, cancel, std::move(grant));
  actions.emplace_back(SendTo{from, Quiesced{cancel.key, rank_}});
}

std::shared_ptr<const Grant> SourceBook::without_pages(const Grant& grant) {
  Grant out = grant;
  out.tables.clear();
  return std::make_shared<const Grant>(std::move(out));
}

SourceBook::Left* SourceBook::cancelled_before(PartnerId from, const TransferKey& key, Rank target) {
  const auto at = cancelled_.find(key);
  if (at == cancelled_.end()) return nullptr;
  const auto found = std::find_if(at->second.begin(), at->second.end(),
                                  [&](const Left& l) { return l.from == from && l.cancel.target == target; });
  return found == at->second.end() ? nullptr : &*found;
}

void SourceBook::remember_cancel(PartnerId from, const Cancel& cancel, std::shared_ptr<const Grant> grant) {
  if (cancelled_before(from, cancel.key, cancel.target) != nullptr) return;
  cancelled_[cancel.key].push_back({from, cancel, std::move(grant)});
  cancelled_order_.push_back(cancel.key);
  if (cancelled_order_.size() <= kRemembered) return;
  const auto eldest = cancelled_.find(cancelled_order_.front());
  eldest->second.erase(eldest->second.begin());
  if (eldest->second.empty()) cancelled_.erase(eldest);
  cancelled_order_.pop_front();
}

void SourceBook::unfit(const TransferKey& key, const std::string& why, Instant now, std::vector<Action>& actions) {
  if (const auto at = senders_.find(key); at != senders_.end()) {
    if (at->second.state() == Sender::State::waiting) step(at, Sender::CancelAsked{why}, now, actions);
    return;
  }
  if (!ended_.contains(key)) keep_latest(unfit_, unfit_order_, key, why, kRemembered);
}

void SourceBook::gone(PartnerId partner, const Error& why, Instant now, std::vector<Action>& actions) {
  for (auto early = early_.begin(); early != early_.end();) {
    erase_early(early->second, [&](const Early& e) { return e.from == partner; });
    early = early->second.empty() ? early_.erase(early) : std::next(early);
  }
  for (auto at = senders_.begin(); at != senders_.end();) step(at++, Sender::Gone{partner, why}, now, actions);
}

void SourceBook::time(Instant now, std::vector<Action>& actions) {
  const bool early_due = !early_until_.empty() && *early_until_.begin() <= now;
  for (auto early = early_.begin(); early_due && early != early_.end();) {
    erase_early(early->second, [&](const Early& e) {
      if (now < e.until()) return false;
      actions.emplace_back(SendTo{e.from, failed(early->first, Code::deadline, "it was never offered here")});
      return true;
    });
    early = early->second.empty() ? early_.erase(early) : std::next(early);
  }
  std::vector<TransferKey> due;
  for (auto timer = timers_.begin(); timer != timers_.end() && timer->first <= now; ++timer) due.push_back(timer->second);
  for (const TransferKey& key : due) tell(key, Sender::Time{}, now, actions);
}

Instant SourceBook::deadline() const {
  const Instant early = early_until_.empty() ? kNever : *early_until_.begin();
  return timers_.empty() ? early : std::min(early, timers_.begin()->first);
}

}  // namespace kvloom
