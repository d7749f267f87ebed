// control.h: the sockets over which ranks talk: whole messages over ZeroMQ, the convention of vLLM and SGLang.  Stage: stream.
// A source rank (prefill) listens, target ranks (decode) connect. ZeroMQ connects anew by itself when a peer comes back; who is at the other end
// is the business of connection.h. Messages may be lost (a full queue, a peer that went away): the state machines send again.
// Keys: CURVE (Curve25519). With keys everything is encrypted and both ends are proven; without, a server listens on loopback or a Unix socket
// only, unless told otherwise. `make_curve_keys`, or `zmq.curve_keypair()` in Python, draws a pair.
// Thread: whoever made it.  No call waits.  libzmq has one thread of its own in each ControlContext.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

// Z85 text, 40 characters each, as all ZeroMQ tools write it.
struct CurveKeys {
  std::string public_key, secret_key;
};
CurveKeys make_curve_keys();

struct ControlServerOptions {
  std::string address = "tcp://127.0.0.1:*";  // also "ipc:///path"; "*": a free port
  std::optional<CurveKeys> keys;
  std::vector<std::string> clients;  // public keys that may connect; empty: any that knows ours
  bool open_to_all = false;          // without keys, also beyond loopback
};

struct ControlClientOptions {
  std::string address;
  std::optional<CurveKeys> keys;
  std::string server_key;  // public; with keys
};

// Who sent something to a server: means nothing beyond that server, and is never used again.
using Route = std::string;

class ControlServer {
 public:
  struct Received {
    Route from;
    std::vector<std::uint8_t> bytes;
  };
  // @error invalid_argument: an address that is none, a key that is none, an address beyond loopback without keys; unavailable: it is taken
  static Expected<std::unique_ptr<ControlServer>> make(const ControlServerOptions& options);
  ~ControlServer();

  std::string address() const;  // where it listens, with the port
  // Descriptors that become readable when there is something to receive. A send may eat the signal: after a send, `receive` before waiting.
  std::vector<int> fds() const;
  std::optional<Received> receive();
  // False: nobody is there any more, or its queue is full; the message is lost.
  bool send(const Route& to, std::span<const std::uint8_t> bytes);

 private:
  struct Sockets;
  explicit ControlServer(std::unique_ptr<Sockets> sockets);
  std::unique_ptr<Sockets> sockets_;
};

class ControlContext;  // what the clients of one endpoint share

class ControlClient {
 public:
  static Expected<std::unique_ptr<ControlClient>> make(ControlContext& context, const ControlClientOptions& options);
  ~ControlClient();

  int fd() const;  // as those of the server
  std::optional<std::vector<std::uint8_t>> receive();
  bool send(std::span<const std::uint8_t> bytes);

 private:
  struct Socket;
  explicit ControlClient(std::unique_ptr<Socket> socket);
  std::unique_ptr<Socket> socket_;
};

class ControlContext {
 public:
  ControlContext();
  ~ControlContext();

 private:
  friend class ControlClient;
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace kvloom
