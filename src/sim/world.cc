#include "kvloom/sim/world.h"

#include <algorithm>
#include <array>

#include "kvloom/plan/compile.h"
#include "kvloom/sim/world_parts.h"

namespace kvloom::sim {
namespace {

constexpr std::int64_t kPage = 4;
constexpr std::uint64_t kMostEvents = 200'000;

CacheGroup group_of(std::string name, std::vector<LayerId> layers, std::int32_t heads, std::vector<PlaneShape> planes,
                    GroupKind kind = GroupKind::paged, std::optional<Window> window = {}) {
  return {std::move(name), kind, std::move(layers), heads, std::move(planes), window, ""};
}

std::vector<LayerId> layers(const std::vector<std::int32_t>& ids) {
  std::vector<LayerId> out;
  out.reserve(ids.size());
  for (const std::int32_t id : ids) out.emplace_back(id);
  return out;
}

// Small models of every kind of cache.
const std::vector<CacheShape>& shapes() {
  static const std::vector<CacheShape> all = {
      CacheShape::make("mla", 4, {group_of("latent", layers({0, 1, 2, 3}), 1, {{"latent", 3, 1}})}).value(),
      CacheShape::make("gqa", 2, {group_of("kv", layers({0, 1}), 2, {{"k", 2, 1}, {"v", 2, 1}})}).value(),
      CacheShape::make("dsa", 3,
                       {group_of("latent", layers({0, 1, 2}), 1, {{"latent", 3, 1}}),
                        group_of("index_k", layers({0, 2}), 1, {{"key", 2, 1}, {"scale", 1, 1}})})
          .value(),
      CacheShape::make("drafted", 2,
                       {group_of("kv", layers({0, 1}), 2, {{"k", 1, 1}, {"v", 1, 1}}),
                        group_of("draft", layers({2}), 2, {{"k", 1, 1}, {"v", 1, 1}})})
          .value(),
      CacheShape::make("hybrid", 3,
                       {group_of("full", layers({0}), 2, {{"k", 2, 1}}),
                        group_of("sliding", layers({1}), 2, {{"k", 2, 1}}, GroupKind::paged, Window{Window::Kind::sliding, 7}),
                        group_of("ssm", layers({2}), 4, {{"state", 3, 1}}, GroupKind::state)})
          .value(),
  };
  return all;
}

constexpr std::array kPrefill = {"tp=1",        "tp=2",         "cp=2:layers",       "cp=3:layers", "cp=5:layers", "pp=2",
                                 "cp=2:zigzag", "cp=2:blocked", "cp=2:interleave=2", "dcp=2:value", "tp=2,dcp=2"};
constexpr std::array kDecode = {"tp=1",        "tp=2",        "dcp=2",       "dcp=2:stripe=1", "dcp=2:stripe=2",
                                "dcp=2:value", "tp=2,page=8", "tp=1,page=2", "tp=4,dcp=2"};

TransferKey key_of(std::size_t request, std::int64_t attempt) {
  return {fmt::format("req-{}", request), Epoch(static_cast<std::uint64_t>(attempt))};
}

}  // namespace

const char* to_string(FaultKind kind) {
  constexpr std::array names = {
      "message dropped",     "message doubled",      "message late",   "connection cut",      "post failed",     "post hung",
      "post late",           "post half done",       "process killed", "process restarted",   "process frozen",  "clock drift",
      "cancelled by decode", "preempted by prefill", "never offered",  "source that babbles", "notice that lies"};
  return names[static_cast<std::size_t>(kind)];
}

// ---- the cast ----

World::World(std::uint64_t seed, const std::set<FaultId>& left_out, SimulateReport& report, std::vector<std::string>* said)
    : report_(report), said_(said), left_out_(left_out), seed_(seed), random_(seed) {}
World::~World() = default;

std::optional<std::string> World::run() {
  const std::uint64_t strange = strange_edges();
  build();
  draw_requests();
  draw_process_faults();
  while (!events_.empty() && !broken_) {
    Event event = std::move(const_cast<Event&>(events_.top()));  // popped next; its order does not look at `what`
    events_.pop();
    now_ = event.time;
    event.what();
    if (next_event_ > kMostEvents) violate("the schedule does not come to an end");
  }
  if (!broken_) check_end();
  if (!broken_ && strange_edges() != strange) violate("a machine has walked an edge that its table does not have");
  return broken_;
}

void World::build() {
  // Most schedules know a few kinds of faults, some none, some all.
  const double density = random_.one_of(std::array{0.0, 0.0, 0.02, 0.06, 0.15});
  for (int k = 0; k < kFaultKinds; ++k) {
    const bool rare =
        k >= static_cast<int>(FaultKind::killed);  // one chance a process or request, where messages and posts have many
    rates_[static_cast<std::size_t>(k)] = random_.chance(0.5) ? density * (rare ? 3 : 1) : 0;
  }
  fencing_ = random_.one_of(std::array{Fencing::revokes, Fencing::fences, Fencing::waits});
  limits_.resend = std::chrono::milliseconds(20);
  limits_.grace = std::chrono::milliseconds(100);
  limits_.in_flight_per_path = Bytes(random_.one_of(std::array{16, 100, 10000}));
  limits_.join = Bytes(random_.one_of(std::array{0, 30, 1000}));
  limits_.joining_posts = static_cast<int>(random_.between(1, 2));
  const CacheShape& shape = random_.one_of(shapes());
  const auto add_cluster = [&](bool source, const char* words) {
    Cluster cluster;
    cluster.side = std::make_shared<const Side>(Side::make(shape, Sharding::parse(words).value(), kPage).value());
    cluster.first = nodes_.size();
    for (std::int32_t r = 0; r < cluster.side->ranks(); ++r) {
      Node node;
      node.source = source;
      node.cluster = clusters_.size();
      node.rank = Rank(r);
      nodes_.push_back(std::move(node));
    }
    clusters_.push_back(std::move(cluster));
  };
  add_cluster(true, random_.one_of(kPrefill));
  const std::int64_t decodes = random_.between(1, 2);
  for (std::int64_t d = 0; d < decodes; ++d) add_cluster(false, random_.one_of(kDecode));
  say([&] {
    std::string text = fmt::format("{}: {} to", shape.model(), to_string(clusters_[0].side->sharding()));
    for (std::size_t c = 1; c < clusters_.size(); ++c) text += " " + to_string(clusters_[c].side->sharding());
    return text + (fencing_ == Fencing::revokes ? ", revokes" : fencing_ == Fencing::fences ? ", fences" : ", waits");
  });
}

void World::draw_requests() {
  const std::int64_t count = random_.between(1, 4);
  plans_.resize(clusters_.size());
  for (std::int64_t r = 0; r < count; ++r) {
    Request request;
    request.decode = static_cast<std::size_t>(random_.between(1, static_cast<std::int64_t>(clusters_.size()) - 1));
    request.tokens = random_.chance(0.3) ? random_.between(1, 4) : random_.between(1, 40);
    request.prefix = random_.chance(0.5) ? 0 : random_.between(0, request.tokens);
    request.hit = random_.chance(0.6) ? 0 : random_.between(0, request.tokens);
    request.chunk = random_.between(1, request.tokens);
    request.begins = random_.between(0, 20) * kMilli;
    request.payload = random_.chance(0.3);
    requests_.push_back(request);
  }
  // A plan of the request's length, where a rule cuts it; else one for all.
  for (std::size_t r = 0; r < requests_.size(); ++r) {
    const Request& request = requests_[r];
    auto& plans = plans_[request.decode];
    plans.resize(requests_.size());
    bool cuts = false;
    for (const std::size_t c : {std::size_t{0}, request.decode})
      for (const GroupSide& group : clusters_[c].side->groups()) cuts = cuts || group.tokens.needs_total();
    for (std::size_t before = 0; before < r && !cuts; ++before)
      if (plans[before] != nullptr) plans[r] = plans[before];
    if (plans[r] == nullptr)
      plans[r] = std::make_shared<const Plan>(
          compile(clusters_[0].side, clusters_[request.decode].side, cuts ? request.tokens : kUnbounded).value());
  }
  for (const auto& plans : plans_)
    for (const auto& plan : plans)
      if (plan != nullptr && !digests_.contains(plan.get())) digests_.emplace(plan.get(), digest_of(*plan));
  // Pools that hold all requests at once, and a little more; of groups by value, one for the side.
  for (Cluster& cluster : clusters_)
    for (std::size_t g = 0; g < cluster.side->groups().size(); ++g) {
      const GroupSide& group = cluster.side->groups()[g];
      const std::int64_t columns = ceil_div(pool_pages(group), group.tokens.parts) * group.tokens.parts;
      const bool value = group.tokens.rule == TokenRule::value;
      cluster.one_allocator = cluster.one_allocator || value;
      cluster.shared.push_back(value ? std::make_shared<Pool>(columns, random_) : nullptr);
    }
  for (Node& node : nodes_) start(node);
  for (std::size_t r = 0; r < requests_.size(); ++r) at(requests_[r].begins, [this, r] { begin_attempt(r); });
}

// Pages that hold all requests at once, and a little more.
std::int64_t World::pool_pages(const GroupSide& group) const {
  std::int64_t pages = 2;
  for (const Request& request : requests_)
    pages += group.kind == GroupKind::state ? 1 : ceil_div(request.tokens, group.layout.page_tokens()) + 1;
  return pages;
}

// A process comes to life, with empty pools and a new name.
void World::start(Node& node) {
  const Cluster& cluster = clusters_[node.cluster];
  node.id = PartnerId(next_partner_++);
  node.dead = false;
  node.rate = fault(FaultKind::clock_drift) ? 0.9 + 0.01 * static_cast<double>(random_.between(0, 20)) : 1.0;
  node.offset = random_.between(0, 1000) * 1000 * kMilli;
  node.attempts.clear();
  node.admitted.clear();
  node.wake_at = INT64_MAX;
  node.was_frozen = false;
  std::vector<std::shared_ptr<Pool>> pools;
  for (std::size_t g = 0; g < cluster.side->groups().size(); ++g) {
    const auto& shared = cluster.shared[g];
    pools.push_back(shared != nullptr ? shared : std::make_shared<Pool>(pool_pages(cluster.side->groups()[g]), random_));
  }
  node.cache = std::make_unique<Cache>(cluster.side, node.rank, pools);
  node.from = node.source ? std::make_unique<SourceBook>(node.rank, &report_.sender_edges) : nullptr;
  node.to = node.source ? nullptr : std::make_unique<TargetBook>(&report_.receiver_edges);
  if (node.source)
    for (const auto& plans : plans_)
      for (const auto& plan : plans)
        if (plan != nullptr) node.from->know(plan, digests_.at(plan.get()));
}

void World::draw_process_faults() {
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    const std::int64_t when = random_.between(0, 60) * kMilli, down = random_.between(1, 80) * kMilli,
                       length = random_.between(1, 400) * kMilli;
    if (!clusters_[nodes_[n].cluster].one_allocator && fault(FaultKind::killed)) {
      at(when, [this, n] { kill(n); });
      if (fault(FaultKind::restarted)) at(when + down, [this, n] { restart(n); });
    } else if (fault(FaultKind::frozen)) {
      at(when, [this, n, length] {
        if (nodes_[n].dead) return;
        say([&] { return fmt::format("node {} is frozen for {} ms", n, length / kMilli); });
        nodes_[n].frozen_until = now_ + length;
        nodes_[n].was_frozen = true;
      });
    }
  }
}

