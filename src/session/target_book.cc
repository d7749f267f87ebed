#include "kvloom/session/target_book.h"

#include <algorithm>

namespace kvloom {

Expected<void> TargetBook::begin(ReceiverJob job, Instant now, std::vector<Action>& actions) {
  if (receivers_.contains(job.key))
    return fail(Code::invalid_argument, "transfer {} is open: another attempt needs another epoch", to_string(job.key));
  job.first_tag = Tag(next_tag_);
  next_tag_ += job.sources.size() + 1;
  const TransferKey key = job.key;
  const Tag first = job.first_tag;
  auto made = Receiver::make(std::move(job));
  if (!made) return tl::unexpected(made.error());
  first_tags_.emplace(first, key);
  step(receivers_.emplace(key, std::move(*made)).first, Receiver::Begin{}, now, actions);
  return {};
}

void TargetBook::step(At at, const Receiver::Event& event, Instant now, std::vector<Action>& actions) {
  std::vector<Receiver::Action> mine;
  Receiver& receiver = at->second;
  const Instant before = receiver.deadline();
  receiver.advance(event, now, mine, counts_);
  if (const Instant due = receiver.terminal() ? kNever : receiver.deadline(); due != before) {
    timers_.erase({before, at->first});
    if (due != kNever) timers_.emplace(due, at->first);
  }
  const auto partner = [&](Rank source) { return receiver.job().sources[static_cast<std::size_t>(source.value)]; };
  for (Receiver::Action& action : mine) {
    if (auto* grant = std::get_if<Receiver::SendGrant>(&action)) {
      actions.emplace_back(SendTo{partner(grant->source), std::move(grant->grant)});
    } else if (auto* cancel = std::get_if<Receiver::SendCancel>(&action)) {
      if (cancel->cancel.reason.size() > kMaxReason) cancel->cancel.reason.resize(kMaxReason);
      actions.emplace_back(SendTo{partner(cancel->source), std::move(cancel->cancel)});
    } else {
      const PartnerId source = std::visit(
          [&](const auto& what) {
            if constexpr (requires { what.source; })
              return partner(what.source);
            else
              return PartnerId();
          },
          action);
      actions.emplace_back(Keyed{at->first, source, std::move(action)});
    }
  }
  if (!receiver.terminal()) return;
  first_tags_.erase(receiver.job().first_tag);
  receivers_.erase(at);
}

namespace {

struct FromSource {
  const TransferKey* key = nullptr;
  Rank source;
};

FromSource sender_of(const Message& message) {
  return std::visit(
      [](const auto& what) -> FromSource {
        if constexpr (requires { what.source; })
          return {&what.key, what.source};
        else
          return {};
      },
      message);
}

}  // namespace

void TargetBook::message(PartnerId from, const Message& message, Instant now, std::vector<Action>& actions) {
  const FromSource said = sender_of(message);
  if (said.key == nullptr) return;  // what only targets say
  const auto at = receivers_.find(*said.key);
  if (at == receivers_.end()) return;
  const auto& sources = at->second.job().sources;
  const auto rank = static_cast<std::size_t>(said.source.value);
  if (rank >= sources.size() || sources[rank] != from) return;  // it speaks for another
  if (std::holds_alternative<Accepted>(message)) step(at, Receiver::SourceAccepted{said.source}, now, actions);
  if (std::holds_alternative<Quiesced>(message)) step(at, Receiver::SourceQuiesced{said.source}, now, actions);
  if (const auto* failed = std::get_if<Failed>(&message))
    step(at, Receiver::SourceFailed{said.source, {failed->code, Scope::transfer, failed->reason}}, now, actions);
}

void TargetBook::notice(PartnerId from, Tag tag, std::span<const std::byte> payload, Instant now, std::vector<Action>& actions) {
  auto first = first_tags_.upper_bound(tag);
  if (first == first_tags_.begin()) return;
  const auto at = receivers_.find(std::prev(first)->second);
  if (at == receivers_.end()) return;
  const auto source = at->second.source_of(tag);
  if (!source || at->second.job().sources[static_cast<std::size_t>(source->value)] != from) return;
  auto progress = decode_progress(payload);
  if (progress)
    step(at, Receiver::SourceProgress{*source, std::move(*progress)}, now, actions);
  else
    step(at, Receiver::SourceFailed{*source, progress.error()}, now, actions);
}

template <class Make>
void TargetBook::each_of(PartnerId partner, Instant now, std::vector<Action>& actions, Make make) {
  for (auto at = receivers_.begin(); at != receivers_.end();) {
    const auto here = at++;
    const auto& sources = here->second.job().sources;
    const auto rank = std::find(sources.begin(), sources.end(), partner);
    if (rank != sources.end()) step(here, make(Rank(static_cast<std::int32_t>(rank - sources.begin()))), now, actions);
  }
}

void TargetBook::gone(PartnerId partner, const Error& why, Instant now, std::vector<Action>& actions) {
  each_of(partner, now, actions, [&](Rank source) { return Receiver::Event(Receiver::SourceGone{source, why}); });
}

void TargetBook::cut_off(PartnerId partner, Instant now, std::vector<Action>& actions) {
  each_of(partner, now, actions, [](Rank source) { return Receiver::Event(Receiver::SourceCutOff{source}); });
}

void TargetBook::cancel(const TransferKey& key, std::string why, Instant now, std::vector<Action>& actions) {
  if (const auto at = receivers_.find(key); at != receivers_.end()) step(at, Receiver::CancelAsked{std::move(why)}, now, actions);
}

void TargetBook::time(Instant now, std::vector<Action>& actions) {
  std::vector<TransferKey> due;
  for (auto timer = timers_.begin(); timer != timers_.end() && timer->first <= now; ++timer) due.push_back(timer->second);
  for (const TransferKey& key : due)
    if (const auto at = receivers_.find(key); at != receivers_.end()) step(at, Receiver::Time{}, now, actions);
}

Instant TargetBook::deadline() const { return timers_.empty() ? kNever : timers_.begin()->first; }

const Receiver* TargetBook::find(const TransferKey& key) const {
  const auto at = receivers_.find(key);
  return at == receivers_.end() ? nullptr : &at->second;
}

}  // namespace kvloom
