#include "kvloom/geometry/side_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include "kvloom/geometry/side_values.h"
#include "kvloom/geometry/text_lines.h"

namespace kvloom {
namespace {

constexpr std::string_view kHeader = "kvloom side 1";

// ---- writing ----

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\x{:02x}", byte);
    else if (c == '"' || c == '\\')
      out += std::string("\\") + c;
    else
      out += c;
  }
  return out + '"';
}

std::string group_line(const CacheGroup& group) {
  std::vector<std::int32_t> layers;
  for (const LayerId layer : group.layers) layers.push_back(layer.value);
  std::string planes;
  for (const PlaneShape& plane : group.planes)
    planes += fmt::format("{}{}:{}:{}", planes.empty() ? "" : ",", plane.name, plane.bytes, plane.element_bytes);
  std::string out = fmt::format("group {} {} layers {} heads {} planes {}", group.name,
                                group.kind == GroupKind::paged ? "paged" : "state", list_text(layers), group.heads, planes);
  if (group.window)
    out +=
        fmt::format(" window {}:{}", group.window->kind == Window::Kind::sliding ? "sliding" : "chunked", group.window->tokens);
  return out + '\n';
}

std::string token_parts(const TokenSplit& split) {
  switch (split.rule) {
    case TokenRule::all: return "all";
    case TokenRule::cyclic: return fmt::format("{} cyclic {}", split.parts, split.stripe);
    case TokenRule::blocked: return fmt::format("{} blocked", split.parts);
    case TokenRule::zigzag: return fmt::format("{} zigzag", split.parts);
    case TokenRule::value: return fmt::format("{} value", split.parts);
  }
  return {};
}

void append_parts(std::string& out, const char* axis, const std::vector<StridedSet>& parts) {
  out += fmt::format("  parts {}", axis);
  for (const StridedSet& part : parts) out += ' ' + to_string(part);
  out += '\n';
}

void append_places(std::string& out, const GroupSide& group) {
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::vector<std::int32_t>> ranks;
  for (std::size_t r = 0; r < group.places.size(); ++r)
    if (const Place& at = group.places[r]; at.holds)
      ranks[{at.layers, at.heads, at.tokens}].push_back(static_cast<std::int32_t>(r));
  for (const auto& [part, list] : ranks)
    out += fmt::format("  place {}.{}.{} ranks {}\n", std::get<0>(part), std::get<1>(part), std::get<2>(part), list_text(list));
}

void append_group(std::string& out, const GroupSide& group) {
  out += fmt::format("  layout page {} stride {}\n", group.layout.page_tokens(), group.layout.page_stride());
  for (const PlaneLayout& plane : group.layout.planes())
    out += fmt::format("  plane {} offset {} token {} head {} bytes {} content {} element {}\n", plane.name, plane.offset,
                       plane.token_stride, plane.head_stride, plane.bytes, plane.content_stride, plane.element_bytes);
  append_parts(out, "layers", group.layer_parts);
  append_parts(out, "heads", group.head_parts);
  out += fmt::format("  parts tokens {}\n", token_parts(group.tokens));
  append_places(out, group);
}

// ---- reading ----

// Takes words and numbers off the front of one line. Once something is wrong all later answers are empty or 0: asked at the
// line's end.
class LineReader {
 public:
  explicit LineReader(const TextLine& line) : line_(line), rest_(line.text) {}

  bool begins(std::string_view start) {
    if (rest_.substr(0, start.size()) != start) return false;
    rest_.remove_prefix(start.size());
    return true;
  }
  void expect(std::string_view start) {
    if (!begins(start)) wrong("'" + std::string(start) + "'");
  }
  std::int64_t number(std::int64_t most) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0 || value > most) {
      wrong(fmt::format("a number from 0 to {}", most));
      return 0;
    }
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return value;
  }
  std::string name() {
    const std::size_t end = std::min(rest_.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"), rest_.size());
    if (end == 0) wrong("a name [a-z][a-z0-9_]*");
    std::string out(rest_.substr(0, end));
    rest_.remove_prefix(end);
    return out;
  }
  std::string rest() {
    std::string out(rest_);
    rest_ = {};
    return out;
  }
  std::string in_quotes();
  std::vector<LayerId> layers();

  bool ok() const { return !error_; }
  void wrong(const std::string& expected) {
    if (!error_) error_ = unlike(line_, fmt::format("{} at column {}", expected, line_.text.size() - rest_.size() + 1)).value();
    rest_ = {};
  }
  Expected<void> finish() {
    if (ok() && !rest_.empty()) wrong("the end of the line");
    if (error_) return tl::unexpected(*error_);
    return {};
  }

 private:
  TextLine line_;
  std::string_view rest_;
  std::optional<Error> error_;
};

