// pins.h: host memory of engines that is pinned while it is lent, once for all regions over it.  Stage: carry.
// CUDA pins a range once a process, and unpins all of it: so regions share a pin, and the last one to end takes it away. What somebody else
// has pinned (cuMemHostAlloc, torch's pin_memory) is not pinned again, and never unpinned by us.
// Ranges: one inside of a range that is pinned shares it. One that overlaps a pinned range and goes beyond it is refused: a copy may not
// cross from one pinned range into another, and to pin anew would take memory from under copies.
// A pin that is put off (contexts.h) still holds the pages of its time, and its owner may have other memory there by now: what overlaps
// it is refused until it is freed.
// Owner: Contexts.  Thread: any.
// Source: cuMemHostRegister in cuda.h; and as driver 580.159 does (H200): a range is pinned to the byte, two may share a page; one that overlaps
// another is ALREADY_REGISTERED, also where its owner has unmapped the first and has other memory there; a copy across two is INVALID_VALUE;
// what is unmapped can still be unregistered.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "kvloom/base/error.h"

namespace kvloom::cuda {

class Contexts;
class Gpu;

class Pins {
 public:
  // While it stands the memory is pinned.
  class Pin {
   public:
    Pin(Pins& pins, std::shared_ptr<const Gpu> gpu, const std::byte* begin) : pins_(pins), gpu_(std::move(gpu)), begin_(begin) {}
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin() { pins_.leave(gpu_, begin_); }

   private:
    Pins& pins_;
    std::shared_ptr<const Gpu> gpu_;
    const std::byte* begin_;  // of the range that is pinned
  };

  explicit Pins(Contexts& contexts) : contexts_(contexts) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  // Null: somebody else has pinned it.  @pre the GPU's context is current
  // @error invalid_argument: it overlaps what is pinned; exhausted: can't be pinned; unavailable: a former pin of it waits for a gate
  Expected<std::unique_ptr<Pin>> pin(const std::shared_ptr<const Gpu>& gpu, std::span<std::byte> memory);

 private:
  struct Entry {
    const std::byte* end;
    int users = 1;                            // 0: to be unpinned
    std::shared_ptr<std::atomic<bool>> gone;  // owners: this, and who unpins
  };
  using Entries = std::map<const std::byte*, Entry>;

  void leave(const std::shared_ptr<const Gpu>& gpu, const std::byte* begin);
  void forget_gone();
  // The first that overlaps [begin, end).
  Entries::iterator overlapping(const std::byte* begin, const std::byte* end);

  Contexts& contexts_;
  std::mutex mutex_;  // before those of Contexts
  Entries entries_;   // by begin; do not overlap
};

}  // namespace kvloom::cuda
