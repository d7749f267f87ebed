#include "kvloom/tools/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "kvloom/plan/text.h"
#include "kvloom/tools/html_parts.h"
#include "kvloom/tools/html_table.h"
#include "kvloom/tools/print.h"

namespace kvloom {
namespace {

constexpr std::int32_t kMostRanks = 128;     // drawn on a side
constexpr std::int64_t kMostStripes = 1024;  // of one family; the script has the same number

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

// Where things stand, in pixels: bands to the left of the matrix, so that a source rank is one row of both; stripes below it, so that a
// target rank is one column of both; the panel in the corner that is left.
struct Places {
  std::int32_t sources, targets;  // drawn
  std::int32_t layers;
  double wide, high;  // of a cell
  double bands = 46, bands_wide = 430;
  double top = 50, left = 0, stripes = 0, tall = 300;
  std::int64_t from = 0, to = 1, prefix = 0;  // tokens that the stripes show

  Places(const Plan& plan, std::int32_t layer_count)
      : sources(std::min(plan.source().ranks(), kMostRanks)),
        targets(std::min(plan.target().ranks(), kMostRanks)),
        layers(layer_count),
        wide(std::clamp(std::floor(500.0 / targets), 9.0, 124.0)),
        high(std::clamp(std::floor(400.0 / sources), 9.0, 50.0)) {
    left = bands + bands_wide + 26;
    stripes = top + sources * high + 40;
    tall += 90.0 * std::max(0, static_cast<int>(plan.groups().size()) - 4);  // the panel beside has a line a group
  }
  double layer() const { return bands_wide / layers; }
  double right() const { return left + targets * wide; }
  double width() const { return right() + 150; }
  double height() const { return stripes + tall + 48; }
  double x(std::int32_t target) const { return left + target * wide; }
  double y(std::int32_t source) const { return top + source * high; }
  double token_y(std::int64_t token) const {
    return stripes + tall * static_cast<double>(token - from) / static_cast<double>(to - from);
  }
};

double hue(std::int32_t source, std::int32_t sources) {
  const double turned = 25 + source * 360.0 / sources;
  return turned >= 360 ? turned - 360 : turned;
}

class Picture {
 public:
  Picture(const Plan& plan, const std::vector<MeasuredPath>& paths, std::optional<TokenRange> range)
      : plan_(plan), paths_(paths), range_(range), places_(plan, layer_count(plan)), main_(main_group()) {
    for (const MeasuredPath& path : paths) by_ranks_[{path.source.value, path.target.value}] = &path;
    choose_tokens();
  }

  std::string page() {
    add("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width\">");
    add("<title>{}</title><style>{}</style></head><body>\n", escaped(title(false)), kPictureStyle);
    add("<h1>{}</h1>\n<p class=\"facts\">{}</p>\n<div class=\"sheet\">\n", title(true), facts());
    draw();
    add_panel();
    add("</div>\n");
    out_ += path_table(plan_, paths_, range_.has_value(), main_, lanes());
    add("<script>{}</script>\n</body></html>\n", kPictureScript);
    return std::move(out_);
  }

 private:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  static std::int32_t layer_count(const Plan& plan) {
    std::int32_t most = 0;
    for (const GroupPlan& group : plan.groups()) most = std::max(most, group.target->layers.back().value + 1);
    return most;
  }

  std::int64_t weight(const MeasuredPath& path) const { return path_weight(path, range_.has_value()); }

  // The paged group that moves most: its tokens are drawn.
  std::int32_t main_group() const {
    std::map<std::int32_t, std::int64_t> bytes;
    for (const MeasuredPath& path : paths_)
      for (const MeasuredGroup& group : path.groups) {
        const bool paged = plan_.groups()[static_cast<std::size_t>(group.path.group)].target->kind == GroupKind::paged;
        if (paged)
          bytes[group.path.group] +=
              range_ ? group.moved.bytes : group.path.row_bytes * static_cast<std::int64_t>(group.layers.size());
      }
    const auto most =
        std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    return most == bytes.end() ? 0 : most->first;
  }
  const GroupPlan& main_plan() const { return plan_.groups()[static_cast<std::size_t>(main_)]; }

