// Host memory that is lent more than once, or that its owner has pinned.
#include "kvloom/transport/cuda/pins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/device_work.h"
#include "tests/cuda/cuda_world.h"
#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

using testing::HasSubstr;

class CudaPins : public testing::Test {
 protected:
  CudaPins() : world(CudaWorldOptions{}), memory(3 * kLent) {
    one = world.endpoint({});
    two = world.endpoint({});
  }
  std::span<std::byte> part(std::size_t begin, std::size_t end) { return std::span(memory).subspan(begin, end - begin); }
  // Who is not pinned can't be copied to by a GPU, nor can it be asked for.
  bool pinned(std::size_t at) {
    unsigned type = 0;
    CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    void* values[] = {&type};
    const Current here = world.gpu()->current();
    EXPECT_EQ(world.gpu()->driver().cuPointerGetAttributes(1, names, values, reinterpret_cast<CUdeviceptr>(&memory[at])),
              CUDA_SUCCESS);
    return type == CU_MEMORYTYPE_HOST;
  }
  static std::string why_not(const Expected<Region>& region) { return region ? "it was lent" : region.error().message; }

  static constexpr std::size_t kLent = 8192;
  CudaWorld world;
  std::vector<std::byte> memory;
  std::unique_ptr<Transport> one, two;
};

TEST_F(CudaPins, MemoryThatIsLentTwiceStaysPinnedUntilBothEnd) {
  for (Transport* other : {one.get(), two.get()}) {
    Region first = *one->register_memory(part(0, kLent));
    auto second = other->register_memory(part(0, kLent));
    ASSERT_TRUE(second) << second.error().message;
    EXPECT_EQ(fake::live().registered, 1);
    first = Region();
    EXPECT_TRUE(pinned(100));
    *second = Region();
    EXPECT_FALSE(pinned(100));
  }
}

TEST_F(CudaPins, APartOfWhatIsLentSharesItsPinAndOutlivesIt) {
  Region all = *one->register_memory(part(0, 3 * kLent));
  auto inside = two->register_memory(part(kLent, 2 * kLent));
  ASSERT_TRUE(inside) << inside.error().message;
  all = Region();
  EXPECT_TRUE(pinned(kLent));
  auto again = one->register_memory(part(0, 3 * kLent));
  ASSERT_TRUE(again) << "all of it is still pinned: " << again.error().message;
  *inside = Region();
  *again = Region();
  EXPECT_EQ(fake::live().registered, 0);
}

TEST_F(CudaPins, WhatOverlapsAndGoesBeyondIsRefused) {
  Region lent = *one->register_memory(part(kLent, 2 * kLent));
  for (const auto& [begin, end] :
       {std::pair(std::size_t{0}, kLent + 1), std::pair(2 * kLent - 1, 3 * kLent), std::pair(std::size_t{0}, 3 * kLent)})
    EXPECT_THAT(why_not(two->register_memory(part(begin, end))),
                HasSubstr("overlap 8192 B that are lent, and go beyond them: first lend all of it"));
  EXPECT_EQ(why_not(two->register_memory(part(0, kLent))), "it was lent") << "beside it";
  EXPECT_EQ(why_not(two->register_memory(part(2 * kLent, 3 * kLent))), "it was lent");
  EXPECT_TRUE(pinned(kLent));
}

TEST_F(CudaPins, WhatItsOwnerHasPinnedIsNotUnpinned) {
  const Driver& driver = world.gpu()->driver();
  const Current here = world.gpu()->current();
  ASSERT_EQ(driver.cuMemHostRegister(memory.data(), 2 * kLent, 0), CUDA_SUCCESS);
  {
    const auto first = one->register_memory(part(0, 2 * kLent)), second = two->register_memory(part(100, 200));
    EXPECT_EQ(why_not(first), "it was lent");
    EXPECT_EQ(why_not(second), "it was lent");
    for (const auto& [begin, end] : {std::pair(std::size_t{100}, 3 * kLent), std::pair(2 * kLent - 1, 2 * kLent + 1)})
      EXPECT_THAT(why_not(one->register_memory(part(begin, end))),
                  HasSubstr("is pinned by its owner: pin all of it, or nothing"));
  }
  EXPECT_TRUE(pinned(0));
  EXPECT_EQ(driver.cuMemHostUnregister(memory.data()), CUDA_SUCCESS);
}

TEST_F(CudaPins, AMiddleThatItsOwnerHasPinnedIsSaid) {
  const Current here = world.gpu()->current();
  ASSERT_EQ(world.gpu()->driver().cuMemHostRegister(&memory[kLent], kLent, 0), CUDA_SUCCESS);
  EXPECT_THAT(why_not(one->register_memory(part(0, 3 * kLent))), HasSubstr("is pinned by its owner: pin all of it, or nothing"));
  EXPECT_EQ(fake::live().registered, 1);
}

// Its owner may have freed it, and have other memory there: only a new pin has that.
TEST_F(CudaPins, APinThatWaitsForAGateIsNotUsedAgain) {
  const auto gate = *StreamGate::make(world.gpu());
  Region lent = *one->register_memory(part(0, kLent));
  ASSERT_TRUE(gate->wait(world.stream(), LayerId(0)));
  lent = Region();
  EXPECT_TRUE(fake::stuck().empty());
  EXPECT_THAT(why_not(two->register_memory(part(100, 200))), HasSubstr("it can't be unpinned while a stream waits at a gate"));
  gate->over();
  const std::int64_t before = fake::calls("cuMemHostRegister");
  EXPECT_EQ(why_not(two->register_memory(part(100, 200))), "it was lent");
  EXPECT_EQ(fake::calls("cuMemHostRegister"), before + 1);
  EXPECT_EQ(world.gpu()->contexts().put_off(), 0U);
}

}  // namespace
}  // namespace kvloom::cuda
