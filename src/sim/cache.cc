#include "kvloom/sim/cache.h"

#include <algorithm>

namespace kvloom::sim {

Pool::Pool(std::int64_t pages, Random& random) : owners_(static_cast<std::size_t>(pages), kNobody) {
  for (std::int64_t p = 0; p < pages; ++p) free_.emplace_back(p);
  for (std::size_t i = free_.size(); i > 1; --i)
    std::swap(free_[i - 1], free_[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(i) - 1))]);
}

std::vector<PageId> Pool::take(std::int64_t count, std::int64_t owner) {
  std::vector<PageId> out(free_.end() - count, free_.end());
  free_.erase(free_.end() - count, free_.end());
  for (const PageId page : out) owners_[static_cast<std::size_t>(page.value)] = owner;
  return out;
}

void Pool::give_back(const std::vector<PageId>& pages) {
  for (const PageId page : pages) {
    owners_[static_cast<std::size_t>(page.value)] = kNobody;
    free_.push_back(page);
  }
}

Cache::Cache(std::shared_ptr<const Side> side, Rank rank, std::vector<std::shared_ptr<Pool>> pools)
    : side_(std::move(side)), rank_(rank), pools_(std::move(pools)) {
  for (std::size_t g = 0; g < side_->groups().size(); ++g) {
    const GroupSide& group = side_->groups()[g];
    const std::int64_t parts = group.tokens.rule == TokenRule::value ? group.tokens.parts : 1;
    for (const LayerId layer : group.layers)
      if (holds(g, layer))
        bytes_[{g, layer}].assign(static_cast<std::size_t>(ceil_div(pools_[g]->size(), parts) * group.layout.page_stride()),
                                  0xEE);
  }
}

bool Cache::holds(std::size_t group, LayerId layer) const {
  const GroupSide& g = side_->groups()[group];
  const Place& place = g.places[static_cast<std::size_t>(rank_.value)];
  if (!place.holds) return false;
  const auto at = std::lower_bound(g.layers.begin(), g.layers.end(), layer);
  return at != g.layers.end() && *at == layer &&
         g.layer_parts[static_cast<std::size_t>(place.layers)].contains(at - g.layers.begin());
}

std::int64_t Cache::columns(std::size_t group, std::int64_t tokens, std::int64_t total) const {
  const GroupSide& g = side_->groups()[group];
  const Place& place = g.places[static_cast<std::size_t>(rank_.value)];
  if (!place.holds) return 0;
  if (g.kind == GroupKind::state) return 1;
  return ceil_div(g.tokens.part(place.tokens, total).count_below(tokens), g.layout.page_tokens());
}

std::int64_t Cache::pool_page(std::size_t group, std::int64_t page) const {
  const GroupSide& g = side_->groups()[group];
  if (g.tokens.rule != TokenRule::value) return page;
  return page * g.tokens.parts + g.places[static_cast<std::size_t>(rank_.value)].tokens;
}

std::vector<std::uint8_t>& Cache::bytes(std::size_t group, LayerId layer) { return bytes_.at({group, layer}); }

// Calls visit(byte, right value) for each byte of each row; visit says whether to go on. Returns the token where it stopped, or -1.
template <class Visit>
std::int64_t Cache::rows(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end,
                         std::int64_t total, const std::vector<PageId>& table, Visit visit) {
  const GroupSide& g = side_->groups()[group];
  const Place& place = g.places[static_cast<std::size_t>(rank_.value)];
  const bool state = g.kind == GroupKind::state, value = g.tokens.rule == TokenRule::value;
  const StridedSet part = state ? StridedSet::interval(0, 1) : g.tokens.part(place.tokens, total);
  const StridedSet& heads = g.head_parts[static_cast<std::size_t>(place.heads)];
  auto& memory = bytes(group, layer);
  const std::uint64_t salt =
      mix(static_cast<std::uint64_t>(transfer) * 1024 + group * 64 + static_cast<std::uint64_t>(layer.value));
  for (std::int64_t token = begin; token < end; ++token) {
    if (!part.contains(token)) continue;
    const std::int64_t n = part.count_below(token), slot = n % g.layout.page_tokens();
    std::int64_t page = table[static_cast<std::size_t>(n / g.layout.page_tokens())].value;
    if (value && page % g.tokens.parts != place.tokens) continue;
    if (value) page /= g.tokens.parts;
    for (std::int64_t head = 0; head < heads.size(); ++head) {
      const std::uint64_t row = mix(salt + static_cast<std::uint64_t>(token * 64 + heads.start() + head));
      std::uint64_t p = 0;
      for (const PlaneLayout& plane : g.layout.planes()) {
        ++p;
        for (std::int64_t x = 0; x < plane.bytes; ++x) {
          auto& byte = memory[static_cast<std::size_t>(page * g.layout.page_stride() + plane.at(slot, head, x))];
          const auto right = static_cast<std::uint8_t>((row >> (8 * (p & 3U))) + static_cast<std::uint64_t>(x) * 37);
          if (!visit(byte, right)) return token;
        }
      }
    }
  }
  return -1;
}

void Cache::fill(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end,
                 std::int64_t total, const std::vector<PageId>& table) {
  rows(transfer, group, layer, begin, end, total, table, [](std::uint8_t& byte, std::uint8_t right) {
    byte = right;
    return true;
  });
}

std::int64_t Cache::check(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end,
                          std::int64_t total, const std::vector<PageId>& table) {
  return rows(transfer, group, layer, begin, end, total, table,
              [](std::uint8_t& byte, std::uint8_t right) { return byte == right; });
}

void Cache::poison(std::size_t group, const std::vector<PageId>& pages) {
  const GroupSide& g = side_->groups()[group];
  const bool value = g.tokens.rule == TokenRule::value;
  const std::int64_t part = g.places[static_cast<std::size_t>(rank_.value)].tokens;
  for (const LayerId layer : g.layers) {
    if (!holds(group, layer)) continue;
    auto& memory = bytes(group, layer);
    for (const PageId page : pages) {
      if (value && page.value % g.tokens.parts != part) continue;
      const auto at = memory.begin() + (value ? page.value / g.tokens.parts : page.value) * g.layout.page_stride();
      std::fill(at, at + g.layout.page_stride(), std::uint8_t{0xDD});
    }
  }
}

}  // namespace kvloom::sim
