#include "kvloom/plan/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "kvloom/geometry/text_lines.h"
#include "kvloom/plan/page_sample.h"

namespace kvloom {
namespace {

std::string many(std::int64_t n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); }

// ---- the rules, in the words that made them ----

// A group with words of its own for who holds it: no axis is cut.
std::string holders_word(const Side& side, const GroupSide& group) {
  const auto at = side.sharding().groups().find(group.name);
  if (at == side.sharding().groups().end()) return {};
  if (at->second.holders == GroupWords::Holders::replicated) return group.name + ":replicated";
  if (at->second.holders == GroupWords::Holders::one_rank) return fmt::format("{}:rank={}", group.name, at->second.rank);
  return {};
}

std::string layers_word(const Side& side) {
  const Sharding& s = side.sharding();
  std::string out = s.pp() > 1 ? fmt::format("pp={}", s.pp()) : "";
  if (s.cp_rule() == CpRule::layers) out += fmt::format("{}cp={}:layers", out.empty() ? "" : ",", s.cp());
  return out;
}

std::string tokens_word(const Side& side, const GroupSide& group) {
  const Sharding& s = side.sharding();
  const std::int64_t stripe = group.tokens.stripe;
  switch (group.tokens.rule) {
    case TokenRule::all: return "";
    case TokenRule::blocked: return fmt::format("cp={}:blocked", s.cp());
    case TokenRule::zigzag: return fmt::format("cp={}:zigzag", s.cp());
    case TokenRule::value: return fmt::format("dcp={}:value", s.dcp());
    case TokenRule::cyclic: break;
  }
  std::string out = s.cp_rule() == CpRule::interleave ? fmt::format("cp={}", s.cp()) : "";
  if (s.dcp() > 1) out += fmt::format("{}dcp={}", out.empty() ? "" : ",", s.dcp());
  return out + (stripe == group.layout.page_tokens() ? ", stripe = page" : fmt::format(", stripe={}", stripe));
}

std::string in_brackets(const std::string& words) { return words.empty() ? "" : " (" + words + ")"; }

std::string heads_text(const StridedSet& heads) {
  return heads.size() == 1 ? fmt::format("{}", heads.start()) : fmt::format("{}-{}", heads.start(), heads.end() - 1);
}

std::string layers_text(const GroupSide& group, const StridedSet& ordinals) {
  std::vector<std::int32_t> ids;
  for (std::int64_t k = 0; k < ordinals.count(); ++k)
    for (std::int64_t i = 0; i < ordinals.length(); ++i)
      ids.push_back(group.layers[static_cast<std::size_t>(ordinals.start() + k * ordinals.stride() + i)].value);
  return list_text(ids);
}

// ---- one path ----

class PathStory {
 public:
  PathStory(const Plan& plan, std::int32_t group, Rank source, Rank target, TokenRange range)
      : plan_(plan),
        group_(plan.groups()[static_cast<std::size_t>(group)]),
        from_(group_.source->places[static_cast<std::size_t>(source.value)]),
        to_(group_.target->places[static_cast<std::size_t>(target.value)]),
        source_(source),
        target_(target),
        range_(range.end == kUnbounded ? range : wanted(*group_.target, range)),
        path_(plan.path(group, source, target)) {
    if (path_ && state()) range_ = {0, 1};
  }

  std::string tell() const {
    if (!path_) return fmt::format("{}: nothing. {}\n", group_.target->name, why_nothing());
    std::string out = fmt::format("{}: {}\n", group_.target->name, size());
    out += fmt::format("  who: {}\n", who());
    out += fmt::format("  layers {}: {}\n", layers_text(*group_.target, path_->layers), layers());
    if (group_.target->heads > 1) out += fmt::format("  heads {}: {}\n", heads_text(path_->heads), heads());
    if (!state()) out += fmt::format("  tokens {}: {}\n", families(), tokens());
    for (const std::string& sentence : runs()) out += fmt::format("  runs: {}\n", sentence);
    return out;
  }

