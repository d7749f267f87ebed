#include "kvloom/transport/shm/shm.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
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

namespace kvloom {

namespace {

constexpr std::string_view kScheme = "shm:";
constexpr Bytes kMostLength{std::int64_t{1} << 46};
constexpr int kSpins = 1000;        // about 20 us
constexpr Bytes kQuantum{8 << 20};  // that one peer gets of a poll before the next peer's turn

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
  if (hello.size() > shm::kMostHello)
    return fail(Code::invalid_argument, "a hello of {} bytes; the most is {}", hello.size(), shm::kMostHello);
  return {};
}

}  // namespace

Expected<std::unique_ptr<ShmTransport>> ShmTransport::make(ShmOptions options) {
  if (!shm::OutboxShape{options.slots, options.answers}.valid()) {
    return fail(Code::invalid_argument, "slots={} answers={}: both must be powers of two, from 16 to {}", options.slots,
                options.answers, shm::kMostSlots);
  }
  if (options.copy_threads < 1 || options.copy_threads > 256)
    return fail(Code::invalid_argument, "copy_threads={} is not in 1..256", options.copy_threads);
  if (auto ok = check_hello(options.hello); !ok) return tl::unexpected(ok.error());
  if (options.listen == "*") options.listen = free_name();
  shm::Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return fail(Code::exhausted, "epoll_create1: {}", shm::errno_text());
  shm::Fd listener;
  if (!options.listen.empty()) {
    auto socket = shm::listen_at(options.listen);
    if (!socket) return tl::unexpected(socket.error());
    listener = std::move(*socket);
    epoll_event event = {};
    event.events = EPOLLIN;  // data 0: no peer
    epoll_ctl(epoll.get(), EPOLL_CTL_ADD, listener.get(), &event);
  }
  return std::unique_ptr<ShmTransport>(new ShmTransport(std::move(options), std::move(epoll), std::move(listener)));
}

ShmTransport::ShmTransport(ShmOptions options, shm::Fd epoll, shm::Fd listener)
    : options_(std::move(options)),
      epoll_(std::move(epoll)),
      listener_(std::move(listener)),
      crew_(options_.kernel, options_.copy_threads) {}

ShmTransport::~ShmTransport() { connections_.clear(); }

Abilities ShmTransport::abilities() const {
  return {.name = "shm",
          .can_fence_frozen_peer = true,
          .can_revoke = true,
          .needs_target_progress = true,
          .source_must_be_allocated = true,
          .crosses_processes = true,
          .crosses_hosts = false,
          .max_notice_bytes = shm::kMostNotice};
}

// `kvloom bench --only copy`, 1 thread, Xeon of 2023 (2 cores): shm push of pieces of 256 B to 36,864 B, and empty writes.
Cost ShmTransport::cost() const { return {.per_post = 250, .per_run = 45, .per_piece = 130, .per_byte = 0.098}; }

std::string ShmTransport::address() const { return options_.listen.empty() ? "" : fmt::format("{}{}", kScheme, options_.listen); }

Expected<PeerId> ShmTransport::add(shm::Fd socket, bool announced, std::span<const std::byte> hello) {
  if (connections_.size() >= options_.most_peers)
    return fail(Code::exhausted, "{} peers are connected, which is the most", connections_.size());
  if (auto ok = shm::check_same_user(socket); !ok) return tl::unexpected(ok.error());
  const shm::OutboxShape shape{options_.slots, options_.answers};
  auto outbox = shm::make_shared_memory("kvloom-outbox", shape.bytes());
  if (!outbox) return tl::unexpected(outbox.error());
  const PeerId id(next_peer_++);
  auto connection = std::make_unique<shm::Connection>(id, std::move(socket), std::move(*outbox), shape, announced,
                                                      shm::Surroundings{epoll_, regions_, crew_, events_});
  const auto greeted = connection->greet(hello);
  connections_.emplace(id.value, std::move(connection));
  order_.push_back(id.value);
  if (!greeted) connections_.at(id.value)->close(greeted.error());
  return id;
}

Expected<PeerId> ShmTransport::adopt(int socket) {
  assert_owner("adopt");
  wake();
  shm::Fd owned(socket);
  if (fcntl(socket, F_SETFL, O_NONBLOCK) != 0 || fcntl(socket, F_SETFD, FD_CLOEXEC) != 0) {
    return fail(Code::invalid_argument, "descriptor {} is no socket: {}", socket, shm::errno_text());
  }
  return add(std::move(owned), true, options_.hello);
}

