#include "kvloom/session/target_endpoint.h"

#include <algorithm>

#include "kvloom/plan/wire.h"
#include "kvloom/session/wire.h"

namespace kvloom {
namespace {

constexpr std::chrono::minutes kKeptUnused{10};  // a connection that nobody uses
constexpr std::chrono::seconds kMeeting{
    1};  // sides that do not fit: for the other prefill ranks to connect, so that all are told

}  // namespace

// ---- birth ----

Expected<std::unique_ptr<TargetEndpoint>> TargetEndpoint::make(TargetOptions options, Transport& transport, Sinks sinks) {
  if (auto ok = check_options(options); !ok) return tl::unexpected(ok.error());
  if (options.copy_bytes.value <= 0) options.copy_bytes = transport.abilities().copy_a_poll;
  if (transport.address().empty())
    return fail(Code::invalid_argument, "the transport {} does not listen: prefill ranks could not reach it",
                transport.abilities().name);
  return std::unique_ptr<TargetEndpoint>(new TargetEndpoint(std::move(options), transport, std::move(sinks)));
}

TargetEndpoint::TargetEndpoint(TargetOptions options, Transport& transport, Sinks sinks)
    : options_(std::move(options)),
      transport_(transport),
      telemetry_(std::move(sinks)),
      incarnation_(draw_token().low),
      stepped_(now()) {}

// Nothing lands any more once nobody counts it; and peers hear at once that nobody is here.
TargetEndpoint::~TargetEndpoint() {
  for (const auto& [key, gate] : gates_) gate->over();
  for (const auto& [peer, partner] : peers_) std::ignore = transport_.fence(peer);
}

Expected<GeometryId> TargetEndpoint::describe(LocalCache cache) {
  Described described{std::move(cache), {}, {}};
  described.side = encode_side(*described.cache.side);
  for (std::size_t i = 0; i < described.cache.regions.size(); ++i) {
    auto key = transport_.export_region(described.cache.regions[i]);
    if (!key) return tl::unexpected(key.error());
    described.keys.push_back({described.cache.lengths[i], std::move(*key)});
  }
  const GeometryId id(next_geometry_++);
  if (auto ok = check_geometry(described, id); !ok) return tl::unexpected(ok.error());
  geometries_.emplace(id, std::move(described));
  return id;
}

// Told to a peer it has to get through that peer's limits.
Expected<void> TargetEndpoint::check_geometry(const Described& described, GeometryId id) const {
  const LocalCache& cache = described.cache;
  std::size_t parts = 0;
  for (const PlacedTensor& tensor : cache.tensors) parts += tensor.parts.size();
  for (const auto& [what, count, most] :
       {std::tuple("regions", cache.regions.size(), kMaxRegions), std::tuple("tensors", cache.tensors.size(), kMaxTensors),
        std::tuple("parts of tensors", parts, kMaxTensorParts)})
    if (count > most) return fail(Code::invalid_argument, "{} {} of one geometry: at most {} can be told", count, what, most);
  const auto bytes = encode_told({{}, Geometry{id, cache.rank, described.side, described.keys, cache.tensors}}).size();
  if (bytes > kMaxConnectionBytes)
    return fail(Code::invalid_argument, "a geometry of {} B: at most {} can be told; describe fewer regions or tensors", bytes,
                kMaxConnectionBytes);
  return {};
}

// ---- the engine's side ----

Expected<void> TargetEndpoint::check_range(const Want& want) {
  const auto [begin, end] = want.range;
  if (begin < 0 || end < begin || end > kMaxRequestTokens)
    return fail(Code::invalid_argument,
                "tokens [{}, {}): the prefix must be 0 or more and not beyond the tokens, and these at most 2^48", begin, end);
  if (want.time <= want.time.zero() || want.time > kMaxTimeLeft)
    return fail(Code::invalid_argument, "a time of {} ns: it must be above 0 and at most {} h", want.time.count(),
                kMaxTimeLeft.count());
  return {};
}

Expected<void> TargetEndpoint::check_tables(const Want& want, const Side& side) {
  if (want.tables.size() != side.groups().size())
    return fail(Code::invalid_argument, "{} page tables for {} cache groups", want.tables.size(), side.groups().size());
  if (want.tables.size() > kMaxTables)
    return fail(Code::invalid_argument, "{} cache groups: at most {} go in a grant", want.tables.size(), kMaxTables);
  std::size_t pages = 0;
  for (std::size_t g = 0; g < want.tables.size(); ++g) {
    pages += want.tables[g].pages.size();
    if (const auto ok = PageTable::make(want.tables[g].pages, want.tables[g].pool_pages, PageTable::Use::target); !ok)
      return fail(ok.error().code, "group {}: {}", side.groups()[g].name, ok.error().message);
  }
  if (pages > kMaxPages)
    return fail(Code::invalid_argument, "{} pages in all tables: at most {} go in a grant; larger pages, or two transfers", pages,
                kMaxPages);
  return {};
}

Expected<void> TargetEndpoint::begin(Want want) {
  const auto gate = want.gate;
  auto ok = try_begin(std::move(want));
  if (!ok && gate != nullptr) gate->over();
  return ok;
}

Expected<void> TargetEndpoint::try_begin(Want want) {
  if (waiting_.contains(want.key) || book_.find(want.key) != nullptr)
    return fail(Code::invalid_argument, "transfer {} is open: another attempt needs another epoch", to_string(want.key));
  if (want.key.name.empty() || want.key.name.size() > kMaxName)
    return fail(Code::invalid_argument, "a transfer's name has 1 to {} B, not {}", kMaxName, want.key.name.size());
  const auto geometry = geometries_.find(want.geometry);
  if (geometry == geometries_.end()) return fail(Code::invalid_argument, "geometry {} is not described", want.geometry.value);
  if (auto ok = check_range(want); !ok) return ok;
  if (auto ok = check_tables(want, *geometry->second.cache.side); !ok) return ok;
  if (want.sources.empty() || want.sources.size() > static_cast<std::size_t>(kMaxRanks))
    return fail(Code::invalid_argument, "{} prefill ranks are named: 1 to {} can be", want.sources.size(), kMaxRanks);
  for (const SourceAddress& source : want.sources)
    if (auto link = link_to(source); !link) return tl::unexpected(link.error());
  const Instant here = now(), until = here + want.time;
  std::int64_t pages = 0;
  for (const CacheTable& table : want.tables) pages += static_cast<std::int64_t>(table.pages.size());
  telemetry_.opened(want.key, pages, here);
  const TransferKey key = want.key;
  if (want.gate != nullptr) gates_[key] = want.gate;
  waiting_.emplace(key, Waiting{std::move(want), here, until});
  changed_ = true;
  for (const SourceAddress& source : waiting_.at(key).want.sources)
    if (Link& link = links_.at(source); link.at == Link::At::idle) greet(link);
  start_waiting();
  return {};
}

void TargetEndpoint::cancel(const TransferKey& key, std::string why) {
  if (waiting_.contains(key)) return fail_waiting(key, Outcome::cancelled, {Code::cancelled, Scope::transfer, std::move(why)});
  std::vector<TargetBook::Action> actions;
  book_.cancel(key, std::move(why), now(), actions);
  obey(actions);
}

Bytes TargetEndpoint::covered(const TransferKey& key) const {
  const Receiver* receiver = book_.find(key);
  return receiver == nullptr ? Bytes(0) : receiver->covered();
}

// ---- the loop ----

bool TargetEndpoint::poll(std::chrono::nanoseconds wait, std::vector<TargetEvent>& events, int wake) {
  const auto sleep = [&] {
    const auto armed = transport_.arm();
    if (!armed) return;
    std::vector<int> fds = {*armed};
    if (wake >= 0) fds.push_back(wake);
    for (const auto& [address, link] : links_)
      if (link.socket != nullptr) fds.push_back(link.socket->fd());
    const Instant due = deadline();
    wait_readable(fds, due == kNever ? wait : std::min(wait, due - now()));
  };
  return poll_once(
      happened_, events, wait > wait.zero(), [&] { return step(); }, sleep);
}

bool TargetEndpoint::step() {
  const Instant here = now();
  if (here - stepped_ > options_.silence / 2)
    for (auto& [address, link] : links_) link.pulse.forgive(here);
  stepped_ = here;
  bool did = read_control();
  did |= read_transport();
  if (changed_) start_waiting();
  tick();
  const bool sent = std::exchange(sent_, false);  // a send may have eaten the signal of what came meanwhile: look once more
  return did || sent;
}

bool TargetEndpoint::read_control() {
  bool did = false;
  for (auto& [address, link] : links_)
    for (int turn = 0; turn < kMessagesAStep; ++turn) {
      const auto bytes = link.socket == nullptr ? std::nullopt : link.socket->receive();
      if (!bytes) break;
      did = true;
      const auto what = decode_said(*bytes);
      if (what)
        said(link, *what);
      else
        telemetry_.nonsense(what.error());
      if (!what && link.at == Link::At::greeting) link.why_not = what.error().message;
    }
  return did;
}

bool TargetEndpoint::read_transport() {
  heard_.clear();
  const bool did = transport_.poll({options_.copy_bytes, std::chrono::nanoseconds(0)}, heard_);
  std::vector<TargetBook::Action> actions;
  for (const Event& event : heard_) {
    if (const auto* notice = std::get_if<Notice>(&event)) {
      const auto from = peers_.find(notice->peer);
      if (from == peers_.end()) continue;
      telemetry_.noticed();
      actions.clear();
      book_.notice(from->second, notice->tag, notice->payload, now(), actions);
      obey(actions);
    }
    if (const auto* up = std::get_if<PeerUp>(&event)) {
      const auto token = token_of(up->hello);
      const auto at = std::find_if(links_.begin(), links_.end(), [&](const auto& l) {
        return token && l.second.at == Link::At::greeting && !l.second.peer && l.second.token == *token;
      });
      if (at == links_.end()) {
        std::ignore = transport_.fence(up->peer);  // a stranger
        continue;
      }
      at->second.peer = up->peer;
      complete(at->second);
    }
    if (const auto* down = std::get_if<PeerDown>(&event)) peer_down(down->peer, down->reason);
  }
  return did || !heard_.empty();
}

void TargetEndpoint::tick() {
  const Instant here = now();
  if (book_.deadline() <= here) {
    std::vector<TargetBook::Action> actions;
    book_.time(here, actions);
    obey(actions);
  }
  if (here < pulses_at_) return;
  pulses_at_ = here + options_.heartbeat / 4;
  changed_ |= std::exchange(untold_, false);
  std::vector<TransferKey> late;
  for (const auto& [key, waiting] : waiting_)
    if (waiting.until <= here) late.push_back(key);
  for (const TransferKey& key : late)
    fail_waiting(key, Outcome::failed, {Code::deadline, Scope::transfer, "time is up; " + missing(waiting_.at(key).want)});
  for (auto& [address, link] : links_) {
    link.pulse.need(!link.transfers.empty(), here);
    if (link.at == Link::At::greeting && link.hello_at <= here) {
      if (is_wanted(link))
        greet(link);
      else
        lose(link, {Code::unavailable, Scope::peer, "nobody asks for it any more"});
    }
    if (link.at == Link::At::up && link.pulse.is_lost(here, options_.silence))
      lose(link, {Code::unavailable, Scope::peer,
                  fmt::format("not a word for {} ms: frozen, or cut off", options_.silence / std::chrono::milliseconds(1))});
    if (link.at == Link::At::up && link.pulse.is_due(here, options_.heartbeat)) tell(link, Ping{});
    if (!link.transfers.empty() || is_wanted(link)) link.used = here;
    if (here - link.used > kKeptUnused && link.socket != nullptr) {
      if (link.at != Link::At::idle) lose(link, {Code::unavailable, Scope::peer, "not used any more"});
      link.socket.reset();
    }
  }
}

Instant TargetEndpoint::deadline() const {
  if (changed_) return Instant(0);
  if (!waiting_.empty() || book_.open() > 0) return std::min(book_.deadline(), pulses_at_);
  return kNever;
}

// ---- what waits for connections ----

bool TargetEndpoint::is_wanted(const Link& link) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& waiting) {
    const auto& sources = waiting.second.want.sources;
    return std::find(sources.begin(), sources.end(), link.address) != sources.end();
  });
}

