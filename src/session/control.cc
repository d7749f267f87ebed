#include "kvloom/session/control.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <zmq.hpp>

#include "kvloom/session/connection.h"
#include "kvloom/session/wire.h"

namespace kvloom {
namespace {

constexpr int kQueue = 10000;     // messages to one peer that wait in libzmq
constexpr int kLingerMs = 200;    // at the end: for the last words
constexpr int kReconnectMs = 20;  // a peer that comes back is found again soon
constexpr int kReconnectMaxMs = 500;
constexpr const char* kZapAddress = "inproc://zeromq.zap.01";  // ZeroMQ RFC 27

bool is_local(std::string_view address) {
  for (const std::string_view local : {"tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://"})
    if (address.starts_with(local)) return true;
  return false;
}

void set_up(zmq::socket_t& socket, std::string_view address) {
  socket.set(zmq::sockopt::linger, kLingerMs);
  socket.set(zmq::sockopt::sndhwm, kQueue);
  socket.set(zmq::sockopt::rcvhwm, kQueue);
  socket.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(std::max(kMaxMessageBytes, kMaxConnectionBytes)));
  if (address.find('[') != std::string_view::npos) socket.set(zmq::sockopt::ipv6, true);
}

std::vector<std::uint8_t> bytes_of(const zmq::message_t& message) {
  const auto* data = message.data<std::uint8_t>();
  return {data, data + message.size()};
}

Expected<void> check_key(const std::string& key, const char* what) {
  constexpr std::size_t kKeyText = 40;
  std::uint8_t binary[32];
  if (key.size() == kKeyText && zmq_z85_decode(binary, key.c_str()) != nullptr) return {};
  return fail(Code::invalid_argument, "the {} is no CURVE key: 40 characters of Z85, as zmq.curve_keypair() gives", what);
}

// Throws zmq::error_t inside; turned into an Error here, so that nothing throws across our interfaces.
template <class Body>
auto guarded(const std::string& address, Body body) -> Expected<decltype(body())> {
  try {
    return body();
  } catch (const zmq::error_t& error) {
    const Code code = error.num() == EADDRINUSE || error.num() == EADDRNOTAVAIL ? Code::unavailable : Code::invalid_argument;
    return fail(code, "control socket \"{}\": {}", address, error.what());
  }
}

// A signal ends any call of libzmq with EINTR, also one that would not have waited.
template <class Call>
auto uninterrupted(Call call) {
  for (;;) try {
      return call();
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
}

bool send_frame(zmq::socket_t& socket, zmq::const_buffer bytes, zmq::send_flags flags) {
  return uninterrupted([&] { return socket.send(bytes, flags); }).has_value();
}

// One message of any number of frames.
bool receive_frames(zmq::socket_t& socket, std::vector<zmq::message_t>& frames) {
  frames.clear();
  for (;;) {
    zmq::message_t frame;
    if (!uninterrupted([&] { return socket.recv(frame, zmq::recv_flags::dontwait); })) return false;
    const bool more = frame.more();
    frames.push_back(std::move(frame));
    if (!more) return true;
  }
}

}  // namespace

CurveKeys make_curve_keys() {
  char public_key[41], secret_key[41];
  if (zmq_curve_keypair(public_key, secret_key) != 0) return {};
  return {public_key, secret_key};
}

// ---- server ----

struct ControlServer::Sockets {
  zmq::context_t context{1};
  zmq::socket_t zap;  // asked by libzmq whether a client's key may connect; null without keys
  zmq::socket_t router{context, zmq::socket_type::router};
  std::set<std::vector<std::uint8_t>> clients;  // binary keys
  std::vector<zmq::message_t> frames;

