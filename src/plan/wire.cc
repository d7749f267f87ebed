#include "kvloom/plan/wire.h"

#include <algorithm>

#include "kvloom/base/flat_root.h"
#include "kvloom/geometry/side_values.h"
#include "kvloom/plan/plan_generated.h"
#include "kvloom/plan/text.h"

namespace kvloom {
namespace {

using flatbuffers::Offset;

constexpr const char* kSideIdentifier = "KVLG";

constexpr FlatFormat format(const char* what, const char* identifier) {
  constexpr std::size_t kMaxDepth = 8, kMaxTables = 2 * (2 + kMaxGroups * (2 + kMaxPlanes)) + 1;
  return {what, identifier, kWireVersion, kMaxWireBytes, kMaxDepth, kMaxTables};
}

// ---- writing ----

std::vector<wire::LayerRun> layer_runs(const std::vector<LayerId>& layers) {
  std::vector<wire::LayerRun> out;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t last = i;
    const std::int32_t step = i + 1 < layers.size() ? layers[i + 1].value - layers[i].value : 1;
    while (last + 1 < layers.size() && layers[last + 1].value - layers[last].value == step) ++last;
    out.emplace_back(layers[i].value, layers[last].value, step);
    i = last + 1;
  }
  return out;
}

class Writer {
 public:
  std::vector<std::uint8_t> write(const Side& from) {
    const SideValues values = values_of(from);
    const auto only = side(values, shape(values));
    builder_.Finish(wire::CreateSideRoot(builder_, kWireVersion, only), kSideIdentifier);
    return flat_bytes(builder_);
  }

  std::vector<std::uint8_t> write(const Plan& plan) {
    const SideValues source = values_of(plan.source()), target = values_of(plan.target());
    const auto source_shape = shape(source);
    const bool one = source.model == target.model && source.layers == target.layers && source.groups == target.groups;
    const auto target_shape = one ? source_shape : shape(target);
    const auto from = side(source, source_shape), to = side(target, target_shape);
    const std::string text = digest(plan);
    const wire::Digest sum(std::stoull(text.substr(0, 16), nullptr, 16), std::stoull(text.substr(16), nullptr, 16));
    const std::int64_t total = plan.total() == kUnbounded ? 0 : plan.total();
    wire::FinishPlanBuffer(builder_, wire::CreatePlan(builder_, kWireVersion, total, from, to, &sum));
    return flat_bytes(builder_);
  }

 private:
  Offset<wire::Group> group(const CacheGroup& group) {
    std::vector<Offset<wire::Plane>> planes;
    for (const PlaneShape& plane : group.planes)
      planes.push_back(wire::CreatePlane(builder_, builder_.CreateSharedString(plane.name), plane.bytes, plane.element_bytes));
    wire::WindowKind window = wire::WindowKind::none;
    if (group.window)
      window = group.window->kind == Window::Kind::sliding ? wire::WindowKind::sliding : wire::WindowKind::chunked;
    const auto name = builder_.CreateSharedString(group.name);
    const auto layers = builder_.CreateVectorOfStructs(layer_runs(group.layers));
    return wire::CreateGroup(builder_, name, group.kind == GroupKind::paged ? wire::Kind::paged : wire::Kind::state, layers,
                             group.heads, builder_.CreateVector(planes), window, group.window ? group.window->tokens : 0);
  }

  Offset<wire::Shape> shape(const SideValues& values) {
    std::vector<Offset<wire::Group>> groups;
    for (const CacheGroup& each : values.groups) groups.push_back(group(each));
    const auto model = builder_.CreateString(values.model);
    return wire::CreateShape(builder_, model, values.layers, builder_.CreateVector(groups));
  }

  Offset<wire::Layout> layout(const std::optional<LayoutValues>& values) {
    if (!values) return wire::CreateLayout(builder_);
    std::vector<wire::PlanePlace> planes;
    for (const PlaneLayout& plane : values->planes)
      planes.emplace_back(plane.offset, plane.token_stride, plane.head_stride, plane.content_stride);
    const auto places = builder_.CreateVectorOfStructs(planes);
    return wire::CreateLayout(builder_, values->page_tokens, values->page_stride, places);
  }

  Offset<wire::Side> side(const SideValues& values, Offset<wire::Shape> shape) {
    std::vector<Offset<wire::Layout>> layouts;
    for (const auto& each : values.layouts) layouts.push_back(layout(each));
    const auto words = builder_.CreateString(values.words);
    return wire::CreateSide(builder_, words, values.default_page, shape, builder_.CreateVector(layouts));
  }

