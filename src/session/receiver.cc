#include "kvloom/session/receiver.h"

#include <algorithm>
#include <array>
#include <map>

namespace kvloom {

using State = Receiver::State;
using On = Receiver::On;

// ---- the table ----

namespace {

constexpr std::array kEdges = {
    Edge<State, On>{State::open, On::begin, State::open, "admit and grant every source"},
    Edge<State, On>{State::open, On::begin, State::landed, "nothing is wanted of anybody"},
    Edge<State, On>{State::open, On::accepted, State::open, "the grant is not sent again"},
    Edge<State, On>{State::open, On::progress, State::open, "count bytes, publish layers"},
    Edge<State, On>{State::open, On::progress, State::landed, "all bytes and every `last` are there: end, release"},
    Edge<State, On>{State::open, On::progress, State::ending, "nonsense: cancel the sources"},
    Edge<State, On>{State::open, On::progress, State::failed, "nonsense: revoke, end, release"},
    Edge<State, On>{State::open, On::failed, State::open, "it had finished"},
    Edge<State, On>{State::open, On::failed, State::ending, "cancel the sources"},
    Edge<State, On>{State::open, On::failed, State::failed, "revoke, end, release"},
    Edge<State, On>{State::open, On::quiesced, State::ending, "it stopped unasked: cancel the others"},
    Edge<State, On>{State::open, On::quiesced, State::failed, "it stopped unasked: revoke, end, release"},
    Edge<State, On>{State::open, On::gone, State::ending, "cancel the others, fence it off"},
    Edge<State, On>{State::open, On::gone, State::failed, "revoke, end, release"},
    Edge<State, On>{State::open, On::cut_off, State::ending, "cancel the others"},
    Edge<State, On>{State::open, On::cut_off, State::failed, "nobody else can write: end, release"},
    Edge<State, On>{State::open, On::quiesced, State::open, "it had finished"},
    Edge<State, On>{State::open, On::gone, State::open, "it had finished"},
    Edge<State, On>{State::open, On::cut_off, State::open, "it had finished"},
    Edge<State, On>{State::open, On::cancel, State::ending, "cancel the sources"},
    Edge<State, On>{State::open, On::cancel, State::cancelled, "revoke, end, release"},
    Edge<State, On>{State::open, On::time, State::open, "send unanswered grants again"},
    Edge<State, On>{State::open, On::time, State::ending, "too late: cancel the sources"},
    Edge<State, On>{State::open, On::time, State::failed, "too late: revoke, end, release"},
    Edge<State, On>{State::ending, On::accepted, State::ending, ""},
    Edge<State, On>{State::ending, On::progress, State::ending, "a `last` makes its source quiet"},
    Edge<State, On>{State::ending, On::progress, State::failed, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::progress, State::cancelled, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::failed, State::ending, ""},
    Edge<State, On>{State::ending, On::quiesced, State::ending, "one more is quiet"},
    Edge<State, On>{State::ending, On::quiesced, State::failed, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::quiesced, State::cancelled, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::gone, State::ending, "it can't answer: fence it off"},
    Edge<State, On>{State::ending, On::cut_off, State::ending, "one more is quiet"},
    Edge<State, On>{State::ending, On::cut_off, State::failed, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::cut_off, State::cancelled, "the last one is quiet: end, release"},
    Edge<State, On>{State::ending, On::cancel, State::ending, ""},
    Edge<State, On>{State::ending, On::time, State::ending,
                    "send unanswered cancels again; half of the grace is over: fence off"},
    Edge<State, On>{State::ending, On::time, State::quarantined, "end; the pages stay here"},
    Edge<State, On>{State::quarantined, On::accepted, State::quarantined, ""},
    Edge<State, On>{State::quarantined, On::progress, State::quarantined, "a `last` makes its source quiet"},
    Edge<State, On>{State::quarantined, On::progress, State::failed, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::progress, State::cancelled, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::failed, State::quarantined, ""},
    Edge<State, On>{State::quarantined, On::quiesced, State::quarantined, "one more is quiet"},
    Edge<State, On>{State::quarantined, On::quiesced, State::failed, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::quiesced, State::cancelled, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::gone, State::quarantined, "it can't answer: fence it off"},
    Edge<State, On>{State::quarantined, On::cut_off, State::quarantined, "one more is quiet"},
    Edge<State, On>{State::quarantined, On::cut_off, State::failed, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::cut_off, State::cancelled, "the last one is quiet: release"},
    Edge<State, On>{State::quarantined, On::cancel, State::quarantined, ""},
    Edge<State, On>{State::quarantined, On::time, State::quarantined, "send unanswered cancels again"},
};

// Bytes of one layer that `path` owes for `range`. Rule `value` on our side: only the pages that are ours count.
Expected<std::int64_t> layer_bytes(const Plan& plan, const Path& path, TokenRange range, const GrantTable& table) {
  const GroupPlan& group = plan.groups()[static_cast<std::size_t>(path.group)];
  const GroupSide& target = *group.target;
  if (target.tokens.rule != TokenRule::value)
    return plan.bytes(path, range).value / std::max<std::int64_t>(1, path.layers.size());
  const TokenRange want = wanted(target, range);
  const std::int64_t page = target.layout.page_tokens(), part = target.places[static_cast<std::size_t>(path.target.value)].tokens;
  std::int64_t tokens = 0;
  for (std::size_t column = 0; column < table.pages.size(); ++column) {
    const std::int64_t id = table.pages[column].value, begin = static_cast<std::int64_t>(column) * page;
    if (id < 0 || id % target.tokens.parts != part) continue;
    for (const StridedSet& family : path.tokens)
      tokens += family.count_in(std::max(begin, want.begin), std::min(begin + page, want.end));
  }
  const auto bytes = checked_mul(tokens, path.row_bytes);
  if (!bytes) return fail(Code::overflow, "{} tokens of {} B do not fit 63 bits", tokens, path.row_bytes);
  return *bytes;
}

constexpr Rank kPool{-1};  // whoever has the page

}  // namespace

std::span<const Edge<State, On>> Receiver::edges() { return kEdges; }

// ---- birth ----

Expected<Receiver> Receiver::make(ReceiverJob job) {
  const Plan& plan = *job.plan;
  if (job.rank.value < 0 || job.rank.value >= plan.target().ranks())
    return fail(Code::invalid_argument, "decode rank {} of a plan for {}", job.rank.value, plan.target().ranks());
  if (job.tables.size() != plan.groups().size())
    return fail(Code::invalid_argument, "{} page tables for {} cache groups", job.tables.size(), plan.groups().size());
  if (static_cast<std::int32_t>(job.sources.size()) != plan.source().ranks())
    return fail(Code::invalid_argument, "{} sources for {} prefill ranks", job.sources.size(), plan.source().ranks());
  if (job.range.begin < 0 || job.range.end < job.range.begin || job.range.end == kUnbounded)
    return fail(Code::invalid_argument, "tokens [{}, {}): the prefix must be 0 or more and not beyond the tokens",
                job.range.begin, job.range.end);
  Receiver out(std::move(job));
  for (const Rank source : granted_sources(plan, out.job_.rank)) out.sources_.push_back({.rank = source, .payload = {}});
  if (auto ok = out.owe(); !ok) return tl::unexpected(ok.error());
  return out;
}

Expected<void> Receiver::owe() {
  const Plan& plan = *job_.plan;
  std::vector<Owed> owed;
  std::map<LayerId, std::vector<CacheLayer>> layers;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan.groups().size()); ++g) {
    const auto at = static_cast<std::size_t>(g);
    const GroupPlan& group = plan.groups()[at];
    pooled_.push_back(group.source->tokens.rule == TokenRule::value);
    const Place& place = group.target->places[static_cast<std::size_t>(job_.rank.value)];
    if (place.holds) {
      const StridedSet& part = group.target->layer_parts[static_cast<std::size_t>(place.layers)];
      for (std::int64_t l = part.start(); l < part.start() + part.size(); ++l) {
        const LayerId layer = group.target->layers[static_cast<std::size_t>(l)];
        layers[layer].push_back({g, layer});
      }
    }
    for (const Source& source : sources_) {
      const auto path = plan.path(g, source.rank, job_.rank);
      if (!path) continue;
      if (pooled_[at] && group.source->places[static_cast<std::size_t>(source.rank.value)].tokens != 0) continue;  // counted once
      const auto bytes = layer_bytes(plan, *path, job_.range, job_.tables[at]);
      if (!bytes) return tl::unexpected(bytes.error());
      for (const LayerId layer : plan.layer_ids(*path))
        owed.push_back({pooled_[at] ? kPool : source.rank, {g, layer}, Bytes(*bytes)});
    }
  }
  layers_.assign(layers.begin(), layers.end());
  auto coverage = Coverage::make(owed);
  if (!coverage) return tl::unexpected(coverage.error());
  coverage_ = std::move(*coverage);
  return {};
}