void TargetEndpoint::start_waiting() {
  changed_ = false;
  std::vector<TransferKey> keys;
  for (const auto& [key, waiting] : waiting_) keys.push_back(key);
  for (const TransferKey& key : keys) {
    const Waiting& waiting = waiting_.at(key);
    for (const SourceAddress& source : waiting.want.sources)
      if (Link& link = links_.at(source); link.at == Link::At::idle) greet(link);
    const auto started = try_start(waiting.want, waiting.until);
    if (!started && !is_met(waiting.want) && now() < waiting.begun + kMeeting) {
      untold_ = true;  // the others want to be told as well: again with the next pulse
    } else if (!started) {
      refuse(waiting.want, started.error());
      fail_waiting(key, Outcome::failed, {started.error().code, Scope::transfer, started.error().message});
    } else if (*started) {
      waiting_.erase(key);
    }
  }
}

bool TargetEndpoint::is_met(const Want& want) const {
  return std::all_of(want.sources.begin(), want.sources.end(),
                     [&](const SourceAddress& source) { return links_.at(source).at == Link::At::up; });
}

// Prefill would wait for our grant as long as it was given.
void TargetEndpoint::refuse(const Want& want, const Error& why) {
  const auto described = geometries_.find(want.geometry);
  const Rank rank = described == geometries_.end() ? Rank(0) : described->second.cache.rank;
  const auto said = encoder_.encode(Cancel{want.key, rank, std::string(cut_reason(why.message)), true});
  for (const SourceAddress& source : want.sources)
    if (Link& link = links_.at(source); link.at == Link::At::up) note_sent(link.socket->send(said));
}

