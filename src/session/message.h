// message.h: what ranks say to each other about transfers, over control sockets.  Stage: stream.  Values only.
// A transfer has a name that its caller chose, and an epoch for each attempt at it. Target ranks (decode) send grants and cancels; source
// ranks (prefill) answer. What has landed is not said here: it comes as notices of the transport, behind the bytes (progress.h).
// Durations cross hosts, clocks never do.  All of this is hostile until session/wire.h has decoded it; what decode lets through:
//   names of 1 to kMaxName bytes, ranks in [0, kMaxRanks), at most kMaxTables tables, of together kMaxPages pages in [0, 2^48) or
//   kNoPage, pools of [0, 2^48] pages, 0 <= range.begin <= range.end <= 2^48, 0 < time_left <= kMaxTimeLeft, reasons of at
//   most kMaxReason bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/bind/page_table.h"
#include "kvloom/plan/plan.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

inline constexpr std::size_t kMaxName = 256;                              // bytes of a transfer's name
inline constexpr std::size_t kMaxReason = 512;                            // bytes of a reason; longer ones are cut
inline constexpr std::size_t kMaxTables = 64;                             // cache groups of a grant
inline constexpr std::size_t kMaxPages = std::size_t{1} << 22;            // of a grant, all tables: 64 x 1M tokens of 16 a page
inline constexpr std::int64_t kMaxRequestTokens = std::int64_t{1} << 48;  // of a request
inline constexpr std::chrono::hours kMaxTimeLeft{24};

// One attempt at one transfer.
struct TransferKey {
  std::string name;
  Epoch epoch;
  friend auto operator<=>(const TransferKey&, const TransferKey&) = default;
};
std::string to_string(const TransferKey& key);  // "req-7#2"

// A peer's words, as they may stand in a log: what would break its line or move a cursor prints as \x1b, and so does each character of
// `also`, what would end a quotation.
std::string printable(std::string_view words, std::string_view also = "\"\\");

// A geometry that a target rank has told on its connection (connection.h).
using GeometryId = Id<struct GeometryTag, std::uint32_t>;

// 128 bits of a plan's text form: both sides mean the same plan, or the grant is refused (plan/text.h).
struct PlanDigest {
  std::uint64_t high = 0, low = 0;
  friend auto operator<=>(const PlanDigest&, const PlanDigest&) = default;
};
PlanDigest digest_of(const Plan& plan);

// The request's pages on the granting rank, of one group of the plan. Empty: the rank holds nothing of it.
struct GrantTable {
  std::vector<PageId> pages;    // [columns]; kNoPage: never written
  std::int64_t pool_pages = 0;  // ids are below it
  friend bool operator==(const GrantTable&, const GrantTable&) = default;
};

// Target to source: you may write these tokens into these pages.
struct Grant {
  TransferKey key;
  Rank target;
  PlanDigest digest;
  TokenRange range;  // [prefix, total)
  std::chrono::nanoseconds time_left{};
  Tag tag;                         // the credential; another one for each source
  std::vector<GrantTable> tables;  // [groups of the plan]
  GeometryId geometry;             // where these pages are
  friend bool operator==(const Grant&, const Grant&) = default;
};
// Source to target: the grant is here, and will be served or answered with Failed.
struct Accepted {
  TransferKey key;
  Rank source;
  friend bool operator==(const Accepted&, const Accepted&) = default;
};
// Source to target: nothing more will be posted. What was posted may still be on the way: see Quiesced.
struct Failed {
  TransferKey key;
  Rank source;
  Code code = Code::unavailable;
  std::string reason;
  friend bool operator==(const Failed&, const Failed&) = default;
};
// Target to source: stop. Answered by Quiesced, always, also by a source that has never heard of the transfer.
struct Cancel {
  TransferKey key;
  Rank target;
  std::string reason;
  bool whole = false;  // not only for this rank: the transfer can't be, and no other rank need be waited for
  friend bool operator==(const Cancel&, const Cancel&) = default;
};
// Source to target: nothing of mine can land for this transfer any more.
struct Quiesced {
  TransferKey key;
  Rank source;
  friend bool operator==(const Quiesced&, const Quiesced&) = default;
};

using Message = std::variant<Grant, Accepted, Failed, Cancel, Quiesced>;

// "grant req-7#2 target=1 tokens=[1000, 16384) tag=9", for logs and tests.
std::string to_string(const Message& message);

}  // namespace kvloom
