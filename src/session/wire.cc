#include "kvloom/session/wire.h"

#include <bit>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "kvloom/base/flat_root.h"
#include "kvloom/geometry/sharding.h"
#include "kvloom/session/session_generated.h"

namespace kvloom {
namespace {

using flatbuffers::FlatBufferBuilder;
using flatbuffers::Offset;

// Page ids are copied in bulk between our tables and the bytes.
static_assert(std::endian::native == std::endian::little && sizeof(PageId) == sizeof(std::int64_t) &&
              std::is_trivially_copyable_v<PageId> && kNoPage.value == -1);

constexpr bool same(wire::FailCode a, Code b) { return static_cast<int>(a) == static_cast<int>(b); }
static_assert(same(wire::FailCode::invalid_argument, Code::invalid_argument) && same(wire::FailCode::parse, Code::parse) &&
              same(wire::FailCode::unsupported, Code::unsupported) && same(wire::FailCode::out_of_range, Code::out_of_range) &&
              same(wire::FailCode::overflow, Code::overflow) && same(wire::FailCode::exhausted, Code::exhausted) &&
              same(wire::FailCode::unavailable, Code::unavailable) && same(wire::FailCode::deadline, Code::deadline) &&
              same(wire::FailCode::cancelled, Code::cancelled) && same(wire::FailCode::io, Code::io));

constexpr std::int64_t kMaxId = std::int64_t{1} << 48;  // of pages

// ---- writing ----

template <class T>
Rank speaker(const T& message) {
  if constexpr (requires { message.target; })
    return message.target;
  else
    return message.source;
}

std::size_t pages_of(const Grant& grant) {
  std::size_t pages = 0;
  for (const GrantTable& table : grant.tables) pages += table.pages.size();
  return pages;
}

Offset<wire::Grant> write(FlatBufferBuilder& to, const Grant& grant) {
  std::uint8_t* at = nullptr;
  const Offset<flatbuffers::Vector<std::int64_t>> pages =
      to.CreateUninitializedVector(pages_of(grant), sizeof(std::int64_t), &at);
  std::vector<wire::TableSize> sizes;
  sizes.reserve(grant.tables.size());
  for (const GrantTable& table : grant.tables) {
    const std::size_t bytes = table.pages.size() * sizeof(PageId);
    if (bytes > 0) std::memcpy(at, table.pages.data(), bytes);
    at += bytes;
    sizes.emplace_back(static_cast<std::int64_t>(table.pages.size()), table.pool_pages);
  }
  return wire::CreateGrant(to, grant.digest.high, grant.digest.low, grant.range.begin, grant.range.end, grant.time_left.count(),
                           grant.tag.value, to.CreateVectorOfStructs(sizes), pages, grant.geometry.value);
}
Offset<wire::Accepted> write(FlatBufferBuilder& to, const Accepted&) { return wire::CreateAccepted(to); }
Offset<wire::Failed> write(FlatBufferBuilder& to, const Failed& failed) {
  return wire::CreateFailed(to, static_cast<wire::FailCode>(failed.code), to.CreateString(cut_reason(failed.reason)));
}
Offset<wire::Cancel> write(FlatBufferBuilder& to, const Cancel& cancel) {
  return wire::CreateCancel(to, to.CreateString(cut_reason(cancel.reason)), cancel.whole);
}
Offset<wire::Quiesced> write(FlatBufferBuilder& to, const Quiesced&) { return wire::CreateQuiesced(to); }

template <class Table>
constexpr wire::Content kind(Offset<Table> /*of*/) {
  return wire::ContentTraits<Table>::enum_value;
}

// ---- reading: the verifier has been over these bytes, so pointers and lengths are good, but no number is ----

constexpr bool is_id(PageId page) {
  return static_cast<std::uint64_t>(page.value) + 1 <= std::uint64_t{kMaxId};
}  // kNoPage + 1 is 0

// One pass without a branch per page.
bool are_ids(const std::vector<PageId>& pages) {
  bool good = true;
  for (const PageId page : pages) good &= is_id(page);
  return good;
}

tl::unexpected<Error> no_id(const TransferKey& key, std::size_t table, const std::vector<PageId>& pages) {
  std::size_t column = 0;
  while (is_id(pages[column])) ++column;
  return fail(Code::out_of_range, "grant {}: table {} column {}: page {} is neither in [0, 2^48) nor -1", to_string(key), table,
              column, pages[column].value);
}

Expected<std::vector<GrantTable>> read_tables(const TransferKey& key, const wire::Grant& from) {
  if (from.tables()->size() > kMaxTables)
    return fail(Code::exhausted, "grant {}: {} tables: at most {} are read", to_string(key), from.tables()->size(), kMaxTables);
  if (from.pages()->size() > kMaxPages)
    return fail(Code::exhausted, "grant {}: {} pages: at most {} are read", to_string(key), from.pages()->size(), kMaxPages);
  std::vector<GrantTable> out(from.tables()->size());
  const std::uint8_t* at = from.pages()->Data();
  std::size_t left = from.pages()->size();
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto size = flat_copy<wire::TableSize>(from.tables()->Data() + i * sizeof(wire::TableSize));
    if (size.pool_pages() < 0 || size.pool_pages() > kMaxId)
      return fail(Code::out_of_range, "grant {}: table {}: a pool of {} pages is not in [0, 2^48]", to_string(key), i,
                  size.pool_pages());
    if (size.pages() < 0 || static_cast<std::uint64_t>(size.pages()) > left)
      return fail(Code::parse, "grant {}: table {} has {} pages, but {} are left", to_string(key), i, size.pages(), left);
    out[i].pool_pages = size.pool_pages();
    if (size.pages() == 0) continue;
    out[i].pages.resize(static_cast<std::size_t>(size.pages()));
    std::memcpy(static_cast<void*>(out[i].pages.data()), at, out[i].pages.size() * sizeof(PageId));
    if (!are_ids(out[i].pages)) return no_id(key, i, out[i].pages);
    at += out[i].pages.size() * sizeof(PageId);
    left -= out[i].pages.size();
  }
  if (left > 0) return fail(Code::parse, "grant {}: {} pages that are in no table", to_string(key), left);
  return out;
}

Expected<Message> read(TransferKey key, Rank target, const wire::Grant& from) {
  const TokenRange range{from.begin(), from.end()};
  if (range.begin < 0 || range.end < range.begin || range.end > kMaxRequestTokens)
    return fail(Code::out_of_range, "grant {}: tokens [{}, {}) are not within [0, 2^48)", to_string(key), range.begin, range.end);
  const std::chrono::nanoseconds time_left(from.time_left());
  if (time_left <= time_left.zero() || time_left > kMaxTimeLeft)
    return fail(Code::out_of_range, "grant {}: a time left of {} ns is not above 0 and up to {} h", to_string(key),
                time_left.count(), kMaxTimeLeft.count());
  auto tables = read_tables(key, from);
  if (!tables) return tl::unexpected(tables.error());
  const PlanDigest digest{from.digest_high(), from.digest_low()};
  return Grant{
      std::move(key), target, digest, range, time_left, Tag(from.tag()), std::move(*tables), GeometryId(from.geometry())};
}

Expected<std::string> read_reason(const TransferKey& key, const flatbuffers::String& from) {
  if (from.size() > kMaxReason)
    return fail(Code::exhausted, "{}: a reason of {} B: at most {} are read", to_string(key), from.size(), kMaxReason);
  return from.str();
}

Expected<Message> read(TransferKey key, Rank source, const wire::Failed& from) {
  if (from.code() > wire::FailCode::MAX)
    return fail(Code::unsupported, "failed {}: code {} is unknown", to_string(key), static_cast<int>(from.code()));
  auto reason = read_reason(key, *from.reason());
  if (!reason) return tl::unexpected(reason.error());
  return Failed{std::move(key), source, static_cast<Code>(from.code()), std::move(*reason)};
}

Expected<Message> read(TransferKey key, Rank target, const wire::Cancel& from) {
  auto reason = read_reason(key, *from.reason());
  if (!reason) return tl::unexpected(reason.error());
  return Cancel{std::move(key), target, std::move(*reason), from.whole()};
}

Expected<Rank> read_rank(std::int32_t from) {
  if (from < 0 || from >= kMaxRanks) return fail(Code::out_of_range, "rank {} is not in [0, {})", from, kMaxRanks);
  return Rank(from);
}

}  // namespace