  // The sentences about runs, the first of them how long they are.
  std::vector<std::string> runs() const;

 private:
  bool state() const { return group_.target->kind == GroupKind::state; }
  bool by_value() const {
    return group_.source->tokens.rule == TokenRule::value || group_.target->tokens.rule == TokenRule::value;
  }
  const GroupSide& side(bool source) const { return source ? *group_.source : *group_.target; }
  static const char* name(bool source) { return source ? "prefill" : "decode"; }

  std::string size() const {
    const std::int64_t layers = path_->layers.size();
    std::string rate = fmt::format("{} x {} B a {}", many(layers, "layer"), path_->row_bytes, state() ? "request" : "token");
    if (range_.end == kUnbounded) return rate;
    const std::int64_t tokens = path_->token_count(range_);
    const auto row = checked_mul(layers, path_->row_bytes), bytes = row ? checked_mul(*row, tokens) : std::nullopt;
    return fmt::format("{}{} B = {} x {}", by_value() ? "at most " : "", bytes ? fmt::format("{}", *bytes) : "over 2^63", rate,
                       state() ? "1 request" : many(tokens, "token"));
  }

  std::string families() const {
    std::string out;
    for (const StridedSet& family : path_->tokens) out += (out.empty() ? "" : "|") + to_string(family);
    return out;
  }

  std::vector<std::int32_t> replicas() const {
    std::vector<std::int32_t> out;
    for (std::size_t r = 0; r < group_.source->places.size(); ++r) {
      const Place& at = group_.source->places[r];
      if (at.holds && at.layers == from_.layers && at.heads == from_.heads && at.tokens == from_.tokens)
        out.push_back(static_cast<std::int32_t>(r));
    }
    return out;
  }

  // What replica choice says of this pair.  @pre several replicas
  std::string share() const {
    const Senders& senders = group_.senders_of(from_);
    const Senders::Share& share = senders.shares[static_cast<std::size_t>(target_.value)];
    std::string out = fmt::format("prefill {} hold the same ({} replicas), decode {} is consumer {} of {}", list_text(replicas()),
                                  senders.replicas, target_.value, share.consumer, senders.consumers);
    if (share.step == 0)
      return out + fmt::format(", served whole by replica {}: prefill {}", share.first,
                               replicas()[static_cast<std::size_t>(share.first)]);
    const StridedSet& all = group_.layers.at(from_.layers, to_.layers).front();
    const std::string mine = path_ ? fmt::format("{}", path_->layers.size()) : "none";
    return out +
           fmt::format(", one of {} that no full round of replicas serves: {} dealt out in turn, {} to prefill {} (replica {})",
                       senders.consumers - senders.whole, many(all.size(), "layer"), mine, source_.value, from_.replica);
  }

  std::string who() const {
    if (group_.senders_of(from_).replicas > 1) return share() + ".";
    return fmt::format("only prefill {} holds this part.", source_.value);
  }

  std::string why_nothing() const {
    if (!from_.holds)
      return fmt::format("Prefill {} holds none of it{}.", source_.value,
                         in_brackets(holders_word(plan_.source(), *group_.source)));
    if (!to_.holds)
      return fmt::format("Decode {} wants none of it{}.", target_.value,
                         in_brackets(holders_word(plan_.target(), *group_.target)));
    if (!group_.layers.any(from_.layers, to_.layers)) return fmt::format("No layer in common: {}", layers());
    if (!group_.heads.any(from_.heads, to_.heads)) return fmt::format("No head in common: {}", heads());
    if (!group_.tokens.any(from_.tokens, to_.tokens)) return fmt::format("No token in common: {}", tokens());
    return fmt::format("Another replica sends: {}.", share());
  }

  std::string layers() const {
    const auto part = [&](bool source) {
      const GroupSide& g = side(source);
      const StridedSet& set = g.layer_parts[static_cast<std::size_t>((source ? from_ : to_).layers)];
      const Side& whole = source ? plan_.source() : plan_.target();
      if (g.layer_parts.size() == 1)
        return fmt::format("{} has all {}{}", name(source), g.layers.size(), in_brackets(holders_word(whole, g)));
      return fmt::format("{} has {}{}", name(source), set.empty() ? "none" : layers_text(g, set),
                         in_brackets(layers_word(whole)));
    };
    return fmt::format("{}, {}.", part(true), part(false));
  }

