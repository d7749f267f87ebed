#include "kvloom/geometry/cache_shape.h"

#include <algorithm>
#include <set>

namespace kvloom {
namespace {

bool is_name(const std::string& text) {
  const auto lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto rest = [&](char c) { return lower(c) || (c >= '0' && c <= '9') || c == '_'; };
  return !text.empty() && text.size() <= 64 && lower(text.front()) && std::all_of(text.begin(), text.end(), rest);
}

Expected<void> check_planes(const CacheGroup& group) {
  if (group.planes.empty()) return fail(Code::invalid_argument, "group {}: has no plane", group.name);
  std::set<std::string> names;
  for (const PlaneShape& plane : group.planes) {
    if (!is_name(plane.name) || !names.insert(plane.name).second)
      return fail(Code::invalid_argument, "group {}: plane name '{}' is not [a-z][a-z0-9_]* or stands twice", group.name,
                  plane.name);
    if (plane.bytes <= 0 || plane.element_bytes <= 0 || plane.bytes % plane.element_bytes != 0)
      return fail(Code::invalid_argument,
                  "group {} plane {}: {} bytes of {}-byte elements; both must be positive and the second divide the first",
                  group.name, plane.name, plane.bytes, plane.element_bytes);
  }
  return {};
}

Expected<void> check_group(const CacheGroup& group) {
  if (!is_name(group.name)) return fail(Code::invalid_argument, "group name '{}' is not [a-z][a-z0-9_]*", group.name);
  if (group.heads <= 0) return fail(Code::invalid_argument, "group {}: heads={} is not positive", group.name, group.heads);
  if (group.layers.empty()) return fail(Code::invalid_argument, "group {}: has no layer", group.name);
  for (std::size_t i = 0; i < group.layers.size(); ++i)
    if (group.layers[i].value < 0 || (i > 0 && group.layers[i] <= group.layers[i - 1]))
      return fail(Code::invalid_argument, "group {}: layer {} is negative or not above the one before it", group.name,
                  group.layers[i].value);
  if (group.window && (group.window->tokens <= 0 || group.kind == GroupKind::state))
    return fail(Code::invalid_argument, "group {}: window={} is not positive, or the group is a state and has no tokens",
                group.name, group.window->tokens);
  return check_planes(group);
}

}  // namespace

Bytes CacheGroup::row_bytes() const {
  Bytes sum;
  for (const PlaneShape& plane : planes) sum += Bytes(plane.bytes * heads);
  return sum;
}

Expected<CacheShape> CacheShape::make(std::string model, std::int32_t layers, std::vector<CacheGroup> groups) {
  if (layers <= 0) return fail(Code::invalid_argument, "{}: layers={} is not positive", model, layers);
  if (groups.empty()) return fail(Code::invalid_argument, "{}: has no cache group", model);
  std::set<std::string> names;
  std::int64_t total = 0;
  for (const CacheGroup& group : groups) {
    if (auto ok = check_group(group); !ok) return tl::unexpected(ok.error());
    if (!names.insert(group.name).second) return fail(Code::invalid_argument, "group {}: stands twice", group.name);
    for (const PlaneShape& plane : group.planes) {
      const auto row = checked_mul(plane.bytes, group.heads);
      const auto all = row ? checked_mul(*row, static_cast<std::int64_t>(group.layers.size())) : std::nullopt;
      const auto sum = all ? checked_add(total, *all) : std::nullopt;
      if (!sum)
        return fail(Code::overflow, "group {}: {} B x {} heads x {} layers does not fit 64 bits", group.name, plane.bytes,
                    group.heads, group.layers.size());
      total = *sum;
    }
  }
  CacheShape shape;
  shape.model_ = std::move(model);
  shape.layers_ = layers;
  shape.groups_ = std::move(groups);
  return shape;
}

const CacheGroup* CacheShape::find(const std::string& group) const {
  const auto at = std::find_if(groups_.begin(), groups_.end(), [&](const CacheGroup& g) { return g.name == group; });
  return at == groups_.end() ? nullptr : &*at;
}

namespace {
Bytes sum_rows(const std::vector<CacheGroup>& groups, GroupKind kind) {
  Bytes sum;
  for (const CacheGroup& group : groups)
    if (group.kind == kind) sum += group.row_bytes() * static_cast<std::int64_t>(group.layers.size());
  return sum;
}
}  // namespace

Bytes CacheShape::bytes_per_token() const { return sum_rows(groups_, GroupKind::paged); }
Bytes CacheShape::bytes_per_request() const { return sum_rows(groups_, GroupKind::state); }

}  // namespace kvloom
