// ring_transport.h: a transport between processes of one host, whatever memory it moves.  Stage: carry.
// The target copies: a write is a message of runs in a ring, and the target's poll reads them and has its device copy out of the source's
// memory, mapped here to be read, into its own. That makes fence and revoke exact even when the peer is frozen
// (docs/decisions/0002-who-copies-in-shm.md). So nothing lands while the target does not poll. Nothing of it has a name in a file system.
// Dead peers are noticed by the socket and by a pidfd, at once.
// Thread: one (transport.h), and what its device runs.  Forked children must not use it, nor poll it.
// Address: "shm:NAME" (by the device's name), NAME in the abstract socket namespace, open to processes of the same user.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvloom/transport/shm/connection.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

namespace shm {

struct RingOptions {
  std::string listen;            // NAME of the address; empty: nobody can connect; "*": a free one is chosen
  std::vector<std::byte> hello;  // who we are, for the peers' PeerUp; up to 1 KiB
  std::uint64_t slots = 4096;    // of the ring to each peer, 64 B each; a power of two
  std::uint64_t answers = 1024;  // operations to each peer that may be under way; a power of two
  std::size_t most_peers = 1024;
};

class RingTransport : public Transport {
 public:
  ~RingTransport() override;

  // Takes one end of a SOCK_SEQPACKET socketpair(); the peer takes the other one. For forked children, which close the end that
  // is not theirs.
  Expected<PeerId> adopt(int socket);

  Abilities abilities() const override { return device_->abilities(); }
  Cost cost() const override { return device_->cost(); }
  std::string address() const override;
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
  std::optional<int> arm() override;

 protected:
  // What a transport is made of, opened.
  struct Ends {
    RingOptions options;
    Fd epoll;
    Fd listener;
  };
  // @error invalid_argument (an option that can't be right), unavailable (the name is taken), exhausted (descriptors)
  static Expected<Ends> open(RingOptions options, std::string_view scheme);
  RingTransport(Ends ends, std::unique_ptr<Device> device);

  Device& device() { return *device_; }

 private:
  using Connections = std::unordered_map<std::uint64_t, std::unique_ptr<Connection>>;

  std::string scheme() const { return fmt::format("{}:", device_->abilities().name); }
  void deregister(RegionId region) noexcept override;

  Expected<PeerId> add(Fd socket, bool announced, std::span<const std::byte> hello);
  Connection* find(PeerId peer);
  Region keep(std::shared_ptr<LocalMemory> memory);
  Expected<Operation> checked(PostId post, const Write& write) const;
  bool turn(Bytes budget);
  void read_sockets();
  bool rings_have_work() const;
  void accept_peers();
  void wake();
  bool spin() const;

  RingOptions options_;
  Fd epoll_;
  Fd listener_;
  std::unique_ptr<Device> device_;  // before what stands on it
  LocalRegions regions_;
  std::vector<Event> events_;  // for the next poll
  Connections connections_;
  std::vector<std::uint64_t> order_;  // of connections_, for turns
  std::size_t first_ = 0;             // whose turn comes first: it moves, so that a budget is shared
  std::uint64_t next_peer_ = 1;
  std::uint64_t next_region_ = 1;
  std::uint64_t next_post_ = 1;
  bool armed_ = false;
  unsigned deaf_turns_ = 0;  // since the sockets were read
};

}  // namespace shm
}  // namespace kvloom