std::string LineReader::in_quotes() {
  std::string out;
  expect("\"");
  while (ok() && !begins("\"")) {
    std::int32_t byte = 0;
    if (begins("\\x")) {
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + std::min<std::size_t>(2, rest_.size()), byte, 16);
      if (error != std::errc())
        wrong("two hex digits");
      else
        rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    } else {
      begins("\\");
      if (rest_.empty())
        wrong("a closing \"");
      else
        byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(std::min<std::size_t>(1, rest_.size()));
    }
    out += static_cast<char>(byte);
  }
  return out;
}

std::vector<LayerId> LineReader::layers() {
  std::vector<LayerId> out;
  do {
    const std::int64_t first = number(INT32_MAX - 1);
    const std::int64_t last = begins("-") ? number(INT32_MAX - 1) : first;
    const std::int64_t step = begins("/") ? std::max<std::int64_t>(1, number(INT32_MAX)) : 1;
    if (last < first) wrong(fmt::format("a layer from {} up", first));
    if (static_cast<std::int64_t>(out.size()) + (last - first) / step >= kMaxLayers)
      wrong(fmt::format("at most {} layers", kMaxLayers));
    for (std::int64_t layer = first; ok() && layer <= last; layer += step) out.emplace_back(static_cast<std::int32_t>(layer));
  } while (ok() && begins(","));
  return out;
}

// The lines that carry values, one after another, into SideValues.
class SideReader {
 public:
  Expected<Side> read(std::span<const TextLine> lines) {
    for (const TextLine& line : lines) {
      LineReader reader(line);
      number_ = line.number;
      take(reader);
      if (auto ok = reader.finish(); !ok) return tl::unexpected(ok.error());
    }
    std::string about;
    auto side = make_side(values_, &about);
    if (side || lines.empty()) return side;
    const auto at = line_of_.find(about);
    Error error = side.error();
    error.message = fmt::format("line {}: {}", at == line_of_.end() ? lines.front().number : at->second, error.message);
    return tl::unexpected(std::move(error));
  }

 private:
  void take(LineReader& line) {
    if (line.begins("words "))
      words(line);
    else if (line.begins("page "))
      values_.default_page = line.number(INT64_MAX);
    else if (line.begins("model "))
      model(line);
    else if (line.begins("group "))
      group(line);
    else if (!values_.groups.empty() && line.begins("  layout page "))
      layout(line);
    else if (!values_.groups.empty() && line.begins("  plane "))
      plane(line);
    else
      line.rest();  // follows from the others; compared when all is printed again
  }

  void words(LineReader& line) {
    values_.words = line.rest();
    line_of_["words"] = number_;
  }

  void model(LineReader& line) {
    values_.layers = static_cast<std::int32_t>(line.number(INT32_MAX));
    line.expect(" layers ");
    values_.model = line.in_quotes();
  }

  void group(LineReader& line) {
    if (values_.groups.size() >= kMaxGroups) return line.wrong(fmt::format("at most {} groups", kMaxGroups));
    CacheGroup group;
    group.name = line.name();
    if (line.begins(" state"))
      group.kind = GroupKind::state;
    else
      line.expect(" paged");
    line.expect(" layers ");
    group.layers = line.layers();
    layers_ += static_cast<std::int64_t>(group.layers.size());
    if (layers_ > kMaxLayers) return line.wrong(fmt::format("at most {} layers in all groups", kMaxLayers));
    line.expect(" heads ");
    group.heads = static_cast<std::int32_t>(line.number(kMaxHeads));
    line.expect(" planes ");
    do {
      PlaneShape plane;
      plane.name = line.name();
      line.expect(":");
      plane.bytes = line.number(INT64_MAX);
      line.expect(":");
      plane.element_bytes = line.number(INT64_MAX);
      group.planes.push_back(std::move(plane));
      if (group.planes.size() > kMaxPlanes) return line.wrong(fmt::format("at most {} planes", kMaxPlanes));
    } while (line.ok() && line.begins(","));
    if (line.begins(" window ")) group.window = window(line);
    values_.groups.push_back(std::move(group));
    values_.layouts.emplace_back();
  }

