// What happens between the processes of a World: messages, posts, losses; what the machines ask for; and the laws.
#include <algorithm>
#include <utility>

#include "kvloom/bind/bind.h"
#include "kvloom/sim/world_parts.h"

namespace kvloom::sim {

// ---- network ----

void World::send(std::size_t from, PartnerId to, const Message& message) {
  const auto there = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.id == to; });
  if (there == nodes_.end()) return;
  const auto n = static_cast<std::size_t>(there - nodes_.begin());
  say([&] { return fmt::format("node {} to {}: {}", from, n, to_string(message)); });
  if (fault(FaultKind::connection_cut)) cut_connection(from, n);
  const int copies = fault(FaultKind::message_dropped) ? 0 : fault(FaultKind::message_doubled) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    std::int64_t delay = random_.between(20, 400) * kMicro;
    if (fault(FaultKind::message_late)) delay += random_.between(0, 300) * kMilli;
    on(n, now_ + delay, [this, n, sender = nodes_[from].id, message] {
      Node& node = nodes_[n];
      if (node.source) {
        std::vector<SourceBook::Action> actions;
        node.from->message(sender, message, local(node), actions);
        obey(n, actions);
      } else {
        std::vector<TargetBook::Action> actions;
        node.to->message(sender, message, local(node), actions);
        obey(n, actions);
      }
    });
  }
}

// Both ends lose the control connection; it is made again at once, but what they were about is lost.
void World::cut_connection(std::size_t a, std::size_t b) {
  say([&] { return fmt::format("the connection of nodes {} and {} is cut", a, b); });
  for (const auto& [here, there] : {std::pair(a, b), std::pair(b, a)})
    on(here, now_ + random_.between(0, 20) * kMilli, [this, here = here, partner = nodes_[there].id] { lose(here, partner); });
}

void World::lose(std::size_t n, PartnerId partner) {
  const Error why{Code::unavailable, Scope::peer, "the connection is lost"};
  if (nodes_[n].source) {
    std::vector<SourceBook::Action> actions;
    nodes_[n].from->gone(partner, why, local(nodes_[n]), actions);
    obey(n, actions);
  } else {
    std::vector<TargetBook::Action> actions;
    nodes_[n].to->gone(partner, why, local(nodes_[n]), actions);
    obey(n, actions);
  }
}

void World::cut_off(std::size_t n, PartnerId partner) {
  std::vector<TargetBook::Action> actions;
  nodes_[n].to->cut_off(partner, local(nodes_[n]), actions);
  obey(n, actions);
}

// ---- transport ----

void World::post(std::size_t n, const TransferKey& key, const Sender::Post& post) {
  Node& node = nodes_[n];
  const auto found = node.attempts.find(key);
  if (found == node.attempts.end() || found->second.released) return violate("a post after the pages were released");
  const Attempt& attempt = found->second;
  const auto there = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& other) { return other.id == post.to; });
  auto op = std::make_shared<Operation>();
  op->source = n;
  op->source_id = node.id;
  op->target_id = post.to;
  op->key = key;
  op->id = post.id;
  op->tag = post.grant->tag;
  Progress progress;
  progress.last = post.last;
  progress.payload = post.payload;
  for (const PostPart& part : post.parts) {
    const auto g = static_cast<std::size_t>(part.layer.group);
    const auto path = post.plan->path(part.layer.group, node.rank, post.target);
    const auto table = PageTable::make(post.grant->tables[g].pages, post.grant->tables[g].pool_pages, PageTable::Use::target);
    const auto source_group = static_cast<std::size_t>(post.plan->groups()[g].source - post.plan->source().groups().data());
    auto bound = bind(*post.plan, *path, attempt.bound[source_group], *table, post.grant->range, part.chunk);
    if (!bound) return violate("bind refuses: " + bound.error().message);
    std::array<Run, 16> runs;
    while (const std::size_t count = bound->next(runs))
      for (std::size_t r = 0; r < count; ++r)
        for (std::int64_t i = 0; i < runs[r].count; ++i)
          op->pieces.push_back({source_group, part.layer.layer, (runs[r].source_offset + runs[r].source_step * i).value,
                                (runs[r].target_offset + runs[r].target_step * i).value, runs[r].bytes.value});
    if (bound->bytes() > Bytes(0)) progress.parts.push_back({part.layer, bound->bytes()});
  }
  if (!progress.parts.empty() && fault(FaultKind::lied)) progress.parts.front().bytes += Bytes(std::int64_t{1} << 40);
  op->notice = encode_progress(progress);
  op->left = op->pieces.size();
  say([&] {
    return fmt::format("node {} posts {} of {} to rank {}: {} parts, {} pieces{}", n, post.id.value, to_string(key),
                       post.target.value, post.parts.size(), op->pieces.size(), post.last ? ", last" : "");
  });
  operations_.push_back(op);
  if (there == nodes_.end() || there->dead) {
    return on(n, now_ + random_.between(1, 20) * kMilli,
              [this, op] { complete(op, fail(Code::unavailable, "the peer is gone")); });
  }
  op->target = static_cast<std::size_t>(there - nodes_.begin());
  if (granted_on_[{node.id, post.to, op->tag}] !=
      connections_[{node.id, post.to}])  // its keys went with the connection that was fenced
    return on(n, now_ + random_.between(5, 50) * kMicro,
              [this, op] { complete(op, fail(Code::unavailable, "the connection that it was granted on is gone")); });
  op->hangs = fault(FaultKind::post_hung);
  const bool fails = fault(FaultKind::post_failed), half = fault(FaultKind::post_half), late = fault(FaultKind::post_late);
  const std::int64_t begin = now_ + random_.between(10, 500) * kMicro + (late ? random_.between(0, 400) * kMilli : 0);
  const std::size_t lands = fails ? 0 : half || op->hangs ? op->pieces.size() / 2 : op->pieces.size();
  for (std::size_t i = 0; i < lands; ++i) at(begin + random_.between(0, 300) * kMicro, [this, op, i] { land(op, i); });
  if ((fails || half) && !op->hangs)
    at(begin + random_.between(300, 5000) * kMicro, [this, op] { complete(op, fail(Code::io, "the transport failed")); });
  if (op->pieces.empty() && !fails && !half && !op->hangs) at(begin, [this, op] { finish_landing(op); });
}

