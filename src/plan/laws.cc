#include "kvloom/plan/laws.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/oracle.h"
#include "kvloom/plan/text.h"

namespace kvloom::laws {
namespace {

// A plan between two oracles, group by group.
struct Twins {
  const Plan& plan;
  Oracle source, target;

  Twins(const Plan& p, std::int64_t total) : plan(p), source(p.source(), total), target(p.target(), total) {}

  // The group's index on each side; plan groups follow the target's.
  static std::size_t index_in(const Side& side, const std::string& name) {
    std::size_t i = 0;
    while (side.groups()[i].name != name) ++i;
    return i;
  }
  std::size_t in_source(std::int32_t group) const { return index_in(plan.source(), name(group)); }
  std::size_t in_target(std::int32_t group) const { return index_in(plan.target(), name(group)); }
  const std::string& name(std::int32_t group) const { return plan.groups()[static_cast<std::size_t>(group)].target->name; }
  std::int32_t groups() const { return static_cast<std::int32_t>(plan.groups().size()); }

  bool source_holds(std::int32_t group, Rank rank, std::int64_t token) const {
    return holds(source, in_source(group), rank, token);
  }
  bool target_holds(std::int32_t group, Rank rank, std::int64_t token) const {
    return holds(target, in_target(group), rank, token);
  }

 private:
  static bool holds(const Oracle& side, std::size_t group, Rank rank, std::int64_t token) {
    const std::int64_t column = side.spot(group, rank, token).column;
    return side.holds_token(group, rank, token, supposed_page(column));
  }
};

bool filtered(const Path& path, const Twins& twins) {
  return twins.source.by_value(twins.in_source(path.group)) || twins.target.by_value(twins.in_target(path.group));
}

// Tokens of a request that the group's token axis has at all.
std::vector<std::int64_t> tokens_of(const Twins& twins, std::int32_t group, const Request& request) {
  if (twins.plan.groups()[static_cast<std::size_t>(group)].target->kind == GroupKind::state) return {0};
  return request.tokens;
}

std::string at(const Twins& twins, std::int32_t group, std::int64_t layer, std::int64_t token, std::int64_t head) {
  return fmt::format("group {} layer {} token {} head {}", twins.name(group), layer, token, head);
}

// How often the paths to one target rank carry each of its elements.
Expected<void> check_total_of(const Twins& twins, std::int32_t group, Rank target, const Request& request) {
  const GroupSide& side = *twins.plan.groups()[static_cast<std::size_t>(group)].target;
  const auto tokens = tokens_of(twins, group, request);
  const auto heads = static_cast<std::size_t>(side.heads);
  const auto at_index = [&](std::size_t layer, std::size_t token, std::size_t head) {
    return (layer * tokens.size() + token) * heads + head;
  };
  std::vector<std::int64_t> carried(side.layers.size() * tokens.size() * heads, 0);
  for (std::int32_t s = 0; s < twins.plan.source().ranks(); ++s) {
    const auto path = twins.plan.path(group, Rank(s), target);
    if (!path) continue;
    const auto layers = members(path->layers), path_heads = members(path->heads);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::int64_t times = times_in(path->tokens, tokens[i]);
      if (filtered(*path, twins) &&
          !(twins.source_holds(group, Rank(s), tokens[i]) && twins.target_holds(group, target, tokens[i])))
        times = 0;
      if (times == 0) continue;
      for (const std::int64_t layer : layers)
        for (const std::int64_t head : path_heads)
          carried[at_index(static_cast<std::size_t>(layer), i, static_cast<std::size_t>(head))] += times;
    }
  }
  const std::size_t own = twins.in_target(group);
  for (std::size_t layer = 0; layer < side.layers.size(); ++layer) {
    const bool holds_layer = twins.target.holds_layer(own, target, side.layers[layer]);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool holds = holds_layer && twins.target_holds(group, target, tokens[i]);
      for (std::size_t head = 0; head < heads; ++head) {
        const std::int64_t wanted = holds && twins.target.holds_head(own, target, static_cast<std::int64_t>(head)) ? 1 : 0;
        const std::int64_t found = carried[at_index(layer, i, head)];
        if (found != wanted)
          return fail(Code::invalid_argument, "total: decode rank {}, {}: on {} paths, wanted {}", target.value,
                      at(twins, group, side.layers[layer].value, tokens[i], static_cast<std::int64_t>(head)), found, wanted);
      }
    }
  }
  return {};
}

