#include "kvloom/session/connection.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/plan/wire.h"
#include "kvloom/session/connection_generated.h"
#include "kvloom/session/wire.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;
using WireBytes = std::vector<std::uint8_t>;

const ConnectionToken kToken{0x1122334455667788, 0x99aabbccddeeff00};

Geometry small_geometry() {
  const Side side = shapes::side(shapes::gqa(2), "tp=1");
  Geometry out{GeometryId(7), Rank(0), encode_side(side), {{Bytes(1 << 20), {std::byte{1}, std::byte{2}}}}, {}};
  for (const auto& [group, layer] : held_tensors(side, Rank(0)))
    out.tensors.push_back({group, layer, {{Bytes(0), Bytes(4096), 0, Bytes(4096 * layer.value)}}});
  return out;
}

std::vector<Told> one_of_each() {
  return {{kToken, Hello{1, 2, Rank(4095), "node-3:8000", "shm:kvloom-7"}},
          {kToken, Welcome{3, 4, Rank(5), "node-1", encode_side(shapes::side(shapes::gqa(2), "tp=2"))}},
          {kToken, small_geometry()},
          {kToken, Ping{true}},
          {kToken, HelloFirst{}},
          {kToken, Refused{Code::exhausted, "4096 peers are connected, the most"}}};
}

TEST(Connection, ReadsBackWhatWasTold) {
  for (const Told& told : one_of_each()) {
    const WireBytes bytes = encode_told(told);
    const auto read = decode_told(bytes);
    ASSERT_TRUE(read) << kind_of(told) << ": " << read.error().message;
    EXPECT_EQ(*read, told) << kind_of(told);
    const auto said = decode_said(bytes);
    ASSERT_TRUE(said);
    EXPECT_EQ(std::get<Told>(*said), told);
  }
}

TEST(Connection, TellsMessagesAboutTransfersFromThoseAboutConnections) {
  const Message message = Quiesced{{"req-1", Epoch(2)}, Rank(3)};
  const auto said = decode_said(encode_message(message));
  ASSERT_TRUE(said);
  EXPECT_EQ(std::get<Message>(*said), message);
  EXPECT_TRUE(says(decode_said({}), "0 B that do not begin as a message does"));
}

// Any byte changed, any length: an error with words, or something within the limits that reads back.
TEST(Connection, StaysWithinItsLimitsWhateverByteChanges) {
  for (const Told& told : one_of_each()) {
    WireBytes bytes = encode_told(told);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto read = decode_told(std::span(bytes).first(size));
      ASSERT_TRUE(read || !read.error().message.empty());
    }
    for (std::uint8_t& byte : bytes) {
      const std::uint8_t was = byte;
      for (const unsigned value : {0U, 1U, 127U, 128U, 255U, was ^ 1U, was + 1U}) {
        byte = static_cast<std::uint8_t>(value);
        const auto read = decode_told(bytes);
        ASSERT_TRUE(read || !read.error().message.empty());
        if (!read) continue;
        ASSERT_EQ(decode_told(encode_told(*read)).value(), *read);
      }
      byte = was;
    }
  }
}

TEST(Connection, SaysWhatIsWrong) {
  const auto sent = [](auto what) { return decode_told(encode_told({kToken, std::move(what)})); };
  EXPECT_TRUE(says(sent(Hello{0, 0, Rank(4096), "", ""}), "a connection message: rank 4096 is not in [0, 4096)"));
  EXPECT_TRUE(says(sent(Hello{0, 0, Rank(0), std::string(257, 'x'), ""}), "a name of 257 B: at most 256 are read"));
  EXPECT_TRUE(says(sent(Hello{0, 0, Rank(0), "", std::string(257, 'x')}), "an address of 257 B: at most 256 are read"));
  Geometry geometry = small_geometry();
  geometry.regions.front().length = Bytes(-1);
  EXPECT_TRUE(says(sent(geometry), "a region of -1 B"));
  geometry = small_geometry();
  geometry.regions.front().key.resize(kMaxKeyBytes + 1);
  EXPECT_TRUE(says(sent(geometry), "a region's key of 4097 B: at most 4096 are read"));
  geometry = small_geometry();
  geometry.tensors.front().parts.resize(kMaxTensorParts + 1);
  EXPECT_FALSE(sent(geometry));
  WireBytes newer = encode_told({kToken, Ping{}});
  flatbuffers::GetMutableRoot<wire::Connection>(newer.data())->mutate_version(2);
  EXPECT_TRUE(says(decode_told(newer), "a connection message of version 2: this kvloom reads version 1"));
  EXPECT_EQ(decode_told(newer).error().code, Code::unsupported);
}

TEST(Connection, ATokenIsAHelloOfTheTransport) {
  EXPECT_EQ(token_of(bytes_of(kToken)), kToken);
  EXPECT_EQ(token_of({}), std::nullopt);
  EXPECT_NE(draw_token(), draw_token());
}

}  // namespace
}  // namespace kvloom