  // Whole turns of the ranks, about 48 stripes, from the turn in which the wanted tokens begin; or the whole request where a side does not
  // repeat.
  void choose_tokens() {
    const TokenSplit& split = main_plan().target->tokens;
    const TokenRange want = range_ ? wanted(*main_plan().target, *range_) : TokenRange{0, 0};
    const std::int64_t end = range_ ? std::max<std::int64_t>(range_->end, 1) : kUnbounded;
    places_.prefix = want.begin;
    const TokenSplit& source = main_plan().source->tokens;
    if (split.rule != TokenRule::cyclic || source.needs_total()) {
      places_.to = end == kUnbounded ? 4096 : end;
      return;
    }
    const std::int64_t turn = split.stripe * split.parts;
    const std::int64_t shown =
        std::max({turn, 48 / split.parts * turn, source.rule == TokenRule::cyclic ? source.stripe * source.parts : 0});
    places_.from = want.begin / turn * turn;
    places_.to = std::min(end, places_.from + ceil_div(shown, turn) * turn);
  }

  std::string title(bool html) const {
    const std::string from = to_string(plan_.source().sharding()), to = to_string(plan_.target().sharding());
    const std::string model = plan_.target().shape().model();
    if (!html) return fmt::format("{}: {} to {}", model, from, to);
    return fmt::format("{}: prefill <span class=\"words\">{}</span> to decode <span class=\"words\">{}</span>", escaped(model),
                       escaped(from), escaped(to));
  }

  std::string facts() const {
    std::int64_t bytes = 0, runs = 0;
    for (const MeasuredPath& path : paths_) {
      bytes += path.moved.bytes;
      runs += path.moved.runs;
    }
    std::string text = fmt::format("<b>{} x {}</b> ranks &middot; <b>{}</b> paths", plan_.source().ranks(),
                                   plan_.target().ranks(), count_text(static_cast<std::int64_t>(paths_.size())));
    if (range_) {
      text += fmt::format(" &middot; tokens <b>{}</b>", count_text(range_->end));
      if (range_->begin > 0) text += fmt::format(", the first {} are there already", count_text(range_->begin));
      text += fmt::format(" &middot; <b>{}</b> in <b>{}</b> runs", bytes_text(Bytes(bytes)), count_text(runs));
    } else {
      text += " &middot; any number of tokens";
    }
    text += fmt::format(" &middot; digest <code>{}</code>", digest(plan_));
    if (plan_.source().ranks() > kMostRanks || plan_.target().ranks() > kMostRanks)
      text += fmt::format("<br>Drawn are the first {} ranks of a side.", kMostRanks);
    return text;
  }

  // ---- the picture ----

  void draw() {
    const Places& p = places_;
    add("<svg id=\"loom\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"group\" "
        "aria-label=\"Bands of layers in prefill, stripes of tokens in decode, and the paths between them. The same as a table "
        "below.\" "
        "data-sources=\"{2}\" data-bands=\"{3}\" data-layer=\"{4:.4f}\" data-top=\"{5}\" data-left=\"{6}\" data-wide=\"{7}\" "
        "data-high=\"{8}\" "
        "data-stripes=\"{9}\" data-tall=\"{10}\" data-from=\"{11}\" data-to=\"{12}\" data-prefix=\"{13}\" data-lanes=\"{14}\" "
        "data-row=\"{15}\">\n",
        p.width(), p.height(), p.sources, p.bands, p.layer(), p.top, p.left, p.wide, p.high, p.stripes, p.tall, p.from, p.to,
        p.prefix, lanes(), row());
    draw_bands();
    draw_stripes();
    add("<g id=\"lit\"></g>\n");
    draw_matrix();
    draw_heads();
    add("</svg>\n");
  }

  void draw_heads() {
    const Places& p = places_;
    add("<text class=\"head\" x=\"{}\" y=\"16\">Prefill: each rank's layers</text>", p.bands);
    add("<text class=\"head\" x=\"{}\" y=\"16\">{}</text>", p.left,
        range_ ? "From prefill rank (row) to decode rank (column)" : "From prefill rank (row) to decode rank (column), a token");
    for (const std::int32_t layer : layer_marks())
      add("<text class=\"small\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", p.bands + (layer + .5) * p.layer(),
          p.top - 8, layer);
    add("<text class=\"head\" x=\"{}\" y=\"{}\">Decode: each rank's tokens</text>", p.left, p.stripes - 12);
    const std::int32_t every = std::max(1, static_cast<std::int32_t>(std::ceil(22 / p.wide)));
    for (std::int32_t t = 0; t < p.targets; t += every)
      add("<text class=\"small\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", p.x(t) + p.wide / 2, p.top - 8, t);
    const std::int32_t rows = std::max(1, static_cast<std::int32_t>(std::ceil(13 / p.high)));
    for (std::int32_t s = 0; s < p.sources; s += rows)
      add("<text class=\"small\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", p.bands - 8, p.y(s) + p.high / 2 + 3, s);
    add("\n");
  }