Expected<void> check_faithful_of(const Twins& twins, const Path& path, const Request& request) {
  const std::size_t from = twins.in_source(path.group), to = twins.in_target(path.group);
  const auto refuse = [&](const char* side, const char* axis, std::int64_t index) {
    return fail(Code::invalid_argument, "faithful: path {} -> {} of group {} carries {} {}, which {} rank has not",
                path.source.value, path.target.value, twins.name(path.group), axis, index, side);
  };
  for (const LayerId layer : twins.plan.layer_ids(path)) {
    if (!twins.source.holds_layer(from, path.source, layer)) return refuse("its prefill", "layer", layer.value);
    if (!twins.target.holds_layer(to, path.target, layer)) return refuse("its decode", "layer", layer.value);
  }
  for (const std::int64_t head : members(path.heads)) {
    if (!twins.source.holds_head(from, path.source, head)) return refuse("its prefill", "head", head);
    if (!twins.target.holds_head(to, path.target, head)) return refuse("its decode", "head", head);
  }
  for (const std::int64_t token : tokens_of(twins, path.group, request)) {
    if (times_in(path.tokens, token) == 0) continue;
    if (!twins.source.by_value(from) && !twins.source_holds(path.group, path.source, token))
      return refuse("its prefill", "token", token);
    if (!twins.target.by_value(to) && !twins.target_holds(path.group, path.target, token))
      return refuse("its decode", "token", token);
  }
  return {};
}

Expected<void> check_bounds_of(const Twins& twins, const Path& path) {
  const GroupSide& side = *twins.plan.groups()[static_cast<std::size_t>(path.group)].target;
  const auto refuse = [&](const std::string& what) {
    return fail(Code::invalid_argument, "in bounds: path {} -> {} of group {}: {}", path.source.value, path.target.value,
                side.name, what);
  };
  const auto layers = members(path.layers), heads = members(path.heads);
  if (layers.empty() || heads.empty() || path.tokens.empty()) return refuse("an axis is empty");
  if (layers.front() < 0 || layers.back() >= static_cast<std::int64_t>(side.layers.size()))
    return refuse("layers " + to_string(path.layers));
  if (heads.front() < 0 || heads.back() >= side.heads ||
      heads.back() - heads.front() + 1 != static_cast<std::int64_t>(heads.size()))
    return refuse("heads " + to_string(path.heads));
  std::int64_t row = 0;
  for (const PlaneShape& plane : side.planes) row += plane.bytes;
  if (path.row_bytes != row * static_cast<std::int64_t>(heads.size())) return refuse(fmt::format("rows of {} B", path.row_bytes));
  for (std::size_t i = 0; i < path.tokens.size(); ++i) {
    const StridedSet& family = path.tokens[i];
    if (family.count() < 1 || family.start() < 0) return refuse("tokens " + to_string(family));
    if (i > 0 && family.start() <= path.tokens[i - 1].start()) return refuse("families do not ascend at " + to_string(family));
  }
  return {};
}

// What a path carries of the request, element by element.
using Box = std::tuple<std::int32_t, std::int32_t, std::string, std::vector<LayerId>, std::vector<std::int64_t>,
                       std::vector<std::int64_t>>;

