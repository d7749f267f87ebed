#include "kvloom/tools/rank_memory.h"

#include <algorithm>
#include <cstring>

#include "kvloom/tools/content.h"

namespace kvloom {
namespace {

constexpr std::int64_t kAlign = 4096;

Expected<std::int64_t> tensor_bytes(const PageLayout& layout, std::int64_t pages) {
  const auto body = checked_mul(pages, layout.page_stride());
  std::int64_t apart = 0;  // planes that are tensors of their own begin after their offset
  for (const PlaneLayout& plane : layout.planes())
    if (plane.offset >= layout.page_stride()) apart = std::max(apart, plane.offset);
  const auto sum = body ? checked_add(*body, apart) : std::nullopt;
  if (!sum || *sum > INT64_MAX - kAlign)
    return fail(Code::overflow, "a tensor of {} pages of {} B does not fit 63 bits", pages, layout.page_stride());
  return *sum;
}

std::uint64_t owner_of(const RankCache& cache) {
  return static_cast<std::uint64_t>(cache.rank.value) * 2 + (cache.prefill ? 1 : 0);
}

void write_row(const PlaneLayout& plane, const RowCoordinate& row, std::int64_t at, std::span<std::byte> memory,
               std::vector<std::byte>& scratch) {
  const auto size = static_cast<std::size_t>(plane.bytes);
  if (plane.content_stride == 0) return content_row(row, memory.subspan(static_cast<std::size_t>(at), size));
  scratch.resize(size);
  content_row(row, scratch);
  const auto element = static_cast<std::size_t>(plane.element_bytes);
  for (std::size_t x = 0; x < size; x += element)
    std::memcpy(memory.data() + at + static_cast<std::int64_t>(x / element) * plane.content_stride, scratch.data() + x, element);
}

}  // namespace

Expected<TensorMap> TensorMap::make(const Plan& plan, bool prefill, Rank rank, const std::vector<GroupTables>& tables) {
  TensorMap map;
  for (std::size_t g = 0; g < plan.groups().size(); ++g) {
    const GroupSide& side = prefill ? *plan.groups()[g].source : *plan.groups()[g].target;
    const Place& place = side.places[static_cast<std::size_t>(rank.value)];
    if (!place.holds) continue;
    const std::int64_t pool = tables[g].of(rank).pool_pages();
    const auto bytes = tensor_bytes(side.layout, side.tokens.rule == TokenRule::value ? ceil_div(pool, side.tokens.parts) : pool);
    if (!bytes) return tl::unexpected(bytes.error());
    const StridedSet& layers = side.layer_parts[static_cast<std::size_t>(place.layers)];
    for (std::int64_t l = layers.start(); l < layers.end(); ++l) {
      map.tensors_.push_back({static_cast<std::int32_t>(g), side.layers[static_cast<std::size_t>(l)], map.length_, *bytes});
      const auto next = checked_add(map.length_, ceil_div(*bytes, kAlign) * kAlign);
      if (!next) return fail(Code::overflow, "the cache of rank {} does not fit 63 bits", rank.value);
      map.length_ = *next;
    }
  }
  return map;
}

std::vector<PlacedTensor> TensorMap::placed(const Plan& plan, bool prefill) const {
  const Side& side = prefill ? plan.source() : plan.target();
  std::vector<PlacedTensor> out;
  for (const Tensor& tensor : tensors_) {
    if (tensor.length == 0) continue;
    const GroupPlan& group = plan.groups()[static_cast<std::size_t>(tensor.group)];
    const auto index = (prefill ? group.source : group.target) - side.groups().data();
    out.push_back({static_cast<std::int32_t>(index), tensor.layer, {{Bytes(0), Bytes(tensor.length), 0, Bytes(tensor.offset)}}});
  }
  return out;
}

const Tensor& TensorMap::find(std::int32_t group, LayerId layer) const {
  return *std::lower_bound(
      tensors_.begin(), tensors_.end(), std::pair(group, layer),
      [](const Tensor& t, const std::pair<std::int32_t, LayerId>& key) { return std::pair(t.group, t.layer) < key; });
}

std::int64_t write_rows(const RankCache& cache, const Tensor& tensor, std::int64_t begin, std::int64_t end,
                        std::span<std::byte> memory) {
  return write_rows({&cache.side(tensor.group), cache.rank, tensor.group, tensor.layer, cache.total, 0},
                    cache.table(tensor.group), begin, end, memory);
}

std::int64_t write_rows(const RowsOf& rows, std::span<const PageId> table, std::int64_t begin, std::int64_t end,
                        std::span<std::byte> memory) {
  const GroupSide& side = *rows.side;
  const Place& place = side.places[static_cast<std::size_t>(rows.rank.value)];
  const StridedSet own = side.tokens.part(place.tokens, rows.total),
                   &heads = side.head_parts[static_cast<std::size_t>(place.heads)];
  const std::int64_t page_tokens = side.layout.page_tokens(),
                     parts = side.tokens.rule == TokenRule::value ? side.tokens.parts : 0;
  std::vector<std::byte> scratch;
  std::int64_t written = 0;
  for (std::int64_t token = std::max<std::int64_t>(begin, 0), position = own.count_below(token); token < end; ++token) {
    if (!own.contains(token)) continue;
    const std::int64_t slot = position % page_tokens;
    std::int64_t page = table[static_cast<std::size_t>(position / page_tokens)].value;
    ++position;
    if (parts != 0 && page % parts != place.tokens) continue;
    if (parts != 0) page /= parts;
    for (std::int64_t h = 0; h < heads.size(); ++h)
      for (std::size_t p = 0; p < side.planes.size(); ++p) {
        const PlaneLayout& plane = side.layout.planes()[p];
        const RowCoordinate row{rows.group, rows.layer, token, heads.start() + h, static_cast<std::int64_t>(p), rows.request};
        write_row(plane, row, page * side.layout.page_stride() + plane.at(slot, h, 0), memory, scratch);
        written += plane.bytes;
      }
  }
  return written;
}

void fill_canary(const RankCache& cache, const TensorMap& map, std::span<std::byte> region) {
  for (const Tensor& tensor : map.tensors())
    canary(owner_of(cache), tensor.offset,
           region.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.length)));
}

Expected<CheckResult> check_memory(const RankCache& cache, const TensorMap& map, TokenRange range, const RankStore& store) {
  CheckResult result;
  std::vector<std::byte> expected;
  for (const Tensor& tensor : map.tensors()) {
    expected.resize(static_cast<std::size_t>(tensor.length));
    canary(owner_of(cache), tensor.offset, expected);
    const TokenRange want = wanted(cache.side(tensor.group), range);
    result.wanted += write_rows(cache, tensor, want.begin, want.end, expected);
    const auto wrong = store.count_wrong(tensor.offset, expected);
    if (!wrong) return tl::unexpected(wrong.error());
    result.wrong += *wrong;
  }
  return result;
}

}  // namespace kvloom