std::uint64_t World::strange_edges() const {
  const auto last = [](const EdgeCounts& counts) { return counts.empty() ? 0 : counts.back(); };
  return last(report_.receiver_edges) + last(report_.sender_edges);
}

// ---- time ----

void World::at(std::int64_t time, std::function<void()> what) {
  events_.push({std::max(time, now_), next_event_++, std::move(what)});
}

void World::on(std::size_t node, std::int64_t time, std::function<void()> what) {
  at(time, [this, node, id = nodes_[node].id, what = std::move(what)] {
    const Node& there = nodes_[node];
    if (there.dead || there.id != id) return;
    if (there.frozen_until > now_) return on(node, there.frozen_until, what);
    what();
  });
}

Instant World::local(const Node& node) const {
  return Instant(node.offset + static_cast<std::int64_t>(static_cast<double>(now_) * node.rate));
}

void World::wake(std::size_t n) {
  Node& node = nodes_[n];
  const Instant due = node.source ? node.from->deadline() : node.to->deadline();
  if (due == kNever) return;
  const auto time = static_cast<std::int64_t>(static_cast<double>(due.count() - node.offset) / node.rate) + kMicro;
  if (time >= node.wake_at && node.wake_at > now_) return;
  node.wake_at = time;
  on(n, time, [this, n, time] {
    Node& there = nodes_[n];
    if (there.wake_at == time) there.wake_at = INT64_MAX;
    if (there.source) {
      std::vector<SourceBook::Action> actions;
      there.from->time(local(there), actions);
      obey(n, actions);
    } else {
      std::vector<TargetBook::Action> actions;
      there.to->time(local(there), actions);
      obey(n, actions);
    }
  });
}

