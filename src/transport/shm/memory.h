// memory.h: descriptors, mappings and memfds of the shm transport.  Stage: carry.  Resources, each with one owner.
// A memfd has no name: when the last process that has it is gone, so is its memory, kill -9 or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom::shm {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Mapping {
 public:
  Mapping() = default;
  Mapping(void* base, std::size_t length) : memory_(static_cast<std::byte*>(base), length) {}
  Mapping(Mapping&& other) noexcept : memory_(std::exchange(other.memory_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Mapping();

  std::span<std::byte> memory() const { return memory_; }  // [length], bytes

 private:
  std::span<std::byte> memory_;
};

// Memory that we write and that peers may map read-only.
struct SharedMemory {
  Fd fd;
  Mapping mapping;
};

// How a peer may map it. To pin host memory for a GPU, CUDA wants it writable: then a peer can write where it should only read.
enum class Sharing { read_only, to_pin };

// Zeroed, mapped writable here; sealed so that it can never shrink (a peer that reads it can't be killed by SIGBUS) nor be mapped
// writable by anybody else.
// @pre length > 0    @error exhausted, with the length
Expected<SharedMemory> make_shared_memory(const char* name, Bytes length, Sharing sharing = Sharing::read_only);

// Maps a peer's memory read-only, after checking that it is a memfd that can't shrink and has `length` bytes.
// @error invalid_argument (not such a descriptor), exhausted (address space)
Expected<Mapping> map_peer_memory(const Fd& fd, Bytes length, Sharing sharing = Sharing::read_only);

// "Operation not permitted" and so on, for messages.
const char* errno_text();

}  // namespace kvloom::shm
