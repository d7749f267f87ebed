#include "kvloom/geometry/side.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace kvloom {

StridedSet TokenSplit::part(std::int32_t index, std::int64_t total) const {
  const auto family = [](std::int64_t start, std::int64_t length, std::int64_t stride, std::int64_t count) {
    return StridedSet::make(start, length, stride, count).value_or(StridedSet());
  };
  switch (rule) {
    case TokenRule::all:
    case TokenRule::value: return StridedSet::all();
    case TokenRule::cyclic: return parts == 1 ? StridedSet::all() : family(index * stripe, stripe, parts * stripe, kUnbounded);
    case TokenRule::blocked: {
      const std::int64_t base = total / parts, extra = total % parts;
      const auto begin = [&](std::int64_t d) { return d * base + std::min(d, extra); };
      return StridedSet::interval(begin(index), begin(index + 1));
    }
    case TokenRule::zigzag: {
      const std::int64_t chunk = ceil_div(total, 2 * std::int64_t{parts});
      return family(index * chunk, chunk, (2 * std::int64_t{parts} - 1 - 2 * std::int64_t{index}) * chunk, 2);
    }
  }
  return {};
}

namespace {

// The coordinates of a linear rank: tp fastest, then cp, then pp.
struct Coordinates {
  std::int32_t tp, cp, pp;
  Coordinates(const Sharding& s, std::int32_t rank) : tp(rank % s.tp()), cp(rank / s.tp() % s.cp()), pp(rank / s.tp() / s.cp()) {}
};

// Works out one group; its words override the side's.
class GroupBuilder {
 public:
  GroupBuilder(const CacheShape& shape, const CacheGroup& group, const Sharding& sharding, std::int64_t default_page)
      : shape_(shape), group_(group), sharding_(sharding), default_page_(default_page) {
    const auto at = sharding.groups().find(group.name);
    if (at != sharding.groups().end()) words_ = at->second;
    alone_ = words_.holders == GroupWords::Holders::replicated || words_.holders == GroupWords::Holders::one_rank;
  }

  bool absent() const { return words_.holders == GroupWords::Holders::none; }

  Expected<GroupSide> build() {
    out_.name = group_.name;
    out_.kind = group_.kind;
    out_.layers = group_.layers;
    out_.heads = group_.heads;
    out_.planes = group_.planes;
    out_.window = group_.window;
    for (auto step :
         {&GroupBuilder::split_layers, &GroupBuilder::split_heads, &GroupBuilder::lay_out, &GroupBuilder::split_tokens})
      if (auto ok = (this->*step)(); !ok) return tl::unexpected(ok.error());
    if (auto ok = place_ranks(); !ok) return tl::unexpected(ok.error());
    return std::move(out_);
  }

 private:
  // First layer ids of pp stages, cut again by cp:layers: part i holds ids [starts[i], starts[i + 1]), the last one everything above.
  Expected<std::vector<std::int64_t>> layer_starts() const {
    const std::int64_t total = shape_.layers();
    const auto blocks = [](std::int64_t from, std::int64_t count, std::int64_t parts, std::vector<std::int64_t>& out) {
      for (std::int64_t d = 0; d < parts; ++d) out.push_back(from + d * (count / parts) + std::min(d, count % parts));
    };
    std::vector<std::int64_t> stages;
    blocks(0, total, sharding_.pp(), stages);
    if (!sharding_.pp_layers().empty()) {
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < stages.size(); ++i) {
        stages[i] = sum;
        sum += sharding_.pp_layers()[i];
      }
      if (sum != total)
        return sharding_.point_at(sharding_.pp_span(), Code::invalid_argument,
                                  fmt::format("the pp stages hold {} layers, but {} has {}", sum, shape_.model(), total));
    }
    if (sharding_.cp_rule() != CpRule::layers) return stages;
    std::vector<std::int64_t> starts;
    stages.push_back(total);
    for (std::size_t i = 0; i + 1 < stages.size(); ++i) blocks(stages[i], stages[i + 1] - stages[i], sharding_.cp(), starts);
    return starts;
  }

  Expected<void> split_layers() {
    const auto ordinals = static_cast<std::int64_t>(group_.layers.size());
    if (alone_) {
      out_.layer_parts = {StridedSet::interval(0, ordinals)};
      return {};
    }
    auto starts = layer_starts();
    if (!starts) return tl::unexpected(starts.error());
    const auto ordinal_of = [&](std::int64_t id) {
      const auto at = std::lower_bound(group_.layers.begin(), group_.layers.end(), LayerId(static_cast<std::int32_t>(id)));
      return static_cast<std::int64_t>(at - group_.layers.begin());
    };
    for (std::size_t i = 0; i < starts->size(); ++i) {
      const std::int64_t end = i + 1 < starts->size() ? ordinal_of((*starts)[i + 1]) : ordinals;
      out_.layer_parts.push_back(StridedSet::interval(ordinal_of((*starts)[i]), end));
    }
    return {};
  }

