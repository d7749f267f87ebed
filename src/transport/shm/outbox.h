// outbox.h: the shared memory between two shm peers.  Stage: carry.
// Each side has one outbox: it alone writes it, the other maps it read-only. So nothing that a peer does can break our own state,
// and all that we read of a peer is copied, then checked.
//
//   header   produced: slots that we put into our ring            answered: how many of the peer's operations we are done with,
//   in its order
//            consumed: slots that we took out of the peer's ring   sleeping: odd while we wait on the socket    closed: believe
//            nothing of ours any more
//   answers  [answers], 16 B each: the outcome of operation i stands at i mod answers. The sender keeps at most `answers`
//   operations unanswered, so an
//            answer always has room: two sides with full rings never wait for each other.
//   slots    [slots], 64 B each: a ring of the operations that we post
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>

#include "kvloom/base/run.h"
#include "kvloom/transport/shm/memory.h"

namespace kvloom::shm {

inline constexpr std::size_t kSlotBytes = 64;
inline constexpr std::uint64_t kMostSlots = 1 << 20;

enum class SlotKind : std::uint32_t { write = 1, run = 2, notice = 3, pack = 4 };  // pack: PackSlot, pack.h

struct WriteSlot {
  std::uint64_t tag;
  std::uint64_t source;  // region of the sender
  std::uint64_t target;  // region of the receiver
  std::uint64_t runs;    // so many follow, in slots of one (run) and of several (pack)
};
struct RunSlot {
  std::int64_t source_offset, target_offset, bytes, count, source_step, target_step;
};
struct NoticeSlot {
  std::uint64_t tag;
  std::uint64_t bytes;  // of payload: it follows in whole slots
};

struct Slot {
  SlotKind kind;
  std::uint32_t reserved;
  std::uint64_t operation;  // of write and notice: the index of the operation on this connection, from 0
  union {
    WriteSlot write;
    NoticeSlot notice;
    RunSlot run;
  };
};
static_assert(sizeof(Slot) == kSlotBytes);

struct RawSlot {
  std::array<std::byte, kSlotBytes> bytes;
};

enum class Outcome : std::uint64_t { delivered = 0, not_admitted = 1, no_region = 2 };

struct Answer {
  Outcome outcome;
  std::int64_t bytes;
};
static_assert(sizeof(Answer) == 16);

struct OutboxHeader {
  alignas(64) std::atomic<std::uint64_t> produced;
  alignas(64) std::atomic<std::uint64_t> consumed;
  alignas(64) std::atomic<std::uint64_t> answered;
  alignas(64) std::atomic<std::uint32_t> sleeping;
  std::atomic<std::uint32_t> closed;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Where the parts of an outbox are.
struct OutboxShape {
  std::uint64_t slots;    // a power of two
  std::uint64_t answers;  // a power of two

  constexpr bool valid() const { return power(slots) && power(answers); }
  constexpr Bytes bytes() const {
    return Bytes(static_cast<std::int64_t>(sizeof(OutboxHeader) + answers * sizeof(Answer) + slots * kSlotBytes));
  }
  friend bool operator==(const OutboxShape&, const OutboxShape&) = default;

 private:
  static constexpr bool power(std::uint64_t n) { return n >= 16 && n <= kMostSlots && (n & (n - 1)) == 0; }
};

// Both sides look through this; only the owner's may write.
class OutboxView {
 public:
  OutboxView() = default;
  OutboxView(std::byte* base, OutboxShape shape) : base_(base), shape_(shape) {}

  OutboxHeader& header() const { return *reinterpret_cast<OutboxHeader*>(base_); }
  const OutboxShape& shape() const { return shape_; }
  std::byte* answer(std::uint64_t i) const { return base_ + sizeof(OutboxHeader) + (i & (shape_.answers - 1)) * sizeof(Answer); }
  std::byte* slot(std::uint64_t i) const {
    return base_ + sizeof(OutboxHeader) + shape_.answers * sizeof(Answer) + (i & (shape_.slots - 1)) * kSlotBytes;
  }

  template <class T>
  void put(std::byte* at, const T& value) const {
    std::memcpy(at, &value, sizeof(T));
  }
  template <class T>
  T get(const std::byte* at) const {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }

 private:
  std::byte* base_ = nullptr;
  OutboxShape shape_{};
};

// Orders all loads before it with all loads after it: what was copied was read before `closed` is looked at. (Not
// atomic_thread_fence: TSan does not know it.)
inline void load_fence() {
#if defined(__x86_64__)
  __builtin_ia32_lfence();
#else
  __sync_synchronize();
#endif
}

}  // namespace kvloom::shm