  // Round numbers, and the last layer.
  std::vector<std::int32_t> layer_marks() const {
    const std::int32_t last = places_.layers - 1;
    std::int32_t step = 1;
    for (const std::int32_t round : {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000})
      if (step = round; places_.layers / round <= 12) break;
    std::vector<std::int32_t> marks;
    for (std::int32_t layer = 0; layer < last - step / 2; layer += step) marks.push_back(layer);
    marks.push_back(last);
    return marks;
  }

  // A band has a lane for each group, one above the other; where that is too narrow, all are in one.
  std::size_t lanes() const {
    const std::size_t groups = plan_.groups().size();
    return places_.high >= 8.0 * static_cast<double>(groups) ? groups : 1;
  }
  double row() const { return places_.high - (places_.high > 14 ? 4 : 1); }

  void draw_bands() {
    const Places& p = places_;
    const double lane = row() / static_cast<double>(lanes());
    for (std::int32_t s = 0; s < p.sources; ++s) {
      add("<g class=\"band\"><title>prefill rank {}</title><rect class=\"lane\" x=\"{}\" y=\"{:.1f}\" width=\"{}\" "
          "height=\"{:.1f}\"/>",
          s, p.bands, p.y(s), p.bands_wide, row());
      for (std::size_t g = 0; g < plan_.groups().size(); ++g)
        draw_lane(plan_.groups()[g], s, p.y(s) + static_cast<double>(lanes() > 1 ? g : 0) * lane, lane - (lanes() > 1 ? 1 : 0));
      add("</g>\n");
    }
  }

  void draw_lane(const GroupPlan& group, std::int32_t source, double y, double high) {
    const GroupSide& side = *group.source;
    const Place& at = side.places[static_cast<std::size_t>(source)];
    if (!at.holds) return;
    const StridedSet& part = side.layer_parts[static_cast<std::size_t>(at.layers)];
    const double gap = places_.layer() > 3 ? 1 : 0;
    for (std::int64_t l = part.start(); l < part.end();) {
      std::int64_t end = l + 1;
      while (end < part.end() && id(side, end) == id(side, end - 1) + 1) ++end;
      add("<rect class=\"rank\" style=\"--h:{:.0f}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>",
          hue(source, places_.sources), places_.bands + id(side, l) * places_.layer(), y,
          std::max(1.0, static_cast<double>(end - l) * places_.layer() - gap), high);
      l = end;
    }
  }
  static std::int32_t id(const GroupSide& side, std::int64_t ordinal) {
    return side.layers[static_cast<std::size_t>(ordinal)].value;
  }

  void draw_matrix() {
    const Places& p = places_;
    std::int64_t most = 1, least = kUnbounded;
    for (const MeasuredPath& path : paths_) {
      most = std::max(most, weight(path));
      least = std::min(least, weight(path));
    }
    bool first = true;
    for (std::int32_t s = 0; s < p.sources; ++s) {
      for (std::int32_t t = 0; t < p.targets; ++t) {
        const auto at = by_ranks_.find({s, t});
        const MeasuredPath* path = at == by_ranks_.end() ? nullptr : at->second;
        draw_cell(s, t, path,
                  path == nullptr || most == least
                      ? .5
                      : static_cast<double>(weight(*path) - least) / static_cast<double>(most - least),
                  std::exchange(first, first && path == nullptr));
      }
      if (range_) draw_sum(s);
      add("\n");
    }
  }

