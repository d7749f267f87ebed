#include "kvloom/session/sender.h"

#include <algorithm>
#include <array>

namespace kvloom {

using State = Sender::State;
using On = Sender::On;

// ---- the table ----

namespace {

constexpr Bytes kJoin{256 << 10};  // where the limits do not say
constexpr std::size_t kMaxRefused = 4096;

constexpr std::array kEdges = {
    Edge<State, On>{State::waiting, On::granted, State::waiting, "not for us, or cancelled before: refuse it"},
    Edge<State, On>{State::waiting, On::granted, State::open, "accept; post what is ready"},
    Edge<State, On>{State::waiting, On::granted, State::cancelled, "the only target had cancelled before: end, release"},
    Edge<State, On>{State::waiting, On::ready, State::waiting, "remember"},
    Edge<State, On>{State::waiting, On::payload, State::waiting, "remember"},
    Edge<State, On>{State::waiting, On::cancel_from, State::waiting, "answer quiesced; its grant will be refused"},
    Edge<State, On>{State::waiting, On::gone, State::waiting, ""},
    Edge<State, On>{State::waiting, On::cancel, State::cancelled, "end, release"},
    Edge<State, On>{State::waiting, On::time, State::failed, "nobody granted: end, release"},
    Edge<State, On>{State::open, On::granted, State::open, "accept; post what is ready"},
    Edge<State, On>{State::open, On::granted, State::failed, "the last target had cancelled before: end, release"},
    Edge<State, On>{State::open, On::granted, State::cancelled, "the last target had cancelled before: end, release"},
    Edge<State, On>{State::open, On::ready, State::open, "post it"},
    Edge<State, On>{State::open, On::payload, State::open, "post `last` where all else is posted"},
    Edge<State, On>{State::open, On::posted, State::open, "post more; release layers"},
    Edge<State, On>{State::open, On::posted, State::landed, "every target has its last byte: end, release"},
    Edge<State, On>{State::open, On::posted, State::failed, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::posted, State::cancelled, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::cancel_from, State::open, "stop this link; answer quiesced once no post to it is open"},
    Edge<State, On>{State::open, On::cancel_from, State::failed, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::cancel_from, State::cancelled, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::gone, State::open, "stop this link; fence it off if posts are open"},
    Edge<State, On>{State::open, On::gone, State::failed, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::gone, State::cancelled, "the last link is over: end, release"},
    Edge<State, On>{State::open, On::cancel, State::ending, "tell every target; wait for open posts"},
    Edge<State, On>{State::open, On::cancel, State::failed,
                    "a link had failed, and no post is open: tell every target, end, release"},
    Edge<State, On>{State::open, On::cancel, State::cancelled, "no post is open: tell every target, end, release"},
    Edge<State, On>{State::open, On::time, State::open, "a link is late: stop it; posts hang: fence it off"},
    Edge<State, On>{State::open, On::time, State::ending, "too late: tell every target; wait for open posts"},
    Edge<State, On>{State::open, On::time, State::failed, "too late, and no post is open: end, release"},
    Edge<State, On>{State::open, On::time, State::cancelled, "the last link is over: end, release"},
    Edge<State, On>{State::ending, On::granted, State::ending, "refuse it"},
    Edge<State, On>{State::ending, On::ready, State::ending, ""},
    Edge<State, On>{State::ending, On::payload, State::ending, ""},
    Edge<State, On>{State::ending, On::posted, State::ending, ""},
    Edge<State, On>{State::ending, On::posted, State::failed, "no post is open: end, release"},
    Edge<State, On>{State::ending, On::posted, State::cancelled, "no post is open: end, release"},
    Edge<State, On>{State::ending, On::cancel_from, State::ending, "answer quiesced once no post to it is open"},
    Edge<State, On>{State::ending, On::gone, State::ending, "fence it off"},
    Edge<State, On>{State::ending, On::cancel, State::ending, ""},
    Edge<State, On>{State::ending, On::time, State::ending, "posts hang: fence off"},
};

// What went wrong at one target. Nobody of ours cancelled it, whatever the transport calls a peer that hung up.
Error of_rank(Rank target, const Error& why) {
  const Code code = why.code == Code::cancelled ? Code::unavailable : why.code;
  return {code, Scope::transfer, fmt::format("decode rank {}: {}", target.value, why.message)};
}

}  // namespace

std::span<const Edge<State, On>> Sender::edges() { return kEdges; }

Sender::Sender(SenderJob job, Instant now) : job_(std::move(job)), end_by_(now + job_.time), timer_(end_by_) {}

// ---- what happens ----

void Sender::advance(const Event& event, Instant now, std::vector<Action>& actions, EdgeCounts* counts) {
  if (terminal()) return;
  const State from = state_;
  now_ = now;
  actions_ = &actions;
  const On on = static_cast<On>(event.index());
  switch (on) {
    case On::granted: granted(std::get<Granted>(event)); break;
    case On::ready: ready(std::get<Ready>(event)); break;
    case On::payload:
      payload_ = std::get<Payload>(event).bytes;
      for (auto& [target, link] : links_) pump(target, link);
      break;
    case On::posted: posted(std::get<Posted>(event)); break;
    case On::cancel_from: cancel_from(std::get<CancelFrom>(event)); break;
    case On::gone: gone(std::get<Gone>(event)); break;
    case On::cancel: fail_all(Outcome::cancelled, {Code::cancelled, Scope::transfer, std::get<CancelAsked>(event).why}); break;
    case On::time: time(); break;
  }
  release_layers();
  settle();
  timer_ = kNever;
  if (state_ == State::waiting || state_ == State::open) timer_ = end_by_;
  if (!terminal())
    for (const auto& [target, link] : links_) {
      if (link.at == Link::At::open) timer_ = std::min(timer_, link.end_by);
      if (link.at == Link::At::stopping) timer_ = std::min(timer_, link.fence_at);
    }
  count_edge(edges(), from, on, state_, counts);
}

void Sender::granted(const Granted& event) {
  const Rank target = event.grant->target;
  const auto refuse = [&](Code code, std::string why) {
    actions_->emplace_back(SendFailed{event.from, {code, Scope::transfer, std::move(why)}});
  };
  if (const auto at = links_.find(target); at != links_.end()) {
    const Link& link = at->second;
    if (link.partner != event.from || link.grant->tag != event.grant->tag)
      return refuse(Code::invalid_argument, fmt::format("decode rank {} has granted this before, otherwise", target.value));
    if (link.at == Link::At::stopping || link.at == Link::At::stopped) return refuse(link.why.code, link.why.message);
    actions_->emplace_back(SendAccepted{event.from});  // the first one was lost
    return;
  }
  if (state_ == State::ending) return refuse(why_.code, why_.message);
  if (plan_ != nullptr && digest_ != event.grant->digest)
    return refuse(Code::invalid_argument, "another decode rank has granted under another plan");
  const auto expected = granting_targets(*event.plan, job_.rank);
  if (std::find(expected.begin(), expected.end(), target) == expected.end())
    return refuse(Code::invalid_argument,
                  fmt::format("prefill rank {} has nothing for decode rank {}", job_.rank.value, target.value));
  if (plan_ == nullptr) {
    plan_ = event.plan;
    digest_ = event.grant->digest;
    expected_ = expected;
    for (const GroupSide& group : plan_->source().groups()) {
      const Place& place = group.places[static_cast<std::size_t>(job_.rank.value)];
      const StridedSet& part = group.layer_parts[static_cast<std::size_t>(place.layers)];
      if (place.holds)
        for (std::int64_t l = part.start(); l < part.start() + part.size(); ++l)
          kept_.insert(group.layers[static_cast<std::size_t>(l)]);
    }
  }
  const auto refused = refused_.find({target, event.from});
  if (refused == refused_.end()) return open_link(event);
  Link link;
  link.at = Link::At::stopped;
  link.partner = event.from;
  link.grant = event.grant;
  link.why = {Code::cancelled, Scope::transfer, fmt::format("decode rank {}: {}", target.value, refused->second)};
  if (!outcome_) {
    outcome_ = Outcome::cancelled;
    why_ = link.why;
  }
  links_.emplace(target, std::move(link));
  actions_->emplace_back(SendQuiesced{event.from});
}

void Sender::open_link(const Granted& event) {
  Link link;
  link.partner = event.from;
  link.grant = event.grant;
  link.end_by = (event.arrived == kNever ? now_ : event.arrived) + event.grant->time_left;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan_->groups().size()); ++g) {
    const auto path = plan_->path(g, job_.rank, event.grant->target);
    if (!path) continue;
    const GroupSide& group = *plan_->groups()[static_cast<std::size_t>(g)].target;
    const TokenRange want = wanted(group, event.grant->range);
    if (want.begin >= want.end) continue;
    for (const LayerId layer : plan_->layer_ids(*path)) {
      const auto mark = watermarks_.find(layer);
      link.lanes.push_back({{g, layer},
                            want,
                            event.grant->range.end,
                            path->row_bytes,
                            path->tokens,
                            group.kind == GroupKind::state,
                            mark == watermarks_.end() ? 0 : mark->second});
      ++link.unposted[layer];
    }
  }
  std::stable_sort(link.lanes.begin(), link.lanes.end(),
                   [](const Lane& a, const Lane& b) { return a.layer.layer < b.layer.layer; });
  link.open_lanes = link.lanes.size();
  actions_->emplace_back(SendAccepted{event.from});
  Link& kept = links_.emplace(event.grant->target, std::move(link)).first->second;
  if (state_ == State::waiting) state_ = State::open;
  pump(event.grant->target, kept);
}

