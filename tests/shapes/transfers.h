// transfers.h: the session's machines on small plans, and what they do in a few words, so that a test can list what it wants.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvloom/plan/compile.h"
#include "kvloom/session/receiver.h"
#include "kvloom/session/sender.h"
#include "tests/shapes/shapes.h"

namespace kvloom::shapes {

using SharedPlan = std::shared_ptr<const Plan>;

inline SharedPlan shared_plan(const CacheShape& shape, const std::string& from, const std::string& to,
                              std::int64_t total = kUnbounded) {
  auto plan = compile(side(shape, from), side(shape, to), total);
  if (!plan) ADD_FAILURE() << from << " to " << to << ": " << plan.error().message;
  return std::make_shared<const Plan>(std::move(plan.value()));
}

inline PartnerId source_partner(std::int32_t rank) { return PartnerId(100 + static_cast<std::uint64_t>(rank)); }
inline PartnerId target_partner(std::int32_t rank) { return PartnerId(200 + static_cast<std::uint64_t>(rank)); }
inline TransferKey key(std::uint64_t epoch = 1, std::string name = "req") { return {std::move(name), Epoch(epoch)}; }

// Column c is page c.
inline std::vector<GrantTable> tables_for(const Plan& plan, std::int64_t total) {
  std::vector<GrantTable> out(plan.groups().size());
  for (std::size_t g = 0; g < out.size(); ++g) {
    const std::int64_t page = plan.groups()[g].target->layout.page_tokens();
    for (std::int64_t column = 0; column * page < total; ++column) out[g].pages.emplace_back(column);
    out[g].pool_pages = static_cast<std::int64_t>(out[g].pages.size());
  }
  return out;
}

// Source s writes under the tag 1000 (rank + 1) + s.
inline ReceiverJob receiver_job(const SharedPlan& plan, std::int32_t rank, TokenRange range, bool can_revoke = false) {
  ReceiverJob job;
  job.key = key();
  job.rank = Rank(rank);
  job.plan = plan;
  job.digest = digest_of(*plan);
  job.range = range;
  job.tables = tables_for(*plan, range.end);
  for (std::int32_t s = 0; s < plan->source().ranks(); ++s) job.sources.push_back(source_partner(s));
  job.first_tag = Tag(1000 * (static_cast<std::uint64_t>(rank) + 1));
  job.time = std::chrono::seconds(10);
  job.can_revoke = can_revoke;
  return job;
}

inline SenderJob sender_job(std::int32_t rank, SessionLimits limits = {}, bool has_payload = false) {
  return {key(), Rank(rank), std::chrono::seconds(10), has_payload, limits};
}

inline Grant grant_of(const Plan& plan, std::int32_t target, TokenRange range,
                      std::chrono::nanoseconds time_left = std::chrono::seconds(10)) {
  return {key(),
          Rank(target),
          digest_of(plan),
          range,
          time_left,
          Tag(1000 * (static_cast<std::uint64_t>(target) + 1)),
          tables_for(plan, range.end)};
}

inline Sender::Granted granted(const SharedPlan& plan, std::int32_t target, TokenRange range,
                               std::chrono::nanoseconds time_left = std::chrono::seconds(10)) {
  return {target_partner(target), std::make_shared<const Grant>(grant_of(*plan, target, range, time_left)), plan};
}

// Bytes that a part of a post writes.
inline Bytes bytes_of(const Plan& plan, Rank source, Rank target, const PostPart& part) {
  const auto path = plan.path(part.layer.group, source, target);
  if (!path) ADD_FAILURE() << "a post without a path";
  std::int64_t tokens = 0;
  for (const StridedSet& family : path->tokens) tokens += family.count_in(part.chunk.begin, part.chunk.end);
  return Bytes(tokens * path->row_bytes);
}

// What is noticed once the post is visible.
inline Progress progress_of(Rank source, const Sender::Post& post) {
  Progress out;
  for (const PostPart& part : post.parts) out.parts.push_back({part.layer, bytes_of(*post.plan, source, post.target, part)});
  out.last = post.last;
  out.payload = post.payload;
  return out;
}

// ---- in words ----

inline std::string text(const Receiver::Admit& a) { return fmt::format("admit {} tag {}", a.source.value, a.tag.value); }
inline std::string text(const Receiver::SendGrant& a) { return fmt::format("grant {}", a.source.value); }
inline std::string text(const Receiver::SendCancel& a) { return fmt::format("cancel {}", a.source.value); }
inline std::string text(const Receiver::Revoke& a) { return fmt::format("revoke {} tag {}", a.source.value, a.tag.value); }
inline std::string text(const Receiver::FenceOff& a) { return fmt::format("fence {}", a.source.value); }
inline std::string text(const Receiver::Publish& a) { return fmt::format("publish {}", a.layer.value); }
inline std::string text(const Receiver::End& a) { return fmt::format("end {}", to_string(a.outcome)); }
inline std::string text(const Receiver::Release&) { return "release"; }

inline std::string text(const Sender::SendAccepted& a) { return fmt::format("accepted to {}", a.to.value); }
inline std::string text(const Sender::SendFailed& a) { return fmt::format("failed to {}", a.to.value); }
inline std::string text(const Sender::SendQuiesced& a) { return fmt::format("quiesced to {}", a.to.value); }
inline std::string text(const Sender::Post& a) {
  std::string out = fmt::format("post {} to {}:", a.id.value, a.target.value);
  for (const PostPart& part : a.parts)
    out += fmt::format(" {}/{} [{}, {})", part.layer.group, part.layer.layer.value, part.chunk.begin, part.chunk.end);
  if (a.last) out += " last";
  if (!a.payload.empty()) out += fmt::format(" payload {}", a.payload.size());
  return out;
}
inline std::string text(const Sender::FenceOff& a) { return fmt::format("fence {}", a.partner.value); }
inline std::string text(const Sender::ReleaseLayer& a) { return fmt::format("release layer {}", a.layer.value); }
inline std::string text(const Sender::End& a) { return fmt::format("end {}", to_string(a.outcome)); }
inline std::string text(const Sender::Release&) { return "release"; }

// "cancel 0; cancel 1; end failed"
template <class... Kinds>
std::string said(const std::vector<std::variant<Kinds...>>& actions) {
  std::string out;
  for (const auto& action : actions)
    out += (out.empty() ? "" : "; ") + std::visit([](const auto& what) { return text(what); }, action);
  return out;
}

// The actions of one kind.
template <class Kind, class Actions>
std::vector<Kind> only(const Actions& actions) {
  std::vector<Kind> out;
  for (const auto& action : actions)
    if (const auto* kind = std::get_if<Kind>(&action)) out.push_back(*kind);
  return out;
}

// ---- machines ----

// A machine, all that it has done, and which edges it has walked.
template <class M>
class Driven {
 public:
  explicit Driven(M machine) : machine_(std::move(machine)) {}

