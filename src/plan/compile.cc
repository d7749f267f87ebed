#include "kvloom/plan/compile.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "kvloom/plan/verify.h"

namespace kvloom {
namespace {

constexpr std::size_t kMaxMeetings = std::size_t{1} << 20;
constexpr std::int64_t kMaxTotal = std::int64_t{1} << 60;

std::string layer_text(LayerId layer) { return fmt::format("layer {}", layer.value); }

Expected<void> check_planes(const GroupSide& source, const GroupSide& target) {
  if (source.kind != target.kind)
    return fail(Code::unsupported, "group {}: one side keeps it in pages, the other as a state per request", target.name);
  if (source.heads != target.heads)
    return fail(Code::unsupported, "group {}: prefill has {} heads, decode {}: they must be one model's", target.name,
                source.heads, target.heads);
  if (source.planes.size() != target.planes.size())
    return fail(Code::unsupported, "group {}: prefill rows have {} planes, decode rows {}", target.name, source.planes.size(),
                target.planes.size());
  for (std::size_t i = 0; i < target.planes.size(); ++i) {
    const PlaneShape &from = source.planes[i], &to = target.planes[i];
    if (from.name != to.name || from.bytes != to.bytes)
      return fail(Code::unsupported,
                  "group {}: prefill rows hold {} of {} B where decode rows hold {} of {} B; use one KV dtype on both sides",
                  target.name, from.name, from.bytes, to.name, to.bytes);
    if (from.element_bytes != to.element_bytes)
      return fail(Code::unsupported, "group {} plane {}: elements of {} B in prefill, of {} B in decode", target.name, to.name,
                  from.element_bytes, to.element_bytes);
  }
  return {};
}

Expected<void> check_layers(const GroupSide& source, const GroupSide& target) {
  for (const LayerId layer : target.layers)
    if (!std::binary_search(source.layers.begin(), source.layers.end(), layer))
      return fail(Code::unsupported, "group {}: decode wants {}, which no prefill rank holds", target.name, layer_text(layer));
  return {};
}

Expected<void> check_size(const GroupSide& source, const GroupSide& target) {
  const auto tokens = static_cast<std::size_t>(source.tokens.parts) * static_cast<std::size_t>(target.tokens.parts);
  const auto layers = source.layer_parts.size() * target.layer_parts.size(),
             heads = source.head_parts.size() * target.head_parts.size();
  if (std::max({tokens, layers, heads}) > kMaxMeetings)
    return fail(Code::unsupported, "group {}: {} parts meet on one axis, over the limit of {}: use fewer ranks", target.name,
                std::max({tokens, layers, heads}), kMaxMeetings);
  return {};
}

// Stripes that do not divide each other meet in many families: about (sum of the stripes) / gcd(strides), for each pair of parts.
Expected<void> check_stripes(const GroupSide& source, const GroupSide& target) {
  if (source.tokens.rule != TokenRule::cyclic || target.tokens.rule != TokenRule::cyclic) return {};
  const std::int64_t pairs = std::int64_t{source.tokens.parts} * target.tokens.parts;
  const std::int64_t step = std::gcd(source.tokens.parts * source.tokens.stripe, target.tokens.parts * target.tokens.stripe);
  const std::int64_t families = 3 * (source.tokens.stripe + target.tokens.stripe) / step + 1;
  if (pairs > static_cast<std::int64_t>(3 * kMaxMeetings) / families)
    return fail(Code::unsupported,
                "group {}: stripes of {} tokens over {} ranks and {} over {} meet in over {} families: use stripes of which one "
                "divides the other",
                target.name, source.tokens.stripe, source.tokens.parts, target.tokens.stripe, target.tokens.parts, kMaxMeetings);
  return {};
}

// A source part of layers, in the target's ordinals: both lists ascend, so an interval stays one.
StridedSet in_target_ordinals(const GroupSide& source, const GroupSide& target, const StridedSet& part) {
  if (part.empty()) return {};
  const LayerId first = source.layers[static_cast<std::size_t>(part.start())],
                last = source.layers[static_cast<std::size_t>(part.end() - 1)];
  const auto at = [&](auto it) { return static_cast<std::int64_t>(it - target.layers.begin()); };
  return StridedSet::interval(at(std::lower_bound(target.layers.begin(), target.layers.end(), first)),
                              at(std::upper_bound(target.layers.begin(), target.layers.end(), last)));
}

Meetings meet_intervals(const std::vector<StridedSet>& source, const std::vector<StridedSet>& target) {
  Meetings out(source.size(), target.size());
  for (const StridedSet& a : source)
    for (const StridedSet& b : target) {
      const StridedSet both = StridedSet::interval(std::max(a.start(), b.start()), std::min(a.end(), b.end()));
      out.add(both.empty() ? std::span<const StridedSet>() : std::span(&both, 1));
    }
  return out;
}

Meetings meet_layers(const GroupSide& source, const GroupSide& target) {
  if (source.layers == target.layers) return meet_intervals(source.layer_parts, target.layer_parts);
  std::vector<StridedSet> parts;
  parts.reserve(source.layer_parts.size());
  for (const StridedSet& part : source.layer_parts) parts.push_back(in_target_ordinals(source, target, part));
  return meet_intervals(parts, target.layer_parts);
}

std::vector<StridedSet> token_parts(const TokenSplit& split, std::int64_t total) {
  std::vector<StridedSet> out;
  out.reserve(static_cast<std::size_t>(split.parts));
  for (std::int32_t d = 0; d < split.parts; ++d) out.push_back(split.part(d, total));
  return out;
}

Meetings meet_tokens(const GroupSide& source, const GroupSide& target, std::int64_t total) {
  const auto from = token_parts(source.tokens, total), to = token_parts(target.tokens, total);
  Meetings out(from.size(), to.size());
  for (const StridedSet& a : from)
    for (const StridedSet& b : to) out.add(intersect(a, b));
  return out;
}

// Deals one class of consumers (see plan.h): target ranks that take `layers` layers each. `dealt`: units dealt before.
void share_out(const std::vector<std::size_t>& targets, std::int64_t layers, std::int64_t& dealt, Senders& senders) {
  const auto replicas = static_cast<std::size_t>(senders.replicas);
  const std::size_t left = targets.size() % replicas, whole = targets.size() - left;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    Senders::Share& share = senders.shares[targets[i]];
    const std::int64_t first = i < whole ? static_cast<std::int64_t>(i) : dealt + static_cast<std::int64_t>(i - whole);
    share.first = static_cast<std::int32_t>(first % senders.replicas);
    share.step = i < whole ? 0 : static_cast<std::int32_t>(left);
  }
  senders.whole += static_cast<std::int32_t>(whole);
  dealt += static_cast<std::int64_t>(left) * layers;
}

// Which of `senders.replicas` ranks at `place` serves which target.
void choose(const GroupPlan& plan, const Place& place, Senders& senders) {
  const std::vector<Place>& targets = plan.target->places;
  std::map<std::int64_t, std::vector<std::size_t>> classes;  // by layers taken
  senders.shares.resize(targets.size());
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const Place& to = targets[t];
    if (!to.holds || !plan.layers.any(place.layers, to.layers) || !plan.heads.any(place.heads, to.heads) ||
        !plan.tokens.any(place.tokens, to.tokens))
      continue;
    senders.shares[t].consumer = senders.consumers++;
    classes[plan.layers.at(place.layers, to.layers).front().size()].push_back(t);
  }
  std::int64_t dealt = 0;
  for (const auto& [layers, members] : classes) share_out(members, layers, dealt, senders);
}

