#include "kvloom/session/source_endpoint.h"

#include <algorithm>

#include "kvloom/plan/wire.h"
#include "kvloom/session/wire.h"

namespace kvloom {
namespace {

constexpr std::size_t kMaxLinks = 4096;
constexpr std::size_t kMaxGranted = 2 * SourceBook::kEarly;  // of one peer, that are not over
constexpr std::size_t kMaxUnsaid = 2 * kMaxGranted;
constexpr Bytes kPollBytes{16 << 20};

}  // namespace

// ---- birth ----

Expected<std::unique_ptr<SourceEndpoint>> SourceEndpoint::make(SourceOptions options, Transport& transport, LocalCache cache,
                                                               Sinks sinks) {
  auto control = ControlServer::make(options.control);
  if (!control) return tl::unexpected(control.error());
  if (auto ok = check_options(options); !ok) return tl::unexpected(ok.error());
  if (!options.limits.join) options.limits.join = join_below(transport.cost());
  return std::unique_ptr<SourceEndpoint>(
      new SourceEndpoint(std::move(options), transport, std::move(cache), std::move(sinks), std::move(*control)));
}

SourceEndpoint::SourceEndpoint(SourceOptions options, Transport& transport, LocalCache cache, Sinks sinks,
                               std::unique_ptr<ControlServer> control)
    : options_(std::move(options)),
      transport_(transport),
      cache_(std::move(cache)),
      telemetry_(std::move(sinks)),
      side_bytes_(encode_side(*cache_.side)),
      incarnation_(draw_token().low),
      control_(std::move(control)),
      book_(cache_.rank),
      pacer_(options_.pace),
      stepped_(now()) {}

// What is lent to the transport comes back first; and peers hear at once that nobody is here any more.
SourceEndpoint::~SourceEndpoint() {
  for (const auto& [peer, link] : peers_) std::ignore = transport_.fence(peer);
  constexpr int kMost = 1000;
  for (int turn = 0; turn < kMost && !operations_.empty(); ++turn) {
    heard_.clear();
    transport_.poll({kPollBytes, std::chrono::nanoseconds(0)}, heard_);
    for (const Event& event : heard_)
      if (const auto* done = std::get_if<Completed>(&event)) operations_.erase(done->post.value);
  }
}

// ---- the engine's side ----

Expected<void> SourceEndpoint::offer(const Offer& offer) {
  if (offer.key.name.empty() || offer.key.name.size() > kMaxName)
    return fail(Code::invalid_argument, "a transfer's name has 1 to {} B, not {}", kMaxName, offer.key.name.size());
  if (offer.time <= offer.time.zero() || offer.time > kMaxTimeLeft)
    return fail(Code::invalid_argument, "a time of {} ns: it must be above 0 and at most {} h", offer.time.count(),
                kMaxTimeLeft.count());
  Transfer fresh;
  fresh.tables.resize(cache_.side->groups().size());
  fresh.last_ready = now();
  const bool first = transfers_.try_emplace(offer.key, std::move(fresh)).second;
  std::vector<SourceBook::Action> actions;
  const SenderJob job{offer.key, cache_.rank, offer.time, offer.has_payload, options_.limits};
  if (auto ok = book_.offer(job, now(), actions); !ok) {
    if (first) transfers_.erase(offer.key);
    return ok;
  }
  telemetry_.opened(offer.key, 0, now());
  obey(actions);
  let_posts_go();
  return {};
}

Expected<void> SourceEndpoint::set_table(const TransferKey& key, std::int32_t group, CacheTable table) {
  const auto at = transfers_.find(key);
  if (at == transfers_.end()) return {};
  if (group < 0 || static_cast<std::size_t>(group) >= at->second.tables.size())
    return fail(Code::invalid_argument, "transfer {}: group {} of {}", to_string(key), group, at->second.tables.size());
  auto& kept = at->second.tables[static_cast<std::size_t>(group)];
  const auto before = kept.pages();
  if (table.pages.size() < before.size() || !std::equal(before.begin(), before.end(), table.pages.begin()))
    return fail(Code::invalid_argument,
                "transfer {} group {}: its first {} pages have been said, and may be read now: a table only grows",
                to_string(key), group, before.size());
  auto made = PageTable::make(std::move(table.pages), table.pool_pages, PageTable::Use::source);
  if (!made) return tl::unexpected(made.error());
  kept = std::move(*made);
  return {};
}

void SourceEndpoint::ready(const TransferKey& key, LayerId layer, std::int64_t tokens, std::shared_ptr<DeviceWork> after) {
  const auto at = transfers_.find(key);
  if (at == transfers_.end()) return;
  if (after != nullptr) {
    pending_.push_back({key, layer, tokens, std::move(after)});
    return;
  }
  const Instant here = now();
  at->second.last_ready = here;
  telemetry_.ready(key, layer, tokens, here);
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::Ready{layer, tokens}, here, actions);
  obey(actions);
  let_posts_go();
}