  void answer_zap() {
    // version, request, domain, address, identity, mechanism, credentials
    constexpr std::size_t kRequest = 1, kCredentials = 6, kFrames = 7;
    std::vector<zmq::message_t> asked;
    while (zap && receive_frames(zap, asked)) {
      const bool good = asked.size() == kFrames && (clients.empty() || clients.contains(bytes_of(asked[kCredentials])));
      const std::string_view words[] = {"1.0",
                                        asked.size() > kRequest ? asked[kRequest].to_string_view() : "",
                                        good ? "200" : "400",
                                        good ? "OK" : "this key is not on the list of clients",
                                        "",
                                        ""};
      for (std::size_t i = 0; i < std::size(words); ++i)
        send_frame(zap, zmq::buffer(words[i]), i + 1 < std::size(words) ? zmq::send_flags::sndmore : zmq::send_flags::none);
    }
  }
};

ControlServer::ControlServer(std::unique_ptr<Sockets> sockets) : sockets_(std::move(sockets)) {}
ControlServer::~ControlServer() = default;

Expected<std::unique_ptr<ControlServer>> ControlServer::make(const ControlServerOptions& options) {
  if (!options.keys && !options.open_to_all && !is_local(options.address))
    return fail(Code::invalid_argument,
                "\"{}\" is open to other machines without keys: give CURVE keys, listen on tcp://127.0.0.1, or say open_to_all",
                options.address);
  if (options.keys) {
    if (auto ok = check_key(options.keys->public_key, "public key"); !ok) return tl::unexpected(ok.error());
    if (auto ok = check_key(options.keys->secret_key, "secret key"); !ok) return tl::unexpected(ok.error());
  } else if (!options.clients.empty()) {
    return fail(Code::invalid_argument, "a list of clients' keys, but no keys of our own to prove them by");
  }
  for (const std::string& client : options.clients)
    if (auto ok = check_key(client, "client's key"); !ok) return tl::unexpected(ok.error());
  return guarded(options.address, [&] {
    auto sockets = std::make_unique<Sockets>();
    set_up(sockets->router, options.address);
    sockets->router.set(zmq::sockopt::router_mandatory, true);
    if (options.keys) {
      sockets->zap = zmq::socket_t(sockets->context, zmq::socket_type::rep);
      sockets->zap.bind(kZapAddress);
      for (const std::string& client : options.clients) {
        std::vector<std::uint8_t> binary(32);
        zmq_z85_decode(binary.data(), client.c_str());
        sockets->clients.insert(std::move(binary));
      }
      sockets->router.set(zmq::sockopt::curve_server, true);
      sockets->router.set(zmq::sockopt::curve_publickey, options.keys->public_key);
      sockets->router.set(zmq::sockopt::curve_secretkey, options.keys->secret_key);
      sockets->router.set(zmq::sockopt::zap_domain, "kvloom");
    }
    sockets->router.bind(options.address);
    return std::unique_ptr<ControlServer>(new ControlServer(std::move(sockets)));
  });
}

std::string ControlServer::address() const { return sockets_->router.get(zmq::sockopt::last_endpoint); }

std::vector<int> ControlServer::fds() const {
  std::vector<int> out = {sockets_->router.get(zmq::sockopt::fd)};
  if (sockets_->zap) out.push_back(sockets_->zap.get(zmq::sockopt::fd));
  return out;
}

std::optional<ControlServer::Received> ControlServer::receive() {
  sockets_->answer_zap();
  // From a DEALER: the route, then the message.
  while (receive_frames(sockets_->router, sockets_->frames))
    if (sockets_->frames.size() == 2) return Received{sockets_->frames[0].to_string(), bytes_of(sockets_->frames[1])};
  return std::nullopt;
}

bool ControlServer::send(const Route& to, std::span<const std::uint8_t> bytes) {
  try {
    return send_frame(sockets_->router, zmq::buffer(to), zmq::send_flags::sndmore | zmq::send_flags::dontwait) &&
           send_frame(sockets_->router, zmq::buffer(bytes.data(), bytes.size()), zmq::send_flags::dontwait);
  } catch (const zmq::error_t&) {  // EHOSTUNREACH: it has gone
    return false;
  }
}

// ---- client ----

struct ControlContext::Context {
  zmq::context_t context{1};
};
ControlContext::ControlContext() : context_(std::make_unique<Context>()) {}
ControlContext::~ControlContext() = default;

struct ControlClient::Socket {
  zmq::socket_t dealer;
  std::vector<zmq::message_t> frames;
};

ControlClient::ControlClient(std::unique_ptr<Socket> socket) : socket_(std::move(socket)) {}
ControlClient::~ControlClient() = default;

Expected<std::unique_ptr<ControlClient>> ControlClient::make(ControlContext& context, const ControlClientOptions& options) {
  if (options.keys) {
    if (auto ok = check_key(options.keys->public_key, "public key"); !ok) return tl::unexpected(ok.error());
    if (auto ok = check_key(options.keys->secret_key, "secret key"); !ok) return tl::unexpected(ok.error());
    if (auto ok = check_key(options.server_key, "server's key"); !ok) return tl::unexpected(ok.error());
  }
  return guarded(options.address, [&] {
    auto socket = std::make_unique<Socket>();
    socket->dealer = zmq::socket_t(context.context_->context, zmq::socket_type::dealer);
    set_up(socket->dealer, options.address);
    socket->dealer.set(zmq::sockopt::reconnect_ivl, kReconnectMs);
    socket->dealer.set(zmq::sockopt::reconnect_ivl_max, kReconnectMaxMs);
    if (options.keys) {
      socket->dealer.set(zmq::sockopt::curve_serverkey, options.server_key);
      socket->dealer.set(zmq::sockopt::curve_publickey, options.keys->public_key);
      socket->dealer.set(zmq::sockopt::curve_secretkey, options.keys->secret_key);
    }
    socket->dealer.connect(options.address);
    return std::unique_ptr<ControlClient>(new ControlClient(std::move(socket)));
  });
}

int ControlClient::fd() const { return socket_->dealer.get(zmq::sockopt::fd); }

std::optional<std::vector<std::uint8_t>> ControlClient::receive() {
  while (receive_frames(socket_->dealer, socket_->frames))
    if (socket_->frames.size() == 1) return bytes_of(socket_->frames[0]);
  return std::nullopt;
}

bool ControlClient::send(std::span<const std::uint8_t> bytes) {
  try {
    return send_frame(socket_->dealer, zmq::buffer(bytes.data(), bytes.size()), zmq::send_flags::dontwait);
  } catch (const zmq::error_t&) {
    return false;
  }
}

}  // namespace kvloom
