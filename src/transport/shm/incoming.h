// incoming.h: the target side of one shm connection.  Stage: carry.
// We copy for ourselves, out of the source's memory (mapped read-only) into our own (which no peer has mapped). So what lands is
// decided here and nowhere else: a frozen source can't write, and fencing is to stop copying.
// docs/decisions/0002-who-copies-in-shm.md says why and what it costs.
// Copies may run beside us (device.h): what they bring is a batch, told once they are finished, in order. Whoever takes memory away from
// under them, or the right to write there, drains them first.
// Law: every number of the peer is copied out of the shared memory first, then checked, then used.  Thread: the transport's.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvloom/transport/check_runs.h"
#include "kvloom/transport/shm/device.h"
#include "kvloom/transport/shm/outbox.h"
#include "kvloom/transport/shm/pack.h"
#include "kvloom/transport/transport.h"

namespace kvloom::shm {

// Regions as their transport keeps them.  Owners: this, and the open writes that read them
using LocalRegions = std::unordered_map<std::uint64_t, std::shared_ptr<LocalMemory>>;

inline constexpr Bytes kMostNotice{68 << 10};  // 64 KiB of payload, and room for what a session says around it

class Incoming {
 public:
  Incoming(PeerId peer, OutboxView ours, const LocalRegions& regions, Device& device, std::vector<Event>& events);

  // @error as Device::queue
  Expected<void> attach(OutboxView theirs, int pid);

  void admit(Tag tag) { admitted_.insert(tag.value); }
  void revoke(Tag tag);

  // A region in its parts: the offer, then as many further descriptors as it says.
  // @error invalid_argument, parse: a region offered twice, or too many, or what Device::map refuses
  Expected<void> offer(RegionId region, Bytes length, std::vector<std::byte> words, Fd fd, std::uint64_t more);
  Expected<void> offer_more(RegionId region, Fd fd);
  // @error parse: a write that is part of the way through reads it
  Expected<void> withdraw(RegionId region);

  // No copy runs when it returns.
  void drain();

  // Copies, answers and notices what the peer posted, until nothing is there or the budget is used up. True if it did anything.
  // @error parse, out_of_range, overflow (the peer broke the protocol), unavailable (it closed, so what was copied is not to be
  // believed)
  Expected<bool> consume(Bytes& budget);

  // The next operation reads memory that was not offered yet: the offer is in the socket, or else the peer broke the protocol.
  std::optional<RegionId> missing() const { return missing_; }
  // Its offer has begun, and its last descriptors are still to come.
  bool is_offering(RegionId region) const { return offered_ && offered_->region == region; }

  // The peer, asleep, would like to hear: it has answers to take, or room for more.
  bool has_news();
  // An operation is part of the way out of the ring, or is being copied.
  bool underway() const { return current_.has_value() || !batches_.empty(); }

  bool has_work() const { return partial_ || !batches_.empty() || theirs_.header().produced.load() != taken_; }

 private:
  struct Current {  // the operation that is being taken out
    bool write = false;
    Tag tag;
    std::uint64_t source = 0;
    std::uint64_t target = 0;
    std::uint64_t parts_left = 0;  // runs, or slots of payload
    std::size_t in_slot = 0;       // runs taken of a slot that a budget cut
    std::optional<Run> base;       // the run that stood whole in a slot last
    RunBounds bounds;              // of runs like it
    std::int64_t bytes = 0;        // delivered
    std::optional<Outcome> refused;
    std::vector<std::byte> payload;
    std::span<const std::byte> from;  // where the runs read
    std::span<std::byte> to;          // where they write
    Bytes from_length() const { return Bytes(static_cast<std::int64_t>(from.size())); }
    Bytes to_length() const { return Bytes(static_cast<std::int64_t>(to.size())); }
  };

  struct Told {  // an operation that is over as soon as its batch is
    Tag tag;
    Answer answer;
    std::optional<std::vector<std::byte>> notice;  // its payload
  };
  struct Batch {
    std::vector<Told> told;
    std::uint64_t starts = 0;  // of the queue, that have to be finished
  };
  struct Offered {
    RegionId region;
    Offer offer;
    std::uint64_t more = 0;
  };

  Expected<void> map(RegionId region, Offer offer);
  Expected<void> take_slots(Bytes& budget);
  Expected<void> settle();
  Expected<std::uint64_t> available() const;
  Expected<void> recheck();
  Expected<void> take_slot(Bytes& budget);
  Expected<void> begin(const Slot& slot);
  Expected<bool> take_runs(const Slot& slot, Bytes& budget);
  Expected<void> take_base(const Slot& slot);
  bool take_run(const Run& run, Bytes& budget);
  bool take_pack(const PackSlot& pack, Bytes& budget);
  Error why_not(const Run& run) const;
  Expected<void> take_payload(const RawSlot& slot);
  Expected<void> finish();
  void add(const Run& run, std::int64_t done, Bytes& budget);
  Expected<void> flush();

  const PeerId peer_;
  OutboxView ours_;
  OutboxView theirs_;
  const LocalRegions& regions_;
  Device& device_;
  std::vector<Event>& events_;

  std::unordered_set<std::uint64_t> admitted_;
  std::unordered_map<std::uint64_t, std::unique_ptr<PeerMemory>> sources_;
  std::optional<Offered> offered_;  // its descriptors are not all here
  std::unique_ptr<CopyQueue> queue_;
  int pid_ = 0;  // the peer's
  std::optional<RegionId> missing_;

  std::uint64_t taken_ = 0;     // slots
  std::uint64_t accepted_ = 0;  // operations
  std::uint64_t answered_ = 0;  // operations
  std::uint64_t told_ = 0;      // of them, when has_news was asked last
  std::optional<Current> current_;
  struct Partial {
    Run run;
    std::int64_t done;
  };
  std::optional<Partial> partial_;  // a run that a budget cut; current_ stands
  CopyWork work_;                   // for the next flush: bytes [begin_, end_) of its stream
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  std::vector<Told> told_now_;  // for the next flush
  std::deque<Batch> batches_;   // begun, not told
  std::uint64_t starts_ = 0;
};

}  // namespace kvloom::shm
