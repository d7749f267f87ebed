#include "kvloom/geometry/side_values.h"

#include <algorithm>
#include <utility>

namespace kvloom {
namespace {

tl::unexpected<Error> beyond(const std::string& what, std::int64_t found, std::int64_t limit) {
  return fail(Code::exhausted, "{}: {}, over the limit of {} for a side that is read", what, found, limit);
}

std::int64_t size_of(const auto& list) { return static_cast<std::int64_t>(list.size()); }

Expected<void> check_counts(const SideValues& values) {
  if (values.groups.size() > kMaxGroups) return beyond("cache groups", size_of(values.groups), std::int64_t{kMaxGroups});
  if (values.model.size() > kMaxNameBytes)
    return beyond("bytes of the model's name", size_of(values.model), std::int64_t{kMaxNameBytes});
  if (values.words.size() > kMaxWordsBytes)
    return beyond("bytes of sharding words", size_of(values.words), std::int64_t{kMaxWordsBytes});
  std::int64_t layers = 0;
  for (std::size_t g = 0; g < values.groups.size(); ++g) {
    const CacheGroup& group = values.groups[g];
    layers += size_of(group.layers);
    if (layers > kMaxLayers) return beyond("layers of all groups", layers, kMaxLayers);
    if (group.heads > kMaxHeads) return beyond("heads of group " + group.name, group.heads, kMaxHeads);
    const auto planes = std::max(group.planes.size(), values.layouts[g] ? values.layouts[g]->planes.size() : 0);
    if (planes > kMaxPlanes)
      return beyond("planes of group " + group.name, static_cast<std::int64_t>(planes), std::int64_t{kMaxPlanes});
  }
  return {};
}

// The pieces that PageLayout will look at one by one, at most: for the layout that the words say, and for the one that is given.
Expected<void> check_pieces(const SideValues& values, const Sharding& sharding) {
  std::int64_t sum = 0;
  const auto add = [&](const CacheGroup& group, std::int64_t tokens, bool strided) {
    for (const PlaneShape& plane : group.planes) {  // what is not positive is refused later, by who reads it
      const std::int64_t elements =
          strided && plane.element_bytes > 0 ? std::max<std::int64_t>(1, plane.bytes / plane.element_bytes) : 1;
      const auto slots = checked_mul(std::max<std::int64_t>(1, tokens), std::max(1, group.heads));
      const auto pieces = slots ? checked_mul(*slots, elements) : std::nullopt;
      sum = pieces && *pieces <= kMaxReadPieces ? sum + *pieces : kMaxReadPieces + 1;
    }
    return sum <= kMaxReadPieces;
  };
  const PageWords& side = sharding.pages();
  for (std::size_t g = 0; g < values.groups.size(); ++g) {
    const CacheGroup& group = values.groups[g];
    const auto at = sharding.groups().find(group.name);
    const PageWords own = at == sharding.groups().end() ? PageWords{} : at->second.pages;
    const bool strided = own.strides || own.order.value_or(side.order.value_or(PageOrder::nhd)) == PageOrder::cpu;
    const std::int64_t tokens = own.page_tokens.value_or(side.page_tokens.value_or(values.default_page));
    const auto& given = values.layouts[g];
    const bool given_strided = given && std::any_of(given->planes.begin(), given->planes.end(),
                                                    [](const PlaneLayout& p) { return p.content_stride != 0; });
    if (!add(group, tokens, strided) || (given && !add(group, given->page_tokens, given_strided)))
      return beyond("pieces of a page of group " + group.name + " and those before it", sum, kMaxReadPieces);
  }
  return {};
}

Expected<void> check_planes(const CacheGroup& group, const LayoutValues& given) {
  const auto same = [](const PlaneShape& shape, const PlaneLayout& plane) {
    return shape.name == plane.name && shape.bytes == plane.bytes && shape.element_bytes == plane.element_bytes;
  };
  if (!std::equal(group.planes.begin(), group.planes.end(), given.planes.begin(), given.planes.end(), same))
    return fail(Code::invalid_argument, "group {}: the planes of its layout are not those of its rows", group.name);
  return {};
}

}  // namespace

SideValues values_of(const Side& side) {
  SideValues out{to_string(side.sharding()), side.default_page(),   side.shape().model(),
                 side.shape().layers(),      side.shape().groups(), {}};
  for (CacheGroup& group : out.groups) {
    group.note.clear();
    const GroupSide* at = side.find(group.name);
    out.layouts.push_back(
        at == nullptr ? std::nullopt
                      : std::optional(LayoutValues{at->layout.page_tokens(), at->layout.page_stride(), at->layout.planes()}));
  }
  return out;
}

Expected<Side> make_side(const SideValues& values, std::string* wrong) {
  std::string unread;
  std::string& about = wrong != nullptr ? *wrong : unread;
  about.clear();
  if (values.layouts.size() != values.groups.size())
    return fail(Code::invalid_argument, "{} cache groups, but {} layouts", values.groups.size(), values.layouts.size());
  if (auto ok = check_counts(values); !ok) return tl::unexpected(ok.error());
  for (std::size_t g = 0; g < values.groups.size(); ++g) {
    about = "layout " + values.groups[g].name;
    if (!values.layouts[g]) continue;
    if (auto ok = check_planes(values.groups[g], *values.layouts[g]); !ok) return tl::unexpected(ok.error());
  }
  about = "words";
  auto sharding = Sharding::parse(values.words);
  if (!sharding) return tl::unexpected(sharding.error());
  about.clear();
  if (auto ok = check_pieces(values, *sharding); !ok) return tl::unexpected(ok.error());
  auto shape = CacheShape::make(values.model, values.layers, values.groups);
  if (!shape) return tl::unexpected(shape.error());
  auto side = Side::make(*shape, *sharding, values.default_page);
  if (!side) return side;
  for (std::size_t g = 0; g < values.groups.size(); ++g) {
    const std::string& name = values.groups[g].name;
    if (!values.layouts[g]) continue;
    about = "layout " + name;
    const GroupSide* group = side->find(name);
    if (group == nullptr) return fail(Code::invalid_argument, "group {}: a layout of a group that this side has not", name);
    const LayoutValues& given = *values.layouts[g];
    auto layout = PageLayout::planes(group->layout.heads(), given.page_tokens, given.page_stride, given.planes);
    if (!layout) return tl::unexpected(layout.error());
    if (auto ok = side->set_layout(name, std::move(*layout)); !ok) return tl::unexpected(ok.error());
  }
  return side;
}

}  // namespace kvloom