void World::land(const std::shared_ptr<Operation>& op, std::size_t i) {
  if (op->over) return;
  Node& target = nodes_[op->target];
  if (target.dead || target.id != op->target_id) return;  // its memory is gone; the source will hear of it
  if (fencing_ == Fencing::revokes) {                     // the target copies: it has to run, and looks at the tag
    if (target.frozen_until > now_) return at(target.frozen_until, [this, op, i] { land(op, i); });
    if (!target.admitted.contains({op->source_id, op->tag}))
      return complete(op, fail(Code::cancelled, "the target does not take this tag"));
  }
  if (!check_landing(*op, i)) return;
  const Operation::Piece& piece = op->pieces[i];
  const auto& from = nodes_[op->source].cache->bytes(piece.group, piece.layer);
  auto& to = target.cache->bytes(target_group(*op, piece.group), piece.layer);
  std::copy_n(from.begin() + piece.from, piece.bytes, to.begin() + piece.to);
  if (--op->left == 0) at(now_ + random_.between(0, 50) * kMicro, [this, op] { finish_landing(op); });
}

std::size_t World::target_group(const Operation& op, std::size_t source_group) const {
  const std::string& name = nodes_[op.source].cache->side().groups()[source_group].name;
  const auto& groups = nodes_[op.target].cache->side().groups();
  return static_cast<std::size_t>(std::find_if(groups.begin(), groups.end(), [&](const GroupSide& g) { return g.name == name; }) -
                                  groups.begin());
}

// I1 and I3: both ends' pages belong to the attempt, now.
bool World::check_landing(const Operation& op, std::size_t i) {
  const Operation::Piece& piece = op.pieces[i];
  const auto owned = [&](std::size_t n, std::size_t group, std::int64_t offset, const char* law) {
    Node& node = nodes_[n];
    const auto attempt = node.attempts.find(op.key);
    const std::int64_t stride = node.cache->side().groups()[group].layout.page_stride();
    for (std::int64_t page = offset / stride; page <= (offset + piece.bytes - 1) / stride; ++page) {
      const std::int64_t owner = node.cache->pool(group).owner(node.cache->pool_page(group, page));
      if (attempt != node.attempts.end() && !attempt->second.released && owner == attempt->second.number) continue;
      violate(fmt::format("{}: {} post {} of {}, page {} of node {} belongs to {}", law,
                          nodes_[op.source].cache->side().groups()[piece.group].name, op.id.value, to_string(op.key), page, n,
                          owner));
      return false;
    }
    return true;
  };
  if (!owned(op.target, target_group(op, piece.group), piece.to, "I1 a write lands in a page after its release")) return false;
  if (nodes_[op.source].dead || nodes_[op.source].id != op.source_id) return false;  // its memory is gone: nothing can be read
  if (!owned(op.source, piece.group, piece.from, "I3 a run reads a page that is not the transfer's any more")) return false;
  if (nodes_[op.source].attempts.at(op.key).released_layers.contains(piece.layer)) {
    violate(fmt::format("I3 layer {} of {} is read after it was released on node {}", piece.layer.value, to_string(op.key),
                        op.source));
    return false;
  }
  return true;
}

