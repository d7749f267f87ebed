// The connections of a target endpoint: greeting, what prefill ranks say, losing and cutting off.
#include <algorithm>

#include "kvloom/plan/wire.h"
#include "kvloom/session/target_endpoint.h"

namespace kvloom {

Expected<TargetEndpoint::Link*> TargetEndpoint::link_to(const SourceAddress& address) {
  Link& link = links_[address];
  if (link.socket == nullptr) {
    auto socket = ControlClient::make(context_, {address.address, options_.keys, address.server_key});
    if (!socket) {
      links_.erase(address);
      return tl::unexpected(socket.error());
    }
    link.address = address;
    link.socket = std::move(*socket);
  }
  link.used = now();
  return &link;
}

// Says hello, or says it again.
void TargetEndpoint::greet(Link& link) {
  if (link.at == Link::At::idle) {
    link.at = Link::At::greeting;
    link.token = draw_token();
  }
  link.hello_at = now() + options_.limits.resend;
  tell(link, Hello{incarnation_, 0, geometries_.empty() ? Rank(0) : geometries_.begin()->second.cache.rank, options_.name,
                   transport_.address()});
}

bool TargetEndpoint::tell(Link& link, decltype(Told::what) what) {
  return note_sent(link.socket->send(encode_told({link.token, std::move(what)})));
}

bool TargetEndpoint::note_sent(bool taken) {
  sent_ = true;
  telemetry_.sent(taken);
  return taken;
}

void TargetEndpoint::said(Link& link, const Said& what) {
  telemetry_.received();
  link.pulse.heard(now());
  if (const auto* about = std::get_if<Told>(&what)) return told(link, *about);
  if (link.at != Link::At::up) return;  // of a connection that is lost
  std::vector<TargetBook::Action> actions;
  book_.message(link.partner, std::get<Message>(what), now(), actions);
  obey(actions);
}

void TargetEndpoint::told(Link& link, const Told& told) {
  const bool ours = told.token == link.token;
  if (std::holds_alternative<HelloFirst>(told.what)) {
    if (link.at == Link::At::up && (ours || told.token == ConnectionToken{}))
      lose(link, {Code::unavailable, Scope::peer, "it does not know the connection any more: restarted, or it gave us up"});
    return;
  }
  if (const auto* refused = std::get_if<Refused>(&told.what)) {
    telemetry_.refused(link.address.address, {refused->code, Scope::peer, refused->reason});
    if (link.at == Link::At::greeting) link.why_not = fmt::format("it refuses us: {}", printable(refused->reason));
    return;
  }
  if (!ours) return;
  if (const auto* answer = std::get_if<Welcome>(&told.what); answer != nullptr && link.at == Link::At::greeting)
    return welcome(link, *answer);
  if (const auto* ping = std::get_if<Ping>(&told.what); ping != nullptr && !ping->answer) tell(link, Ping{true});
}

void TargetEndpoint::welcome(Link& link, const Welcome& welcome) {
  auto side = sides_.find(welcome.side);
  if (!side) {
    link.why_not = fmt::format("its geometry can't be read: {}", side.error().message);
    return telemetry_.geometry_refused(link.address.address, side.error());
  }
  link.side = std::move(*side);
  link.rank = welcome.rank;
  link.why_not = "its transport has not connected";
  complete(link);
}

// Up, once the control connection and the transport's are both there.
void TargetEndpoint::complete(Link& link) {
  if (link.at != Link::At::greeting || link.side == nullptr || !link.peer) return;
  link.at = Link::At::up;
  link.partner = PartnerId(next_partner_++);
  link.told.clear();
  partners_.emplace(link.partner, &link);
  peers_.emplace(*link.peer, link.partner);
  changed_ = true;
  telemetry_.connected(link.name());
}

void TargetEndpoint::lose(Link& link, const Error& why) {
  const bool was_up = link.at == Link::At::up;
  const auto peer = std::exchange(link.peer, std::nullopt);
  const PartnerId partner = link.partner;
  link.at = Link::At::idle;
  link.side = nullptr;
  link.transfers.clear();
  link.why_not = why.message;
  const bool fenced = !peer || transport_.fence(*peer).has_value();
  changed_ = true;
  if (!was_up) return;
  partners_.erase(partner);
  telemetry_.lost(link.name(), why);
  std::vector<TargetBook::Action> actions;
  book_.gone(partner, why, now(), actions);
  if (fenced) {
    peers_.erase(*peer);
    book_.cut_off(partner, now(), actions);
  }
  obey(actions);
}

void TargetEndpoint::peer_down(PeerId peer, const Error& why) {
  const auto at = std::find_if(links_.begin(), links_.end(), [&](const auto& l) { return l.second.peer == peer; });
  if (at != links_.end()) return lose(at->second, why);
  const auto lost = peers_.find(peer);  // could not be fenced before
  if (lost == peers_.end()) return;
  const PartnerId partner = lost->second;
  peers_.erase(lost);
  std::vector<TargetBook::Action> actions;
  book_.cut_off(partner, now(), actions);
  obey(actions);
}

bool TargetEndpoint::tell_geometry(Link& link, GeometryId id) {
  if (link.told.contains(id)) return true;
  const Described& described = geometries_.at(id);
  if (!tell(link, Geometry{id, described.cache.rank, described.side, described.keys, described.cache.tensors})) return false;
  if (link.told.size() >= kMaxGeometries) link.told.erase(link.told.begin());  // as the other end does
  link.told.insert(id);
  return true;
}

}  // namespace kvloom