// ---- what happens ----

void Receiver::advance(const Event& event, Instant now, std::vector<Action>& actions, EdgeCounts* counts) {
  if (released_) return;  // nothing can change any more
  const State from = state_;
  now_ = now;
  actions_ = &actions;
  const On on = static_cast<On>(event.index());
  const auto source_of_event = [&]() -> Source* {
    return std::visit(
        [&](const auto& what) -> Source* {
          if constexpr (requires { what.source; })
            return find(what.source);
          else
            return nullptr;
        },
        event);
  };
  Source* const source = source_of_event();
  const bool about_a_source = on != On::begin && on != On::cancel && on != On::time;
  if (about_a_source && source == nullptr) return;  // not one that we granted
  const auto failed = [&](const Error& why) {
    if (state_ == State::open)
      end(Outcome::failed, {why.code, Scope::transfer, fmt::format("prefill rank {}: {}", source->rank.value, why.message)});
  };
  switch (on) {
    case On::begin: begin(); break;
    case On::accepted: source->accepted = true; break;
    case On::progress: progress(*source, std::get<SourceProgress>(event).progress); break;
    case On::failed:
      if (source->finished) break;
      source->accepted = true;
      failed(std::get<SourceFailed>(event).why);
      break;
    case On::quiesced:
      if (source->finished) break;
      source->quiet = true;
      failed({Code::unavailable, Scope::transfer, "stopped before it was done: it knows nothing of this transfer any more"});
      break;
    case On::gone:
      if (source->finished || source->quiet) break;
      if (!source->asked && !job_.can_revoke) {
        source->asked = true;
        actions.emplace_back(FenceOff{source->rank});
      }
      failed(std::get<SourceGone>(event).why);
      break;
    case On::cut_off:
      if (source->finished) break;
      source->quiet = true;
      failed({Code::unavailable, Scope::transfer, "its process or connection has ended"});
      break;
    case On::cancel:
      if (state_ == State::open) end(Outcome::cancelled, {Code::cancelled, Scope::transfer, std::get<CancelAsked>(event).why});
      break;
    case On::time: time(); break;
  }
  if (state_ == State::ending || state_ == State::quarantined) settle();
  timer_ = released_
               ? kNever
               : std::min({resend_at_, state_ == State::open ? end_by_ : kNever, state_ == State::ending ? grace_end_ : kNever});
  count_edge(edges(), from, on, state_, counts);
}

