// transport.h: how bytes get from the memory of one process into that of another.  Stage: carry.  It knows bytes and regions, no
// heads, no tokens: it carries out the "fewest strided runs" that a plan became, and says honestly what arrived.
//
// Roles: the *source* of a write posts it, the *target* has the memory. One Transport is both, towards any number of peers.
// Laws (conformance_test.cc holds every transport to them):
//   - write and notify never fail by returning: each gives exactly one Completed, from a later poll, never from inside the call.
//   - Completed without error is the target's word that the bytes are there and visible to it. A write into a peer that is gone
//     is never delivered.
//   - A Notice arrives after all writes with its tag that the same peer posted before it are visible, and notices of a tag in the
//     order of posting; or not at all: if a write of its tag that was posted before it failed, it fails as well.
//   - Nothing is written into our memory, and no event is told, but inside poll. So between two polls, and after fence or revoke,
//     memory stands still (where abilities say so).
//   - PeerDown comes exactly once for a peer, after the Completed of everything that was posted to it. What is posted later
//     completes with an error.
// Thread: a Transport belongs to the thread that made it and asserts this; take_over hands it on.  Time: only poll waits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/run.h"
#include "kvloom/base/units.h"

namespace kvloom {

// Ids of one transport are never used again, so a restarted peer is a new one.
using PeerId = Id<struct PeerTag, std::uint64_t>;      // a connection
using RegionId = Id<struct RegionTag, std::uint64_t>;  // memory that is lent
using PostId = Id<struct PostTag, std::uint64_t>;      // an operation; ascending

// An attempt at a transfer, as target and source agreed on it: its name and its credential.
using Tag = Id<struct TagTag, std::uint64_t>;

// What a transport can do and what it promises; what is false here has to be made up for by whoever uses it.
struct Abilities {
  std::string_view name;  // "shm", "loopback", ...: the same word in CLI and docs
  // fence works without the peer, which may be frozen, dead or hostile. Else pages wait in quarantine until it is seen dead.
  bool can_fence_frozen_peer = false;
  // Writes of a tag that is not admitted are refused: revoke ends one transfer and leaves the others of its peer.
  bool can_revoke = false;
  bool needs_target_progress = false;     // bytes land only while the target polls
  bool source_must_be_allocated = false;  // a write may only read memory from allocate(), not from register_memory()
  bool crosses_processes = false;
  bool crosses_hosts = false;
  Bytes copy_a_poll{
      16
      << 20};  // how much one poll had best copy: a CPU a millisecond or two; what copies beside us, as much as may be under way
  Bytes max_notice_bytes;
};

// What an operation costs, as a line: for choosing by cost and saying why. Nanoseconds; measured where the transport says so.
struct Cost {
  double per_post = 0;
  double per_run = 0;
  double per_piece = 0;  // a run of count n has n pieces: a copy engine takes them for nothing, a CPU does not
  double per_byte = 0;

  constexpr double of(std::int64_t posts, std::int64_t runs, std::int64_t pieces, Bytes bytes) const {
    return per_post * static_cast<double>(posts) + per_run * static_cast<double>(runs) + per_piece * static_cast<double>(pieces) +
           per_byte * static_cast<double>(bytes.value);
  }
};

// A region of a peer, as that peer's key named it. A value; means nothing once the peer is down.
struct RemoteRegion {
  PeerId peer;
  RegionId id;
  Bytes length;

  friend bool operator==(const RemoteRegion&, const RemoteRegion&) = default;
};

// One batch of copies from one of our regions into one of a peer's. Offsets of the runs count from the starts of the two regions.
struct Write {
  RegionId source;
  RemoteRegion target;
  Tag tag;
  std::span<const Run> runs;  // lent until Completed. Empty is fine: delivered, 0 bytes
};

struct PeerUp {
  PeerId peer;
  std::vector<std::byte> hello;  // what the peer's owner gave its transport to say: who it is
};
struct PeerDown {
  PeerId peer;
  Error reason;
};
struct Completed {
  PostId post;
  PeerId peer;
  Tag tag;
  Expected<Bytes> delivered;  // bytes of runs, or payload of a notice, that the target vouches for; or why it can't
};
struct Notice {
  PeerId peer;
  Tag tag;
  std::vector<std::byte> payload;
};
using Event = std::variant<PeerUp, PeerDown, Completed, Notice>;

// "completed post=7 peer=1 tag=3 delivered=4096", for logs and tests.
std::string to_string(const Event& event);

struct PollLimit {
  Bytes copy{16 << 20};              // stop copying after about this much, so that poll comes back in a millisecond or two
  std::chrono::nanoseconds wait{0};  // with nothing to do, wait up to this long for something
};

class Transport;

// Memory lent to a transport, from its making until its destruction. While it stands, peers that hold its key may write there (on
// admitted tags), and posts read it.  @pre the transport outlives it.  An open write to or from a region
// that is destroyed may fail, and never does harm.
class Region {
 public:
  Region() = default;
  Region(Region&& other) noexcept { swap(other); }
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  RegionId id() const { return id_; }
  std::span<std::byte> memory() const { return memory_; }  // [length], bytes
  std::byte* base() const { return memory_.data(); }
  Bytes length() const { return Bytes(static_cast<std::int64_t>(memory_.size())); }
  explicit operator bool() const { return owner_ != nullptr; }

