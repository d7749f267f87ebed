// shm.h: the transport between processes of one host, over shared memory.  Stage: carry.
// The target copies: a write is a message of runs in a ring, and the target's poll reads them out of the source's memfd, mapped
// read-only, into its own private memory. That makes fence and revoke exact even when the peer is frozen
// (docs/decisions/0002-who-copies-in-shm.md). So: sources must be allocate()d, targets may be any memory (huge pages help), and
// nothing lands while the target does not poll. Nothing of it has a name in a file system. Dead peers are noticed by the socket
// and by a pidfd, at once.
// Thread: one (transport.h), and copy_threads - 1 helpers that run only inside poll.  Forked children must not use it, nor poll
// it.
// Address: "shm:NAME", NAME in the abstract socket namespace, open to processes of the same user.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvloom/transport/shm/connection.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

struct ShmOptions {
  std::string listen;            // NAME of the address; empty: nobody can connect; "*": a free one is chosen
  std::vector<std::byte> hello;  // who we are, for the peers' PeerUp; up to 1 KiB
  int copy_threads = 1;          // that copy what arrives, the polling thread among them
  CopyKernel kernel = best_copy_kernel();
  std::uint64_t slots = 4096;    // of the ring to each peer, 64 B each; a power of two
  std::uint64_t answers = 1024;  // operations to each peer that may be under way; a power of two
  std::size_t most_peers = 1024;
};

class ShmTransport final : public Transport {
 public:
  // @error invalid_argument (an option that can't be right), unavailable (the name is taken), exhausted (descriptors)
  static Expected<std::unique_ptr<ShmTransport>> make(ShmOptions options);
  ~ShmTransport() override;

  // Takes one end of a SOCK_SEQPACKET socketpair(); the peer takes the other one. For forked children, which close the end that
  // is not theirs.
  Expected<PeerId> adopt(int socket);

  Abilities abilities() const override;
  Cost cost() const override;
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

 private:
  using Connections = std::unordered_map<std::uint64_t, std::unique_ptr<shm::Connection>>;

  ShmTransport(ShmOptions options, shm::Fd epoll, shm::Fd listener);
  void deregister(RegionId region) noexcept override;

  Expected<PeerId> add(shm::Fd socket, bool announced, std::span<const std::byte> hello);
  shm::Connection* find(PeerId peer);
  Region keep(std::span<std::byte> memory, std::shared_ptr<shm::SharedMemory> shared);
  Expected<shm::Operation> checked(PostId post, const Write& write) const;
  bool turn(Bytes budget);
  void read_sockets();
  void accept_peers();
  void wake();
  bool spin() const;

  ShmOptions options_;
  shm::Fd epoll_;
  shm::Fd listener_;
  CopyCrew crew_;
  shm::LocalRegions regions_;
  std::vector<Event> events_;  // for the next poll
  Connections connections_;
  std::vector<std::uint64_t> order_;  // of connections_, for turns
  std::size_t first_ = 0;             // whose turn comes first: it moves, so that a budget is shared
  std::uint64_t next_peer_ = 1;
  std::uint64_t next_region_ = 1;
  std::uint64_t next_post_ = 1;
  bool armed_ = false;
};

}  // namespace kvloom