// All bytes are visible: the notice, once those of the posts before it are out, then the word to the source.
void World::finish_landing(const std::shared_ptr<Operation>& op) {
  if (op->over || op->hangs) return;
  if (broken_tags_.contains({op->source_id, op->target_id, op->tag}))
    return complete(op, fail(Code::io, "a write before it failed"));
  op->there = true;
  tell_notices(op->source_id, op->target_id, op->tag);
}

void World::tell_notices(PartnerId source, PartnerId target_id, Tag tag) {
  const auto first = std::find_if(operations_.begin(), operations_.end(), [&](const auto& op) {
    return op->source_id == source && op->target_id == target_id && op->tag == tag;
  });
  if (first == operations_.end() || !(*first)->there) return;
  const auto op = *first;
  if (nodes_[op->target].dead || nodes_[op->target].id != op->target_id) return;
  on(op->target, now_, [this, op] {
    if (op->over) return;
    Node& target = nodes_[op->target];
    if (fencing_ == Fencing::revokes && !target.admitted.contains({op->source_id, op->tag}))
      return complete(op, fail(Code::cancelled, "the target does not take this tag"));
    std::vector<TargetBook::Action> actions;
    target.to->notice(op->source_id, op->tag, op->notice, local(target), actions);
    obey(op->target, actions);
    complete(op, {});
  });
}

// Ends the operation; its source is told, if it can hear.
void World::complete(const std::shared_ptr<Operation>& op, Expected<void> delivered) {
  if (op->over) return;
  op->over = true;
  std::erase(operations_, op);
  if (!delivered)  // no notice follows a write of its tag that failed
    for (const auto& later : std::vector(operations_))
      if (later->source_id == op->source_id && later->target_id == op->target_id && later->tag == op->tag && later->there)
        complete(later, fail(Code::io, "a write before it failed"));
  if (!delivered) broken_tags_.insert({op->source_id, op->target_id, op->tag});
  tell_notices(op->source_id, op->target_id, op->tag);
  if (nodes_[op->source].id != op->source_id) return;
  on(op->source, now_ + random_.between(5, 200) * kMicro, [this, op, delivered = std::move(delivered)] {
    std::vector<SourceBook::Action> actions;
    Node& node = nodes_[op->source];
    node.from->tell(op->key, Sender::Posted{op->id, delivered}, local(node), actions);
    obey(op->source, actions);
  });
}

// Nothing that `source` has posted to `target` lands any more.
void World::cut_link(PartnerId source, PartnerId target, const char* why) {
  for (const auto& op : std::vector(operations_))
    if (op->source_id == source && op->target_id == target) complete(op, fail(Code::unavailable, "{}", why));
}

// `n` cuts the connection of the transport to `partner`.
void World::fence(std::size_t n, PartnerId partner) {
  const auto there = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.id == partner; });
  const bool gone = there == nodes_.end() || there->dead;
  if (fencing_ == Fencing::waits && !nodes_[n].source && !gone) return;  // it has our memory mapped, and may still write
  say([&] { return fmt::format("node {} fences partner {} off", n, partner.value); });
  const PartnerId self = nodes_[n].id;
  const auto ends = nodes_[n].source ? std::pair(self, partner) : std::pair(partner, self);
  const int made = ++connections_[ends];
  if (!nodes_[n].source) known_connections_[ends] = made;
  nodes_[n].source ? cut_link(self, partner, "fenced") : cut_link(partner, self, "fenced");
  if (!nodes_[n].source) fenced_.emplace_back(n, partner);
  if (gone) return;
  const auto other = static_cast<std::size_t>(there - nodes_.begin());
  if (nodes_[n].source)
    on(other, now_ + random_.between(10, 1000) * kMicro, [this, other, self, ends, made] {
      if (made <= known_connections_[ends]) return;  // it has made a new one itself since
      known_connections_[ends] = made;               // until now it granted on the old one
      cut_off(other, self);
    });
  else
    on(other, now_ + random_.between(10, 1000) * kMicro, [this, other, self] { lose(other, self); });
}

// ---- processes ----

