// incoming.h: the target side of one shm connection.  Stage: carry.
// We copy for ourselves, out of the source's memory (mapped read-only) into our own (which no peer has mapped). So what lands is
// decided here and nowhere else: a frozen source can't write, and fencing is to stop copying.
// docs/decisions/0002-who-copies-in-shm.md says why and what it costs.
// Law: every number of the peer is copied out of the shared memory first, then checked, then used.  Thread: the transport's, and
// its copy crew inside consume.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvloom/transport/copy_crew.h"
#include "kvloom/transport/shm/outbox.h"
#include "kvloom/transport/transport.h"

namespace kvloom::shm {

// A region as its transport keeps it.
struct LocalRegion {
  std::span<std::byte> memory;  // [length], bytes
  std::shared_ptr<SharedMemory>
      shared;  // of allocate(); owners: this, and the open writes that read it. Null: the caller's own memory
};
using LocalRegions = std::unordered_map<std::uint64_t, LocalRegion>;

inline constexpr Bytes kMostNotice{68 << 10};  // 64 KiB of payload, and room for what a session says around it

class Incoming {
 public:
  Incoming(PeerId peer, OutboxView ours, const LocalRegions& regions, CopyCrew& crew, std::vector<Event>& events);

  void attach(OutboxView theirs) { theirs_ = theirs; }

  void admit(Tag tag) { admitted_.insert(tag.value); }
  void revoke(Tag tag) { admitted_.erase(tag.value); }

  // @error invalid_argument, parse: a region offered twice, or too many, or what map_peer_memory refuses
  Expected<void> offer(RegionId region, const Fd& fd, std::uint64_t length);
  void withdraw(RegionId region) { sources_.erase(region.value); }

  // Copies, answers and notices what the peer posted, until nothing is there or the budget is used up. True if it did anything.
  // @error parse, out_of_range, overflow (the peer broke the protocol), unavailable (it closed, so what was copied is not to be
  // believed)
  Expected<bool> consume(Bytes& budget);

  // The next operation reads memory that was not offered yet: the offer is in the socket, or else the peer broke the protocol.
  std::optional<RegionId> missing() const { return missing_; }

  // The peer, asleep, would like to hear: it has answers to take, or room for more.
  bool has_news();
  // An operation is part of the way out of the ring.
  bool underway() const { return current_.has_value(); }

  bool has_work() const { return partial_ || theirs_.header().produced.load() != taken_; }

 private:
  struct Current {  // the operation that is being taken out
    bool write = false;
    Tag tag;
    std::uint64_t source = 0;
    std::uint64_t target = 0;
    std::uint64_t parts_left = 0;
    std::int64_t bytes = 0;  // delivered
    std::optional<Outcome> refused;
    std::vector<std::byte> payload;
    std::span<const std::byte> from;  // where the runs read
    std::span<std::byte> to;          // where they write
  };

  Expected<std::uint64_t> available() const;
  Expected<void> recheck();
  Expected<void> take_slot(Bytes& budget);
  Expected<void> begin(const Slot& slot);
  Expected<void> take_run(const Slot& slot, Bytes& budget);
  Expected<void> take_payload(const RawSlot& slot);
  Expected<void> finish();
  void add_job(const CopyJob& job, std::int64_t done, Bytes& budget);
  Expected<void> flush();

  const PeerId peer_;
  OutboxView ours_;
  OutboxView theirs_;
  const LocalRegions& regions_;
  CopyCrew& crew_;
  std::vector<Event>& events_;

  std::unordered_set<std::uint64_t> admitted_;
  std::unordered_map<std::uint64_t, Mapping> sources_;
  std::optional<RegionId> missing_;

  std::uint64_t taken_ = 0;     // slots
  std::uint64_t accepted_ = 0;  // operations
  std::uint64_t answered_ = 0;  // operations
  std::uint64_t told_ = 0;      // of them, when has_news was asked last
  std::optional<Current> current_;
  struct Partial {
    CopyJob job;
    std::int64_t done;
  };
  std::optional<Partial> partial_;  // a run that a budget cut; current_ stands
  std::vector<CopyJob> jobs_;       // for the next flush: bytes [begin_, end_) of their stream
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  std::vector<Answer> answers_;  // for the next flush
};

}  // namespace kvloom::shm
