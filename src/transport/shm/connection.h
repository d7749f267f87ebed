// connection.h: one peer of a ShmTransport.  Stage: carry.  Owned by its transport, on the transport's thread.
//
//   greeting --the peer's hello came--> up --fenced, hung up, died, broke the protocol--> down
//   greeting --the same, or left by its owner-------------------------------------------> down
//
// It tells nothing itself: events go to the transport's queue, for the next poll.
#pragma once

#include <memory>
#include <vector>

#include "kvloom/transport/shm/incoming.h"
#include "kvloom/transport/shm/outgoing.h"
#include "kvloom/transport/shm/socket.h"

namespace kvloom::shm {

// What a connection borrows from its transport.
struct Surroundings {
  const Fd& epoll;
  const LocalRegions& regions;
  Device& device;
  std::vector<Event>& events;
};

// Set in the data of an epoll event: the process of this peer died.
inline constexpr std::uint64_t kDeathBit = std::uint64_t{1} << 63;

class Connection {
 public:
  enum class State { greeting, up, down };

  // announced: its owner knows of this peer before PeerUp
  Connection(PeerId id, Fd socket, SharedMemory outbox, OutboxShape shape, bool announced, Surroundings around);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  State state() const { return state_; }
  Outgoing& outgoing() { return outgoing_; }
  Incoming& incoming() { return incoming_; }

  Expected<void> greet(std::span<const std::byte> hello);

  void read_socket();        // what it brings may close the connection
  bool turn(Bytes& budget);  // takes answers, puts operations, consumes the peer's; true if it did anything
  void pump();               // puts operations

  // An operation is part of the way through, in either direction: more will come in a moment.
  bool underway() const;
  bool has_work() const;  // @pre up

  // Asleep, the peer rings a bell with the next thing that it does.  sleep is false if there is something to do now.
  bool sleep();
  void wake();

  // @post nothing of the peer is copied any more, ours is no longer believed by it, and everything open is completed with the reason
  void close(Error reason);

 private:
  Expected<bool> try_turn(Bytes& budget);
  Expected<void> take(Received received);
  Expected<void> take_hello(const Received& hello);
  void watch(const Fd& fd, std::uint64_t data);
  void unwatch(const Fd& fd);
  void watch_room();
  void ring_bell();

  const PeerId id_;
  const bool announced_;
  State state_ = State::greeting;
  Fd socket_;
  Fd death_watch_;
  // The socket, while it takes nothing: told each time that the peer has read. (It may be writable all along: descriptors are counted as well.)
  Fd room_watch_;
  Surroundings around_;
  SharedMemory outbox_memory_;
  OutboxView outbox_;
  Mapping inbox_memory_;
  OutboxView inbox_;
  Outgoing outgoing_;
  Incoming incoming_;
  bool pumped_ = false;     // by the last turn
  std::uint32_t rung_ = 0;  // the peer's sleep that we rang for
};

}  // namespace kvloom::shm