  std::string heads() const {
    const auto part = [&](bool source) {
      const GroupSide& g = side(source);
      const Side& whole = source ? plan_.source() : plan_.target();
      if (g.head_parts.size() == 1)
        return fmt::format("{} has all {}{}", name(source), g.heads, in_brackets(holders_word(whole, g)));
      const std::string words = fmt::format(
          "tp={}{}", whole.sharding().tp(),
          whole.sharding().dcp() > 1 && g.kind == GroupKind::paged ? fmt::format(",dcp={}", whole.sharding().dcp()) : "");
      return fmt::format("{} has {} of {} ({})", name(source),
                         heads_text(g.head_parts[static_cast<std::size_t>((source ? from_ : to_).heads)]), g.heads, words);
    };
    return fmt::format("{}, {}.", part(true), part(false));
  }

  std::string tokens() const {
    const auto part = [&](bool source) {
      const GroupSide& g = side(source);
      const Side& whole = source ? plan_.source() : plan_.target();
      const TokenSplit& split = g.tokens;
      const std::int64_t index = (source ? from_ : to_).tokens;
      switch (split.rule) {
        case TokenRule::all: return fmt::format("{} has every token{}", name(source), in_brackets(holders_word(whole, g)));
        case TokenRule::cyclic:
          return fmt::format("{} has {} of every {} from token {} ({})", name(source), split.stripe, split.parts * split.stripe,
                             index * split.stripe, tokens_word(whole, g));
        case TokenRule::blocked:
        case TokenRule::zigzag:
          return fmt::format("{} has {} of {} tokens ({})", name(source),
                             to_string(split.part(static_cast<std::int32_t>(index), plan_.total())), plan_.total(),
                             tokens_word(whole, g));
        case TokenRule::value:
          return fmt::format("{} has the virtual pages v with v mod {} = {} ({})", name(source), split.parts, index,
                             tokens_word(whole, g));
      }
      return std::string();
    };
    return fmt::format("{}, {}.", part(true), part(false)) + window();
  }

  std::string window() const {
    if (!group_.target->window) return "";
    const Window& window = *group_.target->window;
    const std::string reads = fmt::format(
        "attention reads {} {}", window.kind == Window::Kind::sliding ? "the last" : "the current chunk of", window.tokens);
    if (range_.end == kUnbounded) return fmt::format(" Of these only what {}.", reads);
    return fmt::format(" Of these only tokens [{}, {}): {}.", range_.begin, range_.end, reads);
  }

  std::string how_long(const PageSample& sample) const;
  std::vector<std::string> what_cuts(const PageSample& sample) const;
  std::vector<std::string> advice(const PageSample& sample) const;
  std::string order_of(bool source, const PlaneLayout& plane, std::int64_t length) const;