Expected<PeerId> ShmTransport::connect(std::string_view address, std::span<const std::byte> hello) {
  assert_owner("connect");
  wake();
  if (auto ok = check_hello(hello); !ok) return tl::unexpected(ok.error());
  if (!address.starts_with(kScheme))
    return fail(Code::invalid_argument, "\"{}\" is not an address of the shm transport, as in {}NAME", address, kScheme);
  auto socket = shm::connect_to(address.substr(kScheme.size()));
  if (!socket) return tl::unexpected(socket.error());
  return add(std::move(*socket), true, hello.empty() ? options_.hello : hello);
}

void ShmTransport::accept_peers() {
  for (;;) {
    shm::Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    (void)add(std::move(socket), false, options_.hello);  // refused: it sees a hang-up
  }
}

shm::Connection* ShmTransport::find(PeerId peer) {
  const auto found = connections_.find(peer.value);
  if (found == connections_.end() || found->second->state() == shm::Connection::State::down) return nullptr;
  return found->second.get();
}

Region ShmTransport::keep(std::span<std::byte> memory, std::shared_ptr<shm::SharedMemory> shared) {
  const RegionId id(next_region_++);
  regions_.emplace(id.value, shm::LocalRegion{memory, std::move(shared)});
  return make_region(id, memory);
}

Expected<Region> ShmTransport::allocate(Bytes length) {
  assert_owner("allocate");
  if (length.value <= 0 || length > kMostLength) return fail(Code::invalid_argument, "a region of {} bytes", length.value);
  auto memory = shm::make_shared_memory("kvloom-region", length);
  if (!memory) return tl::unexpected(memory.error());
  const auto span = memory->mapping.memory();
  if (madvise(span.data(), span.size(), MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
    return fail(Code::exhausted, "no {} bytes of shared memory", length.value);
  }
  return keep(span, std::make_shared<shm::SharedMemory>(std::move(*memory)));
}

Expected<Region> ShmTransport::register_memory(std::span<std::byte> memory) {
  assert_owner("register_memory");
  if (memory.empty()) return fail(Code::invalid_argument, "a region of 0 bytes");
  return keep(memory, nullptr);
}

void ShmTransport::deregister(RegionId region) noexcept {
  assert_owner("~Region");
  regions_.erase(region.value);
  for (auto& [id, connection] : connections_) connection->outgoing().withdraw(region);
}

Expected<std::vector<std::byte>> ShmTransport::export_region(RegionId region) const {
  assert_owner("export_region");
  const auto found = regions_.find(region.value);
  if (found == regions_.end()) return fail(Code::invalid_argument, "there is no region {}", region.value);
  const Key key{shm::kProtocol, region.value, static_cast<std::int64_t>(found->second.memory.size())};
  std::vector<std::byte> out(sizeof(Key));
  std::memcpy(out.data(), &key, sizeof(Key));
  return out;
}

Expected<RemoteRegion> ShmTransport::import_region(PeerId peer, std::span<const std::byte> bytes) {
  assert_owner("import_region");
  if (find(peer) == nullptr) return tl::unexpected(no_peer(peer));
  Key key = {};
  if (bytes.size() != sizeof(Key)) return fail(Code::parse, "a region key of {} bytes; it has {}", bytes.size(), sizeof(Key));
  std::memcpy(&key, bytes.data(), sizeof(Key));
  if (key.protocol != shm::kProtocol)
    return fail(Code::parse, "a region key of protocol {:#x}, ours is {:#x}", key.protocol, shm::kProtocol);
  if (key.length <= 0 || key.length > kMostLength.value) return fail(Code::parse, "a region key for {} bytes", key.length);
  return RemoteRegion{peer, RegionId(key.region), Bytes(key.length)};
}

Expected<void> ShmTransport::admit(PeerId peer, Tag tag) {
  assert_owner("admit");
  shm::Connection* const connection = find(peer);
  if (connection == nullptr) return tl::unexpected(no_peer(peer));
  connection->incoming().admit(tag);
  return {};
}

Expected<void> ShmTransport::revoke(PeerId peer, Tag tag) {
  assert_owner("revoke");
  if (shm::Connection* const connection = find(peer)) connection->incoming().revoke(tag);
  return {};
}

Expected<shm::Operation> ShmTransport::checked(PostId post, const Write& write) const {
  const auto source = regions_.find(write.source.value);
  if (source == regions_.end()) return fail(Code::invalid_argument, "there is no source region {}", write.source.value);
  if (source->second.shared == nullptr) {
    return fail(Code::unsupported, "source region {} is registered memory of its owner; shm writes read memory from allocate()",
                write.source.value);
  }
  const auto total = check_runs(write.runs, Bytes(static_cast<std::int64_t>(source->second.memory.size())), write.target.length);
  if (!total) {
    return fail(total.error().code, "write from region {} to region {} of peer {}: {}", write.source.value, write.target.id.value,
                write.target.peer.value, total.error().message);
  }
  shm::Operation operation;
  operation.post = post;
  operation.tag = write.tag;
  operation.source = write.source;
  operation.target = write.target.id;
  operation.runs = write.runs;
  operation.total = *total;
  operation.memory = source->second.shared;
  return operation;
}

PostId ShmTransport::write(const Write& write) {
  assert_owner("write");
  wake();
  const PostId post(next_post_++);
  shm::Connection* const connection = find(write.target.peer);
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

PostId ShmTransport::notify(PeerId peer, Tag tag, std::span<const std::byte> payload) {
  assert_owner("notify");
  wake();
  const PostId post(next_post_++);
  const Bytes size(static_cast<std::int64_t>(payload.size()));
  shm::Connection* const connection = find(peer);
  if (connection == nullptr) {
    events_.emplace_back(Completed{post, peer, tag, tl::unexpected(no_peer(peer))});
  } else if (size > shm::kMostNotice) {
    connection->outgoing().refuse(post, tag,
                                  {Code::out_of_range, Scope::operation,
                                   fmt::format("a notice of {} bytes; the most is {}", size.value, shm::kMostNotice.value)});
  } else {
    shm::Operation operation;
    operation.post = post;
    operation.tag = tag;
    operation.payload.assign(payload.begin(), payload.end());
    operation.total = size;
    connection->outgoing().post(std::move(operation));
    connection->pump();
  }
  return post;
}

Expected<void> ShmTransport::fence(PeerId peer) {
  assert_owner("fence");
  wake();
  if (const auto found = connections_.find(peer.value); found != connections_.end()) {
    found->second->close({Code::cancelled, Scope::peer, fmt::format("peer {} was fenced off by us", peer.value)});
    connections_.erase(found);
    std::erase(order_, peer.value);
  }
  return {};
}

void ShmTransport::read_sockets() {
  std::array<epoll_event, 64> ready;
  const int count = epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), 0);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t data = ready[static_cast<std::size_t>(i)].data.u64;
    if (data == 0) {
      accept_peers();
      continue;
    }
    const auto found = connections_.find(data & ~shm::kDeathBit);
    if (found == connections_.end()) continue;
    if ((data & shm::kDeathBit) != 0) {
      found->second->close({Code::unavailable, Scope::peer, "the peer's process died"});
    } else {
      found->second->read_socket();
    }
  }
}

