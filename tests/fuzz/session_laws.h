// session_laws.h: what was seen of transfers at a source rank and at a target rank, and the laws of sender.h and receiver.h that it has to keep.
// For session_machines_fuzz.cc. It knows what the machines were told and what they did, not how they work.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kvloom/bind/cache_memory.h"
#include "kvloom/session/receiver.h"
#include "kvloom/session/source_book.h"
#include "tests/fuzz/session_cast.h"

namespace kvloom::fuzz {

inline void require(bool holds, const char* law) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", law);
  std::abort();
}

struct OpenPost {
  TransferKey key;
  Sender::Post post;
  bool there = false;  // its bytes are visible, and its notice is told
};

// ---- at a source ----

class SourceSeen {
 public:
  explicit SourceSeen(Rank rank) : rank_(rank) {}
  std::vector<OpenPost> open;

  bool offered(const TransferKey& key, Instant until) { return transfers_.try_emplace(key, Transfer{.until = until}).second; }
  void ready(const TransferKey& key, LayerId layer, std::int64_t tokens) {
    const auto at = transfers_.find(key);
    if (at == transfers_.end()) return;
    std::int64_t& mark = at->second.ready[layer];
    mark = std::max(mark, tokens);
  }
  // From here until the next of these, what it does is about this message.
  void hears(PartnerId from, const Message* message) {
    heard_ = {};
    if (message == nullptr) return;
    if (const auto* grant = std::get_if<Grant>(message)) {
      grants_.emplace_back(from, *grant);
      heard_ = {grant->key, from, grant->target};
    }
    if (const auto* cancel = std::get_if<Cancel>(message)) {
      cancels_[cancel->key].emplace(from, cancel->target);
      heard_ = {cancel->key, from, cancel->target};
    }
  }

  void does(const TransferKey& key, const Sender::Action& action, bool honest) {
    const auto at = transfers_.find(key);
    require(at != transfers_.end() && !at->second.released, "nothing is done for what is over, or was never offered");
    Transfer& seen = at->second;
    if (const auto* post = std::get_if<Sender::Post>(&action)) posts(key, seen, *post);
    if (const auto* layer = std::get_if<Sender::ReleaseLayer>(&action)) releases_layer(key, seen, layer->layer);
    if (const auto* end = std::get_if<Sender::End>(&action)) {
      require(!seen.ended, "I4: a source ends once");
      require((end->outcome == Outcome::landed) == end->why.message.empty(), "what did not land says why");
      seen.ended = end->outcome;
    }
    if (std::holds_alternative<Sender::Release>(action)) releases(key, seen, honest);
  }
  void delivered_last(const OpenPost& post) { transfers_.at(post.key).has_last.insert(post.post.target); }

  // A Quiesced is true, and answers a cancel, or a grant that its cancel has overtaken.
  void says(PartnerId to, const Message& message) {
    const auto* quiesced = std::get_if<Quiesced>(&message);
    if (quiesced == nullptr) return;
    auto& pending = cancels_[quiesced->key];
    const auto is_quiet = [&](Rank target) {
      return std::none_of(open.begin(), open.end(), [&](const OpenPost& post) {
        return post.key == quiesced->key && post.post.to == to && post.post.target == target;
      });
    };
    if (heard_.key == quiesced->key && heard_.from == to) {
      require(is_quiet(heard_.target), "who is told that all is quiet has no open post");
      quiet_.emplace(quiesced->key, to, heard_.target);
      pending.erase({to, heard_.target});
      return;
    }
    std::erase_if(pending, [&](const auto& cancel) { return cancel.first == to && is_quiet(cancel.second); });
  }

  std::size_t offers() const { return transfers_.size(); }
  std::size_t grants() const { return grants_.size(); }
  void in_time(Instant now, std::chrono::nanoseconds grace) const {
    for (const auto& [key, seen] : transfers_)
      require(seen.ended || now < seen.until + grace, "I4: a source whose fences work ends in time + grace");
  }
  void in_the_end() const {
    for (const auto& [key, seen] : transfers_) require(seen.ended && seen.released, "I4: a source ends and releases");
    for (const auto& [key, pending] : cancels_) require(pending.empty(), "every cancel is answered by Quiesced");
  }

 private:
  struct Transfer {
    Instant until{};
    std::map<LayerId, std::int64_t> ready;
    std::set<LayerId> released_layers;
    std::map<std::tuple<Rank, Tag, CacheLayer>, std::int64_t> posted_to;
    std::set<Rank> has_last;           // targets whose `last` was delivered
    std::shared_ptr<const Plan> plan;  // of its posts
    std::optional<Outcome> ended;
    bool released = false;
  };
  struct Heard {
    TransferKey key;
    PartnerId from;
    Rank target;
  };

