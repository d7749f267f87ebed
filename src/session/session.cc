#include "kvloom/session/session.h"

#include <algorithm>

namespace kvloom {
namespace {

bool has_path(const Plan& plan, Rank source, Rank target) {
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(plan.groups().size()); ++g)
    if (plan.path(g, source, target)) return true;
  return false;
}

bool has_any_path(const Plan& plan, Rank source) {
  for (std::int32_t t = 0; t < plan.target().ranks(); ++t)
    if (has_path(plan, source, Rank(t))) return true;
  return false;
}

}  // namespace

Bytes join_below(const Cost& cost) {
  constexpr double kShare = 0.05;
  constexpr std::int64_t kLeast = 4 << 10, kMost = 4 << 20;
  if (cost.per_byte <= 0) return Bytes(kMost);
  // A post is a write of a run or more, and a notice.
  const double apart = 2 * cost.per_post + cost.per_run + cost.per_piece;
  return Bytes(std::clamp(static_cast<std::int64_t>(apart / (kShare * cost.per_byte)), kLeast, kMost));
}

const char* to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::landed: return "landed";
    case Outcome::failed: return "failed";
    case Outcome::cancelled: return "cancelled";
  }
  return "?";
}

std::vector<Rank> granted_sources(const Plan& plan, Rank target) {
  std::vector<Rank> out;
  for (std::int32_t s = 0; s < plan.source().ranks(); ++s) {
    const bool idle = s % plan.target().ranks() == target.value && !has_any_path(plan, Rank(s));
    if (idle || has_path(plan, Rank(s), target)) out.emplace_back(s);
  }
  return out;
}

std::vector<Rank> granting_targets(const Plan& plan, Rank source) {
  std::vector<Rank> out;
  for (std::int32_t t = 0; t < plan.target().ranks(); ++t)
    if (has_path(plan, source, Rank(t))) out.emplace_back(t);
  if (out.empty()) out.emplace_back(source.value % plan.target().ranks());
  return out;
}

}  // namespace kvloom