void Sender::ready(const Ready& event) {
  std::int64_t& mark = watermarks_[event.layer];
  mark = std::max(mark, event.tokens);
  for (auto& [target, link] : links_) {
    auto lane = std::lower_bound(link.lanes.begin(), link.lanes.end(), event.layer,
                                 [](const Lane& l, LayerId layer) { return l.layer.layer < layer; });
    for (; lane != link.lanes.end() && lane->layer.layer == event.layer; ++lane) lane->ready = mark;
    pump(target, link);
  }
}

void Sender::posted(const Posted& event) {
  const auto at = posts_.find(event.id);
  if (at == posts_.end()) return;
  const OpenPost post = std::move(at->second);
  posts_.erase(at);
  Link& link = links_.at(post.target);
  link.in_flight -= post.bytes;
  --link.posts;
  for (const LayerId layer : post.layers) --link.reading[layer];
  maybe_done_.insert(maybe_done_.end(), post.layers.begin(), post.layers.end());
  if (!event.delivered && link.at == Link::At::open) return stop(link, of_rank(post.target, event.delivered.error()), true);
  link.last_delivered = link.last_delivered || post.last;
  if (link.at == Link::At::open && link.last_delivered && link.posts == 0) link.at = Link::At::done;
  if (link.at == Link::At::stopping && link.posts == 0) stopped(link);
  pump(post.target, link);
}

