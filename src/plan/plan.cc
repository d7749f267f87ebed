#include "kvloom/plan/plan.h"

#include <algorithm>
#include <numeric>

namespace kvloom {

TokenRange wanted(const GroupSide& target, TokenRange range) {
  if (target.kind == GroupKind::state) return {0, range.end > 0 ? 1 : 0};
  if (!target.window) return range;
  const std::int64_t size = target.window->tokens;
  const std::int64_t first = target.window->kind == Window::Kind::sliding ? range.end - size : range.end / size * size;
  return {std::max(range.begin, first), range.end};
}

namespace {

std::size_t triple_of(const GroupSide& side, const Place& place) {
  const auto heads = static_cast<std::size_t>(side.head_parts.size()), tokens = static_cast<std::size_t>(side.tokens.parts);
  return (static_cast<std::size_t>(place.layers) * heads + static_cast<std::size_t>(place.heads)) * tokens +
         static_cast<std::size_t>(place.tokens);
}

// x with a * x = 1 modulo m, by the extended Euclid.  @pre gcd(a, m) == 1
std::int64_t inverse(std::int64_t a, std::int64_t m) {
  std::int64_t r0 = m, r1 = floor_mod(a, m), x0 = 0, x1 = 1;
  while (r1 > 1) {
    const std::int64_t q = r0 / r1;
    r0 -= q * r1;
    x0 -= q * x1;
    std::swap(r0, r1);
    std::swap(x0, x1);
  }
  return m == 1 ? 0 : floor_mod(x1, m);
}

// The layers of a consumer's that replica r sends: those l (from 0) with first + l * step = r modulo R.
// Solved with one modular inverse: a path costs the same however many replicas there are.
StridedSet dealt_layers(const StridedSet& layers, const Senders::Share& share, std::int64_t r, std::int64_t replicas) {
  const std::int64_t n = layers.size(), g = std::gcd(std::int64_t{share.step}, replicas), step = replicas / g,
                     ahead = r - share.first;
  if (ahead % g != 0) return {};
  const std::int64_t l = floor_mod(floor_mod(ahead / g, step) * inverse(share.step / g, step), step);
  if (l >= n) return {};
  return StridedSet::make(layers.start() + l, 1, step, ceil_div(n - l, step)).value_or(StridedSet());
}

}  // namespace

const Senders& GroupPlan::senders_of(const Place& source_place) const { return senders[triple_of(*source, source_place)]; }

std::int64_t Path::token_count(TokenRange range) const {
  std::int64_t sum = 0;
  for (const StridedSet& family : tokens) sum += family.count_in(range.begin, range.end);
  return sum;
}

std::optional<Path> Plan::path(std::int32_t group, Rank source, Rank target) const {
  const GroupPlan& plan = groups_[static_cast<std::size_t>(group)];
  const Place& from = plan.source->places[static_cast<std::size_t>(source.value)];
  const Place& to = plan.target->places[static_cast<std::size_t>(target.value)];
  if (!from.holds || !to.holds || !plan.layers.any(from.layers, to.layers) || !plan.heads.any(from.heads, to.heads) ||
      !plan.tokens.any(from.tokens, to.tokens))
    return std::nullopt;
  Path path{source,
            target,
            group,
            plan.layers.at(from.layers, to.layers).front(),
            plan.heads.at(from.heads, to.heads).front(),
            plan.tokens.at(from.tokens, to.tokens),
            0};
  if (const Senders& senders = plan.senders_of(from); senders.replicas > 1) {
    const Senders::Share& share = senders.shares[static_cast<std::size_t>(target.value)];
    if (share.step == 0) {
      if (share.first != from.replica) return std::nullopt;
    } else {
      path.layers = dealt_layers(path.layers, share, from.replica, senders.replicas);
      if (path.layers.empty()) return std::nullopt;
    }
  }
  for (const PlaneShape& plane : plan.target->planes) path.row_bytes += plane.bytes * path.heads.size();
  return path;
}

std::vector<Path> Plan::paths() const {
  std::vector<Path> out;
  for (std::int32_t s = 0; s < source_->ranks(); ++s)
    for (std::int32_t t = 0; t < target_->ranks(); ++t)
      for (std::int32_t g = 0; g < static_cast<std::int32_t>(groups_.size()); ++g)
        if (auto found = path(g, Rank(s), Rank(t))) out.push_back(*found);
  return out;
}

Bytes Plan::bytes(const Path& path, TokenRange range) const {
  const TokenRange want = wanted(*groups_[static_cast<std::size_t>(path.group)].target, range);
  return Bytes(path.token_count(want) * path.row_bytes * path.layers.size());
}

std::vector<LayerId> Plan::layer_ids(const Path& path) const {
  const std::vector<LayerId>& all = groups_[static_cast<std::size_t>(path.group)].target->layers;
  std::vector<LayerId> out;
  for (std::int64_t l = 0; l < path.layers.count(); ++l)
    for (std::int64_t x = 0; x < path.layers.length(); ++x)
      out.push_back(all[static_cast<std::size_t>(path.layers.start() + l * path.layers.stride() + x)]);
  return out;
}

}  // namespace kvloom
