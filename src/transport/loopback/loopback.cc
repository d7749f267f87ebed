#include "kvloom/transport/loopback/loopback.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvloom/transport/check_runs.h"
#include "kvloom/transport/copy.h"

namespace kvloom {

namespace {

constexpr Bytes kMostNotice{68 << 10};

struct Key {
  std::uint64_t region;
  std::int64_t length;
};

Error no_peer(PeerId peer) { return {Code::unavailable, Scope::peer, fmt::format("peer {} is down, or never was", peer.value)}; }

}  // namespace

std::unique_ptr<LoopbackTransport> LoopbackWorld::endpoint(std::vector<std::byte> hello) {
  std::unique_ptr<LoopbackTransport> out(new LoopbackTransport(*this, fmt::format("loopback:{}", made_++), std::move(hello)));
  endpoints_.emplace(out->address(), out.get());
  return out;
}

LoopbackTransport::~LoopbackTransport() {
  world_.endpoints_.erase(address_);
  while (!links_.empty()) cut(PeerId(links_.begin()->first), {Code::unavailable, Scope::peer, "the peer closed the connection"});
}

Abilities LoopbackTransport::abilities() const {
  return {.name = "loopback",
          .can_fence_frozen_peer = true,
          .can_revoke = true,
          .needs_target_progress = true,
          .source_must_be_allocated = false,
          .crosses_processes = false,
          .crosses_hosts = false,
          .max_notice_bytes = kMostNotice};
}

Expected<PeerId> LoopbackTransport::connect(std::string_view address, std::span<const std::byte> hello) {
  assert_owner("connect");
  const auto found = world_.endpoints_.find(std::string(address));
  if (found == world_.endpoints_.end()) return fail(Scope::peer, Code::unavailable, "nobody is at \"{}\"", address);
  LoopbackTransport& other = *found->second;
  const PeerId ours(next_peer_++);
  const PeerId theirs(other.next_peer_++);
  links_[ours.value].other = &other;
  links_[ours.value].other_peer = theirs;
  other.links_[theirs.value].other = this;
  other.links_[theirs.value].other_peer = ours;
  events_.emplace_back(PeerUp{ours, other.hello_});
  other.events_.emplace_back(PeerUp{theirs, hello.empty() ? hello_ : std::vector(hello.begin(), hello.end())});
  return ours;
}

Expected<Region> LoopbackTransport::allocate(Bytes length) {
  assert_owner("allocate");
  if (length.value <= 0) return fail(Code::invalid_argument, "a region of {} bytes", length.value);
  const auto size = static_cast<std::size_t>(length.value);
  auto owned = std::make_unique<std::byte[]>(size);
  const std::span<std::byte> memory(owned.get(), size);
  const RegionId id(next_region_++);
  regions_.emplace(id.value, Memory{memory, std::move(owned)});
  return make_region(id, memory);
}

Expected<Region> LoopbackTransport::register_memory(std::span<std::byte> memory) {
  assert_owner("register_memory");
  if (memory.empty()) return fail(Code::invalid_argument, "a region of 0 bytes");
  const RegionId id(next_region_++);
  regions_.emplace(id.value, Memory{memory, nullptr});
  return make_region(id, memory);
}

Expected<std::vector<std::byte>> LoopbackTransport::export_region(RegionId region) const {
  const auto found = regions_.find(region.value);
  if (found == regions_.end()) return fail(Code::invalid_argument, "there is no region {}", region.value);
  const Key key{region.value, static_cast<std::int64_t>(found->second.memory.size())};
  std::vector<std::byte> out(sizeof(Key));
  std::memcpy(out.data(), &key, sizeof(Key));
  return out;
}

Expected<RemoteRegion> LoopbackTransport::import_region(PeerId peer, std::span<const std::byte> bytes) {
  if (!links_.contains(peer.value)) return tl::unexpected(no_peer(peer));
  Key key = {};
  if (bytes.size() != sizeof(Key)) return fail(Code::parse, "a region key of {} bytes; it has {}", bytes.size(), sizeof(Key));
  std::memcpy(&key, bytes.data(), sizeof(Key));
  if (key.length <= 0) return fail(Code::parse, "a region key for {} bytes", key.length);
  return RemoteRegion{peer, RegionId(key.region), Bytes(key.length)};
}

Expected<void> LoopbackTransport::admit(PeerId peer, Tag tag) {
  assert_owner("admit");
  const auto link = links_.find(peer.value);
  if (link == links_.end()) return tl::unexpected(no_peer(peer));
  link->second.admitted.insert(tag.value);
  return {};
}

Expected<void> LoopbackTransport::revoke(PeerId peer, Tag tag) {
  assert_owner("revoke");
  if (const auto link = links_.find(peer.value); link != links_.end()) link->second.admitted.erase(tag.value);
  return {};
}

PostId LoopbackTransport::write(const Write& write) {
  assert_owner("write");
  Operation operation;
  operation.tag = write.tag;
  operation.source = write.source;
  operation.target = write.target.id;
  operation.runs = write.runs;
  const auto source = regions_.find(write.source.value);
  if (source == regions_.end()) {
    return post(write.target.peer, std::move(operation),
                Error{Code::invalid_argument, Scope::operation, fmt::format("there is no source region {}", write.source.value)});
  }
  const auto total = check_runs(write.runs, Bytes(static_cast<std::int64_t>(source->second.memory.size())), write.target.length);
  if (!total) return post(write.target.peer, std::move(operation), total.error());
  operation.total = *total;
  return post(write.target.peer, std::move(operation), std::nullopt);
}

PostId LoopbackTransport::notify(PeerId peer, Tag tag, std::span<const std::byte> payload) {
  assert_owner("notify");
  Operation operation;
  operation.tag = tag;
  operation.notice.emplace(payload.begin(), payload.end());
  operation.total = Bytes(static_cast<std::int64_t>(payload.size()));
  if (operation.total > kMostNotice) {
    const Error error{Code::out_of_range, Scope::operation,
                      fmt::format("a notice of {} bytes; the most is {}", payload.size(), kMostNotice.value)};
    return post(peer, std::move(operation), error);
  }
  return post(peer, std::move(operation), std::nullopt);
}

PostId LoopbackTransport::post(PeerId peer, Operation operation, std::optional<Error> refused) {
  operation.post = PostId(next_post_++);
  const PostId id = operation.post;
  const auto found = links_.find(peer.value);
  if (found == links_.end()) {
    events_.emplace_back(Completed{id, peer, operation.tag, tl::unexpected(no_peer(peer))});
    return id;
  }
  Link& link = found->second;
  world_.posted_.push_back({address_,
                            link.other->address_,
                            id,
                            operation.tag,
                            operation.source,
                            operation.target,
                            {operation.runs.begin(), operation.runs.end()},
                            operation.notice});
  if (!refused && link.tags.broken(operation.tag)) refused = OpenTags::error(operation.tag);
  link.tags.open(operation.tag);
  if (refused) {
    link.tags.break_tag(operation.tag);
    ended_.push_back({peer, id, operation.tag, tl::unexpected(*refused)});
  } else {
    link.other->links_.at(link.other_peer.value).inbox.push_back(std::move(operation));
  }
  return id;
}

// Which operation of the inbox is next: the first, or with a seed any that may come before those ahead of it.
std::optional<std::size_t> LoopbackTransport::choose(const Link& link) {
  if (link.inbox.empty()) return std::nullopt;
  if (!world_.order_) return 0;
  auto& random = *world_.order_;
  if (random() % 4 == 0) return std::nullopt;
  const std::size_t i = random() % link.inbox.size();
  if (!link.inbox[i].notice) return i;
  const bool first = std::none_of(link.inbox.begin(), link.inbox.begin() + static_cast<std::ptrdiff_t>(i),
                                  [&](const Operation& before) { return before.tag == link.inbox[i].tag; });
  return first ? std::optional(i) : std::nullopt;
}

Expected<Bytes> LoopbackTransport::copy(const Link& link, const Operation& operation) {
  const auto source = link.other->regions_.find(operation.source.value);
  const auto target = regions_.find(operation.target.value);
  if (source == link.other->regions_.end())
    return fail(Scope::transfer, Code::out_of_range, "there is no source region {} any more", operation.source.value);
  if (target == regions_.end())
    return fail(Scope::transfer, Code::out_of_range, "the target has no region {} any more", operation.target.value);
  const auto length = [](const Memory& m) { return Bytes(static_cast<std::int64_t>(m.memory.size())); };
  if (auto ok = check_runs(operation.runs, length(source->second), length(target->second)); !ok) return ok;
  std::vector<CopyJob> jobs;
  for (const Run& run : operation.runs) jobs.push_back({target->second.memory.data(), source->second.memory.data(), run});
  if (world_.order_) std::shuffle(jobs.begin(), jobs.end(), *world_.order_);
  copy_range(copy_kernels().front(), jobs, 0, operation.total.value);
  return operation.total;
}

Expected<Bytes> LoopbackTransport::deliver(PeerId peer, Link& link, Operation& operation) {
  if (!link.admitted.contains(operation.tag.value)) {
    return fail(Scope::transfer, Code::cancelled, "the target does not admit tag {}: it was revoked, or never granted",
                operation.tag.value);
  }
  if (!operation.notice) {
    auto copied = copy(link, operation);
    if (!copied) link.admitted.erase(operation.tag.value);  // so that no notice after it claims what did not come
    return copied;
  }
  events_.emplace_back(Notice{peer, operation.tag, *std::move(operation.notice)});
  return operation.total;
}

bool LoopbackTransport::take_inbox(PeerId peer, Link& link, Bytes& budget) {
  bool any = false;
  while (budget.value > 0) {
    const auto chosen = choose(link);
    if (!chosen) break;
    any = true;
    Operation operation = std::move(link.inbox[*chosen]);
    link.inbox.erase(link.inbox.begin() + static_cast<std::ptrdiff_t>(*chosen));
    budget -= operation.total;
    link.other->ended_.push_back({link.other_peer, operation.post, operation.tag, deliver(peer, link, operation)});
  }
  return any || !link.inbox.empty();
}

void LoopbackTransport::complete(PeerId peer, PostId post, Tag tag, Expected<Bytes> delivered) {
  if (const auto link = links_.find(peer.value); link != links_.end()) link->second.tags.close(tag, delivered.has_value());
  events_.emplace_back(Completed{post, peer, tag, std::move(delivered)});
}

// Ends the link on both sides.
void LoopbackTransport::cut(PeerId peer, Error reason) {
  const auto found = links_.find(peer.value);
  Link link = std::move(found->second);
  LoopbackTransport& other = *link.other;
  Link back = std::move(other.links_.at(link.other_peer.value));
  links_.erase(found);
  other.links_.erase(link.other_peer.value);
  const auto end = [&](LoopbackTransport& side, PeerId id, std::deque<Operation>& open) {
    for (const Ended& ended : side.ended_) {
      if (ended.peer == id) side.complete(id, ended.post, ended.tag, ended.delivered);
    }
    std::erase_if(side.ended_, [&](const Ended& ended) { return ended.peer == id; });
    for (const Operation& operation : open)
      side.events_.emplace_back(Completed{operation.post, id, operation.tag, tl::unexpected(reason)});
    side.events_.emplace_back(PeerDown{id, reason});
  };
  end(*this, peer, back.inbox);
  end(other, link.other_peer, link.inbox);
}

Expected<void> LoopbackTransport::fence(PeerId peer) {
  assert_owner("fence");
  if (links_.contains(peer.value)) cut(peer, {Code::cancelled, Scope::peer, fmt::format("peer {} was fenced off", peer.value)});
  return {};
}

bool LoopbackTransport::poll(PollLimit limit, std::vector<Event>& events) {
  assert_owner("poll");
  bool any = false;
  for (auto& [id, link] : links_) any |= take_inbox(PeerId(id), link, limit.copy);
  for (Ended& ended : std::exchange(ended_, {})) complete(ended.peer, ended.post, ended.tag, std::move(ended.delivered));
  any |= !events_.empty();
  std::move(events_.begin(), events_.end(), std::back_inserter(events));
  events_.clear();
  return any;
}

}  // namespace kvloom
