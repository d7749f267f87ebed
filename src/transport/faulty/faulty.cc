#include "kvloom/transport/faulty/faulty.h"

#include <algorithm>
#include <random>
#include <utility>

namespace kvloom {

FaultPlan FaultPlan::script(std::map<std::uint64_t, Fault> faults) {
  FaultPlan plan;
  plan.script_ = std::move(faults);
  return plan;
}

FaultPlan FaultPlan::seeded(std::uint64_t seed, double probability) {
  FaultPlan plan;
  plan.seed_ = seed;
  plan.probability_ = probability;
  return plan;
}

Fault FaultPlan::at(std::uint64_t operation) const {
  if (const auto found = script_.find(operation); found != script_.end()) return found->second;
  if (probability_ <= 0) return {};
  std::mt19937_64 random(seed_ ^ (operation * 0x9e3779b97f4a7c15));
  random.discard(4);
  if (static_cast<double>(random() >> 11) * 0x1p-53 >= probability_) return {};
  return {static_cast<Fault::Kind>(1 + random() % 5), static_cast<int>(random() % 16)};
}

namespace {

std::vector<Run> first_half(std::span<const Run> runs) {
  std::vector<Run> half(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>((runs.size() + 1) / 2));
  if (runs.size() > 1 || half.empty()) return half;
  Run& run = half.front();
  if (run.count > 1) {
    run.count /= 2;
  } else if (run.bytes.value > 1) {
    run.bytes = Bytes(run.bytes.value / 2);
  } else {
    half.clear();
  }
  return half;
}

}  // namespace

Abilities FaultyTransport::abilities() const {
  Abilities abilities = inner_->abilities();
  abilities.name = "faulty";
  return abilities;
}

PostId FaultyTransport::write(const Write& write) {
  Operation operation;
  operation.peer = write.target.peer;
  operation.tag = write.tag;
  operation.write = write;
  return post(std::move(operation));
}

PostId FaultyTransport::notify(PeerId peer, Tag tag, std::span<const std::byte> payload) {
  Operation operation;
  operation.peer = peer;
  operation.tag = tag;
  operation.payload.assign(payload.begin(), payload.end());
  return post(std::move(operation));
}

PostId FaultyTransport::post(Operation operation) {
  assert_owner("write");
  operation.post = PostId(next_post_);
  operation.fault = plan_.at(next_post_ - 1);
  ++next_post_;
  using Kind = Fault::Kind;
  const Kind kind = operation.fault.kind;
  if (kind == Kind::delay || kind == Kind::drop) operation.wait = operation.fault.polls;
  OpenTags& tags = tags_[operation.peer.value];
  if (tags.broken(operation.tag)) operation.error = OpenTags::error(operation.tag);
  tags.open(operation.tag);
  if (!operation.error && (kind == Kind::fail || kind == Kind::drop || kind == Kind::truncate)) {
    operation.error = Error{Code::unavailable, Scope::operation,
                            kind == Kind::fail   ? "refused by plan"
                            : kind == Kind::drop ? "lost by plan"
                                                 : "cut by plan"};
    tags.break_tag(operation.tag);
  }
  const PostId id = operation.post;
  auto& queue = held_[operation.peer.value];
  queue.push_back(std::make_unique<Operation>(std::move(operation)));
  return id;
}

PostId FaultyTransport::forward_once(Operation& operation) {
  const bool cut = operation.fault.kind == Fault::Kind::truncate;
  if (!operation.write) {
    std::span<const std::byte> payload(operation.payload);
    return inner_->notify(operation.peer, operation.tag, cut ? payload.first(payload.size() / 2) : payload);
  }
  Write write = *operation.write;
  if (cut) {
    operation.cut = first_half(write.runs);
    write.runs = operation.cut;
  }
  return inner_->write(write);
}

void FaultyTransport::forward(std::unique_ptr<Operation> operation) {
  const bool cut = operation->fault.kind == Fault::Kind::truncate && operation->error->message == "cut by plan";
  if (operation->error && !cut) return complete(*operation);
  const std::shared_ptr<Operation> shared(std::move(operation));
  shared->open = shared->fault.kind == Fault::Kind::duplicate ? 2 : 1;
  for (int i = 0; i < shared->open; ++i) forwarded_.emplace(forward_once(*shared).value, shared);
}

void FaultyTransport::complete(Operation& operation) {
  const auto tags = tags_.find(operation.peer.value);
  tags->second.close(operation.tag, !operation.error);
  if (tags->second.empty()) tags_.erase(tags);
  Expected<Bytes> delivered = operation.delivered.value_or(Bytes(0));
  if (operation.error) delivered = tl::unexpected(*operation.error);
  events_.emplace_back(Completed{operation.post, operation.peer, operation.tag, std::move(delivered)});
}

void FaultyTransport::take(Completed inner) {
  const auto found = forwarded_.find(inner.post.value);
  const std::shared_ptr<Operation> operation = found->second;
  forwarded_.erase(found);
  if (inner.delivered) {
    operation->delivered = *inner.delivered;
  } else if (!operation->error) {
    operation->error = inner.delivered.error();
  }
  if (--operation->open == 0) complete(*operation);
}

void FaultyTransport::fail_held(PeerId peer, const Error& reason) {
  const auto found = held_.find(peer.value);
  if (found == held_.end()) return;
  for (const auto& operation : found->second) {
    if (!operation->error) operation->error = reason;
    complete(*operation);
  }
  held_.erase(found);
}

// PeerDown comes after the Completed of what was posted before.
void FaultyTransport::tell_downs(std::vector<Event>& events) {
  std::erase_if(downs_, [&](const PeerDown& down) {
    for (const auto& [post, operation] : forwarded_) {
      if (operation->peer == down.peer) return false;
    }
    events.emplace_back(down);
    return true;
  });
}

Expected<void> FaultyTransport::fence(PeerId peer) {
  auto fenced = inner_->fence(peer);
  if (fenced) fail_held(peer, {Code::cancelled, Scope::peer, fmt::format("peer {} was fenced off", peer.value)});
  return fenced;
}

bool FaultyTransport::poll(PollLimit limit, std::vector<Event>& events) {
  assert_owner("poll");
  bool any = !events_.empty() || !held_.empty() || !downs_.empty();
  for (auto& [peer, queue] : held_) {
    if (!queue.empty() && queue.front()->wait > 0) --queue.front()->wait;
    while (!queue.empty() && queue.front()->wait == 0) {
      std::unique_ptr<Operation> operation = std::move(queue.front());
      queue.pop_front();
      forward(std::move(operation));
    }
  }
  std::erase_if(held_, [](const auto& entry) { return entry.second.empty(); });
  if (any) limit.wait = {};
  std::vector<Event> inner;
  any |= inner_->poll(limit, inner);
  for (Event& event : inner) {
    if (auto* completed = std::get_if<Completed>(&event)) {
      take(std::move(*completed));
    } else if (auto* down = std::get_if<PeerDown>(&event)) {
      fail_held(down->peer, down->reason);
      downs_.push_back(std::move(*down));
    } else {
      events_.push_back(std::move(event));
    }
  }
  std::move(events_.begin(), events_.end(), std::back_inserter(events));
  events_.clear();
  tell_downs(events);
  return any;
}

std::optional<int> FaultyTransport::arm() {
  return held_.empty() && events_.empty() && downs_.empty() ? inner_->arm() : std::nullopt;
}

void FaultyTransport::take_over() {
  Transport::take_over();
  inner_->take_over();
}

}  // namespace kvloom