// The geometry of the prefill ranks that are connected, if any is; they have to agree.
Expected<std::shared_ptr<const Side>> TargetEndpoint::source_side(const Want& want) {
  std::shared_ptr<const Side> side;
  for (std::size_t s = 0; s < want.sources.size(); ++s) {
    const Link& link = links_.at(want.sources[s]);
    if (link.at != Link::At::up) continue;
    if (link.rank.value != static_cast<std::int32_t>(s))
      return fail(Code::invalid_argument, "{} is named as prefill rank {}, but says that it is rank {}", link.address.address, s,
                  link.rank.value);
    // Equal ones are one object, unless KnownSides has forgotten it meanwhile.
    if (side != nullptr && side != link.side && encode_side(*side) != encode_side(*link.side))
      return fail(Code::invalid_argument, "prefill rank {} has another geometry than the ranks before it: {}", s,
                  to_string(link.side->sharding()));
    side = link.side;
  }
  if (side != nullptr && static_cast<std::size_t>(side->ranks()) != want.sources.size())
    return fail(Code::invalid_argument, "{} prefill ranks are named, but they say that they are {}", want.sources.size(),
                side->ranks());
  return side;
}

Expected<bool> TargetEndpoint::try_start(const Want& want, Instant until) {
  const auto described = geometries_.find(want.geometry);
  if (described == geometries_.end()) return fail(Code::invalid_argument, "geometry {} is forgotten", want.geometry.value);
  const LocalCache& cache = described->second.cache;
  const auto side = source_side(want);
  if (!side) return tl::unexpected(side.error());
  if (*side == nullptr) return false;
  const auto plan = plans_.find(*side, cache.side, want.range.end);
  if (!plan) return tl::unexpected(plan.error());
  if (auto ok = check_memory(cache, *plan->plan); !ok) return tl::unexpected(ok.error());
  const auto granted = granted_sources(*plan->plan, cache.rank);
  for (const Rank source : granted)
    if (links_.at(want.sources[static_cast<std::size_t>(source.value)]).at != Link::At::up) return false;
  for (const Rank source : granted)
    if (!tell_geometry(links_.at(want.sources[static_cast<std::size_t>(source.value)]), want.geometry)) {
      untold_ = true;  // a grant would be refused: again with the next pulse
      return false;
    }
  for (const Rank source : granted) links_.at(want.sources[static_cast<std::size_t>(source.value)]).transfers.insert(want.key);
  std::vector<TargetBook::Action> actions;
  if (auto ok = book_.begin(job_of(want, cache, *plan, until), now(), actions); !ok) {
    over(want.key);
    return tl::unexpected(ok.error());
  }
  if (const Receiver* receiver = book_.find(want.key); receiver != nullptr) owed_[want.key] = receiver->expected();
  obey(actions);
  return true;
}