void Sender::refuse_grant(const CancelFrom& event) {
  refused_.emplace(std::pair(event.target, event.from), event.why);
  if (refused_.size() <= kMaxRefused) return;
  const auto eldest = std::min_element(refused_.begin(), refused_.end(),
                                       [](const auto& a, const auto& b) { return a.first.second < b.first.second; });
  refused_.erase(eldest);  // of a connection that has ended long ago: ids of partners ascend
}

void Sender::cancel_from(const CancelFrom& event) {
  const auto at = links_.find(event.target);
  if (at == links_.end() || at->second.partner != event.from) {
    if (at == links_.end()) refuse_grant(event);
    actions_->emplace_back(SendQuiesced{event.from});
    return;
  }
  Link& link = at->second;
  if (link.at == Link::At::done || link.at == Link::At::stopped) {
    actions_->emplace_back(SendQuiesced{event.from});
    return;
  }
  link.quiesce = true;
  if (link.at == Link::At::open)
    stop(link, {Code::cancelled, Scope::transfer, fmt::format("decode rank {}: {}", event.target.value, event.why)}, false);
}

void Sender::gone(const Gone& event) {
  for (auto& [target, link] : links_) {
    if (link.partner != event.partner) continue;
    if (link.at == Link::At::open) stop(link, of_rank(target, event.why), false);
    if (link.at == Link::At::stopping && link.fence_at != kNever) {
      link.fence_at = kNever;
      actions_->emplace_back(FenceOff{link.partner});
    }
  }
}

