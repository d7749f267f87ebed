// loopback.h: a transport inside one thread, for tests of what stands on transports.  Stage: carry.  Law: conformance_test.cc.
// Bytes move when the target polls. A LoopbackWorld records all that was posted, and with a seed delivers in any order that the
// laws of transport.h allow: writes in any order, their runs in any order, a notice as soon as the writes before it have landed,
// and only a few operations per poll.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvloom/transport/open_tags.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

class LoopbackTransport;

// What was posted, in order, whatever became of it.
struct Posted {
  std::string from;  // addresses
  std::string to;
  PostId post;
  Tag tag;
  RegionId source;
  RegionId target;
  std::vector<Run> runs;
  std::optional<std::vector<std::byte>> notice;  // payload: then the fields of a write mean nothing
};

// The endpoints that can reach each other.  @pre outlives them
class LoopbackWorld {
 public:
  LoopbackWorld() = default;
  explicit LoopbackWorld(std::uint64_t seed) : order_(seed) {}

  std::unique_ptr<LoopbackTransport> endpoint(std::vector<std::byte> hello);
  const std::vector<Posted>& posted() const { return posted_; }

 private:
  friend class LoopbackTransport;
  std::unordered_map<std::string, LoopbackTransport*> endpoints_;  // by address
  std::vector<Posted> posted_;
  std::optional<std::mt19937_64> order_;  // none: in order
  int made_ = 0;
};

class LoopbackTransport final : public Transport {
 public:
  ~LoopbackTransport() override;

  Abilities abilities() const override;
  Cost cost() const override { return {.per_post = 100, .per_run = 10, .per_piece = 20, .per_byte = 0.15}; }
  std::string address() const override { return address_; }
  Expected<PeerId> connect(std::string_view address, std::span<const std::byte> hello = {}) override;
  Expected<Region> allocate(Bytes length) override;
  Expected<Region> register_memory(std::span<std::byte> memory) override;
  Expected<std::vector<std::byte>> export_region(RegionId region) const override;
  Expected<RemoteRegion> import_region(PeerId peer, std::span<const std::byte> key) override;
  Expected<void> admit(PeerId peer, Tag tag) override;
  Expected<void> revoke(PeerId peer, Tag tag) override;
  PostId write(const Write& write) override;
  PostId notify(PeerId peer, Tag tag, std::span<const std::byte> payload) override;
  Expected<void> fence(PeerId peer) override;
  bool poll(PollLimit limit, std::vector<Event>& events) override;
  std::optional<int> arm() override { return std::nullopt; }

 private:
  friend class LoopbackWorld;
  struct Operation {
    PostId post;
    Tag tag;
    RegionId source;
    RegionId target;
    std::span<const Run> runs;
    std::optional<std::vector<std::byte>> notice;
    Bytes total;
  };
  struct Link {
    LoopbackTransport* other = nullptr;
    PeerId other_peer;
    std::deque<Operation> inbox;  // what the other side posted to us
    OpenTags tags;                // of what we posted to the other side
    std::unordered_set<std::uint64_t> admitted;
  };
  struct Memory {
    std::span<std::byte> memory;
    std::unique_ptr<std::byte[]> owned;
  };

  LoopbackTransport(LoopbackWorld& world, std::string address, std::vector<std::byte> hello)
      : world_(world), address_(std::move(address)), hello_(std::move(hello)) {}
  void deregister(RegionId region) noexcept override { regions_.erase(region.value); }

  PostId post(PeerId peer, Operation operation, std::optional<Error> refused);
  void complete(PeerId peer, PostId post, Tag tag, Expected<Bytes> delivered);
  std::optional<std::size_t> choose(const Link& link);
  Expected<Bytes> deliver(PeerId peer, Link& link, Operation& operation);
  Expected<Bytes> copy(const Link& link, const Operation& operation);
  bool take_inbox(PeerId peer, Link& link, Bytes& budget);
  void cut(PeerId peer, Error reason);

  LoopbackWorld& world_;
  std::string address_;
  std::vector<std::byte> hello_;
  std::unordered_map<std::uint64_t, Memory> regions_;
  std::unordered_map<std::uint64_t, Link> links_;
  std::vector<Event> events_;
  struct Ended {  // operations of ours: told, and their tag closed, by the next poll
    PeerId peer;
    PostId post;
    Tag tag;
    Expected<Bytes> delivered;
  };
  std::vector<Ended> ended_;
  std::uint64_t next_peer_ = 1;
  std::uint64_t next_region_ = 1;
  std::uint64_t next_post_ = 1;
};

}  // namespace kvloom