  // What it does on this, in words.
  std::string on(const typename M::Event& event, Instant now = Instant(0)) {
    last_.clear();
    machine_.advance(event, now, last_, &counts_);
    did_.insert(did_.end(), last_.begin(), last_.end());
    return said(last_);
  }

  const M& machine() const { return machine_; }
  const std::vector<typename M::Action>& last() const { return last_; }
  const std::vector<typename M::Action>& did() const { return did_; }
  template <class Kind>
  std::size_t count() const {
    return only<Kind>(did_).size();
  }
  const EdgeCounts& counts() const { return counts_; }

 private:
  M machine_;
  std::vector<typename M::Action> last_, did_;
  EdgeCounts counts_;
};

// All ranks of one transfer; messages come at once. A post stays open until it is completed: its notice, then its Posted.
class Transfer {
 public:
  Transfer(SharedPlan plan, TokenRange range, SessionLimits limits = {}, bool has_payload = false) : plan_(std::move(plan)) {
    for (std::int32_t t = 0; t < plan_->target().ranks(); ++t)
      targets_.emplace_back(Receiver::make(receiver_job(plan_, t, range)).value());
    for (std::int32_t s = 0; s < plan_->source().ranks(); ++s)
      sources_.emplace_back(Sender(sender_job(s, limits, has_payload), Instant(0)));
  }

  void grant(std::int32_t target) { at_target(target, Receiver::Begin{}); }
  void grant_all() {
    for (std::int32_t t = 0; t < plan_->target().ranks(); ++t) grant(t);
  }
  void ready(std::int32_t source, LayerId layer, std::int64_t tokens) { at_source(source, Sender::Ready{layer, tokens}); }
  // All layers of all groups, on every source.
  void ready_all(std::int64_t tokens) {
    for (std::int32_t s = 0; s < plan_->source().ranks(); ++s)
      for (const LayerId layer : layers()) ready(s, layer, tokens);
  }
  // The oldest of those on the path of the `which`-th: notices of a tag come in the order of posting (transport.h).
  void complete(std::size_t which) {
    const auto at = std::find_if(open_.begin(), open_.end(), [&](const auto& open) {
      return open.first == open_[which].first && open.second.target == open_[which].second.target;
    });
    const auto [source, post] = *at;
    open_.erase(at);
    at_target(post.target.value, Receiver::SourceProgress{source, progress_of(source, post)});
    at_source(source.value, Sender::Posted{post.id, {}});
  }
  void complete_all() {
    while (!open_.empty()) complete(0);
  }