  // tp ranks that hold the same heads and take turns at the tokens. A state per request has no tokens: all tp ranks cut its heads.
  std::int32_t ranks_a_slice() const { return group_.kind == GroupKind::state ? 1 : sharding_.dcp(); }

  static std::string possible_tp(std::int64_t heads, std::int64_t dcp) {
    std::string text;
    for (std::int64_t d = 1; d <= heads; ++d)
      if (heads % d == 0) text += fmt::format("{}, ", d * dcp);
    return text + fmt::format("{}, ... do", 2 * heads * dcp);
  }

  Expected<void> split_heads() {
    const std::int64_t slices = alone_ ? 1 : sharding_.tp() / ranks_a_slice();
    const std::int64_t heads = group_.heads;
    if (heads % slices != 0 && slices % heads != 0) {
      const std::string dcp = ranks_a_slice() > 1 ? fmt::format(" with dcp={}", sharding_.dcp()) : "";
      return sharding_.point_at(sharding_.tp_span().length != 0 ? sharding_.tp_span() : sharding_.dcp_span(),
                                Code::invalid_argument,
                                fmt::format("tp={}{} does not divide {} heads of group {}; {}", sharding_.tp(), dcp, heads,
                                            group_.name, possible_tp(heads, ranks_a_slice())));
    }
    const std::int64_t parts = std::min(slices, heads);
    for (std::int64_t d = 0; d < parts; ++d)
      out_.head_parts.push_back(StridedSet::interval(d * heads / parts, (d + 1) * heads / parts));
    return {};
  }

  Expected<void> lay_out() {
    const PageWords& side = sharding_.pages();
    const PageWords& own = words_.pages;
    const std::int64_t local = group_.heads / static_cast<std::int64_t>(out_.head_parts.size());
    const bool state = group_.kind == GroupKind::state;
    if (state && own.page_tokens)
      return sharding_.point_at(own.span, Code::invalid_argument,
                                fmt::format("group {} is a state per request: it has no pages of tokens", group_.name));
    const std::int64_t tokens = state ? 1 : own.page_tokens.value_or(side.page_tokens.value_or(default_page_));
    const PageOrder order = state ? PageOrder::nhd : own.order.value_or(side.order.value_or(PageOrder::nhd));
    auto layout = own.strides ? PageLayout::strided(group_, local, tokens, own.strides->block, own.strides->head,
                                                    own.strides->token, own.strides->content)
                              : PageLayout::make(order, group_, local, tokens,
                                                 own.page_stride.value_or(state ? 0 : side.page_stride.value_or(0)));
    if (!layout)
      return sharding_.point_at(own.span.length != 0 ? own.span : side.span, layout.error().code, layout.error().message);
    out_.layout = *layout;
    return {};
  }

  Expected<void> split_tokens() {
    TokenSplit& split = out_.tokens;
    if (alone_ || group_.kind == GroupKind::state) return {};
    const std::int64_t page = out_.layout.page_tokens();
    const bool interleave = sharding_.cp_rule() == CpRule::interleave;
    if (sharding_.cp_rule() == CpRule::zigzag || sharding_.cp_rule() == CpRule::blocked) {
      split = {sharding_.cp_rule() == CpRule::zigzag ? TokenRule::zigzag : TokenRule::blocked, sharding_.cp(), 0};
      return {};
    }
    const std::int32_t parts = sharding_.dcp() * (interleave ? sharding_.cp() : 1);
    if (parts == 1) return {};
    if (words_.by_value && interleave)
      return sharding_.point_at(words_.span, Code::unsupported,
                                fmt::format("{}:value and cp:interleave would both choose the token's rank", group_.name));
    if (words_.by_value || (sharding_.dcp_by_value() && !words_.stripe)) {
      split = {TokenRule::value, parts, 0};
      return {};
    }
    std::int64_t stripe = words_.stripe.value_or(interleave ? sharding_.cp_stripe() : sharding_.dcp_stripe());
    if (stripe == 0) stripe = page;
    if (page % stripe != 0)
      return sharding_.point_at(
          words_.stripe ? words_.span
          : interleave  ? sharding_.cp_span()
                        : sharding_.dcp_span(),
          Code::invalid_argument,
          fmt::format("stripe={} does not divide the page of {} tokens of group {}: a stripe may not cross a page", stripe, page,
                      group_.name));
    split = {TokenRule::cyclic, parts, stripe};
    return {};
  }

  Place place(std::int32_t rank) const {
    Place place;
    if (words_.holders == GroupWords::Holders::one_rank) place.holds = rank == words_.rank;
    if (alone_) return place;
    const Coordinates at(sharding_, rank);
    place.layers = sharding_.cp_rule() == CpRule::layers ? at.pp * sharding_.cp() + at.cp : at.pp;
    const std::int32_t slices = sharding_.tp() / ranks_a_slice();
    place.heads = at.tp / ranks_a_slice() / (slices / static_cast<std::int32_t>(out_.head_parts.size()));
    if (out_.tokens.rule == TokenRule::zigzag || out_.tokens.rule == TokenRule::blocked)
      place.tokens = at.cp;
    else if (out_.tokens.parts > 1)
      place.tokens = (sharding_.cp_rule() == CpRule::interleave ? at.cp * sharding_.dcp() : 0) + at.tp % sharding_.dcp();
    return place;
  }