  void posts(const TransferKey& key, Transfer& seen, const Sender::Post& post) {
    const Grant& grant = *post.grant;
    require(!seen.ended, "nothing is posted after the end");
    const bool told =
        std::any_of(grants_.begin(), grants_.end(), [&](const auto& g) { return g.first == post.to && g.second == grant; });
    require(told && grant.key == key && grant.target == post.target, "a post is for a grant, and goes to who has granted it");
    require(!quiet_.contains({key, post.to, post.target}), "nothing is posted to who was told that all is quiet");
    require(seen.plan == nullptr || seen.plan == post.plan, "all posts of a transfer are under one plan");
    seen.plan = post.plan;
    for (const PostPart& part : post.parts) {
      require(!seen.released_layers.contains(part.layer.layer), "I3: a layer that was released is not read any more");
      const GroupSide& group = *post.plan->groups()[static_cast<std::size_t>(part.layer.group)].target;
      const std::int64_t needs = group.kind == GroupKind::state ? grant.range.end : part.chunk.end;
      require(part.chunk.begin < part.chunk.end && seen.ready[part.layer.layer] >= needs, "only what is ready is posted");
      std::int64_t& before = seen.posted_to.try_emplace({post.target, grant.tag, part.layer}, -1).first->second;
      require(part.chunk.begin >= before, "no token is posted twice");
      before = part.chunk.end;
    }
    open.push_back({key, post, false});
  }
  void releases_layer(const TransferKey& key, Transfer& seen, LayerId layer) {
    require(seen.released_layers.insert(layer).second, "a layer is released once");
    for (const OpenPost& post : open)
      for (const PostPart& part : post.post.parts)
        require(post.key != key || part.layer.layer != layer, "I3: no open post reads a layer that is released");
  }
  void releases(const TransferKey& key, Transfer& seen, bool honest) {
    require(seen.ended.has_value(), "I4: a source releases with its end, once");
    for (const OpenPost& post : open) require(post.key != key, "I3: no open post reads what is released");
    seen.released = true;
    if (*seen.ended != Outcome::landed || !honest) return;
    for (const Rank target : granting_targets(*seen.plan, rank_))
      require(seen.has_last.contains(target), "what has landed was delivered to every target, to the last byte");
  }

  Rank rank_;
  std::map<TransferKey, Transfer> transfers_;
  std::map<TransferKey, std::multiset<std::pair<PartnerId, Rank>>> cancels_;  // that have no answer yet
  std::set<std::tuple<TransferKey, PartnerId, Rank>> quiet_;                  // who was told so, as which target
  std::vector<std::pair<PartnerId, Grant>> grants_;
  Heard heard_;
};

// ---- at a target ----

class TargetSeen {
 public:
  TargetSeen(Rank rank, bool revokes) : rank_(rank), revokes_(revokes) {}

  // @return false: it was begun before
  bool begins(const ReceiverJob& job, Instant until) {
    Transfer fresh;
    fresh.plan = job.plan;
    fresh.range = job.range;
    fresh.until = until;
    return transfers_.try_emplace(job.key, std::move(fresh)).second;
  }
  bool knows(const TransferKey& key) const { return transfers_.contains(key); }
  void hears_quiesced(const TransferKey& key, Rank source) {
    if (const auto at = transfers_.find(key); at != transfers_.end()) at->second.silent.insert(source);
  }
  // `source`: by the tag.
  void notices(Rank source, const TransferKey& key, const Progress& progress) {
    Transfer& seen = transfers_.at(key);
    if (progress.last) {
      seen.silent.insert(source);
      seen.payloads.try_emplace(source, progress.payload);  // what comes after the last is nothing
    }
    for (const LandedPart& part : progress.parts) seen.told[part.layer] += part.bytes.value;
  }
  void cuts_off(Rank source) {
    for (auto& [key, seen] : transfers_) {
      seen.silent.insert(source);
      seen.dead.insert(source);
    }
  }
  // The transfer and source of a tag.
  std::optional<std::pair<TransferKey, Rank>> find(Tag tag) const {
    for (const auto& [key, seen] : transfers_)
      for (const auto& [source, admitted] : seen.tags)
        if (admitted == tag && !seen.released) return std::pair(key, source);
    return std::nullopt;
  }

