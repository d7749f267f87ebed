#include "kvloom/plan/verify.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace kvloom {
namespace {

struct Window {
  std::int64_t begin, end;
};

// Disjoint intervals, by sorting.
bool disjoint_intervals(std::vector<StridedSet> parts) {
  std::sort(parts.begin(), parts.end(), [](const StridedSet& a, const StridedSet& b) { return a.start() < b.start(); });
  std::int64_t end = 0;
  for (const StridedSet& part : parts) {
    if (part.empty()) continue;
    if (!part.interval() || part.start() < end) return false;
    end = part.end();
  }
  return true;
}

// Residue windows [start, start + length) modulo one stride: disjoint if sorted neighbours do not touch, round the end too.
bool disjoint_residues(std::vector<StridedSet> parts) {
  std::sort(parts.begin(), parts.end(), [](const StridedSet& a, const StridedSet& b) { return a.start() < b.start(); });
  const std::int64_t stride = parts.front().stride();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const StridedSet& part = parts[i];
    if (!part.flat() || part.stride() != stride || part.start() + part.length() > stride) return false;
    if (i > 0 && parts[i - 1].start() + parts[i - 1].length() > part.start()) return false;
  }
  return true;
}

// Few segments each (blocked: one; zigzag: two), taken one by one.
bool disjoint_segments(const std::vector<StridedSet>& parts) {
  std::vector<StridedSet> segments;
  for (const StridedSet& part : parts) {
    if (!part.bounded() || !part.flat()) return false;
    for (std::int64_t k = 0; k < part.count(); ++k)
      segments.push_back(
          StridedSet::interval(part.start() + k * part.stride(), part.start() + k * part.stride() + part.length()));
  }
  return disjoint_intervals(std::move(segments));
}

std::vector<StridedSet> token_parts(const GroupSide& side, std::int64_t total) {
  std::vector<StridedSet> parts;
  parts.reserve(static_cast<std::size_t>(side.tokens.parts));
  for (std::int32_t d = 0; d < side.tokens.parts; ++d) parts.push_back(side.tokens.part(d, total));
  return parts;
}

bool disjoint_tokens(const GroupSide& side, std::int64_t total) {
  // `value`: each virtual page has one owner by its own value; one part (`all`) is disjoint by itself.
  if (side.tokens.parts == 1 || side.tokens.rule == TokenRule::value) return true;
  std::vector<StridedSet> parts = token_parts(side, total);
  if (side.tokens.rule == TokenRule::cyclic) return disjoint_residues(std::move(parts));
  return disjoint_segments(parts);
}

// A stretch of tokens whose counts stand for all: the request, or one common period.
Expected<Window> counting_window(const GroupPlan& plan, std::int64_t total) {
  if (total != kUnbounded) return Window{0, total};
  std::int64_t period = 1;
  for (const GroupSide* side : {plan.source, plan.target}) {
    const StridedSet part = side->tokens.part(0, total);
    if (part.period() == 0) continue;
    const auto joint = checked_mul(period / std::gcd(period, part.period()), part.period());
    if (!joint || *joint > kUnbounded / 4)
      return fail(Code::unsupported, "group {}: the stripes of the two sides line up only every {} x {} tokens",
                  plan.target->name, period, part.period());
    period = *joint;
  }
  return Window{0, period};
}

std::int64_t count(std::span<const StridedSet> families, Window window) {
  std::int64_t sum = 0;
  for (const StridedSet& family : families) sum += family.count_in(window.begin, window.end);
  return sum;
}

// Both levels of the family either step by whole periods of the part, or stay inside one of its segments.  @pre part.flat()
bool lies_in(const StridedSet& family, const StridedSet& part) {
  if (family.empty()) return true;
  if (part.empty() || family.start() < part.start() || family.end() > part.end()) return false;
  if (part.interval()) return true;
  if (family.length() == kUnbounded) return false;
  Wide extent = family.length();
  if (family.inner_count() > 1 && family.inner_stride() % part.stride() != 0)
    extent += Wide(family.inner_stride()) * (family.inner_count() - 1);
  if (family.count() > 1 && family.stride() % part.stride() != 0) extent += Wide(family.stride()) * (family.count() - 1);
  return (family.start() - part.start()) % part.stride() + extent <= part.length();
}

