#include "kvloom/session/wire.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/text.h"
#include "kvloom/session/connection.h"
#include "kvloom/session/session_generated.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using namespace std::chrono_literals;
using WireBytes = std::vector<std::uint8_t>;
using flatbuffers::FlatBufferBuilder;

constexpr std::int64_t kMaxId = std::int64_t{1} << 48;

// ---- the laws ----

Expected<void> check_message_wire(const Message& message) {
  const WireBytes bytes = encode_message(message);
  const auto read = decode_message(bytes);
  if (!read) return tl::unexpected(read.error());
  if (*read != message || encode_message(*read) != bytes)
    return fail(Code::parse, "{} came back as {}", to_string(message), to_string(*read));
  return {};
}

// The limits of message.h once more, said in the plainest way.
bool is_within(const TransferKey& key, Rank rank) {
  return !key.name.empty() && key.name.size() <= kMaxName && rank.value >= 0 && rank.value < kMaxRanks;
}
bool is_within(const Grant& m) {
  if (!is_within(m.key, m.target) || m.tables.size() > kMaxTables) return false;
  if (m.range.begin < 0 || m.range.begin > m.range.end || m.range.end > kMaxId) return false;
  if (m.time_left <= 0ns || m.time_left > kMaxTimeLeft) return false;
  std::size_t pages = 0;
  for (const GrantTable& table : m.tables) {
    pages += table.pages.size();
    if (table.pool_pages < 0 || table.pool_pages > kMaxId) return false;
    for (const PageId page : table.pages)
      if (page != kNoPage && (page.value < 0 || page.value >= kMaxId)) return false;
  }
  return pages <= kMaxPages;
}
bool is_within(const Accepted& m) { return is_within(m.key, m.source); }
bool is_within(const Failed& m) { return is_within(m.key, m.source) && m.code <= Code::io && m.reason.size() <= kMaxReason; }
bool is_within(const Cancel& m) { return is_within(m.key, m.target) && m.reason.size() <= kMaxReason; }
bool is_within(const Quiesced& m) { return is_within(m.key, m.source); }

// Any bytes: an error with words, or a message within the limits that obeys the law.
testing::AssertionResult is_harmless(std::span<const std::uint8_t> bytes) {
  const auto read = decode_message(bytes);
  if (!read) return testing::AssertionResult(!read.error().message.empty()) << "an error without words";
  if (!std::visit([](const auto& m) { return is_within(m); }, *read))
    return testing::AssertionFailure() << "beyond the limits: " << to_string(*read);
  return holds(check_message_wire(*read));
}

// ---- messages ----

TransferKey key() { return {"req-7", Epoch(2)}; }

Grant small_grant() {
  return {key(),
          Rank(1),
          {0x0123456789abcdef, 0xfedcba9876543210},
          {1000, 16384},
          1500ms,
          Tag(9),
          {{{PageId(4), kNoPage, PageId(kMaxId - 1)}, kMaxId}, {}, {{PageId(0), PageId(1)}, 2}}};
}

std::vector<Message> one_of_each() {
  return {small_grant(),
          Accepted{key(), Rank(3)},
          Failed{key(), Rank(3), Code::exhausted, "no pinned memory is left"},
          Cancel{key(), Rank(1), "the client went away"},
          Cancel{key(), Rank(1), "another model", true},
          Quiesced{key(), Rank(3)}};
}

std::string generated_words(std::size_t least, std::size_t most) {
  const auto size = *rc::gen::inRange<std::size_t>(least, most + 1);
  return *rc::gen::container<std::string>(size, rc::gen::arbitrary<char>());
}

GrantTable generated_table() {
  const auto page = rc::gen::oneOf(rc::gen::just(std::int64_t{-1}), rc::gen::inRange<std::int64_t>(0, kMaxId));
  GrantTable table{{}, *rc::gen::inRange<std::int64_t>(0, kMaxId + 1)};
  for (int n = *rc::gen::inRange(0, 20); n > 0; --n) table.pages.emplace_back(*page);
  return table;
}

