#include "kvloom/geometry/sharding.h"

#include <fmt/format.h>

#include <charconv>

namespace kvloom {
namespace {

// The sentence, then the text, then a marker under the word.
tl::unexpected<Error> marked(const std::string& text, WordSpan span, Code code, const std::string& sentence) {
  const std::string marks(std::max<std::size_t>(span.length, 1), '^');
  return fail(code, "{}\n  {}\n  {}{}", sentence, text, std::string(span.begin, ' '), marks);
}

bool is_number(std::string_view text) { return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos; }

struct Piece {  // a part of the text and where it stands
  std::string_view text;
  std::size_t begin = 0;
  WordSpan span() const { return {begin, text.size()}; }
};

// Splits at the first `c`: what stands before it, and (if there is one) after it.
std::pair<Piece, std::optional<Piece>> split(Piece piece, char c) {
  const std::size_t at = piece.text.find(c);
  if (at == std::string_view::npos) return {piece, std::nullopt};
  return {{piece.text.substr(0, at), piece.begin}, Piece{piece.text.substr(at + 1), piece.begin + at + 1}};
}

std::vector<Piece> words_of(std::string_view text) {
  std::vector<Piece> words;
  Piece rest{text, 0};
  for (;;) {
    auto [word, more] = split(rest, ',');
    words.push_back(word);
    if (!more) return words;
    rest = *more;
  }
}

}  // namespace

class ShardingParser {
 public:
  explicit ShardingParser(std::string_view text) { out_.text_ = std::string(text); }

  Expected<Sharding> parse() {
    const std::vector<Piece> words = words_of(out_.text_);
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (is_number(words[i].text) && in_list_) {  // pp=4:20,20,20,18 goes on
        if (auto ok = add_layers(words[i]); !ok) return tl::unexpected(ok.error());
        continue;
      }
      in_list_ = false;
      if (auto ok = word(words[i]); !ok) return tl::unexpected(ok.error());
    }
    if (auto ok = finish(); !ok) return tl::unexpected(ok.error());
    return out_;
  }

 private:
  tl::unexpected<Error> refuse(Piece piece, const std::string& sentence, Code code = Code::parse) const {
    return marked(out_.text_, piece.span(), code, sentence);
  }

  Expected<std::int64_t> number(Piece piece, std::string_view what, std::int64_t limit) const {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(piece.text.data(), piece.text.data() + piece.text.size(), value);
    const bool whole = end == piece.text.data() + piece.text.size();
    if (error == std::errc::result_out_of_range || (error == std::errc() && whole && value > limit))
      return refuse(piece, fmt::format("{}={} is too large: at most {}", what, piece.text, limit));
    if (error != std::errc() || !whole) return refuse(piece, fmt::format("{} wants a whole number, not '{}'", what, piece.text));
    if (value <= 0) return refuse(piece, fmt::format("{}={} must be 1 or more", what, piece.text), Code::invalid_argument);
    return value;
  }

  template <class T>
  Expected<void> store(Piece piece, std::string_view what, std::int64_t limit, T& out) const {
    auto value = number(piece, what, limit);
    if (!value) return tl::unexpected(value.error());
    out = static_cast<T>(*value);
    return {};
  }

  Expected<void> word(Piece piece) {
    if (piece.text.empty()) return refuse(piece, "empty sharding word: write words such as tp=8, cp=8:layers, dcp=4, page=64");
    const std::size_t colon = piece.text.find(':'), equals = piece.text.find('=');
    if (colon != std::string_view::npos && (equals == std::string_view::npos || colon < equals)) return group_word(piece);
    const auto [key, rest] = split(piece, '=');
    if (!rest) return refuse(piece, unknown(piece.text));
    const auto [value, detail] = split(*rest, ':');
    return axis_word(key, value, detail);
  }

  static std::string unknown(std::string_view word) {
    return fmt::format(
        "unknown sharding word '{}': tp=N, dcp=N[:stripe=S|:value], cp=N[:layers|:zigzag|:blocked|:interleave=S], "
        "pp=N[:L,L,...], page=P, layout=ORDER, page_stride=B, or GROUP:replicated and the like",
        word);
  }

  Expected<void> axis_word(Piece key, Piece value, std::optional<Piece> detail) {
    if (key.text == "tp") return tp_ok(once(key, out_.tp_span_), value, detail);
    if (key.text == "dcp") return dcp(once(key, out_.dcp_span_), value, detail);
    if (key.text == "cp") return cp(once(key, out_.cp_span_), value, detail);
    if (key.text == "pp") return pp(once(key, out_.pp_span_), value, detail);
    if (auto pages = page_word(key, value, detail, out_.pages_, false); !pages || *pages) return pages.map([](bool) {});
    return refuse(key, unknown(key.text));
  }

