#include "kvloom/transport/shm/ring_transport.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "kvloom/transport/check_runs.h"
#include "kvloom/transport/copy_kernels.h"

namespace kvloom::shm {

namespace {

constexpr Bytes kMostLength{std::int64_t{1} << 46};
constexpr int kSpins = 1000;  // about 20 us
// To ask the kernel for sockets takes longer than to look at all rings. So while they have work: at most so many turns, of few bytes each.
constexpr unsigned kDeafTurns = 64;
constexpr Bytes kFewCopied{1 << 20};
constexpr std::int64_t kQuanta = 2;  // of a poll's bytes one peer gets this part, before the next peer's turn

// The key of a region, as it travels.
struct Key {
  std::uint64_t protocol;
  std::uint64_t region;
  std::int64_t length;
};

std::string free_name() {
  std::uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) random = static_cast<std::uint64_t>(time(nullptr));
  return fmt::format("kvloom-{:016x}", random);
}

Error no_peer(PeerId peer) { return {Code::unavailable, Scope::peer, fmt::format("peer {} is down, or never was", peer.value)}; }

void wait_readable(int fd, std::chrono::nanoseconds wait) {
  pollfd waiting{fd, POLLIN, 0};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(wait);
  const timespec limit{seconds.count(), (wait - seconds).count()};
  ppoll(&waiting, 1, &limit, nullptr);
}

Expected<void> check_hello(std::span<const std::byte> hello) {
  if (hello.size() > kMostHello)
    return fail(Code::invalid_argument, "a hello of {} bytes; the most is {}", hello.size(), kMostHello);
  return {};
}

}  // namespace

Expected<RingTransport::Ends> RingTransport::open(RingOptions options, std::string_view scheme) {
  if (!OutboxShape{options.slots, options.answers}.valid()) {
    return fail(Code::invalid_argument, "slots={} answers={}: both must be powers of two, from 16 to {}", options.slots,
                options.answers, kMostSlots);
  }
  if (auto ok = check_hello(options.hello); !ok) return tl::unexpected(ok.error());
  if (options.listen == "*") options.listen = free_name();
  Ends out{std::move(options), Fd(epoll_create1(EPOLL_CLOEXEC)), {}};
  if (!out.epoll) return fail(Code::exhausted, "epoll_create1: {}", errno_text());
  if (!out.options.listen.empty()) {
    auto socket = listen_at(out.options.listen);
    if (!socket) return fail(socket.error().code, "listening at {}:{}: {}", scheme, out.options.listen, socket.error().message);
    out.listener = std::move(*socket);
    epoll_event event = {};
    event.events = EPOLLIN;  // data 0: no peer
    epoll_ctl(out.epoll.get(), EPOLL_CTL_ADD, out.listener.get(), &event);
  }
  return out;
}

RingTransport::RingTransport(Ends ends, std::unique_ptr<Device> device)
    : options_(std::move(ends.options)),
      epoll_(std::move(ends.epoll)),
      listener_(std::move(ends.listener)),
      device_(std::move(device)) {}

RingTransport::~RingTransport() { connections_.clear(); }

std::string RingTransport::address() const { return options_.listen.empty() ? "" : scheme() + options_.listen; }

Expected<PeerId> RingTransport::add(Fd socket, bool announced, std::span<const std::byte> hello) {
  if (connections_.size() >= options_.most_peers)
    return fail(Code::exhausted, "{} peers are connected, which is the most", connections_.size());
  if (auto ok = check_same_user(socket); !ok) return tl::unexpected(ok.error());
  const OutboxShape shape{options_.slots, options_.answers};
  auto outbox = make_shared_memory("kvloom-outbox", shape.bytes());
  if (!outbox) return tl::unexpected(outbox.error());
  const PeerId id(next_peer_++);
  auto connection = std::make_unique<Connection>(id, std::move(socket), std::move(*outbox), shape, announced,
                                                 Surroundings{epoll_, regions_, *device_, events_});
  const auto greeted = connection->greet(hello);
  connections_.emplace(id.value, std::move(connection));
  order_.push_back(id.value);
  if (!greeted) connections_.at(id.value)->close(greeted.error());
  return id;
}

Expected<PeerId> RingTransport::adopt(int socket) {
  assert_owner("adopt");
  wake();
  Fd owned(socket);
  if (fcntl(socket, F_SETFL, O_NONBLOCK) != 0 || fcntl(socket, F_SETFD, FD_CLOEXEC) != 0) {
    return fail(Code::invalid_argument, "descriptor {} is no socket: {}", socket, errno_text());
  }
  return add(std::move(owned), true, options_.hello);
}

Expected<PeerId> RingTransport::connect(std::string_view address, std::span<const std::byte> hello) {
  assert_owner("connect");
  wake();
  if (auto ok = check_hello(hello); !ok) return tl::unexpected(ok.error());
  if (!address.starts_with(scheme()))
    return fail(Code::invalid_argument, "\"{}\" is not an address of the {} transport, as in {}NAME", address, abilities().name,
                scheme());
  auto socket = connect_to(address.substr(scheme().size()));
  if (!socket) return tl::unexpected(socket.error());
  return add(std::move(*socket), true, hello.empty() ? options_.hello : hello);
}