// Every tensor that somebody will write has its memory described.
Expected<void> TargetEndpoint::check_memory(const LocalCache& cache, const Plan& plan) {
  for (const auto& [group, layer] : held_tensors(*cache.side, cache.rank)) {
    const GroupSide& side = cache.side->groups()[static_cast<std::size_t>(group)];
    const bool planned =
        std::any_of(plan.groups().begin(), plan.groups().end(), [&](const GroupPlan& p) { return p.target->name == side.name; });
    if (planned && cache.memory.find(group, layer) == nullptr)
      return fail(Code::invalid_argument, "group {} layer {} is wanted, but its memory is not described", side.name, layer.value);
  }
  return {};
}

ReceiverJob TargetEndpoint::job_of(const Want& want, const LocalCache& cache, const KnownPlan& plan, Instant until) {
  ReceiverJob job;
  job.key = want.key;
  job.rank = cache.rank;
  job.plan = plan.plan;
  job.digest = plan.digest;
  job.geometry = want.geometry;
  job.range = want.range;
  for (const GroupPlan& group : plan.plan->groups()) {
    const CacheTable& table = want.tables[static_cast<std::size_t>(group.target - plan.plan->target().groups().data())];
    job.tables.push_back({table.pages, table.pool_pages});
  }
  for (const SourceAddress& source : want.sources) {
    const Link& link = links_.at(source);
    job.sources.push_back(link.at == Link::At::up ? link.partner : PartnerId(next_partner_++));
  }
  job.time = std::max(until - now(), std::chrono::nanoseconds(1));
  job.can_revoke = transport_.abilities().can_revoke;
  job.limits = options_.limits;
  return job;
}