  static Window window(LineReader& line) {
    Window out;
    if (line.begins("chunked:"))
      out.kind = Window::Kind::chunked;
    else
      line.expect("sliding:");
    out.tokens = line.number(INT64_MAX);
    return out;
  }

  void layout(LineReader& line) {
    line_of_["layout " + values_.groups.back().name] = number_;
    LayoutValues layout;
    layout.page_tokens = line.number(INT64_MAX);
    line.expect(" stride ");
    layout.page_stride = line.number(INT64_MAX);
    values_.layouts.back() = std::move(layout);
  }

  void plane(LineReader& line) {
    if (!values_.layouts.back()) return line.wrong("a layout line before its planes");
    if (values_.layouts.back()->planes.size() >= kMaxPlanes) return line.wrong(fmt::format("at most {} planes", kMaxPlanes));
    PlaneLayout plane;
    plane.name = line.name();
    const auto field = [&](std::string_view name, std::int64_t& out) {
      line.expect(name);
      out = line.number(INT64_MAX);
    };
    field(" offset ", plane.offset);
    field(" token ", plane.token_stride);
    field(" head ", plane.head_stride);
    field(" bytes ", plane.bytes);
    field(" content ", plane.content_stride);
    field(" element ", plane.element_bytes);
    values_.layouts.back()->planes.push_back(std::move(plane));
  }

  SideValues values_;
  std::int64_t layers_ = 0;  // of all groups
  std::size_t number_ = 0;   // of the line that is read
  std::map<std::string, std::size_t> line_of_;
};

std::string undigested(const Side& side) {
  std::string out = fmt::format("{}\n", kHeader);
  append_side(out, side);
  return out;
}

}  // namespace

void append_side(std::string& out, const Side& side) {
  out += fmt::format("words {}\npage {}\nmodel {} layers {}\n", to_string(side.sharding()), side.default_page(),
                     side.shape().layers(), in_quotes(side.shape().model()));
  for (const CacheGroup& group : side.shape().groups()) {
    out += group_line(group);
    if (const GroupSide* at = side.find(group.name))
      append_group(out, *at);
    else
      out += "  absent\n";
  }
}

Expected<Side> read_side(std::span<const TextLine> lines) {
  auto side = SideReader().read(lines);
  if (!side) return side;
  std::string canonical;
  append_side(canonical, *side);
  const auto expected = split_lines(canonical);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i >= expected.size()) return unlike(lines[i], "the end of the side");
    if (lines[i].text != expected[i].text) return unlike(lines[i], quoted_line(expected[i].text));
  }
  if (lines.size() < expected.size())
    return fail(Code::parse, "line {}: found the end of the side, expected {}", lines.empty() ? 1 : lines.back().number + 1,
                quoted_line(expected[lines.size()].text));
  return side;
}

std::string to_string(const Side& side) {
  const std::string text = undigested(side);
  return text + digest_line(text);
}

Expected<Side> parse_side(std::string_view text) {
  if (text.size() > kMaxTextBytes)
    return fail(Code::exhausted, "a side's text of {} B: at most {} are read", text.size(), kMaxTextBytes);
  const auto lines = split_lines(text);
  if (lines.empty() || lines.front().text != kHeader)
    return unlike(lines.empty() ? TextLine{1, {}} : lines.front(), fmt::format("'{}'", kHeader));
  const bool digested = lines.back().text.substr(0, 7) == "digest ";
  auto side = read_side(std::span(lines).subspan(1, lines.size() - 1 - (digested && lines.size() > 1 ? 1 : 0)));
  if (!side) return side;
  if (auto same = check_same(text, to_string(*side)); !same) return tl::unexpected(same.error());
  return side;
}

std::string digest(const Side& side) { return text_digest(undigested(side)); }

}  // namespace kvloom