void Receiver::begin() {
  end_by_ = now_ + job_.time;
  resend_at_ = now_ + job_.limits.resend;
  for (const Source& source : sources_) {
    actions_->emplace_back(Admit{source.rank, Tag(job_.first_tag.value + static_cast<std::uint64_t>(source.rank.value))});
    actions_->emplace_back(SendGrant{source.rank, grant(source)});
  }
  publish();
  land_if_done();
}

Grant Receiver::grant(const Source& source) const {
  return {job_.key,    job_.rank,      job_.digest,
          job_.range,  end_by_ - now_, Tag(job_.first_tag.value + static_cast<std::uint64_t>(source.rank.value)),
          job_.tables, job_.geometry};
}

void Receiver::progress(Source& source, const Progress& progress) {
  source.accepted = true;
  if (source.finished) return;
  if (state_ == State::open)
    for (const LandedPart& part : progress.parts) {
      const auto group = static_cast<std::size_t>(part.layer.group);
      const Rank owes = group < pooled_.size() && pooled_[group] ? kPool : source.rank;
      if (auto ok = coverage_.landed(owes, part.layer, part.bytes); !ok)
        return end(Outcome::failed,
                   {Code::invalid_argument, Scope::transfer,
                    fmt::format("prefill rank {} says what it can't: {}", source.rank.value, ok.error().message)});
    }
  if (progress.last) {
    source.finished = true;
    source.payload = progress.payload;
  }
  if (state_ != State::open) return;
  publish();
  land_if_done();
}

