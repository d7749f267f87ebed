#include "kvloom/landing/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <vector>

namespace kvloom {
namespace {

// The finaliser of MurmurHash3: every bit of the input moves half of the output.
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccd;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53;
  return x ^ (x >> 33);
}

std::uint64_t coordinate_hash(LayerId layer, std::int64_t token, std::int64_t head, std::int64_t plane) {
  std::uint64_t hash = mix(static_cast<std::uint64_t>(layer.value) + kGolden);
  for (const std::int64_t part : {token, head, plane}) hash = mix(hash + static_cast<std::uint64_t>(part) + kGolden);
  return hash;
}

// A row's bytes, gathered where the layout strides its content.
std::span<const std::byte> row_of(const PlaneLayout& plane, std::span<const std::byte> tensor, std::int64_t at,
                                  std::vector<std::byte>& scratch) {
  if (plane.content_stride == 0) return tensor.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(plane.bytes));
  scratch.resize(static_cast<std::size_t>(plane.bytes));
  for (std::int64_t x = 0; x < plane.bytes; ++x)
    scratch[static_cast<std::size_t>(x)] =
        tensor[static_cast<std::size_t>(at + x / plane.element_bytes * plane.content_stride + x % plane.element_bytes)];
  return scratch;
}

// All rows of one token.
Checksum token_checksum(const GroupSide& group, const StridedSet& heads, LayerId layer, std::int64_t token,
                        std::span<const std::byte> tensor, std::int64_t page_start, std::int64_t slot,
                        std::vector<std::byte>& scratch) {
  Checksum out;
  for (std::int64_t head = 0; head < heads.size(); ++head)
    for (std::size_t p = 0; p < group.planes.size(); ++p) {
      const PlaneLayout& plane = group.layout.planes()[p];
      const auto row = row_of(plane, tensor, page_start + plane.at(slot, head, 0), scratch);
      out += row_checksum(layer, token, heads.start() + head, static_cast<std::int64_t>(p), row);
    }
  return out;
}

}  // namespace

std::string to_string(const Checksum& checksum) { return fmt::format("{:016x}:{}", checksum.sum, checksum.rows); }

Checksum row_checksum(LayerId layer, std::int64_t token, std::int64_t head, std::int64_t plane,
                      std::span<const std::byte> bytes) {
  return {mix(XXH3_64bits(bytes.data(), bytes.size()) ^ coordinate_hash(layer, token, head, plane)), 1};
}

Checksum checksum(const GroupSide& group, Rank rank, LayerId layer, std::span<const std::byte> tensor,
                  std::span<const PageId> table, std::int64_t begin, std::int64_t end, std::int64_t total) {
  const Place& place = group.places[static_cast<std::size_t>(rank.value)];
  const StridedSet own = group.tokens.part(place.tokens, total);
  const StridedSet& heads = group.head_parts[static_cast<std::size_t>(place.heads)];
  const std::int64_t parts = group.tokens.rule == TokenRule::value ? group.tokens.parts : 0;
  std::vector<std::byte> scratch;
  Checksum out;
  for (const StridedSet& part : clip(own, begin, end))
    for (std::int64_t k = 0; k < part.count(); ++k)
      for (std::int64_t x = 0; x < part.length(); ++x) {
        const std::int64_t token = part.start() + k * part.stride() + x, position = own.count_below(token);
        std::int64_t page = table[static_cast<std::size_t>(position / group.layout.page_tokens())].value;
        if (parts != 0) {
          if (page % parts != place.tokens) continue;
          page /= parts;
        }
        out += token_checksum(group, heads, layer, token, tensor, page * group.layout.page_stride(),
                              position % group.layout.page_tokens(), scratch);
      }
  return out;
}

}  // namespace kvloom
