#include "kvloom/geometry/page_layout.h"

#include <algorithm>
#include <array>
#include <utility>

namespace kvloom {
namespace {

constexpr std::int64_t kMaxPageTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMaxPieces = std::int64_t{1} << 24;

constexpr std::array<std::pair<std::string_view, PageOrder>, 7> kOrders = {{{"nhd", PageOrder::nhd},
                                                                            {"hnd", PageOrder::hnd},
                                                                            {"packed-nhd", PageOrder::packed_nhd},
                                                                            {"packed-hnd", PageOrder::packed_hnd},
                                                                            {"cpu", PageOrder::cpu},
                                                                            {"mla", PageOrder::nhd},
                                                                            {"dsa-index", PageOrder::nhd}}};

Expected<void> check_sizes(std::int64_t heads, std::int64_t page_tokens, std::int64_t row) {
  if (heads <= 0) return fail(Code::invalid_argument, "a page layout of {} heads: at least 1", heads);
  if (page_tokens <= 0 || page_tokens > kMaxPageTokens)
    return fail(Code::invalid_argument, "page={} tokens: from 1 to {}", page_tokens, kMaxPageTokens);
  const auto per_token = checked_mul(row, heads);
  if (!per_token || !checked_mul(*per_token, page_tokens))
    return fail(Code::overflow, "a page of {} tokens x {} heads x {} B does not fit 63 bits", page_tokens, heads, row);
  return {};
}

// The pieces (contiguous bytes) of one plane of one page.
std::int64_t pieces_of(const PlaneLayout& plane, std::int64_t heads, std::int64_t page_tokens) {
  return heads * page_tokens * (plane.content_stride == 0 ? 1 : plane.bytes / plane.element_bytes);
}

// The pieces of one plane: up to three dimensions (tokens, heads, elements) over `piece` contiguous bytes.
struct Lattice {
  std::int64_t offset = 0, piece = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, extent above 1; ascending

  std::int64_t end() const {
    std::int64_t sum = offset + piece;
    for (const auto& [stride, n] : dims) sum += (n - 1) * stride;
    return sum;
  }
};

Lattice lattice_of(const PlaneLayout& plane, std::int64_t heads, std::int64_t page_tokens) {
  Lattice out{plane.offset, plane.content_stride == 0 ? plane.bytes : plane.element_bytes, {}};
  const auto add = [&](std::int64_t stride, std::int64_t n) {
    if (n > 1) out.dims.emplace_back(stride, n);
  };
  add(plane.token_stride, page_tokens);
  add(plane.head_stride, heads);
  if (plane.content_stride != 0) add(plane.content_stride, plane.bytes / plane.element_bytes);
  std::sort(out.dims.begin(), out.dims.end());
  return out;
}

bool nests_alone(const Lattice& plane) {
  std::int64_t extent = plane.piece;
  for (const auto& [stride, n] : plane.dims) {
    if (stride < extent) return false;
    extent += (n - 1) * stride;
  }
  return true;
}

// True if planes surely share no byte: they stand side by side, each with its strides nested; or all repeat together in one outer
// dimension (k and v in one row, in one head's block) and share none within it. All named layouts nest.
bool nests(std::vector<Lattice> planes) {
  std::sort(planes.begin(), planes.end(), [](const Lattice& a, const Lattice& b) { return a.offset < b.offset; });
  const auto meets = [](const Lattice& a, const Lattice& b) { return a.end() > b.offset; };
  if (std::adjacent_find(planes.begin(), planes.end(), meets) == planes.end())
    return std::all_of(planes.begin(), planes.end(), nests_alone);
  if (planes.front().dims.empty()) return false;
  const auto outer = planes.front().dims.back();
  std::int64_t end = 0;
  for (Lattice& plane : planes) {
    if (plane.dims.empty() || plane.dims.back() != outer) return false;
    plane.dims.pop_back();
    end = std::max(end, plane.end());
  }
  return end - planes.front().offset <= outer.first && nests(std::move(planes));
}

// Any strides at all: every piece of a page, sorted: neighbours must not overlap.
Expected<void> check_disjoint(std::int64_t heads, std::int64_t page_tokens, const std::vector<PlaneLayout>& planes) {
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (const PlaneLayout& plane : planes) {
    const std::int64_t piece = plane.content_stride == 0 ? plane.bytes : plane.element_bytes;
    for (std::int64_t slot = 0; slot < page_tokens; ++slot)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::int64_t byte = 0; byte < plane.bytes; byte += piece) pieces.emplace_back(plane.at(slot, head, byte), piece);
  }
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 1; i < pieces.size(); ++i)
    if (pieces[i - 1].first + pieces[i - 1].second > pieces[i].first)
      return fail(Code::invalid_argument, "page layout: bytes {} and {} of a page are used twice; check the strides",
                  pieces[i - 1].first, pieces[i].first);
  return {};
}

