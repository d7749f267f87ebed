// socket.h: the Unix socket beside the rings of the shm transport: greetings, memory handed over, wake-ups, and the news of a
// peer's death.  Stage: carry. SOCK_SEQPACKET in the abstract namespace (or a socketpair): messages keep their borders, and
// nothing is left in the file system.
// Law: what a peer sends is hostile until decode() has checked it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvloom/transport/shm/memory.h"

namespace kvloom::shm {

inline constexpr std::size_t kMostHello = 1024;

enum class Kind : std::uint32_t {
  hello =
      1,  // first of each side. a = the device's protocol, b = slots, c = answers; descriptor of its outbox; then the hello bytes
  offer =
      2,  // memory that our writes read. a = region, b = length, c = how many `more` follow; a descriptor or none; the device's words
  withdraw = 3,  // a = region: no write that is still to come reads it
  bell = 4,      // wake up
  more = 5,      // a = region of the offer before it; a further descriptor
};

struct Message {
  Kind kind = Kind::bell;
  std::uint32_t reserved = 0;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
};

struct Received {
  Message message;
  std::vector<std::byte> tail;  // hello bytes, words of an offer
  Fd fd;                        // of hello and more, and where the device has one of offer
  int pid = 0;                  // of hello: who sent it, as the kernel says; 0 if it is outside of our pid namespace
};

enum class Sent { yes, full, gone };

// With our pid vouched for by the kernel, if it is a hello.
Sent send(const Fd& socket, const Message& message, std::span<const std::byte> tail, const Fd* fd);

// The next message; nothing if none is there.
// @error unavailable (hung up), parse (it does not follow the protocol; descriptors that came with it are closed)
Expected<std::optional<Received>> receive(const Fd& socket);

// @error unavailable (not our user), io
Expected<void> check_same_user(const Fd& socket);

// @pre name without the leading zero byte    @error invalid_argument (too long), unavailable (nobody listens, or the name is
// taken)
Expected<Fd> listen_at(std::string_view name);
Expected<Fd> connect_to(std::string_view name);

// Becomes readable when the process is dead, even unreaped; none if that can't be known.
Fd watch_process(int pid);

}  // namespace kvloom::shm