Expected<void> SourceEndpoint::payload(const TransferKey& key, std::vector<std::byte> bytes) {
  if (bytes.size() > kMaxPayload)
    return fail(Code::invalid_argument, "transfer {}: a payload of {} B: at most {} ride with completion", to_string(key),
                bytes.size(), kMaxPayload);
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::Payload{std::move(bytes)}, now(), actions);
  obey(actions);
  let_posts_go();
  return {};
}

void SourceEndpoint::cancel(const TransferKey& key, std::string why) {
  drop_posts(key, std::nullopt, "cancelled");
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::CancelAsked{std::move(why)}, now(), actions);
  obey(actions);
}

// ---- the loop ----

bool SourceEndpoint::poll(std::chrono::nanoseconds wait, std::vector<SourceEvent>& events, int wake) {
  const auto sleep = [&] {
    const auto armed = transport_.arm();
    if (!armed) return;
    const auto most = pending_.empty() ? wait : std::min(wait, options_.device_nap);
    std::vector<int> fds = control_->fds();
    fds.push_back(*armed);
    if (wake >= 0) fds.push_back(wake);
    const Instant due = deadline();
    wait_readable(fds, due == kNever ? most : std::min(most, due - now()));
  };
  return poll_once(
      happened_, events, wait > wait.zero(), [&] { return step(); }, sleep);
}

bool SourceEndpoint::step() {
  const Instant here = now();
  if (here - stepped_ > options_.silence / 2)
    for (auto& [route, link] : links_) link.pulse.forgive(here);
  stepped_ = here;
  bool did = read_control();
  did |= read_transport();
  did |= read_device();
  did |= tell_done();
  did |= let_posts_go();
  tick();
  const bool sent = std::exchange(sent_, false);  // a send may have eaten the signal of what came meanwhile: look once more
  return did || sent;
}

bool SourceEndpoint::read_control() {
  bool did = false;
  for (int turn = 0; turn < kMessagesAStep; ++turn) {
    const auto received = control_->receive();
    if (!received) break;
    did = true;
    const auto what = decode_said(received->bytes);
    if (what) {
      said(received->from, *what);
      continue;
    }
    telemetry_.nonsense(what.error());
    tell(received->from, {}, Refused{what.error().code, what.error().message});
  }
  return did;
}

bool SourceEndpoint::read_transport() {
  heard_.clear();
  const bool did = transport_.poll({kPollBytes, std::chrono::nanoseconds(0)}, heard_);
  for (const Event& event : heard_) {
    if (const auto* done = std::get_if<Completed>(&event)) completed(*done);
    if (const auto* down = std::get_if<PeerDown>(&event))
      if (const auto at = peers_.find(down->peer); at != peers_.end()) lose(at->second->partner, down->reason);
  }
  return did || !heard_.empty();
}

