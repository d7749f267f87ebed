#include "kvloom/tools/run_control.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <span>
#include <vector>

namespace kvloom {

Expected<std::pair<Channel, Channel>> Channel::make() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0)
    return fail(Code::io, "socketpair: {}", std::strerror(errno));
  for (const int fd : fds) {
    const int bytes = 1 << 20;  // a message lists all peers
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  return std::pair(Channel(fds[0]), Channel(fds[1]));
}

Channel& Channel::operator=(Channel&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Channel::~Channel() { close(); }

void Channel::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Expected<void> Channel::send(const nlohmann::json& message) {
  const std::string text = message.dump();
  while (::send(fd_, text.data(), text.size(), MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    return fail(Code::unavailable, "the other process is gone ({})", std::strerror(errno));
  }
  return {};
}

Expected<nlohmann::json> Channel::receive() {
  for (;;) {
    char none = 0;
    const ssize_t size = ::recv(fd_, &none, 0, MSG_PEEK | MSG_TRUNC);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return fail(Code::unavailable, "the other process is gone");
    std::string text(static_cast<std::size_t>(size), '\0');
    if (::recv(fd_, text.data(), text.size(), 0) != size) return fail(Code::unavailable, "the other process is gone");
    auto message = nlohmann::json::parse(text, nullptr, false);
    if (message.is_discarded()) return fail(Code::io, "not a message: {}", text);
    return message;
  }
}

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("ended with status {}", WEXITSTATUS(status));
}

}  // namespace kvloom
