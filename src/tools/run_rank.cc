#include "kvloom/tools/run_rank.h"

#include <poll.h>

#include <cstring>

namespace kvloom {

Expected<void> RankProcess::open_transport(bool listen) {
  ShmOptions options;
  if (listen) options.listen = "*";
  options.copy_threads = job_.copy_threads;
  options.hello.resize(sizeof rank_.value);
  std::memcpy(options.hello.data(), &rank_.value, sizeof rank_.value);
  auto made = ShmTransport::make(std::move(options));
  if (!made) return tl::unexpected(made.error());
  transport_ = std::move(*made);
  return {};
}

Expected<nlohmann::json> RankProcess::next_message() {
  for (;;) {
    transport_->poll({Bytes(16 << 20), std::chrono::nanoseconds(0)}, kept_);
    const auto wake = transport_->arm();
    pollfd fds[2] = {{parent_.fd(), POLLIN, 0}, {wake.value_or(-1), POLLIN, 0}};
    ::poll(fds, 2, wake ? -1 : 0);
    if (fds[0].revents != 0) return parent_.receive();
  }
}

std::vector<Event> RankProcess::poll() {
  std::vector<Event> events = std::exchange(kept_, {});
  const auto wait = events.empty() ? std::chrono::milliseconds(100) : std::chrono::milliseconds(0);
  transport_->poll({Bytes(16 << 20), wait}, events);
  return events;
}

}  // namespace kvloom