Grant generated_grant(TransferKey key, Rank target) {
  const auto number = rc::gen::arbitrary<std::uint64_t>();
  Grant grant{std::move(key), target, {*number, *number}, {}, {}, Tag(*number), {}};
  grant.range.begin = *rc::gen::inRange<std::int64_t>(0, kMaxId + 1);
  grant.range.end = *rc::gen::inRange<std::int64_t>(grant.range.begin, kMaxId + 1);
  grant.time_left =
      std::chrono::nanoseconds(*rc::gen::inRange<std::int64_t>(1, std::chrono::nanoseconds(kMaxTimeLeft).count() + 1));
  for (int n = *rc::gen::inRange(0, 8); n > 0; --n) grant.tables.push_back(generated_table());
  return grant;
}

Message generated_message() {
  const TransferKey key{generated_words(1, kMaxName), Epoch(*rc::gen::arbitrary<std::uint64_t>())};
  const Rank rank(*rc::gen::inRange<std::int32_t>(0, kMaxRanks));
  switch (*rc::gen::inRange(0, 5)) {
    case 0: return generated_grant(key, rank);
    case 1: return Accepted{key, rank};
    case 2: return Failed{key, rank, static_cast<Code>(*rc::gen::inRange(0, 10)), generated_words(0, kMaxReason)};
    case 3: return Cancel{key, rank, generated_words(0, kMaxReason), *rc::gen::arbitrary<bool>()};
    default: return Quiesced{key, rank};
  }
}

// ---- there and back ----

TEST(SessionWire, ReadsBackOneOfEach) {
  for (const Message& message : one_of_each()) EXPECT_TRUE(holds(check_message_wire(message)));
}

RC_GTEST_PROP(SessionWire, ReadsBack, ()) {
  const auto law = check_message_wire(generated_message());
  if (!law) RC_FAIL(law.error().message);
}

