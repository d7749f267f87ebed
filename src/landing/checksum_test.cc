#include "kvloom/landing/checksum.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace kvloom {
namespace {

CacheShape shape() {
  const std::vector<LayerId> layers = {LayerId(0), LayerId(1), LayerId(2), LayerId(3), LayerId(4)};
  return CacheShape::make("m", 5, {{"kv", GroupKind::paged, layers, 4, {{"k", 6, 2}, {"v", 4, 2}}, {}, ""}}).value();
}

std::byte content(LayerId layer, std::int64_t token, std::int64_t head, std::size_t plane, std::int64_t byte) {
  std::uint64_t x = static_cast<std::uint64_t>(((layer.value * 1000 + token) * 16 + head) * 4) + plane;
  x = (x * 64 + static_cast<std::uint64_t>(byte)) * 0x9e3779b97f4a7c15ULL;
  return static_cast<std::byte>(x >> 40);
}

// One rank's tensors and table, filled by plain loops over all tokens.
struct RankCache {
  std::vector<PageId> table;
  std::map<LayerId, std::vector<std::byte>> tensors;
};

RankCache fill(const Side& side, Rank rank, std::int64_t total, std::mt19937_64& random) {
  const GroupSide& group = side.groups().front();
  const Place& place = group.places[static_cast<std::size_t>(rank.value)];
  const StridedSet own = group.tokens.part(place.tokens, total), &heads = group.head_parts[static_cast<std::size_t>(place.heads)];
  RankCache out;
  const std::int64_t pages = total / group.layout.page_tokens() + 2;
  for (std::int64_t p = 0; p < pages; ++p) out.table.emplace_back(p);
  std::shuffle(out.table.begin(), out.table.end(), random);
  const StridedSet& layers = group.layer_parts[static_cast<std::size_t>(place.layers)];
  for (std::int64_t l = layers.start(); l < layers.end(); ++l) {
    const LayerId layer = group.layers[static_cast<std::size_t>(l)];
    auto& tensor = out.tensors[layer];
    tensor.resize(static_cast<std::size_t>(pages * group.layout.page_stride()), std::byte{0xee});
    for (std::int64_t token = 0; token < total; ++token) {
      if (!own.contains(token)) continue;
      const std::int64_t at = own.count_below(token),
                         page = out.table[static_cast<std::size_t>(at / group.layout.page_tokens())].value;
      for (std::int64_t h = 0; h < heads.size(); ++h)
        for (std::size_t p = 0; p < group.planes.size(); ++p)
          for (std::int64_t x = 0; x < group.planes[p].bytes; ++x)
            tensor[static_cast<std::size_t>(page * group.layout.page_stride() +
                                            group.layout.planes()[p].at(at % group.layout.page_tokens(), h, x))] =
                content(layer, token, heads.start() + h, p, x);
    }
  }
  return out;
}

Checksum of_side(const Side& side, std::int64_t begin, std::int64_t total, std::mt19937_64& random) {
  const GroupSide& group = side.groups().front();
  Checksum sum;
  for (std::int32_t rank = 0; rank < side.ranks(); ++rank) {
    if (group.places[static_cast<std::size_t>(rank)].replica != 0) continue;
    const RankCache cache = fill(side, Rank(rank), total, random);
    for (const auto& [layer, tensor] : cache.tensors)
      sum += checksum(group, Rank(rank), layer, tensor, cache.table, begin, total, total);
  }
  return sum;
}

// The law: one sum, however the cache is sharded.
TEST(Checksum, IsTheSameForEveryShardingLayoutAndTable) {
  std::mt19937_64 random(7);
  const std::int64_t total = 150, begin = 37;
  const auto side = [](const char* words) { return Side::make(shape(), Sharding::parse(words).value(), 8).value(); };
  const Checksum wanted = of_side(side("tp=1"), begin, total, random);
  EXPECT_EQ(wanted.rows, (total - begin) * 5 * 4 * 2);
  for (const char* words :
       {"cp=8:layers", "dcp=4", "tp=4,dcp=2:stripe=1", "tp=8,page=16,layout=hnd", "cp=3:zigzag,layout=packed-nhd",
        "pp=2,tp=2,layout=cpu", "cp=4:interleave=2", "cp=2:blocked,page=5", "tp=2,layout=packed-hnd,page_stride=512"})
    EXPECT_EQ(to_string(of_side(side(words), begin, total, random)), to_string(wanted)) << words;
}

TEST(Checksum, ChangesWithOneBitAndWithRowsThatChangePlaces) {
  std::vector<std::byte> a(576), b(576);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<std::byte>(i);
    b[i] = static_cast<std::byte>(i * 7);
  }
  const auto sum = [](std::int64_t ta, std::span<const std::byte> x, std::int64_t tb, std::span<const std::byte> y) {
    Checksum out = row_checksum(LayerId(1), ta, 0, 0, x);
    return out += row_checksum(LayerId(1), tb, 0, 0, y);
  };
  EXPECT_EQ(sum(5, a, 6, b), sum(6, b, 5, a)) << "order does not matter";
  EXPECT_NE(sum(5, a, 6, b), sum(5, b, 6, a)) << "places do";
  auto c = b;
  c[300] ^= std::byte{1};
  EXPECT_NE(sum(5, a, 6, b), sum(5, a, 6, c));
  EXPECT_NE(row_checksum(LayerId(1), 5, 0, 0, a), row_checksum(LayerId(2), 5, 0, 0, a));
  EXPECT_NE(row_checksum(LayerId(1), 5, 0, 0, a), row_checksum(LayerId(1), 5, 1, 0, a));
  EXPECT_NE(row_checksum(LayerId(1), 5, 0, 0, a), row_checksum(LayerId(1), 5, 0, 1, a));
}

}  // namespace
}  // namespace kvloom
