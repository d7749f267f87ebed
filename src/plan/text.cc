#include "kvloom/plan/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "kvloom/geometry/side_text.h"
#include "kvloom/geometry/text_lines.h"
#include "kvloom/plan/compile.h"

namespace kvloom {
namespace {

constexpr std::string_view kHeader = "kvloom plan 1";
constexpr std::int64_t kMaxReadPairs = std::int64_t{1} << 17;

std::string tokens_line(std::int64_t total) { return total == kUnbounded ? "tokens inf" : fmt::format("tokens {}", total); }

void append_axis(std::string& out, const char* axis, const Meetings& meetings, std::size_t sources, std::size_t targets) {
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(sources); ++s)
    for (std::int32_t t = 0; t < static_cast<std::int32_t>(targets); ++t) {
      if (!meetings.any(s, t)) continue;
      out += fmt::format("  {} {} > {}: ", axis, s, t);
      const auto families = meetings.at(s, t);
      for (std::size_t i = 0; i < families.size(); ++i) out += (i == 0 ? "" : "|") + to_string(families[i]);
      out += '\n';
    }
}

// What of the rule in plan.h a reader needs: who is served, and how many of them by one replica each.
void append_senders(std::string& out, const GroupPlan& group) {
  const std::size_t heads = group.source->head_parts.size(), tokens = static_cast<std::size_t>(group.source->tokens.parts);
  for (std::size_t i = 0; i < group.senders.size(); ++i) {
    const Senders& senders = group.senders[i];
    if (senders.replicas < 2) continue;
    std::vector<std::int32_t> targets;
    for (std::size_t t = 0; t < senders.shares.size(); ++t)
      if (senders.shares[t].consumer >= 0) targets.push_back(static_cast<std::int32_t>(t));
    out += fmt::format("  senders {}.{}.{}: {} replicas, targets {}, {} of them whole, {} by layers\n", i / tokens / heads,
                       i / tokens % heads, i % tokens, senders.replicas, list_text(targets), senders.whole,
                       senders.consumers - senders.whole);
  }
}

void append_group(std::string& out, const GroupPlan& group) {
  const auto parts = [](const TokenSplit& split) { return static_cast<std::size_t>(split.parts); };
  out += fmt::format("meet {}\n", group.target->name);
  append_axis(out, "layers", group.layers, group.source->layer_parts.size(), group.target->layer_parts.size());
  append_axis(out, "heads", group.heads, group.source->head_parts.size(), group.target->head_parts.size());
  append_axis(out, "tokens", group.tokens, parts(group.source->tokens), parts(group.target->tokens));
  append_senders(out, group);
}

std::string undigested(const Plan& plan) {
  std::string out = fmt::format("{}\n{}\nsource\n", kHeader, tokens_line(plan.total()));
  append_side(out, plan.source());
  out += "target\n";
  append_side(out, plan.target());
  for (const GroupPlan& group : plan.groups()) append_group(out, group);
  return out;
}

Expected<std::int64_t> read_total(const TextLine& line) {
  std::int64_t total = 0;
  if (line.text == "tokens inf") return kUnbounded;
  constexpr std::string_view kStart = "tokens ";
  if (line.text.substr(0, kStart.size()) != kStart) return unlike(line, "'tokens inf' or 'tokens N'");
  const std::string_view digits = line.text.substr(kStart.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), total);
  if (error != std::errc() || end != digits.data() + digits.size() || total <= 0)
    return unlike(line, "'tokens inf' or 'tokens N'");
  return total;
}

// The first line after `source` that is no line of a side.
TextLine first_stray(const std::vector<TextLine>& lines) {
  const auto of_side = [](const TextLine& line) {
    for (const std::string_view start : {"words ", "page ", "model ", "group ", "  "})
      if (line.text.substr(0, start.size()) == start) return true;
    return false;
  };
  const auto stray = std::find_if_not(lines.begin() + 3, lines.end(), of_side);
  return stray == lines.end() ? TextLine{lines.size() + 1, {}} : *stray;
}

}  // namespace

std::string to_string(const Plan& plan) {
  const std::string text = undigested(plan);
  return text + digest_line(text);
}

std::string digest(const Plan& plan) { return text_digest(undigested(plan)); }

Expected<Plan> compile_read(std::shared_ptr<const Side> source, std::shared_ptr<const Side> target, std::int64_t total) {
  const auto groups = static_cast<std::int64_t>(std::max<std::size_t>(1, target->groups().size()));
  if (std::int64_t{source->ranks()} * target->ranks() * groups > kMaxReadPairs)
    return fail(Code::exhausted, "a plan of {} x {} ranks and {} groups: at most {} pairs of ranks are read", source->ranks(),
                target->ranks(), target->groups().size(), kMaxReadPairs);
  return compile(std::move(source), std::move(target), total);
}

Expected<Plan> parse_plan(std::string_view text) {
  if (text.size() > kMaxTextBytes)
    return fail(Code::exhausted, "a plan's text of {} B: at most {} are read", text.size(), kMaxTextBytes);
  const auto lines = split_lines(text);
  if (lines.size() < 3)
    return fail(Code::parse, "a plan of {} lines: it begins with '{}', 'tokens ...' and 'source'", lines.size(), kHeader);
  if (lines[0].text != kHeader) return unlike(lines[0], fmt::format("'{}'", kHeader));
  const auto total = read_total(lines[1]);
  if (!total) return tl::unexpected(total.error());
  if (lines[2].text != "source") return unlike(lines[2], "'source'");
  const auto cut = std::find_if(lines.begin() + 3, lines.end(), [](const TextLine& line) { return line.text == "target"; });
  if (cut == lines.end()) return unlike(first_stray(lines), "'target'");
  const auto end = std::find_if(cut + 1, lines.end(), [](const TextLine& line) { return line.text.substr(0, 5) == "meet "; });
  auto source = read_side({lines.begin() + 3, cut}), target = source ? read_side({cut + 1, end}) : source;
  if (!source) return tl::unexpected(source.error());
  if (!target) return tl::unexpected(target.error());
  auto plan =
      compile_read(std::make_shared<const Side>(std::move(*source)), std::make_shared<const Side>(std::move(*target)), *total);
  if (!plan) {
    Error error = plan.error();
    error.message = fmt::format("line {}: the two sides make no plan: {}", lines[2].number, error.message);
    return tl::unexpected(std::move(error));
  }
  if (auto same = check_same(text, to_string(*plan)); !same) return tl::unexpected(same.error());
  return plan;
}

}  // namespace kvloom
