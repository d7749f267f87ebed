// wire.h: what the session layer says, as bytes that another process may trust after decode.  Stage: stream.  Schema: session.fbs
// (FlatBuffers). Bytes come from hostile peers, may begin at any address, and may be a newer kvloom's: fields that we do not know
// are passed over, messages and versions that we do not know are refused.
// Law (check_message_wire): decode_message(encode_message(m)) == m; any bytes give an error or a message within the limits of
// message.h, in never more memory than a few times their own size.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/session/message.h"

namespace kvloom {

inline constexpr std::uint32_t kSessionVersion = 1;
// A grant of kMaxPages pages, everything else that a message may hold, and room for what newer writers add.
inline constexpr std::size_t kMaxMessageBytes = kMaxPages * sizeof(PageId) + (std::size_t{64} << 10);
inline constexpr std::size_t kMaxHelloBytes = std::size_t{4} << 10;

// Reasons over kMaxReason bytes are cut, between characters.
// @pre otherwise within the limits of message.h, else nobody will read it      @cost O(pages): two copies
std::vector<std::uint8_t> encode_message(const Message& message);

// @pre nobody writes to `bytes` meanwhile: they are read in place, unless they begin at an odd address
// @error parse: not such bytes, cut short, pointing outside of themselves, no name, tables that do not add up to the pages;
//        unsupported: another version, a message or a code that we do not know; out_of_range, exhausted: a limit of message.h
// @cost O(pages): two copies and one look at each page
// Whether pages are below pool_pages is asked by PageTable::make when the grant is bound: an error there can be answered with
// Failed, an error here loses the name of the transfer that it would have to be about.
Expected<Message> decode_message(std::span<const std::uint8_t> bytes);

// Who speaks: the first thing that is said on a connection.
struct Hello {
  enum class Side : std::uint8_t { prefill, decode };
  std::uint64_t incarnation = 0;   // another one each time that the process starts
  std::uint64_t capabilities = 0;  // a bit each; those that we do not know are kept
  Side side = Side::prefill;
  Rank rank;         // in [0, kMaxRanks)
  std::string name;  // for people; at most kMaxName bytes
  friend bool operator==(const Hello&, const Hello&) = default;
};

// @pre rank and name are within their limits, else nobody will read it
// @post at most 344 B: fits the hello of every transport (shm takes 1 KiB)
std::vector<std::uint8_t> encode_hello(const Hello& hello);

// @error as decode_message
Expected<Hello> decode_hello(std::span<const std::uint8_t> bytes);

}  // namespace kvloom