 private:
  friend class Transport;
  Region(Transport* owner, RegionId id, std::span<std::byte> memory) : owner_(owner), id_(id), memory_(memory) {}
  void swap(Region& other) noexcept;

  Transport* owner_ = nullptr;
  RegionId id_;
  std::span<std::byte> memory_;
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual Abilities abilities() const = 0;
  virtual Cost cost() const = 0;

  // What a peer gives to connect to reach us; empty where nobody can.
  virtual std::string address() const = 0;

  // Starts to connect; PeerUp or PeerDown tells the outcome. Posts to it may begin at once. The other side sees a PeerUp of its
  // own, with `hello`; where that is empty, with what our transport says to everybody.
  // @error invalid_argument (not an address of this kind, a hello of over 1 KiB), unavailable (nobody there), exhausted (descriptors)
  virtual Expected<PeerId> connect(std::string_view address, std::span<const std::byte> hello = {}) = 0;

  // Memory that peers can reach fastest, zeroed; it is given back with the Region.
  // @pre length > 0    @error exhausted, with what was asked for
  virtual Expected<Region> allocate(Bytes length) = 0;

  // Memory of the caller, lent until the Region is gone. Always good as a target; as a source unless source_must_be_allocated.
  // @pre not empty
  virtual Expected<Region> register_memory(std::span<std::byte> memory) = 0;

  // The key with which a peer can name our region: bytes to be sent to it by any way, and read by import_region there.
  // @error invalid_argument (no such region)
  virtual Expected<std::vector<std::byte>> export_region(RegionId region) const = 0;

  // @error parse (the bytes are hostile until this has checked them), unavailable (the peer is down)
  virtual Expected<RemoteRegion> import_region(PeerId peer, std::span<const std::byte> key) = 0;

  // As a target: from now on writes and notices of this peer with this tag are taken. Do this before the source learns of the
  // tag, and never again after revoke. Where can_revoke is false all tags are taken and admit does nothing.
  // @error unavailable (the peer is down)
  virtual Expected<void> admit(PeerId peer, Tag tag) = 0;

  // As a target: after this returns, nothing of this peer with this tag lands or is noticed; what is on the way fails at its
  // source. Also to be called at the good end of a transfer: admitted tags take memory.
  // @error unsupported (can_revoke is false: use fence, or keep the pages in quarantine)
  virtual Expected<void> revoke(PeerId peer, Tag tag) = 0;

  // Source side. Writes run side by side: pieces of different writes that overlap on the target have no order until one is
  // Completed. Everything wrong with it (a run outside of a region, a peer that is down, ...) is told by Completed.
  virtual PostId write(const Write& write) = 0;

  // The payload is copied before this returns. @pre payload.size() <= max_notice_bytes, else Completed says so
  virtual PostId notify(PeerId peer, Tag tag, std::span<const std::byte> payload) = 0;

  // Ends the connection from our side. After it returns nothing from that peer can land in our memory; the memory that our open
  // posts to it read may be used again: what the peer may still copy from there is never told as landed. Open posts complete with
  // an error, then comes PeerDown. Fencing a peer that is down is fine.
  // @error deadline (only where can_fence_frozen_peer is false: the peer must be seen dead first, keep the pages in quarantine)
  virtual Expected<void> fence(PeerId peer) = 0;

  // Drives everything: lands what arrived, appends what happened to `events`. True if it did anything.
  // @cost no allocation, lock or system call per run
  virtual bool poll(PollLimit limit, std::vector<Event>& events) = 0;

  // For event loops with other things to wait for: a descriptor that becomes readable as soon as poll has something to do; good
  // until the next call of any kind. Nothing: there is something to do now (or this transport can't sleep), so poll instead of
  // waiting.
  virtual std::optional<int> arm() = 0;

  // Makes the calling thread the owner. @pre the former owner makes no call any more, and this happens after its last
  virtual void take_over() { owner_ = std::this_thread::get_id(); }

 protected:
  void assert_owner(const char* call) const;
  Region make_region(RegionId id, std::span<std::byte> memory) { return {this, id, memory}; }
  virtual void deregister(RegionId region) noexcept = 0;  // called once, by the Region

 private:
  friend class Region;
  std::thread::id owner_ = std::this_thread::get_id();
};

}  // namespace kvloom