  // `heat`: 0 for the least, 1 for the most.
  void draw_cell(std::int32_t s, std::int32_t t, const MeasuredPath* path, double heat, bool first) {
    const Places& p = places_;
    const double wide = p.wide - (p.wide > 14 ? 3 : 1), high = p.high - (p.high > 14 ? 4 : 1);
    if (path == nullptr) {
      add("<g class=\"cell none\" data-path=\"{}-{}\"><rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"2\"/></g>",
          s, t, p.x(t), p.y(s), wide, high);
      return;
    }
    const bool words = p.wide >= 62 && p.high >= 15;  // under words the colour stays light
    const double opacity = words ? .10 + .34 * heat : .12 + .88 * heat;
    const std::string bytes = bytes_text(static_cast<double>(weight(*path)));
    add("<g class=\"cell\" role=\"button\" tabindex=\"{}\" data-path=\"{}-{}\" aria-label=\"Prefill rank {} to decode rank {}: "
        "{}\"><rect x=\"{:.1f}\" "
        "y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"2\" fill-opacity=\"{:.2f}\"/>",
        first ? 0 : -1, s, t, s, t, range_ ? fmt::format("{} in {} runs", bytes, path->moved.runs) : bytes + " a token", p.x(t),
        p.y(s), wide, high, opacity);
    if (words) {
      const bool two = range_ && p.high >= 34;
      const double x = p.x(t) + wide / 2, y = p.y(s) + high / 2;
      add("<text class=\"big\" style=\"font-size:{:.1f}px\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
          std::min(13.0, p.wide * .18), x, two ? y - 2 : y + 4, bytes);
      if (two)
        add("<text class=\"small\" style=\"font-size:{:.1f}px\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{} runs</text>",
            std::min(11.0, p.wide * .155), x, y + 13, count_text(path->moved.runs));
    }
    add("</g>");
  }

  // What a source rank sends, as a bar to the right of its row.
  void draw_sum(std::int32_t s) {
    std::vector<std::int64_t> sums(static_cast<std::size_t>(places_.sources), 0);
    if (sums_.empty()) {
      for (const MeasuredPath& path : paths_)
        if (path.source.value < places_.sources) sums[static_cast<std::size_t>(path.source.value)] += weight(path);
      sums_ = std::move(sums);
    }
    const std::int64_t most = std::max<std::int64_t>(1, *std::max_element(sums_.begin(), sums_.end())),
                       own = sums_[static_cast<std::size_t>(s)];
    const Places& p = places_;
    const double high = p.high > 14 ? 6 : std::max(2.0, p.high - 4);
    if (s == 0) add("<text class=\"small\" x=\"{:.1f}\" y=\"{}\">sends</text>", p.right() + 12, p.top - 8);
    add("<rect class=\"rank\" style=\"--h:{:.0f}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" rx=\"1\"/>",
        hue(s, p.sources), p.right() + 12, p.y(s) + p.high / 2 - (p.high > 26 ? 10 : high / 2 + .5),
        120.0 * static_cast<double>(own) / static_cast<double>(most), high);
    if (p.high > 26)
      add("<text class=\"small\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", p.right() + 12, p.y(s) + p.high / 2 + 10,
          bytes_text(Bytes(own)));
  }

  // ---- stripes ----

  void draw_stripes() {
    const Places& p = places_;
    const GroupSide& side = *main_plan().target;
    for (std::int32_t t = 0; t < p.targets; ++t) {
      const Place& at = side.places[static_cast<std::size_t>(t)];
      add("<g><title>decode rank {}</title><rect class=\"lane\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"/>", t,
          p.x(t), p.stripes, p.wide - (p.wide > 14 ? 3 : 1), p.tall);
      if (at.holds)
        for (const StridedSet& part : clip(side.tokens.part(at.tokens, plan_.total()), p.from, p.to)) draw_family(t, part);
      add("</g>\n");
    }
    draw_token_axis();
  }

  void draw_family(std::int32_t t, const StridedSet& family) {
    if (family.count() * family.inner_count() > kMostStripes) {  // too fine to be seen
      const std::int64_t border = std::clamp(places_.prefix, family.start(), family.end());
      draw_stripe("past", t, family.start(), border);
      return draw_stripe("stripe", t, border, family.end());
    }
    for (std::int64_t k = 0; k < family.count(); ++k)
      for (std::int64_t i = 0; i < family.inner_count(); ++i) {
        const std::int64_t begin = family.start() + k * family.stride() + i * family.inner_stride(),
                           end = begin + family.length();
        const std::int64_t border = std::clamp(places_.prefix, begin, end);
        draw_stripe("past", t, begin, border);
        draw_stripe("stripe", t, border, end);
      }
  }