// ---- engines ----

void World::begin_attempt(std::size_t r) {
  Request& request = requests_[r];
  const std::int64_t attempt = request.attempts++;
  request.over = 0;
  request.all_landed = true;
  report_.transfers += 1;
  say([&] {
    return fmt::format("request {} attempt {}: tokens {} prefix {} hit {} chunk {} to decode group {}", r, attempt,
                       request.tokens, request.prefix, request.hit, request.chunk, request.decode);
  });
  const bool offered = !fault(FaultKind::never_offered);
  const std::int64_t source_first = random_.between(-10, 10) * kMilli;
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    const Node& node = nodes_[n];
    if (node.source && offered)
      on(n, now_ + std::max<std::int64_t>(0, source_first) + random_.between(0, 2000) * kMicro,
         [this, r, n, attempt] { begin_source(r, n, attempt); });
    if (!node.source && node.cluster == request.decode)
      on(n, now_ + std::max<std::int64_t>(0, -source_first) + random_.between(0, 2000) * kMicro,
         [this, r, n, attempt] { begin_target(r, n, attempt); });
  }
  const std::int64_t when = now_ + random_.between(0, 60) * kMilli;
  const bool cancelled = fault(FaultKind::cancelled), preempted = fault(FaultKind::preempted);
  const TransferKey key = key_of(r, attempt);
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    if (nodes_[n].source && preempted)
      on(n, when + random_.between(0, 500) * kMicro, [this, n, key] {
        std::vector<SourceBook::Action> actions;
        nodes_[n].from->tell(key, Sender::CancelAsked{"preempted"}, local(nodes_[n]), actions);
        nodes_[n].from->tell(key, Sender::CancelAsked{"preempted again"}, local(nodes_[n]), actions);
        obey(n, actions);
      });
    // A source that says what is not so: it can only harm itself, where writes are refused by tag; elsewhere only one that writes nothing may.
    if (nodes_[n].source && (fencing_ == Fencing::revokes || !offered) && fault(FaultKind::babbled))
      on(n, when + random_.between(0, 500) * kMicro, [this, n, key, r] {
        const Cluster& decode = clusters_[requests_[r].decode];
        const auto target = decode.first + static_cast<std::size_t>(random_.between(0, decode.side->ranks() - 1));
        const Rank rank(nodes_[n].rank.value + (random_.chance(0.2) ? 1 : 0));
        send(n, nodes_[target].id,
             random_.chance(0.7) ? Message(Quiesced{key, rank}) : Message(Failed{key, rank, Code::io, "for no reason"}));
      });
    if (!nodes_[n].source && nodes_[n].cluster == request.decode && cancelled)
      on(n, when + random_.between(0, 500) * kMicro, [this, n, key] {
        std::vector<TargetBook::Action> actions;
        nodes_[n].to->cancel(key, "its user left", local(nodes_[n]), actions);
        obey(n, actions);
      });
  }
}