  void does(const TransferKey& key, const Receiver::Action& action) {
    const auto at = transfers_.find(key);
    require(at != transfers_.end() && !at->second.released, "nothing is done for what is over, or never begun");
    Transfer& seen = at->second;
    if (const auto* admit = std::get_if<Receiver::Admit>(&action)) seen.tags.emplace(admit->source, admit->tag);
    if (const auto* revoke = std::get_if<Receiver::Revoke>(&action)) {
      require(revokes_ && seen.tags.at(revoke->source) == revoke->tag, "what was admitted is revoked, where that can be");
      seen.silent.insert(revoke->source);
      seen.dead.insert(revoke->source);
    }
    if (const auto* publish = std::get_if<Receiver::Publish>(&action)) publishes(seen, publish->layer);
    if (const auto* end = std::get_if<Receiver::End>(&action)) ends(seen, *end);
    if (std::holds_alternative<Receiver::Release>(action)) releases(seen);
  }
  // As long as everybody is honest.  `posts`: of a source, that are not over
  void stays_untouched(const TransferKey& key, Rank source, const std::vector<OpenPost>& posts) const {
    const Transfer& seen = transfers_.at(key);
    for (const OpenPost& post : posts)
      require(post.there || post.key != key || post.post.target != rank_ || seen.dead.contains(source),
              "I1: nothing lands in pages that were released");
  }

  std::size_t begun() const { return transfers_.size(); }
  void in_time(Instant now) const {
    for (const auto& [key, seen] : transfers_) require(seen.ended || now < seen.until, "I4: a target ends in time + grace");
  }
  void in_the_end() const {
    for (const auto& [key, seen] : transfers_) require(seen.ended && seen.released, "I4: a target ends and releases");
  }

 private:
  struct Transfer {
    std::shared_ptr<const Plan> plan;
    TokenRange range;
    Instant until{};
    std::map<Rank, Tag> tags;
    std::set<Rank> silent;  // finished, quiet, revoked or cut off
    std::set<Rank> dead;    // revoked or cut off: nothing of theirs lands
    std::vector<LayerId> published;
    std::map<CacheLayer, std::int64_t> told;  // bytes
    std::map<Rank, std::vector<std::byte>> payloads;
    std::optional<Outcome> ended;
    bool released = false;
  };

  void publishes(Transfer& seen, LayerId layer) {
    require(!seen.ended, "I2: no layer is published after the end");
    require(seen.published.empty() || seen.published.back() < layer, "I2: layers are published in order, each once");
    seen.published.push_back(layer);
    if (is_by_value(*seen.plan)) return;
    for (std::int32_t g = 0; g < static_cast<std::int32_t>(seen.plan->groups().size()); ++g) {
      std::int64_t owed = 0;
      for (std::int32_t s = 0; s < seen.plan->source().ranks(); ++s)
        if (const auto path = seen.plan->path(g, Rank(s), rank_)) {
          const auto ids = seen.plan->layer_ids(*path);
          if (std::find(ids.begin(), ids.end(), layer) != ids.end())
            owed += seen.plan->bytes(*path, seen.range).value / path->layers.size();
        }
      require(seen.told[{g, layer}] >= owed, "I2: a layer is published after all its bytes");
    }
  }
  void ends(Transfer& seen, const Receiver::End& end) const {
    require(!seen.ended, "I4: a target ends once");
    require((end.outcome == Outcome::landed) == end.why.message.empty(), "what did not land says why");
    seen.ended = end.outcome;
    if (end.outcome != Outcome::landed) return;
    std::set<LayerId> held;
    for (const auto& [group, layer] : held_tensors(seen.plan->target(), rank_)) held.insert(layer);
    require(std::equal(held.begin(), held.end(), seen.published.begin(), seen.published.end()), "I2: what landed has all layers");
    std::erase_if(seen.payloads, [](const auto& payload) { return payload.second.empty(); });
    require(std::equal(end.payloads.begin(), end.payloads.end(), seen.payloads.begin(), seen.payloads.end(),
                       [](const auto& a, const auto& b) { return a.first == b.first && a.second == b.second; }),
            "what landed has all payloads");
  }
  void releases(Transfer& seen) const {
    require(seen.ended.has_value(), "I4: a target releases once, not before its end");
    seen.released = true;
    for (const Rank source : granted_sources(*seen.plan, rank_))
      require(seen.silent.contains(source), "I1: pages are released when every source is finished, quiet, revoked or cut off");
  }

  Rank rank_;
  bool revokes_;
  std::map<TransferKey, Transfer> transfers_;
};

}  // namespace kvloom::fuzz