  const Plan& plan_;
  const GroupPlan& group_;
  const Place& from_;
  const Place& to_;
  Rank source_, target_;
  TokenRange range_;
  std::optional<Path> path_;
};

bool token_first(const PageLayout& layout, const PlaneLayout& plane) {
  return layout.heads() == 1 || plane.token_stride >= plane.head_stride;
}

std::int64_t least_piece(const PageSample& sample) {
  std::int64_t least = kUnbounded;
  for (const Run& run : sample.runs) least = std::min(least, run.bytes.value);
  return least;
}

std::int64_t neighbours(const PageSample& sample) {
  std::int64_t most = 0;
  for (const TokenPiece& piece : sample.pieces) most = std::max(most, piece.length);
  return most;
}

std::string run_text(const Run& run) {
  if (run.count == 1) return fmt::format("{} B", run.bytes.value);
  return fmt::format("{} pieces of {} B (step {} -> {})", run.count, run.bytes.value, run.source_step.value,
                     run.target_step.value);
}

// "2 runs of 512 B and 1 of 16 pieces of ...": equal runs together, the first few kinds.
std::string runs_text(std::vector<Run> runs) {
  constexpr std::size_t kKinds = 4;
  for (Run& run : runs) run.source_offset = run.target_offset = Bytes(0);
  std::string out;
  std::size_t kinds = 0;
  while (!runs.empty()) {
    const Run kind = runs.front();
    const auto others = std::stable_partition(runs.begin(), runs.end(), [&](const Run& run) { return run == kind; });
    const auto same = others - runs.begin();
    runs.erase(runs.begin(), others);
    if (++kinds > kKinds) return out + fmt::format(" and {} others", same + static_cast<std::ptrdiff_t>(runs.size()));
    out +=
        fmt::format("{}{}{}", out.empty() ? "" : " and ", same, out.empty() ? (same == 1 ? " run of " : " runs of ") : " of ") +
        run_text(kind);
  }
  return out;
}

std::string PathStory::how_long(const PageSample& sample) const {
  const GroupSide& owner = side(sample.source_page);
  const auto whole = [&](bool source) {
    return sample.pieces.size() == 1 && sample.pieces.front().count == 1 &&
           sample.pieces.front().length == side(source).layout.page_tokens() && sample.runs.size() == 1 &&
           sample.runs.front().count == 1 && sample.runs.front().bytes.value == side(source).layout.payload();
  };
  if (whole(true) && whole(false))
    return fmt::format("a page is whole on both sides: {} B a run.", sample.runs.front().bytes.value);
  const std::string page = fmt::format("{} page of {}", name(sample.source_page), many(owner.layout.page_tokens(), "token"));
  const std::string others = fmt::format("{} {}", many(static_cast<std::int64_t>(sample.pieces.size()), "page"),
                                         sample.source_page ? "of decode" : "of prefill");
  std::string part = sample.tokens == owner.layout.page_tokens() ? "" : fmt::format(" ({} of its tokens)", sample.tokens);
  if (!sample.whole) part += " (the range cuts it)";
  const bool joined = std::all_of(sample.runs.begin(), sample.runs.end(), [](const Run& run) { return run.count == 1; });
  return fmt::format("a {}{} meets {}: {}{}.", page, part, others, runs_text(sample.runs),
                     joined ? "" : "; the pieces of one run are one strided copy");
}

// How one side keeps `length` neighbouring tokens of the path's heads, if not as one stretch of bytes.
std::string PathStory::order_of(bool source, const PlaneLayout& plane, std::int64_t length) const {
  const PageLayout& layout = side(source).layout;
  const std::int64_t local = layout.heads(), heads = path_->heads.size(), row = plane.bytes * heads;
  if (plane.content_stride != 0)
    return fmt::format("{} keeps the elements of a row apart, {} B every {} B", name(source), plane.element_bytes,
                       plane.content_stride);
  const bool by_token = token_first(layout, plane);
  if (by_token && heads < local)
    return fmt::format("heads split: {} of {}'s {} heads, {} B of each token's {} B", heads, name(source), local, row,
                       plane.bytes * local);
  if (by_token && length > 1 && plane.token_stride != row)
    return fmt::format("{}'s rows of {} B stand {} B apart", name(source), row, plane.token_stride);
  if (!by_token && heads > 1 && plane.head_stride != plane.bytes * length)
    return fmt::format("{} keeps each head's tokens together: {} x {} B, the next head {} B on", name(source), length,
                       plane.bytes, plane.head_stride);
  return "";
}

std::vector<std::string> PathStory::what_cuts(const PageSample& sample) const {
  std::vector<std::string> out;
  const std::int64_t length = neighbours(sample), source_page = group_.source->layout.page_tokens(),
                     target_page = group_.target->layout.page_tokens();
  const std::int64_t smaller = std::min(source_page, target_page);
  if (source_page != target_page)
    out.push_back(fmt::format("pages of {} tokens in prefill, of {} in decode: no run is longer than the smaller", source_page,
                              target_page));
  if (length < smaller && sample.whole) {
    std::string stripes;
    for (const bool source : {true, false})
      if (side(source).tokens.rule != TokenRule::all)
        stripes += fmt::format("{}{}'s {}", stripes.empty() ? "" : " and ", name(source),
                               tokens_word(source ? plan_.source() : plan_.target(), side(source)));
    if (!stripes.empty())
      out.push_back(fmt::format("{} leave{} {} side by side on both sides: {} B", stripes,
                                stripes.find(" and ") == std::string::npos ? "s" : "", many(length, "token"),
                                length * path_->row_bytes));
  }
  const auto &from = group_.source->layout.planes(), &to = group_.target->layout.planes();
  std::map<std::string, std::string> planes;  // what keeps rows apart, the planes of which it is true
  std::string names;
  for (std::size_t p = 0; p < from.size(); ++p) {
    names += (names.empty() ? "" : ", ") + from[p].name;
    for (const std::string& sentence : {order_of(true, from[p], length), order_of(false, to[p], length)})
      if (!sentence.empty()) planes[sentence] += (planes[sentence].empty() ? "" : ", ") + from[p].name;
    const bool by_token = token_first(group_.source->layout, from[p]);
    if (path_->heads.size() > 1 && by_token != token_first(group_.target->layout, to[p])) {
      const std::string sentence =
          fmt::format("{} goes by token, then head, {} by head, then token: one head of one token is {} B", name(by_token),
                      name(!by_token), from[p].bytes);
      planes[sentence] += (planes[sentence].empty() ? "" : ", ") + from[p].name;
    }
  }
  for (const auto& [sentence, of] : planes) out.push_back(fmt::format("{} (plane {})", sentence, of));
  if (from.size() > 1 && sample.runs.size() > sample.pieces.size())
    out.push_back(fmt::format("the planes {} stand apart in a page: runs of their own", names));
  return out;
}

std::vector<std::string> PathStory::advice(const PageSample& sample) const {
  std::vector<std::string> out;
  const GroupSide &from = *group_.source, &to = *group_.target;
  const std::int64_t page = std::min(from.layout.page_tokens(), to.layout.page_tokens()), length = neighbours(sample);
  if (sample.whole && length < page)
    out.push_back(fmt::format("a stripe of one page on both sides (no stripe= word) puts {} tokens side by side instead of {}",
                              page, length));
  const auto strided = [](const PageLayout& layout) {
    return std::any_of(layout.planes().begin(), layout.planes().end(),
                       [](const PlaneLayout& plane) { return plane.content_stride != 0; });
  };
  const bool from_by_token = token_first(from.layout, from.layout.planes().front()),
             to_by_token = token_first(to.layout, to.layout.planes().front());
  const std::int64_t bytes = to.planes.front().bytes, heads = path_->heads.size();
  if (strided(from.layout) != strided(to.layout)) {
    out.emplace_back("a layout with contiguous content on both sides (layout=nhd or hnd)");
  } else if (from_by_token != to_by_token) {
    out.emplace_back("one layout= on both sides");
  } else if (heads < from.layout.heads() || heads < to.layout.heads()) {
    if (from_by_token)
      out.push_back(fmt::format("layout=hnd on both sides keeps a head's tokens together: {} B a piece instead of {}",
                                length * bytes, heads * bytes));
  } else if (from.layout.planes() != to.layout.planes()) {
    out.emplace_back("one layout= (and page_stride=) on both sides");
  }
  if (page * path_->row_bytes < kShortPiece)
    out.push_back(fmt::format("a larger page: {} x {} B are {} B", page, path_->row_bytes, page * path_->row_bytes));
  return out;
}

std::vector<std::string> PathStory::runs() const {
  if (state()) return {fmt::format("a state moves whole: {} B a layer and request of these heads.", path_->row_bytes)};
  const PageSample sample = sample_page(plan_, *path_, range_);
  if (sample.runs.empty()) return {"none: no token of the range is on this path."};
  std::vector<std::string> out = {how_long(sample)};
  const bool whole = sample.runs.size() == 1 && sample.runs.front().bytes.value == group_.target->layout.payload();
  if (!whole)
    for (const std::string& sentence : what_cuts(sample)) out.push_back(sentence + ".");
  if (by_value())
    out.emplace_back("which pages these are is known when page tables are bound: about one in as many as there are ranks.");
  const std::int64_t piece = least_piece(sample);
  if (piece >= kShortPiece) return out;
  const auto changes = advice(sample);
  std::string text;
  for (const std::string& change : changes) text += (text.empty() ? "" : "; or ") + change;
  out.push_back(
      fmt::format("pieces of {} B, below {} B, move slowly{}{}.", piece, kShortPiece, text.empty() ? "" : ". Better: ", text));
  return out;
}

// ---- the whole plan ----

// Bytes that each rank sends or gets, and how uneven that is.
std::string balance(const char* what, const std::vector<std::int64_t>& bytes) {
  const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
  const double mean =
      static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})) / static_cast<double>(bytes.size());
  if (*least == *most) return fmt::format("{} {} B each", what, *most);
  return fmt::format("{} {} to {} B each (the most is {:.2f} of the mean)", what, *least, *most,
                     static_cast<double>(*most) / mean);
}