World::Attempt& World::new_attempt(Node& node, std::size_t r, std::int64_t number) {
  const TransferKey key = key_of(r, number);
  Attempt& attempt = node.attempts[key];
  attempt.key = key;
  attempt.request = r;
  attempt.number = static_cast<std::int64_t>(r) * 8 + number;
  attempt.begun = now_;
  attempt.time = random_.between(100, 400) * kMilli;
  return attempt;
}

void World::begin_target(std::size_t r, std::size_t n, std::int64_t number) {
  Node& node = nodes_[n];
  const Request& request = requests_[r];
  Attempt& attempt = new_attempt(node, r, number);
  const TransferKey key = attempt.key;
  const auto& plan = plans_[request.decode][r];
  const auto sources = granted_sources(*plan, node.rank);
  attempt.gets_payload = std::find(sources.begin(), sources.end(), Rank(0)) != sources.end();
  take_pages(node, attempt, request.tokens);
  ReceiverJob job;
  job.key = key;
  job.rank = node.rank;
  job.plan = plan;
  job.digest = digests_.at(plan.get());
  job.range = {request.prefix, request.tokens};
  for (std::size_t g = 0; g < attempt.tables.size(); ++g) job.tables.push_back({attempt.tables[g], node.cache->pool(g).size()});
  for (std::int32_t s = 0; s < clusters_[0].side->ranks(); ++s)
    job.sources.push_back(nodes_[clusters_[0].first + static_cast<std::size_t>(s)].id);
  job.time = std::chrono::nanoseconds(attempt.time);
  job.can_revoke = fencing_ == Fencing::revokes;
  job.limits = limits_;
  std::vector<TargetBook::Action> actions;
  if (auto ok = node.to->begin(std::move(job), local(node), actions); !ok)
    return violate("a receiver is refused: " + ok.error().message);
  obey(n, actions);
}