// Step 1 on one axis: what meets lies in both parts.
Expected<void> check_inside(const GroupPlan& plan, const char* axis, const Meetings& meetings,
                            const std::vector<StridedSet>& sources, const std::vector<StridedSet>& targets) {
  for (std::size_t s = 0; s < sources.size(); ++s)
    for (std::size_t t = 0; t < targets.size(); ++t)
      for (const StridedSet& family : meetings.at(static_cast<std::int32_t>(s), static_cast<std::int32_t>(t)))
        if (!lies_in(family, sources[s]) || !lies_in(family, targets[t]))
          return fail(Code::unsupported, "group {}: {} of the {} lies outside prefill's part {} or decode's part {}",
                      plan.target->name, to_string(family), axis, to_string(sources[s]), to_string(targets[t]));
  return {};
}

// Source parts of layers in the target's ordinals, id by id.
std::vector<StridedSet> source_layers(const GroupPlan& plan) {
  const auto below = [&](std::int64_t ordinal) {  // target layers whose ids are below that of the source's ordinal
    const auto& ids = plan.target->layers;
    if (ordinal == static_cast<std::int64_t>(plan.source->layers.size())) return static_cast<std::int64_t>(ids.size());
    const LayerId id = plan.source->layers[static_cast<std::size_t>(ordinal)];
    return static_cast<std::int64_t>(std::count_if(ids.begin(), ids.end(), [&](LayerId layer) { return layer < id; }));
  };
  std::vector<StridedSet> out;
  out.reserve(plan.source->layer_parts.size());
  for (const StridedSet& part : plan.source->layer_parts)
    out.push_back(part.empty() ? StridedSet() : StridedSet::interval(below(part.start()), below(part.end())));
  return out;
}

// Step 2 on one axis.  `value` sources: every rank offers every token and the page decides, so one row stands for all.
Expected<void> check_axis(const GroupPlan& plan, const char* axis, const Meetings& meetings, std::int64_t sources,
                          const std::vector<StridedSet>& targets, Window window) {
  for (std::size_t t = 0; t < targets.size(); ++t) {
    std::int64_t met = 0;
    for (std::int64_t s = 0; s < sources; ++s)
      met += count(meetings.at(static_cast<std::int32_t>(s), static_cast<std::int32_t>(t)), window);
    const std::int64_t want = targets[t].count_in(window.begin, window.end);
    if (met != want)
      return fail(Code::unsupported, "group {}: decode's part {} of the {} has {} members, of which prefill's parts hold {}",
                  plan.target->name, to_string(targets[t]), axis, want, met);
  }
  return {};
}

Expected<void> check_axes(const GroupPlan& plan, std::int64_t total) {
  const GroupSide &source = *plan.source, &target = *plan.target;
  if (!disjoint_intervals(source.layer_parts) || !disjoint_intervals(source.head_parts) || !disjoint_tokens(source, total))
    return fail(Code::unsupported, "group {}: two prefill parts overlap", target.name);
  auto window = counting_window(plan, total);
  if (!window) return tl::unexpected(window.error());
  const auto token_sources = token_parts(source, total), token_targets = token_parts(target, total);
  const bool same_layers = source.layers == target.layers;
  if (auto ok =
          check_inside(plan, "layers", plan.layers, same_layers ? source.layer_parts : source_layers(plan), target.layer_parts);
      !ok)
    return ok;
  if (auto ok = check_inside(plan, "heads", plan.heads, source.head_parts, target.head_parts); !ok) return ok;
  if (auto ok = check_inside(plan, "tokens", plan.tokens, token_sources, token_targets); !ok) return ok;
  const Window layers{0, static_cast<std::int64_t>(target.layers.size())}, heads{0, target.heads};
  const auto size = [](const std::vector<StridedSet>& parts) { return static_cast<std::int64_t>(parts.size()); };
  const std::int64_t token_rows = source.tokens.rule == TokenRule::value ? 1 : source.tokens.parts;
  if (auto ok = check_axis(plan, "layers", plan.layers, size(source.layer_parts), target.layer_parts, layers); !ok) return ok;
  if (auto ok = check_axis(plan, "heads", plan.heads, size(source.head_parts), target.head_parts, heads); !ok) return ok;
  return check_axis(plan, "tokens", plan.tokens, token_rows, token_targets, *window);
}