bool SourceEndpoint::read_device() {
  bool did = false;
  while (!pending_.empty()) {
    const auto done = pending_.front().after->is_done();
    if (done && !*done) break;
    const Pending next = std::move(pending_.front());
    pending_.pop_front();
    did = true;
    if (done)
      ready(next.key, next.layer, next.tokens);
    else
      cancel(next.key, fmt::format("layer {} was not computed: {}", next.layer.value, done.error().message));
  }
  return did;
}

bool SourceEndpoint::tell_done() {
  const std::vector<Done> done = std::exchange(done_, {});
  std::vector<SourceBook::Action> actions;
  for (const Done& each : done) book_.tell(each.key, Sender::Posted{each.id, each.delivered}, now(), actions);
  obey(actions);
  return !done.empty();
}

void SourceEndpoint::tick() {
  const Instant here = now();
  if (book_.deadline() <= here) {
    std::vector<SourceBook::Action> actions;
    book_.time(here, actions);
    obey(actions);
  }
  if (here < pulses_at_) return;
  pulses_at_ = here + options_.heartbeat / 4;
  std::vector<PartnerId> silent, deaf;
  for (auto& [route, link] : links_) {
    while (!link.unsaid.empty() && send(link, link.unsaid.front())) link.unsaid.pop_front();
    if (link.unsaid.size() > kMaxUnsaid) deaf.push_back(link.partner);
    std::erase_if(link.granted, [&](const auto& g) { return !transfers_.contains(g.first) && g.second.until <= here; });
    const bool needed = std::any_of(link.granted.begin(), link.granted.end(),
                                    [&](const auto& granted) { return transfers_.contains(granted.first); });
    link.pulse.need(needed, here);
    if (link.pulse.is_lost(here, options_.silence)) silent.push_back(link.partner);
    if (link.pulse.is_due(here, options_.heartbeat)) tell(route, link.token, Ping{});
  }
  for (const PartnerId partner : deaf) lose(partner, lost("it does not take what is said to it"));
  for (const PartnerId partner : silent)
    lose(partner, lost("not a word for {} ms: frozen, or cut off", options_.silence / std::chrono::milliseconds(1)));
}

Instant SourceEndpoint::deadline() const {
  Instant out = std::min(book_.deadline(), pacer_.deadline());
  const bool beating = std::any_of(links_.begin(), links_.end(),
                                   [](const auto& l) { return !l.second.granted.empty() || !l.second.unsaid.empty(); });
  if (beating) out = std::min(out, pulses_at_);
  return done_.empty() ? out : Instant(0);
}

// ---- what peers say ----

void SourceEndpoint::said(const Route& from, const Said& what) {
  telemetry_.received();
  if (const auto* about = std::get_if<Told>(&what)) return told(from, *about);
  const auto at = links_.find(from);
  if (at == links_.end()) return tell(from, {}, HelloFirst{});
  at->second.pulse.heard(now());
  message(at->second, std::get<Message>(what));
}

void SourceEndpoint::told(const Route& from, const Told& told) {
  if (const auto* greeting = std::get_if<Hello>(&told.what)) return hello(from, told.token, *greeting);
  const auto at = links_.find(from);
  if (at == links_.end() || at->second.token != told.token) return tell(from, told.token, HelloFirst{});
  Link& link = at->second;
  link.pulse.heard(now());
  if (const auto* described = std::get_if<Geometry>(&told.what)) return geometry(link, *described);
  if (const auto* ping = std::get_if<Ping>(&told.what); ping != nullptr && !ping->answer) tell(from, link.token, Ping{true});
}

