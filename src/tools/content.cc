#include "kvloom/tools/content.h"

#include <algorithm>
#include <cstring>

namespace kvloom {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  return x;
}

// 8 bytes from each of seed, seed + golden, ...
void words(std::uint64_t seed, std::span<std::byte> out) {
  std::size_t at = 0;
  for (; at + 8 <= out.size(); at += 8, seed += kGolden) {
    const std::uint64_t word = mix(seed);
    std::memcpy(out.data() + at, &word, 8);
  }
  const std::uint64_t word = mix(seed);
  std::memcpy(out.data() + at, &word, out.size() - at);
}

}  // namespace

void content_row(const RowCoordinate& row, std::span<std::byte> out) {
  std::uint64_t seed = static_cast<std::uint64_t>(row.request) * kGolden;
  for (const std::int64_t part : {std::int64_t{row.group}, std::int64_t{row.layer.value}, row.token, row.head, row.plane})
    seed = mix((seed + static_cast<std::uint64_t>(part) + 1) * kGolden);
  words(seed, out);
}

void canary(std::uint64_t owner, std::int64_t offset, std::span<std::byte> out) {
  words(mix((owner + 0x5ca1ab1e) * kGolden) + static_cast<std::uint64_t>(offset) * kGolden, out);
}

}  // namespace kvloom
