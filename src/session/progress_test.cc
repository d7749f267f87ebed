#include "kvloom/session/progress.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using NoticeBytes = std::vector<std::byte>;

Expected<void> check_progress(const Progress& progress) {
  const NoticeBytes bytes = encode_progress(progress);
  const auto read = decode_progress(bytes);
  if (!read) return tl::unexpected(read.error());
  if (*read != progress) return fail(Code::parse, "another notice came back");
  return {};
}

// Any bytes: an error with words, or a notice within the limits that is encoded to the same bytes.
testing::AssertionResult is_harmless(std::span<const std::byte> bytes) {
  const auto read = decode_progress(bytes);
  if (!read) return testing::AssertionResult(!read.error().message.empty()) << "an error without words";
  if (read->parts.size() > kMaxParts || read->payload.size() > kMaxPayload || (!read->last && !read->payload.empty()))
    return testing::AssertionFailure() << "beyond the limits";
  for (const LandedPart& part : read->parts)
    if (part.layer.group < 0 || part.layer.layer.value < 0 || part.bytes < Bytes(0))
      return testing::AssertionFailure() << "a negative number";
  const NoticeBytes again = encode_progress(*read);
  return testing::AssertionResult(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) << "other bytes";
}

LandedPart part(std::int32_t group, std::int32_t layer, std::int64_t bytes) { return {{group, LayerId(layer)}, Bytes(bytes)}; }

Progress small() {
  return {{part(0, 3, 36'864), part(1, 77, std::int64_t{1} << 40)}, true, {std::byte{1}, std::byte{0xff}, std::byte{0}}};
}

NoticeBytes with(std::size_t at, std::initializer_list<unsigned> values) {
  NoticeBytes bytes = encode_progress(small());
  for (const unsigned value : values) bytes[at++] = static_cast<std::byte>(value);
  return bytes;
}

// What the bytes are is said here in full: both ends of a connection may be different builds.
TEST(Progress, HasTheseBytes) {
  const NoticeBytes bytes = encode_progress({{part(0x01020304, 5, 0x0a0b0c0d0e0f)}, true, {std::byte{0xee}}});
  std::string hex;
  for (const std::byte byte : bytes) hex += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  EXPECT_EQ(hex,
            "01"
            "01"
            "0100"
            "01000000"
            "04030201"
            "05000000"
            "0f0e0d0c0b0a0000"
            "ee");
}

TEST(Progress, ReadsBackAtItsLimits) {
  Progress full{{}, true, NoticeBytes(kMaxPayload, std::byte{7})};
  for (std::size_t i = 0; i < kMaxParts; ++i) full.parts.push_back(part(63, INT32_MAX, INT64_MAX - static_cast<std::int64_t>(i)));
  EXPECT_TRUE(holds(check_progress(full)));
  EXPECT_TRUE(holds(check_progress({})));
  EXPECT_TRUE(holds(check_progress({{}, true, {}})));
}

RC_GTEST_PROP(Progress, ReadsBack, ()) {
  Progress progress;
  for (int n = *rc::gen::inRange(0, 100); n > 0; --n)
    progress.parts.push_back(part(*rc::gen::inRange<std::int32_t>(0, INT32_MAX), *rc::gen::inRange<std::int32_t>(0, INT32_MAX),
                                  *rc::gen::inRange<std::int64_t>(0, INT64_MAX)));
  progress.last = *rc::gen::arbitrary<bool>();
  if (progress.last)
    for (const std::uint8_t byte : *rc::gen::arbitrary<std::vector<std::uint8_t>>()) progress.payload.push_back(std::byte{byte});
  const auto law = check_progress(progress);
  if (!law) RC_FAIL(law.error().message);
}

TEST(Progress, RefusesEveryTruncationAndEveryExcess) {
  NoticeBytes bytes = encode_progress(small());
  for (std::size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode_progress(std::span(bytes).first(size))) << size;
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_progress(bytes));
}

TEST(Progress, StaysWithinItsLimitsWhateverByteChanges) {
  const NoticeBytes bytes = encode_progress(small());
  for (std::size_t at = 0; at < bytes.size(); ++at)
    for (unsigned value = 0; value < 256; ++value) {
      NoticeBytes other = bytes;
      other[at] = static_cast<std::byte>(value);
      ASSERT_TRUE(is_harmless(other)) << "byte " << at << " = " << value;
    }
}

RC_GTEST_PROP(Progress, StaysWithinItsLimitsWhateverTheBytes, (const std::vector<std::uint8_t>& noise)) {
  RC_ASSERT(static_cast<bool>(is_harmless(std::as_bytes(std::span(noise)))));
}

TEST(Progress, SaysWhatIsWrong) {
  const NoticeBytes bytes = encode_progress(small());
  EXPECT_TRUE(says(decode_progress({}), "a progress notice of 0 B: its head alone has 8"));
  EXPECT_TRUE(says(decode_progress(with(0, {2})), "a progress notice of version 2: this kvloom reads version 1"));
  EXPECT_EQ(decode_progress(with(0, {2})).error().code, Code::unsupported);
  EXPECT_TRUE(says(decode_progress(with(1, {2})), "a progress notice whose `last` is 2, neither 0 nor 1"));
  EXPECT_TRUE(says(decode_progress(with(1, {0})), "a progress notice with a payload of 3 B that is not the last one"));
  EXPECT_TRUE(says(decode_progress(with(2, {0x01, 0x10})), "a progress notice of 4097 layers: at most 4096 are read"));
  EXPECT_TRUE(
      says(decode_progress(with(4, {1, 0, 1, 0})), "a progress notice with a payload of 65537 B: at most 65536 are read"));
  EXPECT_TRUE(says(decode_progress(std::span(bytes).first(42)),
                   "a progress notice of 42 B is cut short: 2 layers and a payload of 3 B make 43"));
  EXPECT_TRUE(
      says(decode_progress(with(2, {1})), "a progress notice of 43 B is too long: 1 layers and a payload of 3 B make 27"));
  EXPECT_TRUE(says(decode_progress(with(11, {0x80})), "part 0 is 36864 B of group -2147483648 layer 3"));
  EXPECT_TRUE(says(decode_progress(with(12, {0xfe, 0xff, 0xff, 0xff})), "part 0 is 36864 B of group 0 layer -2"));
  EXPECT_TRUE(
      says(decode_progress(with(32, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})), "part 1 is -1 B of group 1 layer 77"));
}

}  // namespace
}  // namespace kvloom