std::string range_text(TokenRange range) {
  return range.end == kUnbounded ? fmt::format("tokens [{}, end)", range.begin)
                                 : fmt::format("tokens [{}, {})", range.begin, range.end);
}

}  // namespace

std::string explain(const Plan& plan, Rank source, Rank target, TokenRange range) {
  std::string out = fmt::format("prefill {} to decode {}, {}\n", source.value, target.value, range_text(range));
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan.groups().size()); ++g)
    out += PathStory(plan, g, source, target, range).tell();
  return out;
}

std::string explain(const Plan& plan, TokenRange range) {
  const auto paths = plan.paths();
  std::string out =
      fmt::format("{} ({}) to {} ({}), {}: {}\n", many(plan.source().ranks(), "prefill rank"),
                  to_string(plan.source().sharding()), many(plan.target().ranks(), "decode rank"),
                  to_string(plan.target().sharding()), range_text(range), many(static_cast<std::int64_t>(paths.size()), "path"));
  if (range.end != kUnbounded) {
    std::vector<std::int64_t> sent(static_cast<std::size_t>(plan.source().ranks())),
        got(static_cast<std::size_t>(plan.target().ranks()));
    for (const Path& path : paths) {
      sent[static_cast<std::size_t>(path.source.value)] += plan.bytes(path, range).value;
      got[static_cast<std::size_t>(path.target.value)] += plan.bytes(path, range).value;
    }
    const bool at_most = std::any_of(plan.groups().begin(), plan.groups().end(), [](const GroupPlan& group) {
      return group.source->tokens.rule == TokenRule::value || group.target->tokens.rule == TokenRule::value;
    });
    out += fmt::format("{}; {}{}\n", balance("prefill ranks send", sent), balance("decode ranks get", got),
                       at_most ? "; at most: whose a page is, its table says" : "");
  }
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan.groups().size()); ++g) {
    const auto in_group = [&](const Path& path) { return path.group == g; };
    const auto most = std::max_element(paths.begin(), paths.end(), [&](const Path& a, const Path& b) {
      return std::pair(in_group(a), a.row_bytes * a.layers.size()) < std::pair(in_group(b), b.row_bytes * b.layers.size());
    });
    const auto count = std::count_if(paths.begin(), paths.end(), in_group);
    out += fmt::format("{}: {}", plan.groups()[static_cast<std::size_t>(g)].target->name, many(count, "path"));
    if (count > 0) {
      out += fmt::format(", such as prefill {} to decode {}:\n", most->source.value, most->target.value);
      for (const std::string& sentence : PathStory(plan, g, most->source, most->target, range).runs())
        out += fmt::format("  runs: {}\n", sentence);
    } else {
      out += '\n';
    }
  }
  return out;
}

}  // namespace kvloom
