// connection.h: what two ranks say about their connection itself, before and beside the messages about transfers (message.h).  Stage: stream.
//
//   target (decode)                          source (prefill)
//     Hello(token, transport address) ─────────►  connects its transport to that address, saying the token there
//     ◄───────────────── Welcome(its geometry)
//     Geometry(id, side, memory), Grant ... ───►  from now on grants may name the geometry
//     Ping ────────────────────────────────────►  ◄── Ping(answer)        while transfers are open between the two
//     anything but Hello ──────────────────────►  ◄── HelloFirst          by a source that does not know the connection (any more)
//
// The token is drawn at random for each connection and known to its two ends only: it joins the control connection with the transport's.
// All of this is hostile until decode_said has read it; what it lets through: names and addresses of at most kMaxName bytes, ranks in [0, kMaxRanks),
// at most kMaxRegions regions and kMaxTensors tensors; sides are bytes still (plan/wire.h reads them).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/cache_memory.h"
#include "kvloom/session/message.h"

namespace kvloom {

inline constexpr std::size_t kMaxGeometries = 64;            // of one peer; both ends forget the one of the lowest id for another
inline constexpr std::size_t kMaxRegions = 65536;            // of one geometry
inline constexpr std::size_t kMaxTensors = 65536;            // of one geometry
inline constexpr std::size_t kMaxTensorParts = 1U << 18;     // of all tensors together
inline constexpr std::size_t kMaxKeyBytes = 4096;            // of one region's key
inline constexpr std::size_t kMaxConnectionBytes = 8 << 20;  // of one message

struct ConnectionToken {
  std::uint64_t high = 0, low = 0;
  friend auto operator<=>(const ConnectionToken&, const ConnectionToken&) = default;
};
ConnectionToken draw_token();                                               // from the system's entropy
std::vector<std::byte> bytes_of(const ConnectionToken& token);              // 16 B: the transport's hello
std::optional<ConnectionToken> token_of(std::span<const std::byte> hello);  // nothing if it is none

struct Hello {
  std::uint64_t incarnation = 0;   // another one each time that the process starts
  std::uint64_t capabilities = 0;  // a bit each; those that we do not know are kept
  Rank rank;                       // for people: what it is to a transfer, its grants say
  std::string name;                // for people
  std::string transport;           // where its transport listens
  friend bool operator==(const Hello&, const Hello&) = default;
};
struct Welcome {
  std::uint64_t incarnation = 0;
  std::uint64_t capabilities = 0;
  Rank rank;
  std::string name;
  std::vector<std::uint8_t> side;  // encode_side
  friend bool operator==(const Welcome&, const Welcome&) = default;
};
// A region of the sender's memory, as its transport names it.
struct RegionKey {
  Bytes length;
  std::vector<std::byte> key;
  friend bool operator==(const RegionKey&, const RegionKey&) = default;
};
struct Geometry {
  GeometryId id;
  Rank rank;                       // the sender's, on this side
  std::vector<std::uint8_t> side;  // encode_side
  std::vector<RegionKey> regions;
  std::vector<PlacedTensor> tensors;  // all that the rank holds
  friend bool operator==(const Geometry&, const Geometry&) = default;
};
struct Ping {
  bool answer = false;
  friend bool operator==(const Ping&, const Ping&) = default;
};
struct HelloFirst {
  friend bool operator==(const HelloFirst&, const HelloFirst&) = default;
};
struct Refused {
  Code code = Code::unsupported;
  std::string reason;
  friend bool operator==(const Refused&, const Refused&) = default;
};

struct Told {
  ConnectionToken token;
  std::variant<Hello, Welcome, Geometry, Ping, HelloFirst, Refused> what;
  friend bool operator==(const Told&, const Told&) = default;
};
const char* kind_of(const Told& told);  // "hello", for logs

// @pre within the limits above, else nobody will read it
std::vector<std::uint8_t> encode_told(const Told& told);
// @error as decode_message
Expected<Told> decode_told(std::span<const std::uint8_t> bytes);

// Whatever comes over a control connection.  @error as decode_message
using Said = std::variant<Message, Told>;
Expected<Said> decode_said(std::span<const std::uint8_t> bytes);

}  // namespace kvloom