  void at_source(std::int32_t source, const Sender::Event& event) {
    auto& sender = sources_[static_cast<std::size_t>(source)];
    sender.on(event);
    for (const auto& post : only<Sender::Post>(sender.last())) {
      open_.emplace_back(Rank(source), post);
      posts_.emplace_back(Rank(source), post);
    }
  }
  void at_target(std::int32_t target, const Receiver::Event& event) {
    auto& receiver = targets_[static_cast<std::size_t>(target)];
    receiver.on(event);
    for (const auto& grant : only<Receiver::SendGrant>(std::vector(receiver.last())))
      at_source(grant.source.value, Sender::Granted{target_partner(target), std::make_shared<const Grant>(grant.grant), plan_});
  }

  std::vector<LayerId> layers() const {
    std::vector<LayerId> out;
    for (const GroupPlan& group : plan_->groups())
      out.insert(out.end(), group.target->layers.begin(), group.target->layers.end());
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
  }
  const Plan& plan() const { return *plan_; }
  Driven<Receiver>& target(std::int32_t rank) { return targets_[static_cast<std::size_t>(rank)]; }
  Driven<Sender>& source(std::int32_t rank) { return sources_[static_cast<std::size_t>(rank)]; }
  const std::vector<std::pair<Rank, Sender::Post>>& open() const { return open_; }    // by source
  const std::vector<std::pair<Rank, Sender::Post>>& posts() const { return posts_; }  // all that there were
  // Every rank of both sides has landed.
  testing::AssertionResult landed() const {
    for (std::size_t t = 0; t < targets_.size(); ++t)
      if (targets_[t].machine().state() != Receiver::State::landed)
        return testing::AssertionFailure() << "decode rank " << t << " is " << to_string(targets_[t].machine().state());
    for (std::size_t s = 0; s < sources_.size(); ++s)
      if (sources_[s].machine().state() != Sender::State::landed)
        return testing::AssertionFailure() << "prefill rank " << s << " is " << to_string(sources_[s].machine().state());
    return testing::AssertionSuccess();
  }

 private:
  SharedPlan plan_;
  std::vector<Driven<Receiver>> targets_;
  std::vector<Driven<Sender>> sources_;
  std::vector<std::pair<Rank, Sender::Post>> open_, posts_;
};

// ---- tables of edges ----

// No edge stands twice, and from `first` each of `states` can be reached.
template <class State, class On>
Expected<void> check_edges(std::span<const Edge<State, On>> edges, State first, std::vector<State> states) {
  for (std::size_t i = 0; i < edges.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (edges[i].from == edges[j].from && edges[i].on == edges[j].on && edges[i].to == edges[j].to)
        return fail(Code::invalid_argument, "{} on {} to {} stands twice", to_string(edges[i].from), to_string(edges[i].on),
                    to_string(edges[i].to));
  std::vector<State> reached = {first};
  for (std::size_t next = 0; next < reached.size(); ++next)
    for (const auto& edge : edges)
      if (edge.from == reached[next] && std::find(reached.begin(), reached.end(), edge.to) == reached.end())
        reached.push_back(edge.to);
  for (const State state : states)
    if (std::find(reached.begin(), reached.end(), state) == reached.end())
      return fail(Code::invalid_argument, "{} is never reached", to_string(state));
  return {};
}

// Edges that were never walked: "open on begin to landed, ...".
template <class State, class On>
std::string unwalked(std::span<const Edge<State, On>> edges, const EdgeCounts& counts) {
  std::string out;
  for (std::size_t i = 0; i < edges.size(); ++i)
    if (i >= counts.size() || counts[i] == 0)
      out += fmt::format("{}{} on {} to {}", out.empty() ? "" : ", ", to_string(edges[i].from), to_string(edges[i].on),
                         to_string(edges[i].to));
  return out;
}

inline void add_counts(EdgeCounts& sum, const EdgeCounts& more) {
  sum.resize(std::max(sum.size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) sum[i] += more[i];
}

// Many lives, each of a seed, that keep the laws which Life checks as it lives; between them they walk every edge of the machine.
template <class Machine, class Life>
void live_and_walk_every_edge() {
  EdgeCounts walked;
  for (std::uint64_t seed = 0; seed < 6000; ++seed) {
    SCOPED_TRACE(seed);
    Life life(seed);
    life.live();
    add_counts(walked, life.counts());
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(unwalked(Machine::edges(), walked), "");
}

}  // namespace kvloom::shapes