TEST(SessionWire, AGrantOfAMillionTokensIsLittleMoreThanItsPages) {
  Grant grant = small_grant();
  grant.tables = {{std::vector<PageId>(15'625, PageId(7)), 1 << 20}};
  EXPECT_TRUE(holds(check_message_wire(grant)));
  EXPECT_LT(encode_message(grant).size(), 15'625 * sizeof(PageId) + 256);
}

TEST(SessionWire, ReadsBackAtItsLimits) {
  const std::string name(kMaxName, 'n'), reason(kMaxReason, 'r');
  const Rank last(kMaxRanks - 1);
  Grant full{{name, Epoch(UINT64_MAX)}, last, {UINT64_MAX, UINT64_MAX}, {kMaxId, kMaxId}, kMaxTimeLeft, Tag(UINT64_MAX), {}};
  full.tables.resize(kMaxTables, {std::vector<PageId>(kMaxPages / kMaxTables, PageId(kMaxId - 1)), kMaxId});
  EXPECT_TRUE(decode_message(encode_message(full)).value() == Message(full));
  EXPECT_LE(encode_message(full).size(), kMaxMessageBytes);
  full.tables = {{std::vector<PageId>(kMaxPages, kNoPage), 0}};
  EXPECT_TRUE(decode_message(encode_message(full)).value() == Message(full));
  Failed failed;
  failed.key.name = name;
  failed.source = last;
  failed.reason = reason;
  Cancel cancel;
  cancel.key.name = "n";
  EXPECT_TRUE(holds(check_message_wire(failed)));
  EXPECT_TRUE(holds(check_message_wire(cancel)));
}

TEST(SessionWire, CutsLongReasonsBetweenCharacters) {
  const std::string umlauts = "ä" + std::string(kMaxReason - 3, 'x') + "ää";  // the last but one crosses the limit
  const auto read = decode_message(encode_message(Cancel{key(), Rank(0), umlauts}));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(std::get<Cancel>(*read).reason, umlauts.substr(0, kMaxReason - 1));
  const auto failed = decode_message(encode_message(Failed{key(), Rank(0), Code::io, std::string(9999, 'x')}));
  ASSERT_TRUE(failed) << failed.error().message;
  EXPECT_EQ(std::get<Failed>(*failed).reason, std::string(kMaxReason, 'x'));
}

TEST(SessionWire, ReadsFromAnyAddress) {
  for (const Message& message : one_of_each())
    for (std::size_t shift = 1; shift < 8; ++shift) {
      WireBytes moved(shift);
      const WireBytes bytes = encode_message(message);
      moved.insert(moved.end(), bytes.begin(), bytes.end());
      const auto read = decode_message(std::span(moved).subspan(shift));
      ASSERT_TRUE(read) << read.error().message;
      EXPECT_EQ(to_string(*read), to_string(message));
    }
}

// ---- damage ----

TEST(SessionWire, RefusesEveryTruncation) {
  constexpr std::size_t kPadding = 3;  // at the end, read by nobody
  for (const Message& message : one_of_each()) {
    const WireBytes bytes = encode_message(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_TRUE(size + kPadding >= bytes.size() || !decode_message(std::span(bytes).first(size))) << to_string(message) << size;
      EXPECT_TRUE(is_harmless(std::span(bytes).first(size))) << to_string(message) << " " << size;
    }
  }
}

TEST(SessionWire, StaysWithinItsLimitsWhateverByteChanges) {
  for (const Message& message : one_of_each()) {
    WireBytes bytes = encode_message(message);
    for (std::uint8_t& byte : bytes) {
      const std::uint8_t was = byte;
      for (unsigned value = 0; value < 256; ++value) {
        byte = static_cast<std::uint8_t>(value);
        ASSERT_TRUE(is_harmless(bytes)) << to_string(message) << ": byte " << &byte - bytes.data() << " = " << value;
      }
      byte = was;
    }
  }
}

RC_GTEST_PROP(SessionWire, StaysWithinItsLimitsWhateverBytesAreOverwritten, ()) {
  WireBytes bytes = encode_message(generated_message());
  for (int n = *rc::gen::inRange(1, 5); n > 0; --n)
    bytes[*rc::gen::inRange<std::size_t>(0, bytes.size())] = *rc::gen::arbitrary<std::uint8_t>();
  const auto harmless = is_harmless(bytes);
  if (!harmless) RC_FAIL(std::string(harmless.message()));
}

RC_GTEST_PROP(SessionWire, RefusesNoise, (const WireBytes& noise)) { RC_ASSERT(!decode_said(noise)); }

// ---- what only another writer would write ----

// A cancel, in the words of another program.
struct Written {
  std::uint32_t version = kSessionVersion;
  wire::Content kind = wire::Content::Cancel;
  bool has_newer_fields = false;
};
WireBytes written(const Written& how) {
  FlatBufferBuilder builder;
  const auto newer = builder.CreateString("what this is, only newer kvlooms know");
  const auto reason = builder.CreateString("because");
  wire::CancelBuilder cancel(builder);
  cancel.add_reason(reason);
  if (how.has_newer_fields) builder.AddOffset(flatbuffers::FieldIndexToOffset(3), newer);
  const auto content = cancel.Finish();
  const auto name = builder.CreateString("req-7");
  wire::MessageBuilder root(builder);
  root.add_version(how.version);
  root.add_name(name);
  root.add_content_type(how.kind);
  root.add_content(content.Union());
  if (how.has_newer_fields) {
    builder.AddElement<std::uint64_t>(flatbuffers::FieldIndexToOffset(8), 77, 0);
    builder.AddOffset(flatbuffers::FieldIndexToOffset(9), newer);
  }
  wire::FinishMessageBuffer(builder, root.Finish());
  return {builder.GetBufferPointer(), builder.GetBufferPointer() + builder.GetSize()};
}

TEST(SessionWire, PassesOverFieldsOfNewerWriters) {
  const auto read = decode_message(written({.has_newer_fields = true}));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(to_string(*read), "cancel req-7#0 target=0 reason=\"because\"");
}

TEST(SessionWire, RefusesOtherVersionsAndMessagesThatItDoesNotKnow) {
  const auto old = decode_message(written({.version = 0})), newer = decode_message(written({.version = 2}));
  EXPECT_TRUE(says(old, "a message of version 0: this kvloom reads version 1"));
  EXPECT_TRUE(says(newer, "a message of version 2: this kvloom reads version 1"));
  const auto unknown = decode_message(written({.kind = static_cast<wire::Content>(6)}));
  EXPECT_TRUE(says(unknown, "req-7#0: a message of kind 6: this kvloom knows 1 to 5"));
  const auto none = decode_message(written({.kind = wire::Content::NONE}));
  EXPECT_TRUE(says(none, "req-7#0: a message of kind 0: this kvloom knows 1 to 5"));
  for (const auto* read : {&old, &newer, &unknown, &none}) EXPECT_EQ(read->error().code, Code::unsupported);
}

// Whatever else another version changes: its number is read first.
TEST(SessionWire, RefusesAnotherVersionOfWhichItUnderstandsNothingElse) {
  FlatBufferBuilder builder;
  const auto start = builder.StartTable();
  builder.AddElement<std::uint32_t>(4, 7, 0);  // the first field
  builder.Finish(flatbuffers::Offset<flatbuffers::Table>(builder.EndTable(start)), wire::MessageIdentifier());
  const std::span bytes(builder.GetBufferPointer(), builder.GetSize());
  EXPECT_TRUE(says(decode_message(bytes), "a message of version 7: this kvloom reads version 1"));
}

// ---- the words of errors ----

testing::AssertionResult refuses(const Message& message, Code code, const std::string& words) {
  const auto read = decode_message(encode_message(message));
  if (!read && read.error().code != code) return testing::AssertionFailure() << to_string(read.error());
  return says(read, words);
}

Message with(void (*change)(Grant&)) {
  Grant grant = small_grant();
  change(grant);
  return grant;
}

TEST(SessionWire, SaysWhatIsWrongWithTheBytes) {
  const WireBytes bytes = encode_message(small_grant());
  EXPECT_TRUE(says(decode_message({}), "0 B that do not begin as a message does ('KVLS')"));
  EXPECT_TRUE(says(decode_message(encode_told({})), "B that do not begin as a message does ('KVLS')"));
  EXPECT_TRUE(says(decode_message(std::span(bytes).first(100)), "a message of 100 B that is damaged or cut short"));
  EXPECT_TRUE(says(decode_message(WireBytes(kMaxMessageBytes + 1)), "a message of 33619969 B: at most 33619968 are read"));
}

TEST(SessionWire, SaysWhichLimitAMessageBreaks) {
  using enum Code;
  EXPECT_TRUE(refuses(Accepted{{"", Epoch(1)}, Rank(0)}, parse, "a transfer's name of 0 B"));
  EXPECT_TRUE(
      refuses(Accepted{{std::string(257, 'n'), Epoch(1)}, Rank(0)}, exhausted, "a transfer's name of 257 B: at most 256"));
  EXPECT_TRUE(refuses(Quiesced{key(), Rank(4096)}, out_of_range, "req-7#2: rank 4096 is not in [0, 4096)"));
  EXPECT_TRUE(refuses(Quiesced{key(), Rank(-1)}, out_of_range, "req-7#2: rank -1 is not in [0, 4096)"));
  EXPECT_TRUE(refuses(Failed{key(), Rank(0), static_cast<Code>(10), ""}, unsupported, "failed req-7#2: code 10 is unknown"));
  FlatBufferBuilder builder;
  const auto cancel = wire::CreateCancelDirect(builder, std::string(kMaxReason + 1, 'r').c_str());
  wire::FinishMessageBuffer(builder, wire::CreateMessageDirect(builder, 1, "n", 0, 0, wire::Content::Cancel, cancel.Union()));
  EXPECT_TRUE(
      says(decode_message({builder.GetBufferPointer(), builder.GetSize()}), "n#0: a reason of 513 B: at most 512 are read"));
}

TEST(SessionWire, SaysWhichLimitAGrantBreaks) {
  using enum Code;
  EXPECT_TRUE(refuses(with([](Grant& g) { g.range = {-1, 5}; }), out_of_range, "grant req-7#2: tokens [-1, 5) are not within"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.range = {6, 5}; }), out_of_range, "tokens [6, 5) are not within [0, 2^48)"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.range = {6, kMaxId + 1}; }), out_of_range, "tokens [6, 281474976710657) are not"));
  EXPECT_TRUE(
      refuses(with([](Grant& g) { g.time_left = 0ns; }), out_of_range, "a time left of 0 ns is not above 0 and up to 24 h"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.time_left = -3ns; }), out_of_range, "a time left of -3 ns"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.time_left = 24h + 1ns; }), out_of_range, "a time left of 86400000000001 ns"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.tables.resize(65); }), exhausted, "grant req-7#2: 65 tables: at most 64 are read"));
  EXPECT_TRUE(
      refuses(with([](Grant& g) { g.tables[1].pages.resize(kMaxPages - 4); }), exhausted, "4194305 pages: at most 4194304"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.tables[2].pages[1] = PageId(-2); }), out_of_range,
                      "grant req-7#2: table 2 column 1: page -2 is neither in [0, 2^48) nor -1"));
  EXPECT_TRUE(refuses(with([](Grant& g) { g.tables[0].pages[0] = PageId(kMaxId); }), out_of_range,
                      "table 0 column 0: page 281474976710656 is neither"));
  EXPECT_TRUE(
      refuses(with([](Grant& g) { g.tables[1].pool_pages = -5; }), out_of_range, "table 1: a pool of -5 pages is not in"));
  EXPECT_TRUE(
      refuses(with([](Grant& g) { g.tables[1].pool_pages = kMaxId + 1; }), out_of_range, "a pool of 281474976710657 pages"));
}