void Receiver::publish() {
  for (; published_ < layers_.size(); ++published_) {
    const auto& [id, parts] = layers_[published_];
    if (!std::all_of(parts.begin(), parts.end(), [&](const CacheLayer& part) { return coverage_.complete(part); })) return;
    actions_->emplace_back(Publish{id});
  }
}

void Receiver::land_if_done() {
  if (!std::all_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.finished; })) return;
  if (!coverage_.complete())
    return end(Outcome::failed,
               {Code::unavailable, Scope::transfer,
                fmt::format("every source says that it is done, but there is missing: {}", coverage_.missing())});
  outcome_ = Outcome::landed;
  state_ = State::landed;
  release();
}

// ---- the end ----

void Receiver::end(Outcome outcome, Error why) {
  outcome_ = outcome;
  why_ = std::move(why);
  state_ = State::ending;
  grace_end_ = now_ + job_.limits.grace;
  resend_at_ = now_ + std::min(job_.limits.resend, job_.limits.grace / 2);
  for (Source& source : sources_) {
    if (source.finished || source.quiet) continue;
    if (job_.can_revoke) source.quiet = true;  // release() revokes before it says so
    actions_->emplace_back(SendCancel{source.rank, {job_.key, job_.rank, why_.message}});
  }
}

void Receiver::settle() {
  if (!std::all_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.finished || s.quiet; })) return;
  state_ = outcome_ == Outcome::cancelled ? State::cancelled : State::failed;
  release();
}

void Receiver::release() {
  if (job_.can_revoke)
    for (const Source& source : sources_)
      actions_->emplace_back(Revoke{source.rank, Tag(job_.first_tag.value + static_cast<std::uint64_t>(source.rank.value))});
  if (!ended_) tell_end();
  actions_->emplace_back(Release{});
  released_ = true;
}

void Receiver::tell_end() {
  End end{outcome_, why_, {}};
  if (outcome_ == Outcome::landed)
    for (Source& source : sources_)
      if (!source.payload.empty()) end.payloads.emplace_back(source.rank, std::move(source.payload));
  actions_->emplace_back(std::move(end));
  ended_ = true;
}

void Receiver::time() {
  const auto resend = [&](const auto& each) {
    if (now_ < resend_at_) return;
    resend_at_ = now_ + job_.limits.resend;
    for (Source& source : sources_)
      if (!source.finished && !source.quiet) each(source);
  };
  if (state_ == State::open) {
    if (now_ >= end_by_)
      return end(Outcome::failed, {Code::deadline, Scope::transfer,
                                   fmt::format("time is up; missing: {}",
                                               coverage_.complete() ? "the last word of a source" : coverage_.missing())});
    return resend([&](const Source& source) {
      if (!source.accepted) actions_->emplace_back(SendGrant{source.rank, grant(source)});
    });
  }
  const bool give_up = now_ >= grace_end_ - job_.limits.grace / 2;
  resend([&](Source& source) {
    actions_->emplace_back(SendCancel{source.rank, {job_.key, job_.rank, why_.message}});
    if (!give_up || source.asked) return;
    source.asked = true;
    actions_->emplace_back(FenceOff{source.rank});
  });
  if (state_ == State::ending && now_ >= grace_end_) {
    state_ = State::quarantined;
    tell_end();
  }
}

Receiver::Source* Receiver::find(Rank rank) {
  const auto at = std::find_if(sources_.begin(), sources_.end(), [&](const Source& s) { return s.rank == rank; });
  return at == sources_.end() ? nullptr : &*at;
}

std::optional<Rank> Receiver::source_of(Tag tag) const {
  for (const Source& source : sources_)
    if (tag.value == job_.first_tag.value + static_cast<std::uint64_t>(source.rank.value)) return source.rank;
  return std::nullopt;
}

const char* to_string(State state) {
  switch (state) {
    case State::open: return "open";
    case State::ending: return "ending";
    case State::quarantined: return "quarantined";
    case State::landed: return "landed";
    case State::failed: return "failed";
    case State::cancelled: return "cancelled";
  }
  return "?";
}

const char* to_string(On on) {
  switch (on) {
    case On::begin: return "begin";
    case On::accepted: return "accepted";
    case On::progress: return "progress";
    case On::failed: return "failed";
    case On::quiesced: return "quiesced";
    case On::gone: return "gone";
    case On::cut_off: return "cut off";
    case On::cancel: return "cancel";
    case On::time: return "time";
  }
  return "?";
}

}  // namespace kvloom