void Sender::time() {
  if (now_ >= end_by_ && state_ != State::ending)
    fail_all(Outcome::failed, {Code::deadline, Scope::transfer, fmt::format("time is up; {}", missing())});
  for (auto& [target, link] : links_) {
    if (link.at == Link::At::open && now_ >= link.end_by)
      stop(link, {Code::deadline, Scope::transfer, fmt::format("the time that decode rank {} gave is up", target.value)}, true);
    if (link.at == Link::At::stopping && now_ >= link.fence_at) {
      link.fence_at = kNever;
      actions_->emplace_back(FenceOff{link.partner});
    }
  }
}

// ---- posting ----

std::int64_t Sender::ready_to(const Lane& lane) {
  if (lane.state) return lane.ready >= lane.total ? lane.left.end : lane.left.begin;
  return std::clamp(lane.ready, lane.left.begin, lane.left.end);
}

// What is ready of `link`, up to about `room` bytes; `bytes` says how much it comes to.
std::vector<PostPart> Sender::gather(const Link& link, Bytes room, Bytes& bytes) const {
  std::vector<PostPart> out;
  for (const Lane& lane : link.lanes) {
    TokenRange chunk{lane.left.begin, ready_to(lane)};
    if (chunk.begin >= chunk.end) continue;
    const auto bytes_to = [&](std::int64_t end) {
      std::int64_t tokens = 0;
      for (const StridedSet& family : lane.tokens) tokens += family.count_in(chunk.begin, end);
      return Bytes(tokens * lane.row_bytes);
    };
    Bytes size = bytes_to(chunk.end);
    if (bytes + size > room) {
      if (!out.empty()) break;
      // The longest chunk that fits; one row at the least, wherever it stands.
      std::int64_t low = chunk.begin, high = chunk.end;
      while (high - low > 1) {
        const std::int64_t middle = low + (high - low) / 2;
        (bytes_to(middle) <= std::max(room, Bytes(lane.row_bytes)) ? low : high) = middle;
      }
      chunk.end = bytes_to(low) > Bytes(0) ? low : high;
      size = bytes_to(chunk.end);
    }
    bytes += size;
    out.push_back({lane.layer, chunk});
  }
  return out;
}

void Sender::commit(Link& link, const std::vector<PostPart>& parts) {
  std::size_t next = 0;  // parts are in the order of lanes
  for (Lane& lane : link.lanes) {
    if (next == parts.size()) return;
    if (lane.layer != parts[next].layer) continue;
    lane.left.begin = parts[next].chunk.end;
    if (lane.left.begin == lane.left.end) {
      --link.open_lanes;
      --link.unposted[lane.layer.layer];
    }
    ++next;
  }
}

void Sender::pump(Rank target, Link& link) {
  while (link.at == Link::At::open && !link.last_posted) {
    if (link.posts > 0 && link.in_flight >= job_.limits.in_flight_per_path) return;
    Bytes bytes;
    auto parts = gather(link, job_.limits.in_flight_per_path - link.in_flight, bytes);
    std::size_t ending = 0;  // lanes that these parts complete
    for (const PostPart& part : parts)
      for (const Lane& lane : link.lanes)
        if (lane.layer == part.layer && lane.left.end == part.chunk.end) ++ending;
    const bool all = ending == link.open_lanes;
    const bool last = all && (!job_.has_payload || payload_);
    if (parts.empty() && !last) return;
    if (!all && link.posts >= job_.limits.joining_posts && bytes < job_.limits.join.value_or(kJoin)) return;
    commit(link, parts);
    OpenPost open{target, bytes, last, {}};
    for (const PostPart& part : parts) {
      open.layers.push_back(part.layer.layer);
      ++link.reading[part.layer.layer];
    }
    const SendId id(next_post_++);
    posts_.emplace(id, std::move(open));
    link.in_flight += bytes;
    ++link.posts;
    link.last_posted = last;
    actions_->emplace_back(Post{id, link.partner, target, link.grant, plan_, std::move(parts), last,
                                last && payload_ ? *payload_ : std::vector<std::byte>(), bytes});
  }
}

// ---- the end ----