void SourceEndpoint::hello(const Route& from, const ConnectionToken& token, const Hello& hello) {
  const Welcome welcome{incarnation_, 0, cache_.rank, options_.name, side_bytes_};
  if (const auto at = links_.find(from); at != links_.end()) {
    if (at->second.token == token) return tell(from, token, welcome);  // the first one was lost
    lose(at->second.partner, lost("it has connected anew"));
  }
  const auto refuse = [&](Code code, std::string why) {
    telemetry_.refused(printable(hello.name), {code, Scope::peer, why});
    tell(from, token, Refused{code, std::move(why)});
  };
  if (links_.size() >= kMaxLinks) return refuse(Code::exhausted, fmt::format("{} peers are connected, the most", links_.size()));
  const auto peer = transport_.connect(hello.transport, bytes_of(token));
  if (!peer) return refuse(peer.error().code, fmt::format("its transport can't be reached: {}", peer.error().message));
  Link link;
  link.partner = PartnerId(next_partner_++);
  link.route = from;
  link.token = token;
  link.name = fmt::format("decode rank {} ({})", hello.rank.value, printable(hello.name));
  link.peer = *peer;
  Link& kept = links_.emplace(from, std::move(link)).first->second;
  partners_.emplace(kept.partner, &kept);
  peers_.emplace(kept.peer, &kept);
  telemetry_.connected(kept.name);
  tell(from, token, welcome);
}

void SourceEndpoint::geometry(Link& link, Geometry geometry) {
  if (link.geometries.size() >= kMaxGeometries && !link.geometries.contains(geometry.id))
    link.geometries.erase(link.geometries.begin());
  auto read = read_geometry(link, geometry);
  if (!read) telemetry_.geometry_refused(link.name, read.error());
  link.geometries.insert_or_assign(geometry.id, std::move(read));
}

Expected<SourceEndpoint::RemoteCache> SourceEndpoint::read_geometry(const Link& link, Geometry& geometry) {
  const auto side = sides_.find(geometry.side);
  if (!side) return tl::unexpected(side.error());
  RemoteCache out{*side, geometry.rank, {}, {}};
  std::vector<Bytes> lengths;
  for (const RegionKey& region : geometry.regions) {
    const auto remote = transport_.import_region(link.peer, region.key);
    if (!remote) return tl::unexpected(remote.error());
    out.regions.push_back(*remote);
    lengths.push_back(std::min(remote->length, region.length));
  }
  auto memory = CacheMemory::make(**side, geometry.rank, lengths, std::move(geometry.tensors));
  if (!memory) return tl::unexpected(memory.error());
  out.memory = std::move(*memory);
  return out;
}

void SourceEndpoint::message(Link& link, const Message& message) {
  if (const auto* granted = std::get_if<Grant>(&message)) return grant(link, *granted);
  if (const auto* cancelled = std::get_if<Cancel>(&message)) {
    const bool is_its_own =
        cancelled->whole || std::any_of(link.geometries.begin(), link.geometries.end(), [&](const auto& geometry) {
          return geometry.second && geometry.second->rank == cancelled->target;
        });
    if (!is_its_own) {  // a rank that it has never told of: nothing of ours can land for it
      return say(link, Quiesced{cancelled->key, cache_.rank});
    }
    drop_posts(cancelled->key, link.partner, "cancelled by its target");
  }
  std::vector<SourceBook::Action> actions;
  book_.message(link.partner, message, now(), actions);
  obey(actions);
}

void SourceEndpoint::grant(Link& link, const Grant& grant) {
  const auto refuse = [&](const Error& why) {
    say(link, Failed{grant.key, cache_.rank, why.code, std::string(cut_reason(why.message))});
  };
  if (link.granted.size() >= kMaxGranted && !link.granted.contains(grant.key))
    return refuse({Code::exhausted, Scope::transfer, fmt::format("{} grants of this rank are open, the most", kMaxGranted)});
  if (auto known = learn_plan(link, grant); !known) {
    refuse(known.error());
    std::vector<SourceBook::Action> actions;
    book_.unfit(grant.key, fmt::format("decode rank {}: {}", grant.target.value, known.error().message), now(), actions);
    return obey(actions);
  }
  telemetry_.granted();
  if (!link.granted.contains(grant.key)) link.granted.emplace(grant.key, Granted{now() + grant.time_left, {}});
  if (!link.warm) warm_up(link, grant);
  std::vector<SourceBook::Action> actions;
  book_.message(link.partner, grant, now(), actions);
  obey(actions);
}

