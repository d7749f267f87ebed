#include "kvloom/bind/cache_memory.h"

#include <gtest/gtest.h>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::says;

constexpr Bytes kTensor{4096};

// Each held tensor in a place of its own in one region.
std::vector<PlacedTensor> one_after_another(const Side& side, Rank rank) {
  std::vector<PlacedTensor> out;
  for (const auto& [group, layer] : held_tensors(side, rank))
    out.push_back({group, layer, {{Bytes(0), kTensor, 0, kTensor * static_cast<std::int64_t>(out.size())}}});
  return out;
}

TEST(CacheMemory, FindsEachTensorThatTheRankHolds) {
  const Side side = shapes::side(shapes::drafted(), "cp=2:layers");
  for (const Rank rank : {Rank(0), Rank(1)}) {
    const auto tensors = one_after_another(side, rank);
    const Bytes length = kTensor * static_cast<std::int64_t>(tensors.size());
    const auto memory = CacheMemory::make(side, rank, std::span(&length, 1), tensors);
    ASSERT_TRUE(memory) << memory.error().message;
    for (const PlacedTensor& tensor : tensors)
      EXPECT_EQ(memory->find(tensor.group, tensor.layer)->parts()[0].region_offset, tensor.parts[0].region_offset);
  }
}

TEST(CacheMemory, RefusesWhatARankDoesNotHold) {
  const Side side = shapes::side(shapes::gqa(2), "cp=2:layers");
  const Bytes length = kTensor * 64;
  const auto make = [&](Rank rank, std::vector<PlacedTensor> tensors) {
    return CacheMemory::make(side, rank, std::span(&length, 1), std::move(tensors));
  };
  auto tensors = one_after_another(side, Rank(0));
  EXPECT_TRUE(says(make(Rank(2), tensors), "rank 2 of a side of 2 ranks"));
  EXPECT_TRUE(says(make(Rank(1), tensors), "rank 1 does not hold group 0 layer 0"));
  tensors.push_back(tensors.front());
  EXPECT_TRUE(says(make(Rank(0), tensors), "group 0 layer 0 is there twice"));
  tensors.back().layer = LayerId(99);
  EXPECT_TRUE(says(make(Rank(0), tensors), "rank 0 does not hold group 0 layer 99"));
  tensors.pop_back();
  tensors.pop_back();
  const auto left_out = make(Rank(0), tensors);
  ASSERT_TRUE(left_out);
  EXPECT_EQ(left_out->find(0, LayerId(1)), nullptr);
}

TEST(CacheMemory, RefusesPartsOutsideOfTheirRegions) {
  const Side side = shapes::side(shapes::gqa(2), "tp=1");
  const Bytes length = kTensor * 64;
  const auto changed = [&](auto change) {
    auto tensors = one_after_another(side, Rank(0));
    change(tensors.front().parts.front());
    return CacheMemory::make(side, Rank(0), std::span(&length, 1), std::move(tensors));
  };
  EXPECT_TRUE(says(changed([](TensorPart& part) { part.region = 1; }), "group 0 layer 0: region 1 of 1"));
  EXPECT_TRUE(says(changed([](TensorPart& part) { part.region = -1; }), "region -1 of 1"));
  EXPECT_TRUE(says(changed([](TensorPart& part) { part.region_offset = Bytes(INT64_MAX); }), "of region 0, which has 262144 B"));
  EXPECT_TRUE(says(changed([](TensorPart& part) { part.length = Bytes(262145); }), "262145 B at 0 of region 0"));
  EXPECT_TRUE(says(changed([](TensorPart& part) { part.length = Bytes(0); }), "group 0 layer 0: region 0: 0 bytes"));
}

}  // namespace
}  // namespace kvloom