TEST(SessionWire, RefusesTablesThatDoNotAddUpToThePages) {
  const auto grant = [](const std::vector<std::int64_t>& sizes) {
    FlatBufferBuilder builder;
    std::vector<wire::TableSize> tables;
    tables.reserve(sizes.size());
    for (const std::int64_t size : sizes) tables.emplace_back(size, 100);
    const std::vector<std::int64_t> pages = {1, 2, 3};
    const auto content = wire::CreateGrantDirect(builder, 0, 0, 0, 9, 1, 0, &tables, &pages);
    wire::FinishMessageBuffer(builder, wire::CreateMessageDirect(builder, 1, "n", 0, 0, wire::Content::Grant, content.Union()));
    return decode_message({builder.GetBufferPointer(), builder.GetSize()});
  };
  EXPECT_TRUE(grant({1, 2}));
  EXPECT_TRUE(says(grant({1, 3}), "grant n#0: table 1 has 3 pages, but 2 are left"));
  EXPECT_TRUE(says(grant({-1, 4}), "grant n#0: table 0 has -1 pages, but 3 are left"));
  EXPECT_TRUE(says(grant({INT64_MAX, INT64_MAX}), "table 0 has 9223372036854775807 pages"));
  EXPECT_TRUE(says(grant({2, 0}), "grant n#0: 1 pages that are in no table"));
  EXPECT_TRUE(says(grant({}), "grant n#0: 3 pages that are in no table"));
}