// Step 3: every product of source parts that a target part meets has a rank.
Expected<void> check_holders(const GroupPlan& plan) {
  const GroupSide &source = *plan.source, &target = *plan.target;
  const auto met = [](const Meetings& meetings, std::size_t parts, std::size_t targets) {
    std::vector<std::int32_t> out;
    for (std::size_t s = 0; s < parts; ++s)
      for (std::size_t t = 0; t < targets; ++t)
        if (meetings.any(static_cast<std::int32_t>(s), static_cast<std::int32_t>(t))) {
          out.push_back(static_cast<std::int32_t>(s));
          break;
        }
    return out;
  };
  const auto layers = met(plan.layers, source.layer_parts.size(), target.layer_parts.size());
  const auto heads = met(plan.heads, source.head_parts.size(), target.head_parts.size());
  const auto tokens =
      met(plan.tokens, static_cast<std::size_t>(source.tokens.parts), static_cast<std::size_t>(target.tokens.parts));
  for (const std::int32_t l : layers)
    for (const std::int32_t h : heads)
      for (const std::int32_t t : tokens)
        if (plan.senders_of({l, h, t, 0, true}).replicas < 1)
          return fail(Code::unsupported, "group {}: no prefill rank holds layers {} of heads {}, token part {}", target.name,
                      to_string(source.layer_parts[static_cast<std::size_t>(l)]),
                      to_string(source.head_parts[static_cast<std::size_t>(h)]), t);
  return {};
}

// Step 4, for the triples that have a choice.
Expected<void> check_shares(const Plan& plan, std::int32_t group) {
  const GroupPlan& g = plan.groups()[static_cast<std::size_t>(group)];
  for (std::int32_t t = 0; t < plan.target().ranks(); ++t) {
    const Place& to = g.target->places[static_cast<std::size_t>(t)];
    if (!to.holds) continue;
    std::vector<std::int64_t> sent(g.senders.size(), 0);
    bool choice = false;
    for (std::int32_t s = 0; s < plan.source().ranks(); ++s) {
      const Place& from = g.source->places[static_cast<std::size_t>(s)];
      if (!from.holds || g.senders_of(from).replicas < 2) continue;
      choice = true;
      if (const auto path = plan.path(group, Rank(s), Rank(t)))
        sent[static_cast<std::size_t>(&g.senders_of(from) - g.senders.data())] += path->layers.size();
    }
    if (!choice) continue;
    for (std::int32_t s = 0; s < plan.source().ranks(); ++s) {
      const Place& from = g.source->places[static_cast<std::size_t>(s)];
      if (!from.holds || g.senders_of(from).replicas < 2 || g.senders_of(from).shares[static_cast<std::size_t>(t)].consumer < 0)
        continue;
      const std::int64_t want = g.layers.at(from.layers, to.layers).front().size();
      const std::int64_t got = sent[static_cast<std::size_t>(&g.senders_of(from) - g.senders.data())];
      if (got != want)
        return fail(Code::unsupported, "group {}: replicas send {} of {} layers to decode rank {}", g.target->name, got, want, t);
    }
  }
  return {};
}

}  // namespace

Expected<void> prove_exact_cover(const Plan& plan) {
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan.groups().size()); ++g) {
    const GroupPlan& group = plan.groups()[static_cast<std::size_t>(g)];
    if (auto ok = check_axes(group, plan.total()); !ok) return ok;
    if (auto ok = check_holders(group); !ok) return ok;
    const bool choice = std::any_of(group.senders.begin(), group.senders.end(), [](const Senders& s) { return s.replicas > 1; });
    if (choice)
      if (auto ok = check_shares(plan, g); !ok) return ok;
  }
  return {};
}

}  // namespace kvloom