  // Marks where the word stands; a second one of the same key is an error.
  Expected<Piece> once(Piece key, WordSpan& span) const {
    if (span.length != 0) return refuse(key, fmt::format("{} is said twice", key.text));
    span = key.span();
    return key;
  }

  Expected<void> tp_ok(const Expected<Piece>& key, Piece value, std::optional<Piece> detail) {
    if (!key) return tl::unexpected(key.error());
    if (detail) return refuse(*detail, "tp takes no rule");
    out_.tp_span_.length += 1 + value.text.size();
    return store(value, "tp", kMaxRanks, out_.tp_);
  }

  Expected<void> dcp(const Expected<Piece>& key, Piece value, std::optional<Piece> detail) {
    if (!key) return tl::unexpected(key.error());
    out_.dcp_span_.length += 1 + value.text.size();
    if (auto ok = store(value, "dcp", kMaxRanks, out_.dcp_); !ok) return ok;
    if (!detail) return {};
    if (detail->text == "value") {
      out_.dcp_by_value_ = true;
      return {};
    }
    const auto [rule, stripe] = split(*detail, '=');
    if (rule.text != "stripe" || !stripe)
      return refuse(*detail, fmt::format("unknown rule '{}' of dcp: stripe=S or value", detail->text));
    return store(*stripe, "stripe", INT32_MAX, out_.dcp_stripe_);
  }

  Expected<void> cp(const Expected<Piece>& key, Piece value, std::optional<Piece> detail) {
    if (!key) return tl::unexpected(key.error());
    out_.cp_span_.length += 1 + value.text.size();
    if (auto ok = store(value, "cp", kMaxRanks, out_.cp_); !ok) return ok;
    if (!detail) return {};
    const auto [rule, stripe] = split(*detail, '=');
    if (rule.text == "interleave" && stripe) {
      out_.cp_rule_ = CpRule::interleave;
      return store(*stripe, "interleave", INT32_MAX, out_.cp_stripe_);
    }
    if (detail->text == "layers")
      out_.cp_rule_ = CpRule::layers;
    else if (detail->text == "zigzag")
      out_.cp_rule_ = CpRule::zigzag;
    else if (detail->text == "blocked")
      out_.cp_rule_ = CpRule::blocked;
    else if (detail->text != "replicated")
      return refuse(*detail,
                    fmt::format("unknown rule '{}' of cp: layers, zigzag, blocked, interleave=S or replicated", detail->text));
    return {};
  }

  Expected<void> pp(const Expected<Piece>& key, Piece value, std::optional<Piece> detail) {
    if (!key) return tl::unexpected(key.error());
    out_.pp_span_.length += 1 + value.text.size();
    if (auto ok = store(value, "pp", kMaxRanks, out_.pp_); !ok) return ok;
    if (!detail) return {};
    in_list_ = true;
    return add_layers(*detail);
  }

  Expected<void> add_layers(Piece piece) {
    std::int64_t layers = 0;
    if (piece.text != "0")  // a stage may hold nothing
      if (auto ok = store(piece, "layers of a stage", 1 << 20, layers); !ok) return ok;
    out_.pp_layers_.push_back(layers);
    return {};
  }

  // True if the key was one of the page words.
  Expected<bool> page_word(Piece key, Piece value, std::optional<Piece> detail, PageWords& pages, bool group) const {
    const bool known =
        key.text == "page" || key.text == "layout" || key.text == "page_stride" || (group && key.text == "strides");
    if (!known) return false;
    if (detail) return refuse(*detail, fmt::format("{} takes no rule", key.text));
    const bool again = key.text == "page"          ? pages.page_tokens.has_value()
                       : key.text == "page_stride" ? pages.page_stride.has_value()
                       : key.text == "strides"     ? pages.strides.has_value()
                                                   : pages.order.has_value();
    if (again) return refuse(key, fmt::format("{} is said twice", key.text));
    pages.span = {key.begin, key.text.size() + 1 + value.text.size()};
    Expected<void> ok;
    if (key.text == "page") {
      pages.page_tokens = 0;
      ok = store(value, "page", 1 << 20, *pages.page_tokens);
    } else if (key.text == "page_stride") {
      pages.page_stride = 0;
      ok = store(value, "page_stride", std::int64_t{1} << 40, *pages.page_stride);
    } else if (key.text == "strides") {
      ok = strides(value, pages);
    } else {
      auto order = parse_page_order(value.text);
      if (!order) return refuse(value, order.error().message);
      pages.order = *order;
    }
    if (!ok) return tl::unexpected(ok.error());
    return true;
  }

