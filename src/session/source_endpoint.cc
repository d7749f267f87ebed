#include "kvloom/session/source_endpoint.h"

#include <algorithm>

#include "kvloom/bind/bind.h"
#include "kvloom/plan/wire.h"
#include "kvloom/session/wire.h"

namespace kvloom {
namespace {

constexpr std::size_t kMaxLinks = 4096;
constexpr std::size_t kMaxGeometries = 64;  // of one peer
constexpr std::size_t kRunsAWrite = 512;
constexpr Bytes kPollBytes{16 << 20};

std::int32_t group_index(const Side& side, const GroupSide* group) {
  return static_cast<std::int32_t>(group - side.groups().data());
}

Error lost(const std::string& name, std::string_view how) {
  return {Code::unavailable, Scope::peer, fmt::format("{}: {}", name, how)};
}

}  // namespace

// ---- birth ----

Expected<std::unique_ptr<SourceEndpoint>> SourceEndpoint::make(SourceOptions options, Transport& transport, LocalCache cache,
                                                               Sinks sinks) {
  auto control = ControlServer::make(options.control);
  if (!control) return tl::unexpected(control.error());
  options.limits.join = join_below(transport.cost());
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

SourceEndpoint::~SourceEndpoint() = default;

// ---- the engine's side ----

Expected<void> SourceEndpoint::offer(const Offer& offer) {
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

void SourceEndpoint::ready(const TransferKey& key, LayerId layer, std::int64_t tokens) {
  const auto at = transfers_.find(key);
  if (at == transfers_.end()) return;
  const Instant here = now();
  at->second.last_ready = here;
  telemetry_.ready(key, layer, tokens, here);
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::Ready{layer, tokens}, here, actions);
  obey(actions);
  let_posts_go();
}

void SourceEndpoint::payload(const TransferKey& key, std::vector<std::byte> bytes) {
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::Payload{std::move(bytes)}, now(), actions);
  obey(actions);
  let_posts_go();
}

void SourceEndpoint::cancel(const TransferKey& key, std::string why) {
  drop_posts(key, std::nullopt, "cancelled");
  std::vector<SourceBook::Action> actions;
  book_.tell(key, Sender::CancelAsked{std::move(why)}, now(), actions);
  obey(actions);
}

// ---- the loop ----

bool SourceEndpoint::poll(std::chrono::nanoseconds wait, std::vector<SourceEvent>& events, int wake) {
  bool did = step();
  if (!did && happened_.empty() && wait > wait.zero()) {
    if (const auto armed = transport_.arm()) {
      std::vector<int> fds = control_->fds();
      fds.push_back(*armed);
      if (wake >= 0) fds.push_back(wake);
      const Instant due = deadline();
      wait_readable(fds, due == kNever ? wait : std::min(wait, due - now()));
    }
    did = step();
  }
  did = did || !happened_.empty();
  events.insert(events.end(), std::make_move_iterator(happened_.begin()), std::make_move_iterator(happened_.end()));
  happened_.clear();
  return did;
}

bool SourceEndpoint::step() {
  const Instant here = now();
  if (here - stepped_ > options_.silence / 2)
    for (auto& [route, link] : links_) link.pulse.forgive(here);
  stepped_ = here;
  bool did = read_control();
  did |= read_transport();
  did |= tell_done();
  did |= let_posts_go();
  tick();
  return did;
}

bool SourceEndpoint::read_control() {
  bool did = false;
  while (const auto received = control_->receive()) {
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
      if (const auto at = peers_.find(down->peer); at != peers_.end())
        lose(at->second->partner, lost(at->second->name, down->reason.message));
  }
  return did || !heard_.empty();
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
  std::vector<PartnerId> silent;
  for (auto& [route, link] : links_) {
    std::erase_if(link.granted, [&](const auto& g) { return !transfers_.contains(g.first) && g.second.until <= here; });
    const bool needed = std::any_of(link.granted.begin(), link.granted.end(),
                                    [&](const auto& granted) { return transfers_.contains(granted.first); });
    link.pulse.need(needed, here);
    if (link.pulse.is_lost(here, options_.silence)) silent.push_back(link.partner);
    if (link.pulse.is_due(here, options_.heartbeat)) tell(route, link.token, Ping{});
  }
  for (const PartnerId partner : silent)
    lose(partner, lost(find(partner)->name,
                       fmt::format("not a word for {} ms: frozen, or cut off", options_.silence / std::chrono::milliseconds(1))));
}

Instant SourceEndpoint::deadline() const {
  Instant out = std::min(book_.deadline(), pacer_.deadline());
  for (const auto& [route, link] : links_)
    out = std::min(out, !transfers_.empty() && !link.granted.empty() ? pulses_at_ : link.pulse.deadline(options_));
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
    lose(at->second.partner, lost(at->second.name, "it has connected anew"));
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
  if (!read) telemetry_.refused(link.name, read.error());
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
  if (const auto* cancelled = std::get_if<Cancel>(&message)) drop_posts(cancelled->key, link.partner, "cancelled by its target");
  std::vector<SourceBook::Action> actions;
  book_.message(link.partner, message, now(), actions);
  obey(actions);
}

void SourceEndpoint::grant(Link& link, const Grant& grant) {
  const auto refuse = [&](const Error& why) {
    const Message answer = Failed{grant.key, cache_.rank, why.code, std::string(cut_reason(why.message))};
    telemetry_.sent(control_->send(link.route, encoder_.encode(answer)));
  };
  if (auto known = learn_plan(link, grant); !known) return refuse(known.error());
  telemetry_.granted();
  if (!link.granted.contains(grant.key)) link.granted.emplace(grant.key, Granted{{}, now() + grant.time_left});
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
  for (const RegionId region : cache_.regions) transport_.write({region, remote.regions.front(), grant.tag, {}});
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
  telemetry_.sent(control_->send(to, encode_told({token, std::move(what)})));
}

SourceEndpoint::Link* SourceEndpoint::find(PartnerId partner) {
  const auto at = partners_.find(partner);
  return at == partners_.end() ? nullptr : at->second;
}

// ---- what the book says ----

void SourceEndpoint::obey(std::vector<SourceBook::Action>& actions) {
  for (SourceBook::Action& action : actions) {
    if (const auto* message = std::get_if<SendTo>(&action)) {
      if (const Link* link = find(message->to); link != nullptr)
        telemetry_.sent(control_->send(link->route, encoder_.encode(message->message)));
    } else {
      auto& keyed = std::get<SourceBook::Keyed>(action);
      obey(keyed.key, keyed.action);
    }
  }
}

void SourceEndpoint::obey(const TransferKey& key, Sender::Action& action) {
  if (auto* post = std::get_if<Sender::Post>(&action)) return queue(key, std::move(*post));
  if (const auto* fence = std::get_if<Sender::FenceOff>(&action)) {
    // The connection with it, and so its other transfers: a peer that does not answer for so long has none that go on.
    if (const Link* link = find(fence->partner); link != nullptr)
      lose(fence->partner, lost(link->name, "posts to it do not end"));
    return;
  }
  if (const auto* layer = std::get_if<Sender::ReleaseLayer>(&action)) {
    happened_.emplace_back(LayerReleased{key, layer->layer});
    return;
  }
  if (auto* end = std::get_if<Sender::End>(&action)) {
    const auto tail = now() - transfers_.at(key).last_ready;
    telemetry_.ended(key, end->outcome, end->why, now());
    if (end->outcome == Outcome::landed) telemetry_.tail(tail);
    happened_.emplace_back(SourceEnded{key, end->outcome, std::move(end->why), now(), tail});
    return;
  }
  transfers_.erase(key);
  telemetry_.released(key, now());
  for (auto& [route, link] : links_) link.granted.erase(key);
  happened_.emplace_back(SourceReleased{key});
}

// ---- posting ----

void SourceEndpoint::queue(const TransferKey& key, Sender::Post post) {
  pacer_.push({post.to, key, post.id, post.bytes, now()});
  waiting_.emplace(std::pair(key, post.id), std::move(post));
}

void SourceEndpoint::drop_posts(const TransferKey& key, std::optional<PartnerId> to, const char* why) {
  for (Paced& paced : to ? pacer_.drop(*to, key) : pacer_.drop(key)) {
    waiting_.erase({paced.key, paced.id});
    done_.push_back({std::move(paced.key), paced.id, fail(Scope::transfer, Code::cancelled, "{}", why)});
  }
}

bool SourceEndpoint::let_posts_go() {
  bool did = false;
  while (const auto paced = pacer_.next(now())) {
    const auto at = waiting_.find({paced->key, paced->id});
    const Sender::Post next = std::move(at->second);
    waiting_.erase(at);
    telemetry_.left_queue(now() - paced->pushed);
    post(paced->key, next);
    did = true;
  }
  return did;
}

void SourceEndpoint::post(const TransferKey& key, const Sender::Post& post) {
  const std::uint64_t number = next_open_++;
  ++counts_.posts;
  OpenPost& open = open_[number];
  open.key = key;
  open.id = post.id;
  open.to = post.to;
  open.post = {post.target, {}, post.bytes, now()};
  if (!post.parts.empty()) open.post.first = post.parts.front();
  Link* link = find(post.to);
  const auto transfer = transfers_.find(key);
  if (link == nullptr)
    open.error = lost(fmt::format("decode rank {}", post.target.value), "the connection is lost");
  else if (transfer == transfers_.end())
    open.error = {Code::cancelled, Scope::transfer, "the transfer is over"};
  else if (auto ok = write_all(post, transfer->second, *link, number); !ok)
    open.error = ok.error();
  if (open.open == 0) finish(number);
}

// The tables of a grant, each checked once, by whoever posts to it first.
Expected<const std::vector<PageTable>*> SourceEndpoint::tables_of(Link& link, const TransferKey& key, const Grant& grant) {
  Granted& granted = link.granted[key];
  if (granted.tables.empty())
    for (const GrantTable& table : grant.tables) {
      auto made = PageTable::make(table.pages, table.pool_pages, PageTable::Use::target);
      if (!made) return tl::unexpected(made.error());
      granted.tables.push_back(std::move(*made));
    }
  return &granted.tables;
}

Expected<void> SourceEndpoint::write_all(const Sender::Post& post, const Transfer& transfer, Link& link, std::uint64_t number) {
  const auto geometry = link.geometries.find(post.grant->geometry);
  if (geometry == link.geometries.end() || !geometry->second)
    return fail(Scope::transfer, Code::unavailable, "geometry {} of decode rank {} is not known any more",
                post.grant->geometry.value, post.target.value);
  const auto tables = tables_of(link, open_.at(number).key, *post.grant);
  if (!tables) return tl::unexpected(tables.error());
  Progress progress;
  for (const PostPart& part : post.parts) {
    const auto bytes = write_part(post, part, transfer, **tables, *geometry->second, number);
    if (!bytes)
      return fail(Scope::transfer, bytes.error().code, "layer {} of group {}: {}", part.layer.layer.value, part.layer.group,
                  bytes.error().message);
    progress.parts.push_back({part.layer, *bytes});
    open_.at(number).written += *bytes;
  }
  progress.last = post.last;
  progress.payload = post.payload;
  telemetry_.posted(open_.at(number).key, post, now() - transfer.last_ready, now());
  notify(link.peer, post.grant->tag, std::move(progress), number);
  return {};
}

Expected<Bytes> SourceEndpoint::write_part(const Sender::Post& post, const PostPart& part, const Transfer& transfer,
                                           const std::vector<PageTable>& targets, const RemoteCache& remote,
                                           std::uint64_t number) {
  const Plan& plan = *post.plan;
  const GroupPlan& group = plan.groups()[static_cast<std::size_t>(part.layer.group)];
  const auto path = plan.path(part.layer.group, cache_.rank, post.target);
  const std::int32_t ours = group_index(plan.source(), group.source), theirs = group_index(plan.target(), group.target);
  const PageTable& table = transfer.tables[static_cast<std::size_t>(ours)];
  auto bound = bind(plan, *path, table, targets[static_cast<std::size_t>(part.layer.group)], post.grant->range, part.chunk);
  if (!bound) return tl::unexpected(bound.error());
  const TensorRegions *from = cache_.memory.find(ours, part.layer.layer), *to = remote.memory.find(theirs, part.layer.layer);
  if (from == nullptr || to == nullptr)
    return fail(Code::invalid_argument, "its memory is not described at {}", from == nullptr ? "prefill" : "decode");
  scratch_.resize(kRunsAWrite);
  while (const std::size_t count = bound->next(scratch_)) {
    placed_.clear();
    if (auto ok = place(std::span(scratch_).first(count), *from, *to, placed_); !ok) return tl::unexpected(ok.error());
    write_runs(remote, post.grant->tag, number);
  }
  return bound->bytes();
}

// Runs between the same two regions, as many as stand together, are one write.
void SourceEndpoint::write_runs(const RemoteCache& remote, Tag tag, std::uint64_t number) {
  OpenPost& open = open_.at(number);
  for (std::size_t begin = 0; begin < placed_.size();) {
    const PlacedRun& first = placed_[begin];
    std::vector<Run> runs;
    if (!spare_.empty()) {
      runs = std::move(spare_.back());
      spare_.pop_back();
      runs.clear();
    }
    for (; begin < placed_.size() && runs.size() < kRunsAWrite && placed_[begin].source_region == first.source_region &&
           placed_[begin].target_region == first.target_region;
         ++begin)
      runs.push_back(placed_[begin].run);
    const std::span<const Run> lent = runs;  // stays where it is while the vector is moved
    open.runs.push_back(std::move(runs));
    const PostId id = transport_.write({cache_.regions[static_cast<std::size_t>(first.source_region)],
                                        remote.regions[static_cast<std::size_t>(first.target_region)], tag, lent});
    operations_.emplace(id.value, number);
    ++open.open;
    telemetry_.wrote(lent.size());
    counts_.runs += static_cast<std::int64_t>(lent.size());
  }
}

// Layers of a notice that is longer than the transport takes go in notices before it.
void SourceEndpoint::notify(PeerId peer, Tag tag, Progress progress, std::uint64_t number) {
  const auto most = static_cast<std::size_t>(transport_.abilities().max_notice_bytes.value);
  const auto send = [&](const Progress& notice) {
    const PostId id = transport_.notify(peer, tag, encode_progress(notice));
    operations_.emplace(id.value, number);
    ++open_.at(number).open;
  };
  const std::size_t room = parts_that_fit(progress.payload.size(), most);
  while (progress.parts.size() > room) {
    const std::size_t count = std::min(progress.parts.size(), parts_that_fit(0, most));
    const auto end = progress.parts.begin() + static_cast<std::ptrdiff_t>(count);
    send({{progress.parts.begin(), end}, false, {}});
    progress.parts.erase(progress.parts.begin(), end);
  }
  send(progress);
}

void SourceEndpoint::completed(const Completed& completed) {
  const auto operation = operations_.find(completed.post.value);
  if (operation == operations_.end()) return;
  const std::uint64_t number = operation->second;
  operations_.erase(operation);
  OpenPost& open = open_.at(number);
  if (!completed.delivered && !open.error) open.error = completed.delivered.error();
  if (--open.open == 0) finish(number);
}

void SourceEndpoint::finish(std::uint64_t number) {
  const auto at = open_.find(number);
  OpenPost& open = at->second;
  constexpr std::size_t kSpare = 256;
  for (std::vector<Run>& runs : open.runs)
    if (spare_.size() < kSpare) spare_.push_back(std::move(runs));
  pacer_.done(open.to, open.post.bytes);
  if (!open.error) counts_.delivered += open.written;
  telemetry_.delivered(open.key, open.post, now(), open.error);
  done_.push_back({open.key, open.id, open.error ? Expected<void>(tl::unexpected(*open.error)) : Expected<void>()});
  open_.erase(at);
}

}  // namespace kvloom
