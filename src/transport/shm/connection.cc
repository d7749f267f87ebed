#include "kvloom/transport/shm/connection.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <new>
#include <utility>

namespace kvloom::shm {

namespace {

constexpr int kMostMessages = 1024;  // of one turn: more than a socket holds, so a peer can't keep us reading

OutboxView fresh_outbox(const SharedMemory& memory, OutboxShape shape) {
  std::byte* const base = memory.mapping.memory().data();
  new (base) OutboxHeader{};
  return {base, shape};
}

}  // namespace

Connection::Connection(PeerId id, Fd socket, SharedMemory outbox, OutboxShape shape, bool announced, Surroundings around)
    : id_(id),
      announced_(announced),
      socket_(std::move(socket)),
      around_(around),
      outbox_memory_(std::move(outbox)),
      outbox_(fresh_outbox(outbox_memory_, shape)),
      outgoing_(id, outbox_, around.events),
      incoming_(id, outbox_, around.regions, around.device, around.events) {
  watch(socket_, id.value);
}

Connection::~Connection() {
  if (state_ != State::down) close({Code::cancelled, Scope::peer, "this transport ended"});
}

void Connection::watch(const Fd& fd, std::uint64_t data) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = data;
  epoll_ctl(around_.epoll.get(), EPOLL_CTL_ADD, fd.get(), &event);
}

// To close it is not enough: the socket that a descriptor stands for may have others.
void Connection::unwatch(const Fd& fd) {
  if (fd) epoll_ctl(around_.epoll.get(), EPOLL_CTL_DEL, fd.get(), nullptr);
}

void Connection::watch_room() {
  if (outgoing_.is_blocked() == static_cast<bool>(room_watch_)) return;
  unwatch(room_watch_);
  room_watch_ = outgoing_.is_blocked() ? Fd(fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0)) : Fd();
  if (!room_watch_) return;
  epoll_event event = {};
  event.events = EPOLLOUT | EPOLLET;
  event.data.u64 = id_.value;
  epoll_ctl(around_.epoll.get(), EPOLL_CTL_ADD, room_watch_.get(), &event);
}

Expected<void> Connection::greet(std::span<const std::byte> hello) {
  const Message message{Kind::hello, 0, around_.device.protocol(), outbox_.shape().slots, outbox_.shape().answers};
  if (send(socket_, message, hello, &outbox_memory_.fd) == Sent::yes) return {};
  return fail(Scope::peer, Code::unavailable, "the peer hung up before it was greeted");
}

void Connection::read_socket() {
  for (int i = 0; i < kMostMessages && state_ != State::down; ++i) {
    auto received = receive(socket_);
    if (received && !*received) return;
    const auto ok = received ? take(std::move(**received)) : tl::unexpected(received.error());
    if (!ok) close(ok.error());
  }
}

Expected<void> Connection::take(Received received) {
  const Message& m = received.message;
  if ((m.kind == Kind::hello) != (state_ == State::greeting))
    return fail(Scope::peer, Code::parse, "the peer's greeting is not its first message, or came twice");
  switch (m.kind) {
    case Kind::hello: return take_hello(received);
    case Kind::offer:
      return incoming_.offer(RegionId(m.a), Bytes(static_cast<std::int64_t>(m.b)), std::move(received.tail),
                             std::move(received.fd), m.c);
    case Kind::more: return incoming_.offer_more(RegionId(m.a), std::move(received.fd));
    case Kind::withdraw: return incoming_.withdraw(RegionId(m.a));
    case Kind::bell: return {};
  }
  return fail(Scope::peer, Code::parse, "a message of unknown kind");
}