// ---- words for people ----

TEST(SessionMessage, Prints) {
  std::string all;
  for (const Message& message : one_of_each()) all += to_string(message) + "\n";
  EXPECT_EQ(all,
            "grant req-7#2 target=1 tokens=[1000, 16384) tag=9\n"
            "accepted req-7#2 source=3\n"
            "failed req-7#2 source=3 reason=\"exhausted: no pinned memory is left\"\n"
            "cancel req-7#2 target=1 reason=\"the client went away\"\n"
            "cancel whole req-7#2 target=1 reason=\"another model\"\n"
            "quiesced req-7#2 source=3\n");
}

TEST(SessionMessage, PrintsOnOneLineWhateverAPeerSays) {
  const TransferKey odd{std::string("a\nb\0\x1b[2J\\", 9), Epoch(UINT64_MAX)};
  EXPECT_EQ(to_string(odd), "a\\x0ab\\x00\\x1b[2J\\x5c#18446744073709551615");
  EXPECT_EQ(to_string(Cancel{key(), Rank(0), "ä \"quoted\"\x7f"}), "cancel req-7#2 target=0 reason=\"ä \\x22quoted\\x22\\x7f\"");
}

TEST(SessionMessage, HasTheDigestThatAPlanPrints) {
  const Plan plan = compile(shapes::side(shapes::gqa(2), "tp=2"), shapes::side(shapes::gqa(2), "tp=1")).value();
  const PlanDigest digest_read = digest_of(plan);
  EXPECT_EQ(fmt::format("{:016x}{:016x}", digest_read.high, digest_read.low), digest(plan));
}

}  // namespace
}  // namespace kvloom