  void draw_stripe(const char* kind, std::int32_t t, std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    const double y = places_.token_y(begin), high = places_.token_y(end) - y;
    add("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>", kind, places_.x(t) + 1, y,
        places_.wide - (places_.wide > 14 ? 5 : 2), std::max(1.0, high - (high > 3 ? 1 : 0)));
  }

  void draw_token_axis() {
    const Places& p = places_;
    const std::int64_t shown = p.to - p.from;
    const TokenSplit& split = main_plan().target->tokens;
    std::int64_t step = split.rule == TokenRule::cyclic ? split.stripe * split.parts : std::max<std::int64_t>(1, shown / 8);
    while (shown / step > 12) step *= 2;
    for (std::int64_t token = p.from; token <= p.to; token += step) {
      const bool free = p.prefix <= p.from || std::abs(p.token_y(token) - p.token_y(p.prefix)) > 9;  // of the prefix line's words
      if (free)
        add("<text class=\"small\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", p.right() + 8, p.token_y(token) + 4, count_text(token));
    }
    if (p.prefix > p.from && p.prefix < p.to) {
      add("<line class=\"prefix\" x1=\"{0:.1f}\" x2=\"{1:.1f}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", p.left - 6, p.right() + 5,
          p.token_y(p.prefix));
      add("<text class=\"small\" x=\"{:.1f}\" y=\"{:.1f}\">{}: prefix ends</text>", p.right() + 8, p.token_y(p.prefix) + 4,
          count_text(p.prefix));
    }
    add("<text class=\"small\" x=\"{}\" y=\"{}\">{}</text>\n", p.left, p.stripes + p.tall + 18, token_caption());
  }

  std::string token_caption() const {
    const Places& p = places_;
    const GroupSide& side = *main_plan().target;
    const std::string name = fmt::format("group {}", side.name);
    if (side.tokens.rule == TokenRule::value)
      return fmt::format("{}: page v belongs to rank v mod {}, known with the page table", name, side.tokens.parts);
    if (side.tokens.rule != TokenRule::cyclic) return fmt::format("{}: pages of {} tokens", name, side.layout.page_tokens());
    const std::string whole = range_ ? fmt::format(" of {}", count_text(range_->end)) : "";
    return fmt::format("{}: stripes of {} token{}; tokens {} to {}{}", name, side.tokens.stripe,
                       side.tokens.stripe == 1 ? "" : "s", count_text(p.from), count_text(p.to), whole);
  }

  // ---- words ----

  void add_panel() {
    const Places& p = places_;
    add("<div class=\"panel\" id=\"panel\" role=\"status\" aria-live=\"polite\" "
        "style=\"left:{}px;top:{}px;width:{}px;height:{}px\">",
        p.bands, p.stripes, p.bands_wide, p.tall);
    add("<h2>Point at a path</h2><p>Each cell of the matrix is a path: its row's band of layers, woven into its column's stripes "
        "of tokens. Point at one, "
        "or press Tab and the arrow keys; Enter or a click keeps it lit, Escape lets go.</p><dl>");
    std::string groups;
    for (const GroupPlan& group : plan_.groups()) groups += (groups.empty() ? "" : ", ") + group.target->name;
    add("<dt>bands</dt><dd>coloured by prefill rank; cache groups from top to bottom: {}</dd>", groups);
    add("<dt>matrix</dt><dd>the stronger the colour, the more {}</dd>", range_ ? "bytes" : "bytes a token");
    add("<dt>stripes</dt><dd>{}</dd></dl></div>\n",
        places_.prefix > 0 ? "the tokens each decode rank keeps; pale ones are not moved" : "the tokens each decode rank keeps");
  }

  const Plan& plan_;
  const std::vector<MeasuredPath>& paths_;
  std::optional<TokenRange> range_;
  Places places_;
  std::int32_t main_;
  std::map<std::pair<std::int32_t, std::int32_t>, const MeasuredPath*> by_ranks_;
  std::vector<std::int64_t> sums_;
  std::string out_;
};

}  // namespace

std::string plan_html(const Plan& plan, const std::vector<MeasuredPath>& paths, std::optional<TokenRange> range) {
  return Picture(plan, paths, range).page();
}

}  // namespace kvloom