std::int64_t row_of(const CacheGroup& group) {
  std::int64_t row = 0;
  for (const PlaneShape& plane : group.planes) row += plane.bytes;
  return row;
}

PlaneLayout plane_at(const PlaneShape& shape, std::int64_t offset, std::int64_t token_stride, std::int64_t head_stride) {
  return {shape.name, offset, token_stride, head_stride, shape.bytes, 0, shape.element_bytes};
}

std::vector<PlaneLayout> order_planes(PageOrder order, const CacheGroup& group, std::int64_t heads, std::int64_t tokens) {
  std::vector<PlaneLayout> planes;
  const std::int64_t row = row_of(group);
  std::int64_t before = 0;  // bytes of the planes before, per token and head
  for (const PlaneShape& shape : group.planes) {
    switch (order) {
      case PageOrder::nhd: planes.push_back(plane_at(shape, before * heads * tokens, shape.bytes * heads, shape.bytes)); break;
      case PageOrder::hnd: planes.push_back(plane_at(shape, before * heads * tokens, shape.bytes, shape.bytes * tokens)); break;
      case PageOrder::packed_nhd: planes.push_back(plane_at(shape, before, row * heads, row)); break;
      case PageOrder::packed_hnd: planes.push_back(plane_at(shape, before, row, row * tokens)); break;
      case PageOrder::cpu:
        planes.push_back(plane_at(shape, before * tokens, shape.bytes, row * tokens));
        if (before == 0) {
          planes.back().token_stride = shape.element_bytes;
          planes.back().content_stride = shape.element_bytes * tokens;
        }
        break;
    }
    before += shape.bytes;
  }
  return planes;
}

}  // namespace

Expected<PageOrder> parse_page_order(std::string_view text) {
  for (const auto& [name, order] : kOrders)
    if (name == text) return order;
  return fail(Code::parse, "unknown layout '{}': nhd, hnd, packed-nhd, packed-hnd, cpu, mla or dsa-index", text);
}

const char* to_string(PageOrder order) {
  for (const auto& [name, value] : kOrders)
    if (value == order) return name.data();
  return "unknown";
}