  Expected<void> place_ranks() {
    if (words_.holders == GroupWords::Holders::one_rank && words_.rank >= sharding_.ranks())
      return sharding_.point_at(
          words_.span, Code::out_of_range,
          fmt::format("rank={} of {} ranks: 0 to {}", words_.rank, sharding_.ranks(), sharding_.ranks() - 1));
    std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> seen;
    for (std::int32_t rank = 0; rank < sharding_.ranks(); ++rank) {
      Place at = place(rank);
      if (at.holds) at.replica = seen[{at.layers, at.heads, at.tokens}]++;
      out_.places.push_back(at);
    }
    return {};
  }

  const CacheShape& shape_;
  const CacheGroup& group_;
  const Sharding& sharding_;
  std::int64_t default_page_;
  GroupWords words_;
  bool alone_ = false;  // no axis is cut: every holder has everything
  GroupSide out_;
};

Expected<void> check_group_names(const CacheShape& shape, const Sharding& sharding) {
  for (const auto& [name, words] : sharding.groups())
    if (shape.find(name) == nullptr) {
      std::string known;
      for (const CacheGroup& group : shape.groups()) known += (known.empty() ? "" : ", ") + group.name;
      return sharding.point_at(words.span, Code::invalid_argument,
                               fmt::format("{} has no cache group '{}': it has {}", shape.model(), name, known));
    }
  return {};
}

}  // namespace

Expected<Side> Side::make(const CacheShape& shape, const Sharding& sharding, std::int64_t default_page) {
  if (auto ok = check_group_names(shape, sharding); !ok) return tl::unexpected(ok.error());
  Side side(shape, sharding, default_page);
  for (const CacheGroup& group : shape.groups()) {
    GroupBuilder builder(shape, group, sharding, default_page);
    if (builder.absent()) continue;
    auto built = builder.build();
    if (!built) return tl::unexpected(built.error());
    side.groups_.push_back(std::move(*built));
  }
  return side;
}

const GroupSide* Side::find(const std::string& group) const {
  const auto at = std::find_if(groups_.begin(), groups_.end(), [&](const GroupSide& g) { return g.name == group; });
  return at == groups_.end() ? nullptr : &*at;
}

Expected<void> Side::set_layout(const std::string& group, PageLayout layout) {
  const auto at = std::find_if(groups_.begin(), groups_.end(), [&](const GroupSide& g) { return g.name == group; });
  if (at == groups_.end()) return fail(Code::invalid_argument, "no cache group '{}' on this side", group);
  if (layout.heads() != at->layout.heads())
    return fail(Code::invalid_argument, "group {}: a layout of {} heads, but each rank holds {}", group, layout.heads(),
                at->layout.heads());
  const auto same = [](const PlaneShape& shape, const PlaneLayout& plane) {
    return shape.name == plane.name && shape.bytes == plane.bytes && shape.element_bytes == plane.element_bytes;
  };
  if (!std::equal(at->planes.begin(), at->planes.end(), layout.planes().begin(), layout.planes().end(), same))
    return fail(Code::invalid_argument, "group {}: the layout's planes (names, bytes, elements) are not those of the group",
                group);
  const auto words = sharding_.groups().find(group);
  const bool page_in_turn = sharding_.cp_rule() != CpRule::interleave && sharding_.dcp_stripe() == 0 &&
                            (words == sharding_.groups().end() || !words->second.stripe);
  if (at->tokens.rule == TokenRule::cyclic && page_in_turn) at->tokens.stripe = layout.page_tokens();
  if (at->tokens.rule == TokenRule::cyclic && layout.page_tokens() % at->tokens.stripe != 0)
    return fail(Code::invalid_argument, "group {}: stripe={} does not divide the page of {} tokens", group, at->tokens.stripe,
                layout.page_tokens());
  at->layout = std::move(layout);
  return {};
}

double Side::bytes_per_token(Rank rank) const {
  double sum = 0;
  for (const GroupSide& group : groups_) {
    const Place& at = group.places[static_cast<std::size_t>(rank.value)];
    if (!at.holds || group.kind == GroupKind::state) continue;
    double row = 0;
    for (const PlaneShape& plane : group.planes) row += static_cast<double>(plane.bytes);
    sum += row * static_cast<double>(group.layer_parts[static_cast<std::size_t>(at.layers)].size()) *
           static_cast<double>(group.head_parts[static_cast<std::size_t>(at.heads)].size()) / group.tokens.parts;
  }
  return sum;
}

}  // namespace kvloom