bool ShmTransport::turn(Bytes budget) {
  read_sockets();
  bool any = !events_.empty();
  first_ = order_.empty() ? 0 : (first_ + 1) % order_.size();
  for (bool more = true; more && budget.value > 0;) {
    more = false;
    for (std::size_t i = 0; i < order_.size() && budget.value > 0; ++i) {
      Bytes quantum = std::min(budget, kQuantum);
      const Bytes before = quantum;
      any |= connections_.at(order_[(first_ + i) % order_.size()])->turn(quantum);
      budget -= before - quantum;
      more |= quantum.value <= 0;
    }
  }
  std::erase_if(order_, [&](std::uint64_t id) { return connections_.at(id)->state() == shm::Connection::State::down; });
  std::erase_if(connections_, [](const auto& entry) { return entry.second->state() == shm::Connection::State::down; });
  return any || !events_.empty();
}

bool ShmTransport::poll(PollLimit limit, std::vector<Event>& events) {
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
bool ShmTransport::spin() const {
  const auto underway = [](const auto& entry) { return entry.second->underway(); };
  for (int i = 0; i < kSpins && std::any_of(connections_.begin(), connections_.end(), underway); ++i) {
    const auto works = [&](const auto& entry) { return underway(entry) && entry.second->has_work(); };
    if (std::any_of(connections_.begin(), connections_.end(), works)) return true;
    relax_cpu();
  }
  return false;
}

std::optional<int> ShmTransport::arm() {
  assert_owner("arm");
  armed_ = true;
  bool asleep = events_.empty();
  for (auto& [id, connection] : connections_) asleep = connection->sleep() && asleep;
  return asleep ? std::optional(epoll_.get()) : std::nullopt;
}

void ShmTransport::wake() {
  if (!std::exchange(armed_, false)) return;
  for (auto& [id, connection] : connections_) connection->wake();
}

}  // namespace kvloom
