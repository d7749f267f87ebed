// wire.h: what the session layer says, as bytes that another process may trust after decode.  Stage: stream.  Schema: session.fbs
// (FlatBuffers). Bytes come from hostile peers, may begin at any address, and may be a newer kvloom's: fields that we do not know
// are passed over, messages and versions that we do not know are refused.
// Law (check_message_wire): decode_message(encode_message(m)) == m; any bytes give an error or a message within the limits of
// message.h, in never more memory than a few times their own size.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/session/message.h"

namespace kvloom {

inline constexpr std::uint32_t kSessionVersion = 1;
// A grant of kMaxPages pages, everything else that a message may hold, and room for what newer writers add.
inline constexpr std::size_t kMaxMessageBytes = kMaxPages * sizeof(PageId) + (std::size_t{64} << 10);

// The first kMaxReason bytes of a reason, cut between characters (UTF-8).
std::string_view cut_reason(std::string_view reason);

// Reasons over kMaxReason bytes are cut, between characters.
// @pre otherwise within the limits of message.h, else nobody will read it      @cost O(pages): two copies
std::vector<std::uint8_t> encode_message(const Message& message);

// Writes messages one after another into the same memory: a grant of 1M tokens has 125 kB, and fresh memory for it costs more than its bytes.
// Thread: one.
class MessageEncoder {
 public:
  MessageEncoder();
  ~MessageEncoder();
  // As encode_message; good until the next call.
  std::span<const std::uint8_t> encode(const Message& message);

 private:
  struct Builder;
  std::unique_ptr<Builder> builder_;
};

// @pre nobody writes to `bytes` meanwhile: they are read in place, unless they begin at an odd address
// @error parse: not such bytes, cut short, pointing outside of themselves, no name, tables that do not add up to the pages;
//        unsupported: another version, a message or a code that we do not know; out_of_range, exhausted: a limit of message.h
// @cost O(pages): two copies and one look at each page
// Whether pages are below pool_pages is asked by PageTable::make when the grant is bound: an error there can be answered with
// Failed, an error here loses the name of the transfer that it would have to be about.
Expected<Message> decode_message(std::span<const std::uint8_t> bytes);

}  // namespace kvloom