void World::kill(std::size_t n) {
  Node& node = nodes_[n];
  if (node.dead) return;
  say([&] { return fmt::format("node {} is killed", n); });
  node.dead = true;
  const PartnerId id = node.id;
  // What it had posted may go on landing until its connections are seen to be down; what reads its memory does not.
  const std::int64_t seen = now_ + random_.between(1, 50) * kMilli;
  for (const auto& op : std::vector(operations_))
    if (op->source_id == id) {
      op->over = true;
      std::erase(operations_, op);
    }
  for (std::size_t other = 0; other < nodes_.size(); ++other) {
    if (nodes_[other].source == node.source) continue;
    on(other, seen + random_.between(0, 5) * kMilli, [this, other, id] {
      lose(other, id);
      if (nodes_[other].source)
        cut_link(nodes_[other].id, id, "the peer is down");
      else
        cut_off(other, id);
    });
  }
}

void World::restart(std::size_t n) {
  if (!nodes_[n].dead) return;
  nodes_[n].frozen_until = 0;
  start(nodes_[n]);
  say([&] { return fmt::format("node {} is back as partner {}", n, nodes_[n].id.value); });
}

// ---- what the machines say ----

void World::obey(std::size_t n, std::vector<SourceBook::Action>& actions) {
  for (SourceBook::Action& action : actions) {
    if (broken_) return;
    if (const auto* message = std::get_if<SendTo>(&action)) {
      send(n, message->to, message->message);
    } else {
      auto& keyed = std::get<SourceBook::Keyed>(action);
      obey_one(n, keyed.key, keyed.action);
    }
  }
  wake(n);
}

void World::obey(std::size_t n, std::vector<TargetBook::Action>& actions) {
  for (TargetBook::Action& action : actions) {
    if (broken_) return;
    if (const auto* message = std::get_if<SendTo>(&action)) {
      send(n, message->to, message->message);
    } else {
      auto& keyed = std::get<TargetBook::Keyed>(action);
      obey_one(n, keyed.key, keyed.source, keyed.action);
    }
  }
  // After what was asked for together with the fence, and before anything is granted on the next connection.
  for (const auto& [node, partner] : std::exchange(fenced_, {})) cut_off(node, partner);
  wake(n);
}

void World::obey_one(std::size_t n, const TransferKey& key, Sender::Action& action) {
  Attempt& attempt = nodes_[n].attempts.at(key);
  if (const auto* out = std::get_if<Sender::Post>(&action)) return post(n, key, *out);
  if (const auto* away = std::get_if<Sender::FenceOff>(&action)) return fence(n, away->partner);
  if (const auto* layer = std::get_if<Sender::ReleaseLayer>(&action)) {
    if (!attempt.released_layers.insert(layer->layer).second)
      violate(fmt::format("layer {} of {} is released twice", layer->layer.value, to_string(key)));
    return;
  }
  if (const auto* end = std::get_if<Sender::End>(&action)) return ended(n, attempt, end->outcome, end->why);
  if (std::get_if<Sender::Release>(&action) != nullptr) released(n, attempt);
}

void World::obey_one(std::size_t n, const TransferKey& key, PartnerId source, Receiver::Action& action) {
  Node& node = nodes_[n];
  Attempt& attempt = node.attempts.at(key);
  if (const auto* admit = std::get_if<Receiver::Admit>(&action))
    granted_on_[{source, node.id, admit->tag}] = known_connections_[{source, node.id}];
  if (const auto* admit = std::get_if<Receiver::Admit>(&action); admit != nullptr && fencing_ == Fencing::revokes)
    node.admitted.insert({source, admit->tag});
  if (const auto* revoke = std::get_if<Receiver::Revoke>(&action)) node.admitted.erase({source, revoke->tag});
  if (std::get_if<Receiver::FenceOff>(&action) != nullptr) fence(n, source);
  if (const auto* layer = std::get_if<Receiver::Publish>(&action)) check_layer(n, attempt, layer->layer);
  if (const auto* end = std::get_if<Receiver::End>(&action)) {
    attempt.landed = end->outcome == Outcome::landed;
    ++report_.outcomes[to_string(end->outcome)];
    const Request& request = requests_[attempt.request];
    if (attempt.landed && request.payload && attempt.gets_payload && end->payloads.empty())
      violate(fmt::format("{} landed on node {} without its payload", to_string(key), n));
    ended(n, attempt, end->outcome, end->why);
  }
  if (std::get_if<Receiver::Release>(&action) != nullptr) {
    if (attempt.landed) {
      std::set<LayerId> all;
      for (const GroupSide& group : node.cache->side().groups()) all.insert(group.layers.begin(), group.layers.end());
      for (const LayerId layer : all) check_layer(n, attempt, layer);
    }
    released(n, attempt);
  }
}