  flatbuffers::FlatBufferBuilder builder_;
};

// ---- reading: the verifier has been over these bytes, so pointers and lengths are good, but no number is ----

Expected<std::vector<LayerId>> read_layers(const wire::Group& group) {
  std::vector<LayerId> out;
  for (const wire::LayerRun* run : *group.layers()) {
    if (run->first() < 0 || run->last() < run->first() || run->step() <= 0 || run->last() == INT32_MAX)
      return fail(Code::parse, "group {}: layers {} to {} by {}", group.name()->str(), run->first(), run->last(), run->step());
    if (static_cast<std::int64_t>(out.size()) + (std::int64_t{run->last()} - run->first()) / run->step() >= kMaxLayers)
      return fail(Code::exhausted, "group {}: over {} layers", group.name()->str(), kMaxLayers);
    for (std::int64_t layer = run->first(); layer <= run->last(); layer += run->step())
      out.emplace_back(static_cast<std::int32_t>(layer));
  }
  return out;
}

Expected<CacheGroup> read_group(const wire::Group& from) {
  CacheGroup group;
  group.name = from.name()->str();
  if (from.kind() != wire::Kind::paged && from.kind() != wire::Kind::state)
    return fail(Code::parse, "group {}: kind {} is unknown", group.name, static_cast<int>(from.kind()));
  group.kind = from.kind() == wire::Kind::paged ? GroupKind::paged : GroupKind::state;
  auto layers = read_layers(from);
  if (!layers) return tl::unexpected(layers.error());
  group.layers = std::move(*layers);
  group.heads = from.heads();
  if (from.planes()->size() > kMaxPlanes) return fail(Code::exhausted, "group {}: over {} planes", group.name, kMaxPlanes);
  for (const wire::Plane* plane : *from.planes())
    group.planes.push_back({plane->name()->str(), plane->bytes(), plane->element_bytes()});
  switch (from.window_kind()) {
    case wire::WindowKind::none: return group;
    case wire::WindowKind::sliding: group.window = Window{Window::Kind::sliding, from.window_tokens()}; return group;
    case wire::WindowKind::chunked: group.window = Window{Window::Kind::chunked, from.window_tokens()}; return group;
  }
  return fail(Code::parse, "group {}: window kind {} is unknown", group.name, static_cast<int>(from.window_kind()));
}

std::optional<LayoutValues> read_layout(const wire::Layout& from, const CacheGroup& group) {
  if (from.planes() == nullptr) return std::nullopt;
  LayoutValues out{from.page_tokens(), from.page_stride(), {}};
  for (std::uint32_t i = 0; i < std::min<std::size_t>(from.planes()->size(), kMaxPlanes + 1); ++i) {
    const auto place = flat_copy<wire::PlanePlace>(from.planes()->Data() + i * sizeof(wire::PlanePlace));
    const PlaneShape plane = i < group.planes.size() ? group.planes[i] : PlaneShape{};  // one too many is refused by make_side
    out.planes.push_back({plane.name, place.offset(), place.token_stride(), place.head_stride(), plane.bytes,
                          place.content_stride(), plane.element_bytes});
  }
  return out;
}

Expected<Side> read_side(const wire::Side& from) {
  const wire::Shape& shape = *from.shape();
  if (shape.groups()->size() > kMaxGroups) return fail(Code::exhausted, "over {} cache groups", kMaxGroups);
  if (from.layouts()->size() != shape.groups()->size())
    return fail(Code::parse, "{} cache groups, but {} layouts", shape.groups()->size(), from.layouts()->size());
  SideValues values{from.words()->str(), from.default_page(), shape.model()->str(), shape.layers(), {}, {}};
  std::int64_t layers = 0;
  for (std::uint32_t g = 0; g < shape.groups()->size(); ++g) {
    auto group = read_group(*shape.groups()->Get(g));
    if (!group) return tl::unexpected(group.error());
    layers += static_cast<std::int64_t>(group->layers.size());
    if (layers > kMaxLayers) return fail(Code::exhausted, "over {} layers in all groups", kMaxLayers);
    values.layouts.push_back(read_layout(*from.layouts()->Get(g), *group));
    values.groups.push_back(std::move(*group));
  }
  return make_side(values);
}

}  // namespace

std::vector<std::uint8_t> encode(const Plan& plan) { return Writer().write(plan); }

std::vector<std::uint8_t> encode_side(const Side& side) { return Writer().write(side); }

Expected<Side> decode_side(std::span<const std::uint8_t> bytes) {
  const auto wire = FlatRoot<wire::SideRoot>::make(bytes, format("geometry", kSideIdentifier));
  if (!wire) return tl::unexpected(wire.error());
  return read_side(*(*wire)->side());
}

Expected<Plan> decode(std::span<const std::uint8_t> bytes) {
  const auto verified = FlatRoot<wire::Plan>::make(bytes, format("plan", wire::PlanIdentifier()));
  if (!verified) return tl::unexpected(verified.error());
  const auto& wire = *verified;
  if (wire->total() < 0) return fail(Code::parse, "a plan for {} tokens", wire->total());
  auto source = read_side(*wire->source());
  if (!source) return tl::unexpected(source.error());
  auto target = read_side(*wire->target());
  if (!target) return tl::unexpected(target.error());
  auto plan = compile_read(std::make_shared<const Side>(std::move(*source)), std::make_shared<const Side>(std::move(*target)),
                           wire->total() == 0 ? kUnbounded : wire->total());
  if (!plan) return plan;
  const auto said = flat_copy<wire::Digest>(wire->digest());
  const std::string sent = fmt::format("{:016x}{:016x}", said.high(), said.low()), made = digest(*plan);
  if (sent != made)
    return fail(Code::parse, "the plan's digest is {}, but its sides make {}: damaged, or made by another version", sent, made);
  return plan;
}

}  // namespace kvloom