void World::begin_source(std::size_t r, std::size_t n, std::int64_t number) {
  Node& node = nodes_[n];
  const Request& request = requests_[r];
  Attempt& attempt = new_attempt(node, r, number);
  const TransferKey key = attempt.key;
  take_pages(node, attempt, 0);
  std::vector<SourceBook::Action> actions;
  SenderJob job{key, node.rank, std::chrono::nanoseconds(attempt.time), request.payload && node.rank == Rank(0), limits_};
  if (auto ok = node.from->offer(std::move(job), local(node), actions); !ok)
    return violate("a sender is refused: " + ok.error().message);
  obey(n, actions);
  on(n, now_ + random_.between(10, 500) * kMicro, [this, n, key] { compute(n, key, 0, 0); });
}

// One layer of one chunk of the forward pass.
void World::compute(std::size_t n, const TransferKey& key, std::int64_t begin, std::size_t step) {
  Node& node = nodes_[n];
  const auto found = node.attempts.find(key);
  if (found == node.attempts.end() || found->second.released) return;
  Attempt& attempt = found->second;
  const Request& request = requests_[attempt.request];
  const std::int64_t end =
      begin == 0 ? std::min(request.tokens, request.hit + request.chunk) : std::min(request.tokens, begin + request.chunk);
  std::set<LayerId> ids;
  for (const GroupSide& group : clusters_[0].side->groups()) ids.insert(group.layers.begin(), group.layers.end());
  if (step == 0) take_pages(node, attempt, end);
  const LayerId layer = *std::next(ids.begin(), static_cast<std::ptrdiff_t>(step));
  for (std::size_t g = 0; g < attempt.tables.size(); ++g) {
    if (!node.cache->holds(g, layer)) continue;
    const bool state = clusters_[0].side->groups()[g].kind == GroupKind::state;
    if (!state) node.cache->fill(attempt.number, g, layer, begin, end, request.tokens, attempt.tables[g]);
    if (state && end == request.tokens) node.cache->fill(attempt.number, g, layer, 0, 1, request.tokens, attempt.tables[g]);
  }
  std::vector<SourceBook::Action> actions;
  node.from->tell(key, Sender::Ready{layer, end}, local(node), actions);
  obey(n, actions);
  const bool last_layer = step + 1 == ids.size();
  if (last_layer && end == request.tokens) {
    on(n, now_ + random_.between(10, 2000) * kMicro, [this, n, key] {
      std::vector<SourceBook::Action> more;
      nodes_[n].from->tell(key, Sender::Payload{{std::byte{42}}}, local(nodes_[n]), more);
      obey(n, more);
    });
    return;
  }
  on(n, now_ + random_.between(50, 1000) * kMicro,
     [this, n, key, begin = last_layer ? end : begin, step = last_layer ? 0 : step + 1] { compute(n, key, begin, step); });
}