  Expected<void> strides(Piece value, PageWords& pages) const {
    Strides out;
    std::optional<Piece> rest = value;
    for (std::int64_t* field : {&out.block, &out.head, &out.token, &out.content}) {
      if (!rest) return refuse(value, "strides=BLOCK/HEAD/TOKEN/CONTENT wants four numbers of bytes");
      const auto [piece, more] = split(*rest, '/');
      if (auto ok = store(piece, "stride", std::int64_t{1} << 40, *field); !ok) return ok;
      rest = more;
    }
    if (rest) return refuse(value, "strides=BLOCK/HEAD/TOKEN/CONTENT wants four numbers of bytes");
    pages.strides = out;
    return {};
  }

  Expected<void> group_word(Piece piece) {
    const auto [group, rest] = split(piece, ':');
    if (group.text.empty()) return refuse(piece, "a group word begins with the group's name, as in draft:replicated");
    GroupWords& words = out_.groups_[std::string(group.text)];
    words.span = piece.span();
    const auto [key, value] = split(*rest, '=');
    if (!value) return bare_group_word(group, key, words);
    if (key.text == "rank") {
      if (auto ok = hold(key, words, GroupWords::Holders::one_rank); !ok) return ok;
      if (value->text == "0") return {};
      return store(*value, "rank", kMaxRanks - 1, words.rank);
    }
    if (key.text == "stripe") {
      if (words.stripe || words.by_value) return refuse(*rest, turns_twice(group));
      words.stripe = 0;
      return store(*value, "stripe", INT32_MAX, *words.stripe);
    }
    if (auto pages = page_word(key, *value, std::nullopt, words.pages, true); !pages || *pages) return pages.map([](bool) {});
    return refuse(*rest, group_unknown(rest->text));
  }

  Expected<void> bare_group_word(Piece group, Piece key, GroupWords& words) const {
    if (key.text == "replicated") return hold(key, words, GroupWords::Holders::replicated);
    if (key.text == "none") return hold(key, words, GroupWords::Holders::none);
    if (key.text != "value") return refuse(key, group_unknown(key.text));
    if (words.stripe || words.by_value) return refuse(key, turns_twice(group));
    words.by_value = true;
    return {};
  }

  Expected<void> hold(Piece key, GroupWords& words, GroupWords::Holders holders) const {
    if (words.holders != GroupWords::Holders::as_side)
      return refuse(key, "it is said twice which ranks hold the group: one of replicated, none, rank=R");
    words.holders = holders;
    return {};
  }

  static std::string turns_twice(Piece group) {
    return fmt::format("it is said twice how ranks take turns at {}: one of stripe=S, value", group.text);
  }

  static std::string group_unknown(std::string_view word) {
    return fmt::format(
        "unknown group word '{}': replicated, none, rank=R, stripe=S, value, page=P, layout=ORDER, page_stride=B or "
        "strides=BLOCK/HEAD/TOKEN/CONTENT",
        word);
  }

  // What can only be said of the words together.
  Expected<void> finish() {
    if (out_.tp_span_.length == 0) out_.tp_ = out_.dcp_;
    forget_rules_of_one_rank();
    if (out_.tp_ % out_.dcp_ != 0)
      return marked(
          out_.text_, out_.dcp_span_, Code::invalid_argument,
          fmt::format("dcp={} does not divide tp={}: dcp ranks are tp ranks (dcp rank = tp rank mod dcp)", out_.dcp_, out_.tp_));
    const std::int64_t world = std::int64_t{out_.tp_} * out_.cp_ * out_.pp_;
    if (world > kMaxRanks)
      return marked(out_.text_, {0, out_.text_.size()}, Code::invalid_argument,
                    fmt::format("{} ranks are too many: at most {}", world, kMaxRanks));
    if (!out_.pp_layers_.empty() && static_cast<std::int64_t>(out_.pp_layers_.size()) != out_.pp_)
      return marked(out_.text_, out_.pp_span_, Code::invalid_argument,
                    fmt::format("pp={} stages, but {} of them are given layers", out_.pp_, out_.pp_layers_.size()));
    if (out_.dcp_ > 1 && (out_.cp_rule_ == CpRule::zigzag || out_.cp_rule_ == CpRule::blocked))
      return marked(
          out_.text_, out_.cp_span_, Code::unsupported,
          "cp:zigzag or cp:blocked and dcp would both cut the tokens: use cp=N:layers, cp=N or cp=N:interleave=S beside dcp");
    if (out_.dcp_ > 1 && out_.cp_rule_ == CpRule::interleave && out_.dcp_by_value_)
      return marked(out_.text_, out_.dcp_span_, Code::unsupported,
                    "dcp:value and cp:interleave would both choose the token's rank");
    if (out_.dcp_ > 1 && out_.cp_rule_ == CpRule::interleave && out_.dcp_stripe_ != 0 && out_.dcp_stripe_ != out_.cp_stripe_)
      return marked(
          out_.text_, out_.dcp_span_, Code::unsupported,
          fmt::format("dcp stripe={} and cp interleave={} must be one number: the ranks of both take turns in one cycle",
                      out_.dcp_stripe_, out_.cp_stripe_));
    return {};
  }