std::string_view cut_reason(std::string_view reason) {
  if (reason.size() <= kMaxReason) return reason;
  std::size_t size = kMaxReason;  // not within a character: bytes 10xxxxxx go on with one
  while (size > 0 && (static_cast<unsigned char>(reason[size]) & 0xc0) == 0x80) --size;
  return reason.substr(0, size);
}

struct MessageEncoder::Builder {
  static constexpr std::size_t kKept = std::size_t{1} << 20;  // bytes that stay ours between messages
  FlatBufferBuilder flat;
};

MessageEncoder::MessageEncoder() : builder_(std::make_unique<Builder>()) {}
MessageEncoder::~MessageEncoder() = default;

std::span<const std::uint8_t> MessageEncoder::encode(const Message& message) {
  FlatBufferBuilder& builder = builder_->flat;
  if (builder.GetSize() > Builder::kKept)
    builder.Reset();
  else
    builder.Clear();
  std::visit(
      [&](const auto& said) {
        const auto content = write(builder, said);
        const auto name = builder.CreateString(said.key.name);
        wire::FinishMessageBuffer(builder, wire::CreateMessage(builder, kSessionVersion, name, said.key.epoch.value,
                                                               speaker(said).value, kind(content), content.Union()));
      },
      message);
  return {builder.GetBufferPointer(), builder.GetSize()};
}