// Grows the tables until they hold the first `tokens` tokens.
void World::take_pages(Node& node, Attempt& attempt, std::int64_t tokens) {
  const Side& side = node.cache->side();
  const std::int64_t total = requests_[attempt.request].tokens;
  attempt.tables.resize(side.groups().size());
  attempt.bound.resize(side.groups().size());
  for (std::size_t g = 0; g < side.groups().size(); ++g) {
    auto& table = attempt.tables[g];
    Pool& pool = node.cache->pool(g);
    const auto wanted_size = static_cast<std::size_t>(node.cache->columns(g, tokens, total));
    const auto grow = [&](std::vector<PageId>& pages) {
      if (pages.size() >= wanted_size) return;
      const auto fresh = pool.take(static_cast<std::int64_t>(wanted_size - pages.size()), attempt.number);
      pages.insert(pages.end(), fresh.begin(), fresh.end());
    };
    if (side.groups()[g].tokens.rule == TokenRule::value) {  // all ranks of the side have it until the last one has let go of it
      const auto [all, fresh] = clusters_[node.cluster].tables.try_emplace({attempt.key, g});
      if (fresh) all->second.ranks = side.ranks();
      grow(all->second.pages);
      table.assign(all->second.pages.begin(),
                   all->second.pages.begin() + static_cast<std::ptrdiff_t>(std::max(wanted_size, table.size())));
    } else {
      grow(table);
    }
    attempt.bound[g] = PageTable::make(table, pool.size(), PageTable::Use::source).value();
  }
}

void World::free_pages(Node& node, Attempt& attempt) {
  for (std::size_t g = 0; g < attempt.tables.size(); ++g) {
    node.cache->poison(g, attempt.tables[g]);
    if (node.cache->side().groups()[g].tokens.rule != TokenRule::value) {
      node.cache->pool(g).give_back(attempt.tables[g]);
      continue;
    }
    auto& tables = clusters_[node.cluster].tables;
    const auto all = tables.find({attempt.key, g});
    if (--all->second.ranks > 0) continue;
    node.cache->pool(g).give_back(all->second.pages);
    tables.erase(all);
  }
}

// A rank has its pages back; when all have, the request may be tried once more.
void World::rank_over(std::size_t r, std::int64_t attempt) {
  Request& request = requests_[r];
  if (attempt != request.attempts - 1) return;
  ++request.over;
  const std::int32_t ranks = clusters_[0].side->ranks() + clusters_[request.decode].side->ranks();
  if (request.over == ranks && !request.all_landed && request.attempts < 2)
    at(now_ + random_.between(0, 5) * kMilli, [this, r] { begin_attempt(r); });
}

}  // namespace kvloom::sim
