// run_control.h: how the processes of `run` talk to the one that started them.  Stage: tools.
// A channel is a socket pair of whole messages; a message is a JSON object with a word `say`. Children end when their parent does.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "kvloom/base/error.h"

namespace kvloom {

class Channel {
 public:
  static Expected<std::pair<Channel, Channel>> make();
  explicit Channel(int fd) : fd_(fd) {}
  Channel(Channel&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Channel& operator=(Channel&& other) noexcept;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  int fd() const { return fd_; }
  void close();
  // @error unavailable: the other end is gone
  Expected<void> send(const nlohmann::json& message);
  // Waits.  @error unavailable: the other end is gone; io: not a message
  Expected<nlohmann::json> receive();

 private:
  int fd_ = -1;
};

// CLOCK_MONOTONIC: one clock for all processes of a host.
std::int64_t now_ns();

// "was killed by signal 9 (Killed)", "ended with status 1".  `status`: as waitpid gives it
std::string how_it_ended(int status);

}  // namespace kvloom