// `tell`: its target does not know yet.
void Sender::stop(Link& link, const Error& why, bool tell) {
  link.at = Link::At::stopping;
  link.why = why;
  for (const auto& [layer, lanes] : link.unposted) maybe_done_.push_back(layer);
  link.unposted.clear();
  link.fence_at = now_ + job_.limits.grace;
  if (!outcome_) {
    outcome_ = why.code == Code::cancelled ? Outcome::cancelled : Outcome::failed;
    why_ = why;
  }
  if (tell) actions_->emplace_back(SendFailed{link.partner, why});
  if (link.posts == 0) stopped(link);
}

void Sender::stopped(Link& link) {
  link.at = Link::At::stopped;
  if (link.quiesce) actions_->emplace_back(SendQuiesced{link.partner});
}

void Sender::fail_all(Outcome outcome, const Error& why) {
  if (state_ == State::ending) return;
  if (!outcome_ || state_ == State::waiting) {
    outcome_ = outcome;
    why_ = why;
  }
  state_ = State::ending;
  for (auto& [target, link] : links_)
    if (link.at == Link::At::open) stop(link, why, true);
}

// Nothing of ours will be read for this target any more, and it will not ask again.
bool Sender::over(Rank target) const {
  const auto at = links_.find(target);
  return at != links_.end() && (at->second.at == Link::At::done || at->second.at == Link::At::stopped);
}

void Sender::settle() {
  if (state_ == State::ending) {
    if (posts_.empty()) finish(*outcome_ == Outcome::cancelled ? State::cancelled : State::failed);
    return;
  }
  if (plan_ == nullptr || !std::all_of(expected_.begin(), expected_.end(), [this](Rank target) { return over(target); })) return;
  if (!outcome_) return finish(State::landed);
  finish(*outcome_ == Outcome::cancelled ? State::cancelled : State::failed);
}

void Sender::finish(State state) {
  state_ = state;
  actions_->emplace_back(End{outcome_.value_or(Outcome::landed), why_});
  actions_->emplace_back(Release{});
}

void Sender::release_layers() {
  const std::vector<LayerId> maybe = std::exchange(maybe_done_, {});
  if (plan_ == nullptr || state_ == State::ending) return;
  if (all_granted_) {
    for (const LayerId layer : maybe) release_layer_if_done(layer);
    return;
  }
  all_granted_ = std::all_of(expected_.begin(), expected_.end(), [this](Rank target) { return links_.contains(target); });
  if (!all_granted_) return;
  for (const LayerId layer : std::vector(kept_.begin(), kept_.end())) release_layer_if_done(layer);
}

void Sender::release_layer_if_done(LayerId layer) {
  const auto none = [layer](const std::map<LayerId, int>& counts) {
    const auto at = counts.find(layer);
    return at == counts.end() || at->second == 0;
  };
  for (const auto& [target, link] : links_)
    if (!none(link.unposted) || !none(link.reading)) return;
  if (kept_.erase(layer) > 0) actions_->emplace_back(ReleaseLayer{layer});
}

std::string Sender::missing() const {
  if (plan_ == nullptr) return "no decode rank has granted it";
  std::string absent, open;
  for (const Rank target : expected_) {
    if (over(target)) continue;
    std::string& list = links_.contains(target) ? open : absent;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", target.value);
  }
  std::string out;
  if (!absent.empty()) out = fmt::format("decode ranks that have not granted: {}", absent);
  if (!open.empty()) out += fmt::format("{}decode ranks that have not got all: {}", out.empty() ? "" : "; ", open);
  return out;
}

const char* to_string(State state) {
  switch (state) {
    case State::waiting: return "waiting";
    case State::open: return "open";
    case State::ending: return "ending";
    case State::landed: return "landed";
    case State::failed: return "failed";
    case State::cancelled: return "cancelled";
  }
  return "?";
}

const char* to_string(On on) {
  switch (on) {
    case On::granted: return "granted";
    case On::ready: return "ready";
    case On::payload: return "payload";
    case On::posted: return "posted";
    case On::cancel_from: return "cancel from a target";
    case On::gone: return "gone";
    case On::cancel: return "cancel";
    case On::time: return "time";
  }
  return "?";
}

}  // namespace kvloom