Expected<void> Connection::take_hello(const Received& hello) {
  const Message& m = hello.message;
  const std::uint64_t ours = around_.device.protocol();
  if (m.a != ours) return fail(Scope::peer, Code::unsupported, "the peer speaks protocol {:#x}, we {:#x}", m.a, ours);
  const OutboxShape shape{m.b, m.c};
  if (!shape.valid()) return fail(Scope::peer, Code::parse, "the peer's outbox has {} slots and {} answers", m.b, m.c);
  auto mapping = map_peer_memory(hello.fd, shape.bytes());
  if (!mapping) return fail(Scope::peer, mapping.error().code, "the peer's outbox: {}", mapping.error().message);
  inbox_memory_ = std::move(*mapping);
  inbox_ = OutboxView(inbox_memory_.memory().data(), shape);
  outgoing_.attach(inbox_);
  if (auto ok = incoming_.attach(inbox_, hello.pid); !ok) return fail(Scope::peer, ok.error().code, "{}", ok.error().message);
  death_watch_ = watch_process(hello.pid);
  if (death_watch_) watch(death_watch_, id_.value | kDeathBit);
  state_ = State::up;
  around_.events.emplace_back(PeerUp{id_, hello.tail});
  return {};
}

bool Connection::turn(Bytes& budget) {
  if (state_ != State::up) return false;
  const auto any = try_turn(budget);
  if (!any) {
    close(any.error());
    return true;
  }
  if (*any && (pumped_ || incoming_.has_news())) ring_bell();
  return *any;
}

Expected<bool> Connection::try_turn(Bytes& budget) {
  auto collected = outgoing_.collect();
  if (!collected) return collected;
  auto pumped = outgoing_.pump(socket_);
  if (!pumped) return pumped;
  pumped_ = *pumped;
  watch_room();
  auto consumed = incoming_.consume(budget);
  if (consumed && incoming_.missing()) {
    const RegionId missing = *incoming_.missing();
    read_socket();
    if (state_ != State::up) return true;
    consumed = incoming_.consume(budget);
    if (consumed && incoming_.missing() == missing && !incoming_.is_offering(missing))
      return fail(Scope::peer, Code::parse, "the peer writes from region {}, which it never offered", missing.value);
  }
  if (!consumed) return consumed;
  return *collected || *pumped || *consumed;
}

void Connection::pump() {
  if (state_ != State::up) return;
  const auto any = outgoing_.pump(socket_);
  watch_room();
  if (any && *any) ring_bell();  // an error is met again, and told, by the next turn
}

void Connection::ring_bell() {
  const std::uint32_t sleeping = inbox_.header().sleeping.load();
  if (sleeping % 2 == 0 || sleeping == rung_) return;
  // If the socket is full, the peer has what wakes it; if it is gone, epoll says so.
  send(socket_, {Kind::bell, 0, 0, 0, 0}, {}, nullptr);
  rung_ = sleeping;
}

bool Connection::underway() const {
  return state_ == State::up && (outgoing_.underway() || incoming_.underway()) && inbox_.header().closed.load() == 0;
}

bool Connection::has_work() const {
  const auto work = outgoing_.has_work();
  return !work || *work || incoming_.has_work();
}

bool Connection::sleep() {
  if (state_ != State::up) return true;  // what comes next comes over the socket
  auto& sleeping = outbox_.header().sleeping;
  if (sleeping.load(std::memory_order_relaxed) % 2 == 0) sleeping.fetch_add(1);
  return !has_work();
}

void Connection::wake() {
  auto& sleeping = outbox_.header().sleeping;
  if (sleeping.load(std::memory_order_relaxed) % 2 == 1) sleeping.fetch_add(1);
}

void Connection::close(Error reason) {
  if (state_ == State::down) return;
  const bool tell = announced_ || state_ == State::up;
  state_ = State::down;
  outbox_.header().closed.store(1);
  incoming_.drain();
  // Forked children may hold copies of these descriptors: say it, do not only drop ours.
  shutdown(socket_.get(), SHUT_RDWR);
  for (const Fd* fd : {&socket_, &death_watch_, &room_watch_}) unwatch(*fd);
  room_watch_ = Fd();
  reason.scope = Scope::peer;
  outgoing_.fail_all(reason);
  if (tell) around_.events.emplace_back(PeerDown{id_, std::move(reason)});
}

}  // namespace kvloom::shm
