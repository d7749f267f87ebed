// What the processes of ranks stand on: their memory as the CPU sees it, and the GPUs that they take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "kvloom/tools/cuda_ranks.h"
#include "kvloom/tools/rank_transport.h"
#include "kvloom/tools/request_pages.h"
#include "kvloom/transport/shm/shm.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using testing::HasSubstr;

// A device that breaks down after a number of copies. Its memory is the region's.
class CountedDevice final : public RankDevice {
 public:
  explicit CountedDevice(int good) : good_(good) {}
  std::string name() const override { return "a device that counts"; }
  Expected<void> put(std::byte* to, std::span<const std::byte> from) override { return copy(to, from.data(), from.size()); }
  Expected<void> get(std::span<std::byte> to, const std::byte* from) override { return copy(to.data(), from, to.size()); }
  Expected<std::int64_t> count_wrong(const std::byte* there, std::span<const std::byte> expected) override {
    return std::inner_product(expected.begin(), expected.end(), there, std::int64_t{0}, std::plus<>(),
                              [](std::byte right, std::byte got) { return std::int64_t{right != got}; });
  }
  Expected<std::shared_ptr<DeviceWork>> computed() override { return nullptr; }

 private:
  Expected<void> copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (good_-- == 0) return fail(Code::io, "the device broke down");
    std::memcpy(to, from, bytes);
    return {};
  }
  int good_;
};

constexpr std::int64_t kLength = 4096;

std::vector<int> bytes_of(std::span<const std::byte> memory) {
  std::vector<int> out;
  for (const std::byte b : memory) out.push_back(std::to_integer<int>(b));
  return out;
}

TEST(RankStore, OfNoBytesHasNothingToPutOrGet) {
  const RankStore store;
  EXPECT_TRUE(store.memory().empty());
  EXPECT_TRUE(store.put_all());
  EXPECT_TRUE(store.get_all());
}

TEST(RankStore, OfHostMemoryIsTheRegionItself) {
  const auto transport = open_transport({}, true, Rank(0)).value();
  const auto store = transport.allocate(Bytes(kLength)).value();
  EXPECT_EQ(store.memory().data(), store.region().base());
  EXPECT_EQ(store.memory().size(), store.region().memory().size());
  store.memory()[7] = std::byte{7};
  ASSERT_TRUE(store.put(7, 1));
  ASSERT_TRUE(store.get_all());
  EXPECT_EQ(store.region().base()[7], std::byte{7});
  EXPECT_EQ(transport.computed().value(), nullptr);
}

TEST(RankStore, OfADeviceCopiesTheRangeThatItIsToldAndNoOther) {
  const RankTransport transport(ShmTransport::make({}).value(), std::make_shared<CountedDevice>(2));
  const auto store = transport.allocate(Bytes(kLength)).value();
  ASSERT_NE(store.memory().data(), store.region().base());
  ASSERT_EQ(store.memory().size(), static_cast<std::size_t>(kLength));
  EXPECT_EQ(bytes_of(store.memory()), std::vector<int>(kLength, 0));

  std::fill(store.memory().begin(), store.memory().end(), std::byte{1});
  ASSERT_TRUE(store.put(100, 20));
  std::vector<int> region(kLength, 0);
  std::fill_n(region.begin() + 100, 20, 1);
  EXPECT_EQ(bytes_of(store.region().memory()), region);

  ASSERT_TRUE(store.put(5, 0)) << "nothing of nothing: the device is not asked";
  ASSERT_TRUE(store.get(110, 20));
  std::vector<int> view(kLength, 1);
  std::fill_n(view.begin() + 120, 10, 0);
  EXPECT_EQ(bytes_of(store.memory()), view);
}

TEST(RankStore, CountsWrongBytesWhereTheyAre) {
  const auto transport = *ShmTransport::make({});
  for (const bool on_device : {false, true}) {
    const auto store =
        RankStore::make(*transport->allocate(Bytes(kLength)), on_device ? std::make_shared<CountedDevice>(0) : nullptr);
    ASSERT_TRUE(store) << store.error().message;
    std::vector<std::byte> expected(1000);
    EXPECT_EQ(*store->count_wrong(100, expected), 0);
    expected[0] = expected[999] = std::byte{1};
    EXPECT_EQ(*store->count_wrong(100, expected), 2);
    store->region().memory()[1099] = std::byte{1};
    EXPECT_EQ(*store->count_wrong(100, expected), 1);
    EXPECT_EQ(*store->count_wrong(0, {}), 0);
  }
}

TEST(RankStore, SaysWhenItsDeviceBrokeDown) {
  const RankTransport transport(ShmTransport::make({}).value(), std::make_shared<CountedDevice>(0));
  const auto store = transport.allocate(Bytes(kLength)).value();
  EXPECT_EQ(store.put_all().error().message, "the device broke down");
}

// ---- pages of requests ----

