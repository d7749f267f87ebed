// device.h: what memory a transport of one host moves, and who copies it: the seam between rings (what to copy, what has landed, who is
// still believed) and what copies (threads, copy engines).  Stage: carry.  cpu_device.h: memfds and threads; ../cuda: GPU memory and its
// copy engines.
// Law (both through the conformance suite): a copy runs only between the start that began it and the moment when its queue has told it as
// finished or was drained. So what is drained stands still.
// Thread: the transport's.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvloom/transport/shm/copy_work.h"
#include "kvloom/transport/shm/memory.h"
#include "kvloom/transport/transport.h"

namespace kvloom::shm {

// What a peer has to be told to map memory of ours. Of a peer: hostile, until Device::map has checked it.
struct Offer {
  Bytes length;
  std::vector<std::byte> words;  // the device's own; at most kMostHello
  std::vector<Fd> descriptors;
  int pid = 0;  // a peer's, as the kernel says; 0: not known
};

// Memory of ours, while it is lent.
class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
  virtual std::span<std::byte> memory() const = 0;    // [length], bytes
  virtual const Offer* offer() const = 0;             // null: peers can't read it, so no write of ours can
  virtual std::string why_not() const { return {}; }  // then: what to do
  virtual void take_back() {}                         // its region ends: its owner may free it; open writes may still have this
};

// Memory of a peer, mapped to be read by our copies.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  virtual std::span<const std::byte> memory() const = 0;  // [length], bytes
};

// The copies out of one peer's memory, in order.
class CopyQueue {
 public:
  virtual ~CopyQueue() = default;  // @pre drained

  // Begins to copy bytes [begin, end) of the stream of its runs, as copy_range.  @pre runs are checked
  // @error io, unavailable: the device refused, what had begun has ended, and none of it counts, nor of starts that were not finished
  virtual Expected<void> start(const CopyWork& work, std::int64_t begin, std::int64_t end) = 0;

  // How many starts are in place, and visible to whoever reads the target memory from now on.  @error io: the device broke down
  virtual Expected<std::uint64_t> finished() = 0;

  // How many bytes more may be started now.
  virtual Bytes room() const = 0;
  // How many bytes one start had best have.
  virtual Bytes batch() const = 0;

  // Waits until no copy runs any more: all are finished, or will never be (the device broke down).
  virtual void drain() = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual Abilities abilities() const = 0;
  virtual Cost cost() const = 0;
  virtual std::uint64_t protocol() const = 0;        // of greetings and keys: others are refused
  virtual std::size_t most_descriptors() const = 0;  // of one offer of a peer: they are open here until it is whole

  // Zeroed.  @error exhausted
  virtual Expected<std::shared_ptr<LocalMemory>> allocate(Bytes length) = 0;
  // The caller's own memory.  @error unsupported: this device can't copy into it, with what to do
  virtual Expected<std::shared_ptr<LocalMemory>> lend(std::span<std::byte> memory) = 0;
  // @error whatever the hostile offer lacks
  virtual Expected<std::unique_ptr<PeerMemory>> map(Offer offer) = 0;
  virtual Expected<std::unique_ptr<CopyQueue>> queue() = 0;
};

}  // namespace kvloom::shm