// I2: all bytes of the layer are there.
void World::check_layer(std::size_t n, Attempt& attempt, LayerId layer) {
  Cache& cache = *nodes_[n].cache;
  const Request& request = requests_[attempt.request];
  for (std::size_t g = 0; g < attempt.tables.size(); ++g) {
    if (!cache.holds(g, layer)) continue;
    const TokenRange want = wanted(cache.side().groups()[g], {request.prefix, request.tokens});
    const std::int64_t wrong = cache.check(attempt.number, g, layer, want.begin, want.end, request.tokens, attempt.tables[g]);
    if (wrong >= 0)
      violate(fmt::format("I2 {} layer {} group {} is said to be there on node {}, but token {} is wrong", to_string(attempt.key),
                          layer.value, cache.side().groups()[g].name, n, wrong));
  }
}

void World::ended(std::size_t n, Attempt& attempt, Outcome outcome, const Error& why) {
  say([&] {
    return fmt::format("node {}: {} {}{}{}", n, to_string(attempt.key), to_string(outcome), why.message.empty() ? "" : ": ",
                       why.message);
  });
  if (attempt.ended) violate(fmt::format("I4 {} ends twice on node {}", to_string(attempt.key), n));
  const Node& node = nodes_[n];
  const auto most = static_cast<std::int64_t>(static_cast<double>(attempt.time + limits_.grace.count()) / node.rate) + 2 * kMilli;
  if (!node.was_frozen && now_ - attempt.begun > most)
    violate(fmt::format("I4 {} ends on node {} after {} ms: more than its time and grace, {} ms", to_string(attempt.key), n,
                        (now_ - attempt.begun) / kMilli, most / kMilli));
  attempt.ended = true;
  const bool only_posts = std::all_of(injected_.begin(), injected_.end(), [](const FaultId& fault) {
    return fault.first == FaultKind::post_failed || fault.first == FaultKind::post_half;
  });
  if (injected_.empty() && outcome != Outcome::landed)
    violate(fmt::format("{} fails on node {} though nothing is wrong: {}", to_string(attempt.key), n, why.message));
  if (only_posts && outcome == Outcome::failed && why.code == Code::deadline)
    violate(fmt::format("I4 {} has to wait for its time to end on node {}, since nobody told it of a failure: {}",
                        to_string(attempt.key), n, why.message));
  if (outcome != Outcome::landed) requests_[attempt.request].all_landed = false;
}

void World::released(std::size_t n, Attempt& attempt) {
  if (attempt.released || !attempt.ended)
    return violate(
        fmt::format("I4 {} is released {} on node {}", to_string(attempt.key), attempt.ended ? "twice" : "before its end", n));
  attempt.released = true;
  free_pages(nodes_[n], attempt);
  rank_over(attempt.request, static_cast<std::int64_t>(attempt.key.epoch.value));
}

// ---- laws ----

void World::violate(std::string what) {
  if (broken_) return;
  broken_ = std::move(what);
  say([&] { return "BROKEN: " + *broken_; });
}

void World::say(const std::function<std::string()>& what) {
  if (said_ != nullptr) said_->push_back(fmt::format("{:10.3f} ms  {}", static_cast<double>(now_) / 1e6, what()));
}

bool World::fault(FaultKind kind) {
  const auto k = static_cast<std::size_t>(kind);
  const std::int64_t number = chances_[k]++;
  if (rates_[k] <= 0) return false;
  Random own(mix(seed_ + k * 1'000'003) + static_cast<std::uint64_t>(number));
  if (!own.chance(rates_[k]) || left_out_.contains({kind, number})) return false;
  injected_.emplace_back(kind, number);
  ++report_.faults[to_string(kind)];
  return true;
}

// I4 and I5, when nothing is left to happen.
void World::check_end() {
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    Node& node = nodes_[n];
    if (node.dead) continue;
    for (const auto& [key, attempt] : node.attempts)
      if (!attempt.ended || !attempt.released)
        return violate(
            fmt::format("I4 {} never {} on node {}", to_string(key), attempt.ended ? "gives its pages back" : "ends", n));
    for (std::size_t g = 0; g < node.cache->side().groups().size(); ++g)
      if (node.cache->pool(g).free() != node.cache->pool(g).size())
        return violate(fmt::format("I5 node {} has {} of {} pages of group {}", n, node.cache->pool(g).free(),
                                   node.cache->pool(g).size(), node.cache->side().groups()[g].name));
    if (!node.admitted.empty()) return violate(fmt::format("I5 node {} still takes {} tags", n, node.admitted.size()));
    if (node.source ? node.from->open() + node.from->early() != 0 : node.to->open() != 0)
      return violate(fmt::format("I5 node {} still has open transfers", n));
  }
}

}  // namespace kvloom::sim