std::vector<std::uint8_t> encode_message(const Message& message) {
  MessageEncoder encoder;
  const auto bytes = encoder.encode(message);
  return {bytes.begin(), bytes.end()};
}

Expected<Message> decode_message(std::span<const std::uint8_t> bytes) {
  // Two tables: a message and its content.
  const auto root =
      FlatRoot<wire::Message>::make(bytes, {"message", wire::MessageIdentifier(), kSessionVersion, kMaxMessageBytes, 2, 2});
  if (!root) return tl::unexpected(root.error());
  const wire::Message& from = **root;
  if (from.name()->size() == 0) return fail(Code::parse, "a transfer's name of 0 B");
  if (from.name()->size() > kMaxName)
    return fail(Code::exhausted, "a transfer's name of {} B: at most {} are read", from.name()->size(), kMaxName);
  TransferKey key{from.name()->str(), Epoch(from.epoch())};
  const auto rank = read_rank(from.rank());
  if (!rank) return fail(rank.error().code, "{}: {}", to_string(key), rank.error().message);
  switch (from.content_type()) {
    case wire::Content::Grant: return read(std::move(key), *rank, *from.content_as_Grant());
    case wire::Content::Accepted: return Accepted{std::move(key), *rank};
    case wire::Content::Failed: return read(std::move(key), *rank, *from.content_as_Failed());
    case wire::Content::Cancel: return read(std::move(key), *rank, *from.content_as_Cancel());
    case wire::Content::Quiesced: return Quiesced{std::move(key), *rank};
    case wire::Content::NONE: break;
  }
  return fail(Code::unsupported, "{}: a message of kind {}: this kvloom knows 1 to {}", to_string(key),
              static_cast<int>(from.content_type()), static_cast<int>(wire::Content::MAX));
}

}  // namespace kvloom