void RingTransport::accept_peers() {
  for (;;) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    (void)add(std::move(socket), false, options_.hello);  // refused: it sees a hang-up
  }
}

Connection* RingTransport::find(PeerId peer) {
  const auto found = connections_.find(peer.value);
  if (found == connections_.end() || found->second->state() == Connection::State::down) return nullptr;
  return found->second.get();
}

Region RingTransport::keep(std::shared_ptr<LocalMemory> memory) {
  const RegionId id(next_region_++);
  const auto span = memory->memory();
  regions_.emplace(id.value, std::move(memory));
  return make_region(id, span);
}

Expected<Region> RingTransport::allocate(Bytes length) {
  assert_owner("allocate");
  if (length.value <= 0 || length > kMostLength) return fail(Code::invalid_argument, "a region of {} bytes", length.value);
  return device_->allocate(length).map([&](std::shared_ptr<LocalMemory> memory) { return keep(std::move(memory)); });
}

Expected<Region> RingTransport::register_memory(std::span<std::byte> memory) {
  assert_owner("register_memory");
  if (memory.empty()) return fail(Code::invalid_argument, "a region of 0 bytes");
  return device_->lend(memory).map([&](std::shared_ptr<LocalMemory> lent) { return keep(std::move(lent)); });
}

void RingTransport::deregister(RegionId region) noexcept {
  assert_owner("~Region");
  for (auto& [id, connection] : connections_) connection->incoming().drain();
  if (const auto ended = regions_.extract(region.value); !ended.empty()) ended.mapped()->take_back();
  for (auto& [id, connection] : connections_) connection->outgoing().withdraw(region);
}

Expected<std::vector<std::byte>> RingTransport::export_region(RegionId region) const {
  assert_owner("export_region");
  const auto found = regions_.find(region.value);
  if (found == regions_.end()) return fail(Code::invalid_argument, "there is no region {}", region.value);
  const Key key{device_->protocol(), region.value, static_cast<std::int64_t>(found->second->memory().size())};
  std::vector<std::byte> out(sizeof(Key));
  std::memcpy(out.data(), &key, sizeof(Key));
  return out;
}

Expected<RemoteRegion> RingTransport::import_region(PeerId peer, std::span<const std::byte> bytes) {
  assert_owner("import_region");
  if (find(peer) == nullptr) return tl::unexpected(no_peer(peer));
  Key key = {};
  if (bytes.size() != sizeof(Key)) return fail(Code::parse, "a region key of {} bytes; it has {}", bytes.size(), sizeof(Key));
  std::memcpy(&key, bytes.data(), sizeof(Key));
  if (key.protocol != device_->protocol())
    return fail(Code::parse, "a region key of protocol {:#x}, ours is {:#x}", key.protocol, device_->protocol());
  if (key.length <= 0 || key.length > kMostLength.value) return fail(Code::parse, "a region key for {} bytes", key.length);
  return RemoteRegion{peer, RegionId(key.region), Bytes(key.length)};
}

Expected<void> RingTransport::admit(PeerId peer, Tag tag) {
  assert_owner("admit");
  Connection* const connection = find(peer);
  if (connection == nullptr) return tl::unexpected(no_peer(peer));
  connection->incoming().admit(tag);
  return {};
}

Expected<void> RingTransport::revoke(PeerId peer, Tag tag) {
  assert_owner("revoke");
  if (Connection* const connection = find(peer)) connection->incoming().revoke(tag);
  return {};
}

Expected<Operation> RingTransport::checked(PostId post, const Write& write) const {
  const auto source = regions_.find(write.source.value);
  if (source == regions_.end()) return fail(Code::invalid_argument, "there is no source region {}", write.source.value);
  if (source->second->offer() == nullptr) {
    return fail(Code::unsupported, "source region {} can't be read by peers: {}", write.source.value, source->second->why_not());
  }
  const auto total =
      check_runs(write.runs, Bytes(static_cast<std::int64_t>(source->second->memory().size())), write.target.length);
  if (!total) {
    return fail(total.error().code, "write from region {} to region {} of peer {}: {}", write.source.value, write.target.id.value,
                write.target.peer.value, total.error().message);
  }
  Operation operation;
  operation.post = post;
  operation.tag = write.tag;
  operation.source = write.source;
  operation.target = write.target.id;
  operation.runs = write.runs;
  operation.total = *total;
  operation.memory = source->second;
  return operation;
}

PostId RingTransport::write(const Write& write) {
  assert_owner("write");
  wake();
  const PostId post(next_post_++);
  Connection* const connection = find(write.target.peer);
  if (connection == nullptr) {
    events_.emplace_back(Completed{post, write.target.peer, write.tag, tl::unexpected(no_peer(write.target.peer))});
    return post;
  }
  auto operation = checked(post, write);
  if (operation) {
    connection->outgoing().post(std::move(*operation));
    connection->pump();
  } else {
    connection->outgoing().refuse(post, write.tag, operation.error());
  }
  return post;
}