std::set<Box> boxes(const Plan& plan, const Request& request, bool mirrored) {
  const Twins twins(plan, request.total);
  std::set<Box> out;
  for (const Path& path : plan.paths()) {
    std::vector<std::int64_t> tokens;
    for (const std::int64_t token : tokens_of(twins, path.group, request))
      if (times_in(path.tokens, token) != 0) tokens.push_back(token);
    if (tokens.empty()) continue;  // beyond the request
    const std::int32_t from = path.source.value, to = path.target.value;
    out.emplace(mirrored ? to : from, mirrored ? from : to, twins.name(path.group), plan.layer_ids(path), members(path.heads),
                tokens);
  }
  return out;
}

bool has_replicas(const Oracle& side) {
  for (std::size_t g = 0; g < side.side().groups().size(); ++g) {
    std::set<std::int64_t> signs;
    for (std::int32_t r = 0; r < side.side().ranks(); ++r)
      if (const std::int64_t sign = side.sign(g, Rank(r)); sign >= 0 && !signs.insert(sign).second) return true;
  }
  return false;
}

bool same_groups(const Side& a, const Side& b) {
  if (a.groups().size() != b.groups().size()) return false;
  return std::equal(a.groups().begin(), a.groups().end(), b.groups().begin(),
                    [](const GroupSide& x, const GroupSide& y) { return x.name == y.name && x.layers == y.layers; });
}

}  // namespace

std::int64_t supposed_page(std::int64_t column) { return column * 5 + column / 3 + 2; }

std::vector<std::int64_t> members(const StridedSet& set) {
  std::vector<std::int64_t> out;
  for (std::int64_t block = 0; block < set.count(); ++block)
    for (std::int64_t segment = 0; segment < set.inner_count(); ++segment)
      for (std::int64_t i = 0; i < set.length(); ++i)
        out.push_back(set.start() + block * set.stride() + segment * set.inner_stride() + i);
  return out;
}

std::int64_t times_in(std::span<const StridedSet> families, std::int64_t token) {
  std::int64_t times = 0;
  for (const StridedSet& family : families) {
    std::int64_t offset = token - family.start();
    if (family.count() == 0 || offset < 0) continue;
    if (family.count() > 1) {
      if (offset / family.stride() >= family.count()) continue;
      offset %= family.stride();
    }
    if (family.inner_count() > 1) {
      if (offset / family.inner_stride() >= family.inner_count()) continue;
      offset %= family.inner_stride();
    }
    times += offset < family.length() ? 1 : 0;
  }
  return times;
}

Request whole(std::int64_t total, std::int64_t prefix) {
  Request request{total, prefix, {}};
  for (std::int64_t t = 0; t < total; ++t) request.tokens.push_back(t);
  return request;
}

Request sampled(std::int64_t total, std::int64_t prefix, std::span<const std::int64_t> near) {
  std::set<std::int64_t> tokens;
  const auto add = [&](std::int64_t center) {
    for (std::int64_t t = center - 2; t <= center + 2; ++t)
      if (t >= 0 && t < total) tokens.insert(t);
  };
  add(0);
  add(prefix);
  add(total);
  for (const std::int64_t center : near) add(center);
  return {total, prefix, {tokens.begin(), tokens.end()}};
}

Expected<void> check_total(const Plan& plan, const Request& request) {
  const Twins twins(plan, request.total);
  for (std::int32_t group = 0; group < twins.groups(); ++group)
    for (std::int32_t t = 0; t < plan.target().ranks(); ++t)
      if (auto ok = check_total_of(twins, group, Rank(t), request); !ok) return ok;
  return {};
}

Expected<void> check_faithful(const Plan& plan, const Request& request) {
  const Twins twins(plan, request.total);
  for (const Path& path : plan.paths())
    if (auto ok = check_faithful_of(twins, path, request); !ok) return ok;
  return {};
}

Expected<void> check_in_bounds(const Plan& plan) {
  const Twins twins(plan, 1);
  for (const Path& path : plan.paths())
    if (auto ok = check_bounds_of(twins, path); !ok) return ok;
  return {};
}

