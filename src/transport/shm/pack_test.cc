#include "kvloom/transport/shm/pack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace kvloom::shm {
namespace {

using Copy = kvloom::Run;  // (inside of a test the name Run is gtest's)

constexpr std::int64_t kPage = 36'864;

std::vector<Copy> unpacked(const Copy& base, const PackSlot& slot) {
  std::vector<Copy> out;
  for (std::size_t i = 0; i < slot.count; ++i) out.push_back(unpack_run(base, slot, i));
  return out;
}

Copy page(std::int64_t source, std::int64_t target) { return {Bytes(source), Bytes(target), Bytes(kPage)}; }

TEST(Pack, GivesBackWhatWasPacked) {
  std::mt19937_64 random(1);
  const auto draw = [&](std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); };
  for (int round = 0; round < 20'000; ++round) {
    const std::int64_t unit = std::int64_t{1} << draw(20), most = std::int64_t{1} << (10 + draw(30));
    std::vector<Copy> runs;
    for (int i = 0; i < 9; ++i)
      runs.push_back({Bytes(draw(most) * unit), Bytes(draw(most) * unit), Bytes(576), 16, Bytes(2304), Bytes(576)});
    const Copy base = runs[8];
    const PackSlot slot = pack_runs(base, runs);
    const auto again = unpacked(base, slot);
    ASSERT_EQ(again, std::vector<Copy>(runs.begin(), runs.begin() + slot.count));
    ASSERT_EQ(is_packed(slot), slot.count > 0);
  }
}

TEST(Pack, PagesOfTheLargestMemoryFillASlot) {
  const std::int64_t last = (std::int64_t{1} << 40) / kPage;  // pages of a TiB
  const Copy base = page(last / 2 * kPage, 0);
  const std::vector<Copy> runs(20, page(last * kPage, last * kPage));
  EXPECT_EQ(pack_runs(base, runs).count, kPacked);
}

TEST(Pack, StopsBeforeARunOfAnotherKind) {
  std::vector<Copy> runs(5, page(0, kPage));
  runs[3].bytes = Bytes(656);
  EXPECT_EQ(pack_runs(runs[0], runs).count, 3);
  EXPECT_EQ(pack_runs(runs[3], runs).count, 0);
  runs[3] = page(0, 0);
  runs[3].count = 2;
  EXPECT_EQ(pack_runs(runs[0], runs).count, 3);
  runs[3].count = 1;
  runs[3].source_step = Bytes(1);
  EXPECT_EQ(pack_runs(runs[0], runs).count, 3);
  EXPECT_EQ(pack_runs(runs[0], {}).count, 0);
}

TEST(Pack, ADistanceThatDoesNotFitEndsTheSlot) {
  const std::int64_t far = (std::int64_t{1} << 40) + 1;  // odd: no unit helps
  const std::vector<Copy> runs{page(1, 1), page(far, 1), page(2, 2)};
  EXPECT_EQ(pack_runs(page(0, 0), runs).count, 1);
  EXPECT_EQ(pack_runs(page(0, 0), std::span(runs).subspan(1)).count, 0);
}

TEST(Pack, NoSlotOfAPeerOverflows) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 100'000; ++i) {
    PackSlot slot;
    for (std::size_t at = 0; at < sizeof(slot); at += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::memcpy(reinterpret_cast<std::byte*>(&slot) + at, &word, sizeof(word));
    }
    if (i % 2 == 0) {
      slot.count = slot.count % 9;
      slot.source_shift %= 34;
      slot.target_shift = kMostShift;
      slot.reserved = 0;
    }
    if (!is_packed(slot)) continue;
    const Copy base = page((std::int64_t{1} << 46) - 1, 0);
    for (const Copy& run : unpacked(base, slot))
      ASSERT_LT(std::abs(run.source_offset.value), std::int64_t{1} << 62 | std::int64_t{1} << 46);
  }
}

}  // namespace
}  // namespace kvloom::shm