// Knows the region of the store that it was first told to put: all of it.
class SeenDevice final : public RankDevice {
 public:
  std::string name() const override { return "a device that remembers"; }
  Expected<void> put(std::byte* to, std::span<const std::byte> from) override {
    if (region.empty()) region = {to, from.size()};
    std::memcpy(to, from.data(), from.size());
    return {};
  }
  Expected<void> get(std::span<std::byte>, const std::byte*) override { return fail(Code::io, "nobody should need this"); }
  Expected<std::int64_t> count_wrong(const std::byte* there, std::span<const std::byte> expected) override {
    ++checks;
    return std::inner_product(expected.begin(), expected.end(), there, std::int64_t{0}, std::plus<>(),
                              [](std::byte right, std::byte got) { return std::int64_t{right != got}; });
  }
  Expected<std::shared_ptr<DeviceWork>> computed() override { return nullptr; }

  std::span<std::byte> region;
  int checks = 0;
};

TEST(RequestPages, AreCheckedWhereTheyLieEveryByteOfThem) {
  constexpr std::int64_t kPages = 9, kPageTokens = 4, kTokens = 10, kHeads = 2, kLayers = 3, kRow = 4;  // k and v of 2 B
  const auto side = std::make_shared<const Side>(
      Side::make(shapes::gqa(kHeads, kLayers), Sharding::parse("tp=1").value(), kPageTokens).value());
  const auto device = std::make_shared<SeenDevice>();
  const RankTransport transport(ShmTransport::make({}).value(), device);
  const auto pages = RequestPages::make(side, Rank(0), {kPages}, 1, transport).value();
  ASSERT_TRUE(pages->take(1, kTokens, kTokens));
  EXPECT_EQ(*pages->wrong_bytes(1, {0, 0}, kTokens), 0) << "canaries still";
  for (const LayerId layer : pages->layers()) ASSERT_TRUE(pages->fill(1, layer, 0, kTokens, kTokens));
  EXPECT_EQ(*pages->wrong_bytes(1, {0, kTokens}, kTokens), 0);
  EXPECT_EQ(*pages->wrong_free_bytes(), 0);

  for (std::byte& byte : device->region) byte = ~byte;
  const std::int64_t page = kPageTokens * kHeads * kRow, held = ceil_div(kTokens, kPageTokens);
  EXPECT_EQ(*pages->wrong_bytes(1, {0, kTokens}, kTokens), held * kLayers * page);
  EXPECT_EQ(*pages->wrong_free_bytes(), (kPages - held) * kLayers * page);
  EXPECT_GT(device->checks, 0);
}

// ---- words ----

std::vector<int> gpus_of(const TransportWords& words, bool prefill, std::int32_t ranks, int visible) {
  std::vector<int> out;
  for (std::int32_t rank = 0; rank < ranks; ++rank) out.push_back(gpu_of(words, prefill, Rank(rank), visible));
  return out;
}

TEST(TransportWords, GivePrefillTheFirstHalfOfTheGpusAndDecodeTheSecond) {
  EXPECT_EQ(gpus_of({}, true, 3, 1), (std::vector{0, 0, 0}));
  EXPECT_EQ(gpus_of({}, false, 3, 1), (std::vector{0, 0, 0}));
  EXPECT_EQ(gpus_of({}, true, 3, 2), (std::vector{0, 0, 0}));
  EXPECT_EQ(gpus_of({}, false, 3, 2), (std::vector{1, 1, 1}));
  EXPECT_EQ(gpus_of({}, true, 3, 3), (std::vector{0, 0, 0}));
  EXPECT_EQ(gpus_of({}, false, 3, 3), (std::vector{1, 2, 1}));
  EXPECT_EQ(gpus_of({}, true, 6, 8), (std::vector{0, 1, 2, 3, 0, 1}));
  EXPECT_EQ(gpus_of({}, false, 6, 8), (std::vector{4, 5, 6, 7, 4, 5}));
}

TEST(TransportWords, GiveTheGpusThatAreSaidInTurn) {
  TransportWords words;
  words.prefill_gpus = {3};
  words.decode_gpus = {2, 0, 2};
  EXPECT_EQ(gpus_of(words, true, 2, 4), (std::vector{3, 3}));
  EXPECT_EQ(gpus_of(words, false, 4, 4), (std::vector{2, 0, 2, 2}));
}

TEST(TransportWords, AreRefusedInWordsThatSayWhatThereIs) {
  TransportWords words;
  EXPECT_TRUE(check_transport(words));
  words.decode_gpus = {1};
  EXPECT_THAT(check_transport(words).error().message, HasSubstr("--decode-gpus is for --transport cuda"));
  words = {.name = "ucx"};
  EXPECT_THAT(check_transport(words).error().message, HasSubstr("shm or cuda"));
  EXPECT_FALSE(open_transport(words, true, Rank(0)));
  words = {.name = "cuda"};
  EXPECT_EQ(check_transport(words).has_value(), cuda_is_built().has_value());
}

}  // namespace
}  // namespace kvloom