// Counts replicas of each source triple and, where there are several, shares out the targets that they serve.
std::vector<Senders> choose_senders(const GroupPlan& plan) {
  const GroupSide& source = *plan.source;
  const std::size_t heads = source.head_parts.size(), tokens = static_cast<std::size_t>(source.tokens.parts);
  std::vector<Senders> out(source.layer_parts.size() * heads * tokens);
  for (Senders& senders : out) senders.replicas = 0;
  const auto senders_at = [&](const Place& place) -> Senders& {
    return out[(static_cast<std::size_t>(place.layers) * heads + static_cast<std::size_t>(place.heads)) * tokens +
               static_cast<std::size_t>(place.tokens)];
  };
  for (const Place& place : source.places)
    if (place.holds) ++senders_at(place).replicas;
  for (const Place& place : source.places)
    if (place.holds && place.replica == 0 && senders_at(place).replicas > 1) choose(plan, place, senders_at(place));
  return out;
}

}  // namespace

class Compiler {
 public:
  Compiler(std::shared_ptr<const Side> source, std::shared_ptr<const Side> target, std::int64_t total) {
    plan_.source_ = std::move(source);
    plan_.target_ = std::move(target);
    plan_.total_ = total;
  }

  Expected<Plan> run() {
    for (const GroupSide& target : plan_.target_->groups())
      if (auto ok = add_group(target); !ok) return tl::unexpected(ok.error());
    if (auto proof = prove_exact_cover(plan_); !proof) return tl::unexpected(proof.error());
    return std::move(plan_);
  }

 private:
  Expected<void> add_group(const GroupSide& target) {
    const GroupSide* source = plan_.source_->find(target.name);
    if (source == nullptr)
      return fail(Code::unsupported,
                  "decode has the cache group {}, prefill has not: say {}:none for decode, or give prefill that group",
                  target.name, target.name);
    for (auto check : {check_planes, check_layers, check_size, check_stripes})
      if (auto ok = check(*source, target); !ok) return ok;
    if ((source->tokens.needs_total() || target.tokens.needs_total()) && plan_.total_ == kUnbounded)
      return fail(Code::unsupported, "group {}: zigzag and blocked cut the request's length: compile with the number of tokens",
                  target.name);
    GroupPlan group;
    group.source = source;
    group.target = &target;
    group.layers = meet_layers(*source, target);
    group.heads = meet_intervals(source->head_parts, target.head_parts);
    group.tokens = tokens_of(*source, target);
    group.senders = choose_senders(group);
    plan_.groups_.push_back(std::move(group));
    return {};
  }

  // Groups mostly share their token rules: then the meetings are the ones of a group before.
  Meetings tokens_of(const GroupSide& source, const GroupSide& target) const {
    for (const GroupPlan& before : plan_.groups_)
      if (before.source->tokens == source.tokens && before.target->tokens == target.tokens) return before.tokens;
    return meet_tokens(source, target, plan_.total_);
  }

  Plan plan_;
};

Expected<Plan> compile(std::shared_ptr<const Side> source, std::shared_ptr<const Side> target, std::int64_t total) {
  if (total <= 0) return fail(Code::invalid_argument, "tokens={}: a plan needs at least 1 token", total);
  if (total != kUnbounded && total > kMaxTotal) return fail(Code::overflow, "tokens={}: at most 2^60", total);
  return Compiler(std::move(source), std::move(target), total).run();
}

Expected<Plan> compile(const Side& source, const Side& target, std::int64_t total) {
  return compile(std::make_shared<const Side>(source), std::make_shared<const Side>(target), total);
}

}  // namespace kvloom