  // One rank cuts nothing, by whatever rule: so that equal shardings are equal words.
  void forget_rules_of_one_rank() {
    if (out_.cp_ == 1) {
      out_.cp_rule_ = CpRule::replicated;
      out_.cp_stripe_ = 0;
    }
    if (out_.dcp_ == 1) {
      out_.dcp_stripe_ = 0;
      out_.dcp_by_value_ = false;
    }
  }

  Sharding out_;
  bool in_list_ = false;
};

Expected<Sharding> Sharding::parse(std::string_view text) { return ShardingParser(text).parse(); }

Sharding Sharding::replicated(std::int32_t ranks) {
  Sharding out;
  out.cp_ = ranks;
  out.text_ = to_string(out);
  return out;
}

tl::unexpected<Error> Sharding::point_at(WordSpan span, Code code, const std::string& sentence) const {
  if (span.length == 0) return fail(code, "{}\n  in '{}'", sentence, text_);
  return marked(text_, span, code, sentence);
}

bool operator==(const Sharding& a, const Sharding& b) {
  return a.tp_ == b.tp_ && a.dcp_ == b.dcp_ && a.cp_ == b.cp_ && a.pp_ == b.pp_ && a.cp_rule_ == b.cp_rule_ &&
         a.cp_stripe_ == b.cp_stripe_ && a.dcp_stripe_ == b.dcp_stripe_ && a.dcp_by_value_ == b.dcp_by_value_ &&
         a.pp_layers_ == b.pp_layers_ && a.pages_ == b.pages_ && a.groups_ == b.groups_;
}

// ---- text ----

namespace {

void add(std::string& text, const std::string& word) { text += (text.empty() ? "" : ",") + word; }

void add_pages(std::string& text, const std::string& prefix, const PageWords& pages) {
  if (pages.page_tokens) add(text, fmt::format("{}page={}", prefix, *pages.page_tokens));
  if (pages.order) add(text, fmt::format("{}layout={}", prefix, to_string(*pages.order)));
  if (pages.page_stride) add(text, fmt::format("{}page_stride={}", prefix, *pages.page_stride));
  if (pages.strides)
    add(text, fmt::format("{}strides={}/{}/{}/{}", prefix, pages.strides->block, pages.strides->head, pages.strides->token,
                          pages.strides->content));
}

std::string cp_word(const Sharding& s) {
  switch (s.cp_rule()) {
    case CpRule::replicated: return fmt::format("cp={}", s.cp());
    case CpRule::layers: return fmt::format("cp={}:layers", s.cp());
    case CpRule::zigzag: return fmt::format("cp={}:zigzag", s.cp());
    case CpRule::blocked: return fmt::format("cp={}:blocked", s.cp());
    case CpRule::interleave: return fmt::format("cp={}:interleave={}", s.cp(), s.cp_stripe());
  }
  return {};
}

std::string dcp_word(const Sharding& s) {
  if (s.dcp_by_value()) return fmt::format("dcp={}:value", s.dcp());
  if (s.dcp_stripe() != 0) return fmt::format("dcp={}:stripe={}", s.dcp(), s.dcp_stripe());
  return fmt::format("dcp={}", s.dcp());
}

void add_group(std::string& text, const std::string& name, const GroupWords& words) {
  const std::string prefix = name + ":";
  switch (words.holders) {
    case GroupWords::Holders::as_side: break;
    case GroupWords::Holders::replicated: add(text, prefix + "replicated"); break;
    case GroupWords::Holders::none: add(text, prefix + "none"); break;
    case GroupWords::Holders::one_rank: add(text, fmt::format("{}rank={}", prefix, words.rank)); break;
  }
  if (words.stripe) add(text, fmt::format("{}stripe={}", prefix, *words.stripe));
  if (words.by_value) add(text, prefix + "value");
  add_pages(text, prefix, words.pages);
}

}  // namespace

std::string to_string(const Sharding& s) {
  std::string text;
  if (s.pp() > 1 || !s.pp_layers().empty()) {
    std::string word = fmt::format("pp={}", s.pp());
    for (std::size_t i = 0; i < s.pp_layers().size(); ++i) word += fmt::format("{}{}", i == 0 ? ':' : ',', s.pp_layers()[i]);
    add(text, word);
  }
  if (s.cp() > 1) add(text, cp_word(s));
  if ((s.tp() > 1 && s.tp() != s.dcp()) || (s.dcp() == 1 && s.cp() == 1 && s.pp() == 1)) add(text, fmt::format("tp={}", s.tp()));
  if (s.dcp() > 1) add(text, dcp_word(s));
  add_pages(text, "", s.pages());
  for (const auto& [name, words] : s.groups()) add_group(text, name, words);
  return text;
}

}  // namespace kvloom