Expected<PageLayout> PageLayout::planes(std::int64_t heads, std::int64_t page_tokens, std::int64_t page_stride,
                                        std::vector<PlaneLayout> planes) {
  if (planes.empty()) return fail(Code::invalid_argument, "a page layout needs a plane");
  std::int64_t pieces = 0;
  for (const PlaneLayout& plane : planes) {
    if (plane.bytes <= 0 || plane.element_bytes <= 0 || plane.bytes % plane.element_bytes != 0 || plane.offset < 0 ||
        plane.token_stride < 0 || plane.head_stride < 0 || plane.content_stride < 0)
      return fail(Code::invalid_argument,
                  "plane {}: bytes, elements, offset and strides must be positive, and elements divide the bytes", plane.name);
    if (auto ok = check_sizes(heads, page_tokens, plane.bytes); !ok) return tl::unexpected(ok.error());
    pieces += std::min(pieces_of(plane, heads, page_tokens), kMaxPieces + 1);
    if (pieces > kMaxPieces)
      return fail(Code::invalid_argument, "a page of {} tokens has over {} pieces: use a smaller page", page_tokens, kMaxPieces);
    // The last byte, wide: strides may be anything.
    const std::int64_t elements = plane.content_stride == 0 ? 1 : plane.bytes / plane.element_bytes;
    const std::int64_t tail = plane.content_stride == 0 ? plane.bytes : plane.element_bytes;
    const Wide extent = Wide(page_tokens - 1) * plane.token_stride + Wide(heads - 1) * plane.head_stride +
                        Wide(elements - 1) * plane.content_stride + tail;
    const bool apart = plane.offset >= page_stride;  // a tensor of its own, found from this one's start
    if (extent + (apart ? 0 : plane.offset) > page_stride)
      return fail(Code::invalid_argument, "plane {} reaches byte {} of a page of {} B: page_stride must be at least that",
                  plane.name, static_cast<std::int64_t>(std::min<Wide>(extent + (apart ? 0 : plane.offset), INT64_MAX)),
                  page_stride);
    if (extent + plane.offset > INT64_MAX)
      return fail(Code::overflow, "plane {}: offset {} does not fit 63 bits with its page", plane.name, plane.offset);
  }
  std::vector<Lattice> lattices;
  lattices.reserve(planes.size());
  for (const PlaneLayout& plane : planes) lattices.push_back(lattice_of(plane, heads, page_tokens));
  if (!nests(std::move(lattices)))
    if (auto ok = check_disjoint(heads, page_tokens, planes); !ok) return tl::unexpected(ok.error());
  PageLayout layout;
  layout.heads_ = heads;
  layout.page_tokens_ = page_tokens;
  layout.page_stride_ = page_stride;
  layout.planes_ = std::move(planes);
  return layout;
}

Expected<PageLayout> PageLayout::make(PageOrder order, const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens,
                                      std::int64_t page_stride) {
  const std::int64_t row = row_of(group);
  if (auto ok = check_sizes(heads, page_tokens, row); !ok) return tl::unexpected(ok.error());
  const std::int64_t tight = row * heads * page_tokens;
  if (page_stride != 0 && page_stride < tight)
    return fail(Code::invalid_argument, "group {}: page_stride={} is below the page of {} B ({} tokens x {} heads x {} B)",
                group.name, page_stride, tight, page_tokens, heads, row);
  return planes(heads, page_tokens, page_stride == 0 ? tight : page_stride, order_planes(order, group, heads, page_tokens));
}

Expected<PageLayout> PageLayout::strided(const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens,
                                         std::int64_t block_stride, std::int64_t head_stride, std::int64_t token_stride,
                                         std::int64_t content_stride) {
  std::vector<PlaneLayout> made;
  made.reserve(group.planes.size());
  std::int64_t elements_before = 0;
  for (const PlaneShape& shape : group.planes) {
    const auto offset = checked_mul(elements_before, content_stride);
    if (!offset)
      return fail(Code::overflow, "group {}: content stride {} x {} elements does not fit 63 bits", group.name, content_stride,
                  elements_before);
    PlaneLayout plane = plane_at(shape, *offset, token_stride, head_stride);
    if (content_stride != shape.element_bytes) plane.content_stride = content_stride;
    made.push_back(plane);
    elements_before += shape.bytes / shape.element_bytes;
  }
  return planes(heads, page_tokens, block_stride, std::move(made));
}

std::int64_t PageLayout::payload() const {
  std::int64_t sum = 0;
  for (const PlaneLayout& plane : planes_) sum += plane.bytes * heads_ * page_tokens_;
  return sum;
}

}  // namespace kvloom