Expected<void> check_conserving(const Plan& plan, const Request& request) {
  const Twins twins(plan, request.total);
  std::vector<std::int64_t> sent(plan.groups().size(), 0);
  for (const Path& path : plan.paths())
    sent[static_cast<std::size_t>(path.group)] += plan.bytes(path, {request.prefix, request.total}).value;
  for (std::int32_t group = 0; group < twins.groups(); ++group) {
    const std::int64_t wanted = twins.target.wanted_bytes(twins.in_target(group), request.prefix);
    const bool value = twins.source.by_value(twins.in_source(group)) || twins.target.by_value(twins.in_target(group));
    const std::int64_t said = sent[static_cast<std::size_t>(group)];
    if (value ? said < wanted : said != wanted)  // by page value the plan knows only what it could be at most
      return fail(Code::invalid_argument, "conserving: group {}: the paths of tokens [{}, {}) have {} bytes, wanted {}",
                  twins.name(group), request.prefix, request.total, said, wanted);
  }
  return {};
}

Expected<void> check_canonical(const Plan& plan) {
  auto again = compile(plan.source(), plan.target(), plan.total());
  if (!again) return fail(Code::invalid_argument, "canonical: the second compile fails: {}", again.error().message);
  const Plan copy = *again;
  const std::string first = to_string(plan), second = to_string(copy);
  if (first == second) return {};
  const auto differ =
      static_cast<std::size_t>(std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first - first.begin());
  return fail(Code::invalid_argument, "canonical: the second text differs from byte {} on: '{}'", differ,
              second.substr(differ, 60));
}

Expected<void> check_reversible(const Plan& plan, const Request& request) {
  if (!same_groups(plan.source(), plan.target())) return {};  // what one side has not, it cannot give back
  auto back = compile(plan.target(), plan.source(), plan.total());
  if (!back) return fail(Code::invalid_argument, "reversible: no way back: {}", back.error().message);
  if (auto ok = check_total(*back, request); !ok)
    return fail(Code::invalid_argument, "reversible: on the way back: {}", ok.error().message);
  const Twins twins(plan, request.total);
  if (has_replicas(twins.source) || has_replicas(twins.target)) return {};
  const auto forth = boxes(plan, request, false), mirrored = boxes(*back, request, true);
  if (forth != mirrored)
    return fail(Code::invalid_argument, "reversible: {} boxes forth, {} back, not the same", forth.size(), mirrored.size());
  return {};
}

Expected<void> check_balanced(const Plan& plan) {
  const Twins twins(plan, plan.total() == kUnbounded ? 1 : plan.total());
  std::map<std::pair<std::int32_t, std::int64_t>, std::map<std::int32_t, std::int64_t>>
      units;  // (group, sign) -> rank -> units sent
  for (std::int32_t group = 0; group < twins.groups(); ++group)
    for (std::int32_t r = 0; r < plan.source().ranks(); ++r)
      if (const std::int64_t sign = twins.source.sign(twins.in_source(group), Rank(r)); sign >= 0) units[{group, sign}][r] = 0;
  for (const Path& path : plan.paths())
    units[{path.group, twins.source.sign(twins.in_source(path.group), path.source)}][path.source.value] +=
        static_cast<std::int64_t>(members(path.layers).size());
  for (const auto& [key, ranks] : units) {
    const auto [least, most] =
        std::minmax_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most->second - least->second > 1)
      return fail(Code::invalid_argument,
                  "balanced: group {}: prefill rank {} sends {} (consumer, layer) units, its replica {} sends {}",
                  twins.name(key.first), most->first, most->second, least->first, least->second);
  }
  return {};
}

Expected<void> check_plan(const Plan& plan, const Request& request) {
  if (auto ok = check_in_bounds(plan); !ok) return ok;  // first: the others index by what a path says
  for (auto law : {check_total, check_faithful, check_conserving, check_reversible})
    if (auto ok = law(plan, request); !ok) return ok;
  for (auto law : {check_canonical, check_balanced})
    if (auto ok = law(plan); !ok) return ok;
  return {};
}

}  // namespace kvloom::laws