PostId RingTransport::notify(PeerId peer, Tag tag, std::span<const std::byte> payload) {
  assert_owner("notify");
  wake();
  const PostId post(next_post_++);
  const Bytes size(static_cast<std::int64_t>(payload.size()));
  Connection* const connection = find(peer);
  if (connection == nullptr) {
    events_.emplace_back(Completed{post, peer, tag, tl::unexpected(no_peer(peer))});
  } else if (size > kMostNotice) {
    connection->outgoing().refuse(post, tag,
                                  {Code::out_of_range, Scope::operation,
                                   fmt::format("a notice of {} bytes; the most is {}", size.value, kMostNotice.value)});
  } else {
    Operation operation;
    operation.post = post;
    operation.tag = tag;
    operation.payload.assign(payload.begin(), payload.end());
    operation.total = size;
    connection->outgoing().post(std::move(operation));
    connection->pump();
  }
  return post;
}

Expected<void> RingTransport::fence(PeerId peer) {
  assert_owner("fence");
  wake();
  if (const auto found = connections_.find(peer.value); found != connections_.end()) {
    found->second->close({Code::cancelled, Scope::peer, fmt::format("peer {} was fenced off by us", peer.value)});
    connections_.erase(found);
    std::erase(order_, peer.value);
  }
  return {};
}

void RingTransport::read_sockets() {
  std::array<epoll_event, 64> ready;
  const int count = epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), 0);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t data = ready[static_cast<std::size_t>(i)].data.u64;
    if (data == 0) {
      accept_peers();
      continue;
    }
    const auto found = connections_.find(data & ~kDeathBit);
    if (found == connections_.end()) continue;
    if ((data & kDeathBit) != 0) {
      found->second->close({Code::unavailable, Scope::peer, "the peer's process died"});
    } else {
      found->second->read_socket();
    }
  }
}

bool RingTransport::rings_have_work() const {
  return std::any_of(connections_.begin(), connections_.end(), [](const auto& entry) {
    return entry.second->state() == Connection::State::up && entry.second->has_work();
  });
}

bool RingTransport::turn(Bytes budget) {
  if (++deaf_turns_ >= kDeafTurns || !rings_have_work()) {
    deaf_turns_ = 0;
    read_sockets();
  }
  bool any = !events_.empty();
  const Bytes begun = budget;
  first_ = order_.empty() ? 0 : (first_ + 1) % order_.size();
  const Bytes most(std::max<std::int64_t>(device_->abilities().copy_a_poll.value / kQuanta, 1));
  for (bool more = true; more && budget.value > 0;) {
    more = false;
    for (std::size_t i = 0; i < order_.size() && budget.value > 0; ++i) {
      Bytes quantum = std::min(budget, most);
      const Bytes before = quantum;
      any |= connections_.at(order_[(first_ + i) % order_.size()])->turn(quantum);
      budget -= before - quantum;
      more |= quantum.value <= 0;
    }
  }
  if (begun - budget > kFewCopied) deaf_turns_ = kDeafTurns;
  std::erase_if(order_, [&](std::uint64_t id) { return connections_.at(id)->state() == Connection::State::down; });
  std::erase_if(connections_, [](const auto& entry) { return entry.second->state() == Connection::State::down; });
  return any || !events_.empty();
}

bool RingTransport::poll(PollLimit limit, std::vector<Event>& events) {
  assert_owner("poll");
  wake();
  bool any = turn(limit.copy);
  if (!any && limit.wait.count() > 0) {
    if (!spin()) {
      if (const auto fd = arm()) wait_readable(*fd, limit.wait);
    }
    wake();
    any = turn(limit.copy);
  }
  std::move(events_.begin(), events_.end(), std::back_inserter(events));
  events_.clear();
  return any;
}

// In the middle of an operation, the next part is there sooner than a sleep and its wake-up take. True if something came.
bool RingTransport::spin() const {
  const auto underway = [](const auto& entry) { return entry.second->underway(); };
  for (int i = 0; i < kSpins && std::any_of(connections_.begin(), connections_.end(), underway); ++i) {
    const auto works = [&](const auto& entry) { return underway(entry) && entry.second->has_work(); };
    if (std::any_of(connections_.begin(), connections_.end(), works)) return true;
    relax_cpu();
  }
  return false;
}

std::optional<int> RingTransport::arm() {
  assert_owner("arm");
  if (rings_have_work()) return std::nullopt;  // then nobody has to ring for us
  armed_ = true;
  bool asleep = events_.empty();
  for (auto& [id, connection] : connections_) asleep = connection->sleep() && asleep;
  return asleep ? std::optional(epoll_.get()) : std::nullopt;
}

void RingTransport::wake() {
  if (!std::exchange(armed_, false)) return;
  for (auto& [id, connection] : connections_) connection->wake();
}

}  // namespace kvloom::shm