// A write of nothing from each of our regions: a transport that maps them maps them now, and not with the first layer.
void SourceEndpoint::warm_up(Link& link, const Grant& grant) {
  link.warm = true;
  const RemoteCache& remote = *link.geometries.at(grant.geometry);
  if (remote.regions.empty()) return;
  // Under a tag that nobody admits: where a region can't be read, no tag of a transfer is broken by that.
  constexpr Tag kNobodys{~std::uint64_t{0}};
  for (const RegionId region : cache_.regions) transport_.write({region, remote.regions.front(), kNobodys, {}});
}

Expected<void> SourceEndpoint::learn_plan(const Link& link, const Grant& grant) {
  const auto geometry = link.geometries.find(grant.geometry);
  if (geometry == link.geometries.end())
    return fail(Scope::transfer, Code::unsupported, "geometry {} has not been told on this connection", grant.geometry.value);
  if (!geometry->second)
    return fail(Scope::transfer, geometry->second.error().code, "geometry {} was refused: {}", grant.geometry.value,
                geometry->second.error().message);
  const RemoteCache& remote = *geometry->second;
  if (remote.rank != grant.target)
    return fail(Scope::transfer, Code::invalid_argument, "geometry {} is of rank {}, the grant of rank {}", grant.geometry.value,
                remote.rank.value, grant.target.value);
  const auto plan = plans_.find(cache_.side, remote.side, grant.range.end);
  if (!plan) return tl::unexpected(plan.error());
  if (plan->digest != grant.digest)
    return fail(
        Scope::transfer, Code::unsupported,
        "the two sides make another plan here than at decode rank {}: is it the same kvloom, and has it seen our geometry?",
        grant.target.value);
  book_.know(plan->plan, plan->digest);
  return {};
}

void SourceEndpoint::lose(PartnerId partner, const Error& why) {
  const auto at = partners_.find(partner);
  if (at == partners_.end()) return;
  const Link& there = *at->second;
  const PeerId peer = there.peer;
  telemetry_.lost(there.name, why);
  peers_.erase(peer);
  const Route route = there.route;
  partners_.erase(at);
  links_.erase(route);
  for (Paced& paced : pacer_.drop(partner)) {
    waiting_.erase({paced.key, paced.id});
    done_.push_back({std::move(paced.key), paced.id, tl::unexpected(why)});
  }
  std::ignore = transport_.fence(peer);  // its posts complete now; where it can't be fenced, with the peer's end
  std::vector<SourceBook::Action> actions;
  book_.gone(partner, why, now(), actions);
  obey(actions);
}

void SourceEndpoint::tell(const Route& to, const ConnectionToken& token, decltype(Told::what) what) {
  note_sent(control_->send(to, encode_told({token, std::move(what)})));
}

// What a target waits for is said again until it is taken; what it asks for anew by itself need not be.
void SourceEndpoint::say(Link& link, const Message& message) {
  const bool is_final = std::holds_alternative<Failed>(message) || std::holds_alternative<Quiesced>(message);
  if ((!is_final || link.unsaid.empty()) && send(link, message)) return;
  if (is_final) link.unsaid.push_back(message);
}

bool SourceEndpoint::send(const Link& link, const Message& message) {
  const bool taken = control_->send(link.route, encoder_.encode(message));
  note_sent(taken);
  return taken;
}

void SourceEndpoint::note_sent(bool taken) {
  sent_ = true;
  telemetry_.sent(taken);
}

SourceEndpoint::Link* SourceEndpoint::find(PartnerId partner) {
  const auto at = partners_.find(partner);
  return at == partners_.end() ? nullptr : at->second;
}

}  // namespace kvloom