void TargetEndpoint::fail_waiting(const TransferKey& key, Outcome outcome, Error why) {
  const auto waiting = waiting_.extract(key);  // `key` may be the map's own
  const TransferKey& kept = waiting.key();
  open_gate(kept);
  telemetry_.ended(kept, outcome, why, now());
  telemetry_.released(kept, now());
  happened_.emplace_back(TargetEnded{kept, outcome, std::move(why), {}, Bytes(0), now()});
  happened_.emplace_back(TargetReleased{kept});
}

std::string TargetEndpoint::missing(const Want& want) const {
  std::string out;
  for (std::size_t s = 0; s < want.sources.size(); ++s) {
    const Link& link = links_.at(want.sources[s]);
    if (link.at == Link::At::up) continue;
    out += fmt::format("{}prefill rank {} at {}: {}", out.empty() ? "" : "; ", s, link.address.address, link.why_not);
  }
  return out;
}

// ---- what the book says ----

void TargetEndpoint::obey(std::vector<TargetBook::Action>& actions) {
  for (TargetBook::Action& action : actions) {
    if (const auto* message = std::get_if<SendTo>(&action)) {
      if (std::holds_alternative<Grant>(message->message)) telemetry_.granted();
      if (const auto link = partners_.find(message->to); link != partners_.end())
        note_sent(link->second->socket->send(encoder_.encode(message->message)));
    } else {
      auto& keyed = std::get<TargetBook::Keyed>(action);
      obey(keyed.key, keyed.source, keyed.action);
    }
  }
}

void TargetEndpoint::obey(const TransferKey& key, PartnerId source, Receiver::Action& action) {
  const auto found = partners_.find(source);
  Link* const link = found == partners_.end() ? nullptr : found->second;
  if (const auto* admit = std::get_if<Receiver::Admit>(&action)) {
    if (link != nullptr) std::ignore = transport_.admit(*link->peer, admit->tag);  // down: PeerDown says so
  } else if (const auto* revoke = std::get_if<Receiver::Revoke>(&action)) {
    if (link != nullptr) std::ignore = transport_.revoke(*link->peer, revoke->tag);  // of a lost one nothing can land
  } else if (std::holds_alternative<Receiver::FenceOff>(action)) {
    if (link != nullptr) lose(*link, {Code::unavailable, Scope::peer, "it does not answer: fenced off"});
  } else if (const auto* layer = std::get_if<Receiver::Publish>(&action)) {
    if (const auto gate = gates_.find(key); gate != gates_.end()) gate->second->landed(layer->layer);
    telemetry_.layer_landed(key, layer->layer, now());
    happened_.emplace_back(LayerLanded{key, layer->layer});
  } else if (auto* end = std::get_if<Receiver::End>(&action)) {
    const Bytes bytes = end->outcome == Outcome::landed ? owed_[key] : Bytes(0);
    open_gate(key);
    telemetry_.landed(bytes);
    telemetry_.ended(key, end->outcome, end->why, now());
    if (book_.find(key) != nullptr) telemetry_.quarantined(key);  // else it is released in this very step
    happened_.emplace_back(TargetEnded{key, end->outcome, std::move(end->why), std::move(end->payloads), bytes, now()});
  } else if (std::holds_alternative<Receiver::Release>(action)) {
    over(key);
    telemetry_.released(key, now());
    happened_.emplace_back(TargetReleased{key});
  }
}

// Nobody waits at the gate of what has ended.
void TargetEndpoint::open_gate(const TransferKey& key) {
  const auto gate = gates_.extract(key);
  if (!gate.empty()) gate.mapped()->over();
}

void TargetEndpoint::over(const TransferKey& key) {
  owed_.erase(key);
  for (auto& [address, link] : links_) link.transfers.erase(key);
}

}  // namespace kvloom
