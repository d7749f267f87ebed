// sharding.h: the words by which engines say how a side shards its cache, parsed.  Stage: describe.  Values only.
//
//   side   = word { "," word }
//   word   = "tp=" N                                   heads over N ranks; more ranks than heads: each head on several
//          | "dcp=" N [ ":stripe=" S | ":value" ]      tokens over N of the tp ranks, dcp rank = tp rank mod N. S tokens in turn (default: a page);
//                                                      value: virtual page v belongs to rank v mod N, as its page v div N
//          | "cp=" N [ ":layers" | ":zigzag" | ":blocked" | ":interleave=" S | ":replicated" ]    (default: replicated)
//          | "pp=" N [ ":" L { "," L } ]               layers over N stages: blocks, or L layers each
//          | "page=" P | "layout=" order | "page_stride=" B
//          | group ":" ( "replicated" | "none" | "rank=" R | "stripe=" S | "value" | "page=" P | "layout=" order | "page_stride=" B
//                      | "strides=" block "/" head "/" token "/" content )
//
// Linear ranks count as vLLM's do: tp fastest, then cp, then pp.  Draft layers go with the last layers, unless a group word says otherwise.
// Source: vLLM (--tensor-parallel-size, --decode-context-parallel-size, cp_kv_cache_interleave_size), SGLang (--dcp-size, CP layer split).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/geometry/page_layout.h"

namespace kvloom {

inline constexpr std::int32_t kMaxRanks = 4096;  // of one side

enum class CpRule : std::uint8_t { replicated, layers, zigzag, blocked, interleave };

// A word's place in the text, so that what is refused later can still point at it.
struct WordSpan {
  std::size_t begin = 0;
  std::size_t length = 0;
  friend bool operator==(WordSpan, WordSpan) { return true; }  // where a word stood is no part of what it says
};

struct Strides {  // of a [layers, blocks, heads, tokens, content] tensor, bytes
  std::int64_t block = 0, head = 0, token = 0, content = 0;
  friend bool operator==(const Strides&, const Strides&) = default;
};

// What is said of pages: by the side for all its groups, or by a group for itself.
struct PageWords {
  std::optional<std::int64_t> page_tokens;
  std::optional<PageOrder> order;
  std::optional<std::int64_t> page_stride;
  std::optional<Strides> strides;  // groups only
  WordSpan span;
  friend bool operator==(const PageWords&, const PageWords&) = default;
};

struct GroupWords {
  enum class Holders : std::uint8_t { as_side, replicated, none, one_rank };
  Holders holders = Holders::as_side;
  std::int32_t rank = 0;  // one_rank
  std::optional<std::int64_t> stripe;
  bool by_value = false;
  PageWords pages;
  WordSpan span;
  friend bool operator==(const GroupWords&, const GroupWords&) = default;
};

class Sharding {
 public:
  // @error parse, invalid_argument: two lines, the sentence and the text with the word marked
  static Expected<Sharding> parse(std::string_view text);
  // One rank that holds everything, `ranks` times.
  static Sharding replicated(std::int32_t ranks);

  std::int32_t tp() const { return tp_; }  // dcp included: tp is a multiple of dcp
  std::int32_t dcp() const { return dcp_; }
  std::int32_t cp() const { return cp_; }
  std::int32_t pp() const { return pp_; }
  std::int32_t ranks() const { return tp_ * cp_ * pp_; }
  CpRule cp_rule() const { return cp_rule_; }
  std::int64_t cp_stripe() const { return cp_stripe_; }    // interleave
  std::int64_t dcp_stripe() const { return dcp_stripe_; }  // 0: a page
  bool dcp_by_value() const { return dcp_by_value_; }
  const std::vector<std::int64_t>& pp_layers() const { return pp_layers_; }  // empty: blocks
  const PageWords& pages() const { return pages_; }
  const std::map<std::string, GroupWords>& groups() const { return groups_; }

  // The same error as a parse error has: the sentence, then the text with the word marked.
  tl::unexpected<Error> point_at(WordSpan span, Code code, const std::string& sentence) const;
  WordSpan tp_span() const { return tp_span_; }
  WordSpan dcp_span() const { return dcp_span_; }
  WordSpan cp_span() const { return cp_span_; }
  WordSpan pp_span() const { return pp_span_; }

  friend bool operator==(const Sharding& a, const Sharding& b);

 private:
  friend class ShardingParser;
  std::int32_t tp_ = 1, dcp_ = 1, cp_ = 1, pp_ = 1;
  CpRule cp_rule_ = CpRule::replicated;
  std::int64_t cp_stripe_ = 0, dcp_stripe_ = 0;
  bool dcp_by_value_ = false;
  std::vector<std::int64_t> pp_layers_;
  PageWords pages_;
  std::map<std::string, GroupWords> groups_;
  std::string text_;
  WordSpan tp_span_, dcp_span_, cp_span_, pp_span_;
};

// The words in one order: parse(to_string(s)) == s.
std::string to_string(const Sharding& sharding);

}  // namespace kvloom
