#include "kvloom/transport/shm/socket.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvloom::shm {

namespace {

constexpr std::size_t kMostFds = 1;

union Control {
  std::array<char, CMSG_SPACE(sizeof(int) * kMostFds) + CMSG_SPACE(sizeof(ucred))> bytes;
  cmsghdr align;
};

void put_control(msghdr& header, int type, const void* data, std::size_t bytes) {
  auto* c = reinterpret_cast<cmsghdr*>(static_cast<char*>(header.msg_control) + header.msg_controllen);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = type;
  c->cmsg_len = CMSG_LEN(bytes);
  memcpy(CMSG_DATA(c), data, bytes);
  header.msg_controllen += CMSG_SPACE(bytes);
}

// Takes every descriptor that came, so that none leaks; keeps one.
void read_control(msghdr& header, Received& out) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET) continue;
    if (c->cmsg_type == SCM_RIGHTS) {
      const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        out.fd = Fd(fd);
      }
    } else if (c->cmsg_type == SCM_CREDENTIALS) {
      ucred who = {};
      memcpy(&who, CMSG_DATA(c), sizeof(who));
      out.pid = who.pid;
    }
  }
}

Expected<std::optional<Received>> decode(Received received, std::size_t bytes, int flags, std::span<const std::byte> tail) {
  const Message& m = received.message;
  if (bytes < sizeof(Message) || (flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
    return fail(Code::parse, "a message of {} bytes, flags {:#x}", bytes, flags);
  const bool has_fd = m.kind == Kind::hello || m.kind == Kind::more || (m.kind == Kind::offer && received.fd);
  const bool has_tail = m.kind == Kind::hello || m.kind == Kind::offer;
  const bool known = has_fd || m.kind == Kind::offer || m.kind == Kind::withdraw || m.kind == Kind::bell;
  if (!known || m.reserved != 0) return fail(Code::parse, "a message of unknown kind {}", static_cast<std::uint32_t>(m.kind));
  if (static_cast<bool>(received.fd) != has_fd)
    return fail(Code::parse, "message kind {} with the wrong descriptors", static_cast<std::uint32_t>(m.kind));
  if (!has_tail && !tail.empty()) return fail(Code::parse, "message kind {} with a tail", static_cast<std::uint32_t>(m.kind));
  received.tail.assign(tail.begin(), tail.end());
  return received;
}

Expected<sockaddr_un> address_of(std::string_view name, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() > sizeof(address.sun_path) - 1) {
    return fail(Code::invalid_argument, "\"{}\" has {} characters; a name has 1 to {}", name, name.size(),
                sizeof(address.sun_path) - 1);
  }
  memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd make_socket() { return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

}  // namespace

Sent send(const Fd& socket, const Message& message, std::span<const std::byte> tail, const Fd* fd) {
  std::array<iovec, 2> parts{
      {{const_cast<Message*>(&message), sizeof(message)}, {const_cast<std::byte*>(tail.data()), tail.size()}}};
  Control control = {};
  msghdr header = {};
  header.msg_iov = parts.data();
  header.msg_iovlen = parts.size();
  header.msg_control = control.bytes.data();
  if (fd != nullptr) {
    const int raw = fd->get();
    put_control(header, SCM_RIGHTS, &raw, sizeof(raw));
  }
  if (message.kind == Kind::hello) {
    const ucred us{getpid(), geteuid(), getegid()};
    put_control(header, SCM_CREDENTIALS, &us, sizeof(us));
  }
  if (header.msg_controllen == 0) header.msg_control = nullptr;
  for (;;) {
    if (sendmsg(socket.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return Sent::yes;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS ? Sent::full : Sent::gone;
  }
}

Expected<std::optional<Received>> receive(const Fd& socket) {
  Received out;
  std::array<std::byte, kMostHello> tail;
  std::array<iovec, 2> parts{{{&out.message, sizeof(out.message)}, {tail.data(), tail.size()}}};
  Control control = {};
  msghdr header = {};
  header.msg_iov = parts.data();
  header.msg_iovlen = parts.size();
  header.msg_control = control.bytes.data();
  header.msg_controllen = control.bytes.size();
  ssize_t got = -1;
  do {
    got = recvmsg(socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return std::nullopt;
  if (got <= 0) return fail(Scope::peer, Code::unavailable, "the peer hung up");
  read_control(header, out);
  const auto bytes = static_cast<std::size_t>(got);
  const std::size_t tail_bytes = bytes > sizeof(Message) ? bytes - sizeof(Message) : 0;
  return decode(std::move(out), bytes, header.msg_flags, std::span(tail).first(tail_bytes));
}

Expected<void> check_same_user(const Fd& socket) {
  ucred who = {};
  socklen_t length = sizeof(who);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
    return fail(Code::io, "SO_PEERCRED: {}", errno_text());
  if (who.uid != geteuid()) return fail(Scope::peer, Code::unavailable, "the peer runs as user {}, we as {}", who.uid, geteuid());
  const int on = 1;
  if (setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0)
    return fail(Code::io, "SO_PASSCRED: {}", errno_text());
  return {};
}

Expected<Fd> listen_at(std::string_view name) {
  socklen_t length = 0;
  auto address = address_of(name, length);
  if (!address) return tl::unexpected(address.error());
  Fd socket = make_socket();
  if (!socket) return fail(Code::exhausted, "no socket: {}", errno_text());
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&*address), length) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    return fail(Code::unavailable, "{}", errno_text());
  }
  return socket;
}

Expected<Fd> connect_to(std::string_view name) {
  socklen_t length = 0;
  auto address = address_of(name, length);
  if (!address) return tl::unexpected(address.error());
  Fd socket = make_socket();
  if (!socket) return fail(Code::exhausted, "no socket: {}", errno_text());
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), length) != 0) {
    return fail(Scope::peer, Code::unavailable, "connecting to {}: {}", name, errno_text());
  }
  return socket;
}

Fd watch_process(int pid) {
  if (pid <= 0 || pid == getpid()) return {};
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace kvloom::shm
