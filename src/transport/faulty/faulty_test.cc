#include "kvloom/transport/faulty/faulty.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kvloom/transport/loopback/loopback.h"
#include "kvloom/transport/shm/shm.h"
#include "tests/conformance/conformance.h"

namespace kvloom {
namespace {

using testing::HasSubstr;
using Kind = Fault::Kind;

class FaultyLoopback : public ConformanceWorld {
 public:
  std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) override {
    return std::make_unique<FaultyTransport>(world_.endpoint(std::move(hello)), FaultPlan());
  }

 private:
  LoopbackWorld world_;
};

class FaultyShm : public ConformanceWorld {
 public:
  std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) override {
    return std::make_unique<FaultyTransport>(*ShmTransport::make({{.listen = "*", .hello = std::move(hello)}}), FaultPlan());
  }
};

const Abilities kLikeLoopback{.name = "faulty", .can_fence_frozen_peer = true, .can_revoke = true, .needs_target_progress = true};
const Abilities kLikeShm{.name = "faulty",
                         .can_fence_frozen_peer = true,
                         .can_revoke = true,
                         .needs_target_progress = true,
                         .source_must_be_allocated = true,
                         .crosses_processes = true};

INSTANTIATE_TEST_SUITE_P(
    Faulty, TransportConformance,
    testing::Values(ConformanceCase{"no_faults_over_loopback", [] { return std::make_unique<FaultyLoopback>(); }, kLikeLoopback},
                    ConformanceCase{"no_faults_over_shm", [] { return std::make_unique<FaultyShm>(); }, kLikeShm}),
    conformance_name);

// A source with faults and a target without.
struct Couple {
  explicit Couple(FaultPlan plan) {
    source.transport = std::make_unique<FaultyTransport>(world.endpoint({}), std::move(plan));
    target.transport = world.endpoint({});
    to_target = *source.transport->connect(target.transport->address());
    drive({&source, &target}, [&] { return target.count<PeerUp>() > 0 && source.count<PeerUp>() > 0; });
    to_source = target.all<PeerUp>()[0].peer;
    from = *source.transport->allocate(Bytes(4096));
    fill(from.memory(), 1);
    to = *target.transport->allocate(Bytes(4096));
    remote = *source.transport->import_region(to_target, *target.transport->export_region(to.id()));
    (void)target.transport->admit(to_source, Tag(1));
  }
  PostId write(Tag tag = Tag(1)) { return source.transport->write({from.id(), remote, tag, runs}); }
  PostId notify(std::string_view text, Tag tag = Tag(1)) { return source.transport->notify(to_target, tag, bytes_of(text)); }
  bool finish(PostId post) {
    return drive({&source, &target}, [&] { return source.completed(post) != nullptr; });
  }
  bool landed(std::int64_t begin, std::int64_t end) const {
    return std::equal(to.memory().begin() + begin, to.memory().begin() + end, from.memory().begin() + begin);
  }

  LoopbackWorld world;
  Party source;
  Party target;
  PeerId to_target;
  PeerId to_source;
  Region from;
  Region to;
  RemoteRegion remote;
  std::vector<Run> runs{{Bytes(0), Bytes(0), Bytes(2048)}, {Bytes(2048), Bytes(2048), Bytes(2048)}};
};

TEST(Faulty, ADroppedWriteIsToldAsFailedAndItsNoticeNeverComes) {
  Couple c(FaultPlan::script({{0, {Kind::drop, 3}}}));
  const PostId write = c.write();
  const PostId notice = c.notify("landed");
  for (int i = 0; i < 2; ++i) c.source.poll();
  EXPECT_EQ(c.source.completed(write), nullptr) << "told late";
  ASSERT_TRUE(c.finish(notice));
  EXPECT_THAT(to_string(c.source.completed(write)->delivered.error()), HasSubstr("lost by plan"));
  EXPECT_FALSE(c.source.completed(notice)->delivered);
  EXPECT_TRUE(c.target.count<Notice>() == 0);
  EXPECT_FALSE(c.landed(0, 2048));
}

TEST(Faulty, ADelayedWriteHoldsWhatFollowsItForSoManyPolls) {
  Couple c(FaultPlan::script({{0, {Kind::delay, 5}}}));
  c.write();
  c.notify("landed");
  for (int i = 0; i < 4; ++i) c.source.poll(), c.target.poll();
  EXPECT_TRUE(c.world.posted().empty());
  for (int i = 0; i < 2; ++i) c.source.poll(), c.target.poll();
  EXPECT_EQ(c.target.count<Notice>(), 1u);
  EXPECT_TRUE(c.landed(0, 4096));
}

TEST(Faulty, ATruncatedWriteLandsInHalfAndIsNotDelivered) {
  Couple c(FaultPlan::script({{0, {Kind::truncate}}}));
  const PostId write = c.write();
  ASSERT_TRUE(c.finish(write));
  EXPECT_THAT(to_string(c.source.completed(write)->delivered.error()), HasSubstr("cut by plan"));
  EXPECT_TRUE(c.landed(0, 2048));
  EXPECT_FALSE(c.landed(2048, 4096));
}

TEST(Faulty, ATruncatedNoticeArrivesInHalf) {
  Couple c(FaultPlan::script({{0, {Kind::truncate}}}));
  const PostId notice = c.notify("landed");
  ASSERT_TRUE(c.finish(notice));
  ASSERT_EQ(c.target.count<Notice>(), 1u);
  EXPECT_EQ(c.target.all<Notice>()[0].payload, bytes_of("lan"));
}

TEST(Faulty, ADuplicateArrivesTwiceAndIsToldOnce) {
  Couple c(FaultPlan::script({{0, {Kind::duplicate}}, {1, {Kind::duplicate}}}));
  c.write();
  const PostId notice = c.notify("landed");
  ASSERT_TRUE(c.finish(notice));
  EXPECT_EQ(c.world.posted().size(), 4u);
  EXPECT_EQ(c.target.count<Notice>(), 2u);
  EXPECT_EQ(c.source.count<Completed>(), 2u);
}

TEST(Faulty, AFailedWriteReachesNobody) {
  Couple c(FaultPlan::script({{0, {Kind::fail}}}));
  const PostId write = c.write();
  ASSERT_TRUE(c.finish(write));
  EXPECT_THAT(to_string(c.source.completed(write)->delivered.error()), HasSubstr("refused by plan"));
  EXPECT_TRUE(c.world.posted().empty());
}

TEST(Faulty, WhatIsHeldFailsWhenThePeerGoes) {
  Couple c(FaultPlan::script({{0, {Kind::delay, 1000}}}));
  const PostId write = c.write();
  ASSERT_TRUE(c.source.transport->fence(c.to_target));
  ASSERT_TRUE(c.finish(write));
  EXPECT_FALSE(c.source.completed(write)->delivered);
  EXPECT_TRUE(std::holds_alternative<PeerDown>(c.source.events.back())) << c.source.text();
}

TEST(Faulty, ASeededPlanRepeatsItselfAndKnowsAllKinds) {
  const FaultPlan plan = FaultPlan::seeded(5, 0.3);
  std::array<int, 6> met{};
  for (std::uint64_t i = 0; i < 2000; ++i) {
    EXPECT_EQ(plan.at(i), FaultPlan::seeded(5, 0.3).at(i));
    ++met[static_cast<std::size_t>(plan.at(i).kind)];
  }
  for (const int count : met) EXPECT_GT(count, 50);
  EXPECT_NEAR(met[0], 1400, 100);
}

TEST(Faulty, WhateverTheFaultsTheLawsHold) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Couple c(FaultPlan::seeded(seed, 0.3));
    std::vector<std::pair<PostId, PostId>> transfers;  // a write and its notice, each pair with a tag of its own
    for (std::uint64_t t = 0; t < 20; ++t) {
      const Tag tag(100 + t);
      ASSERT_TRUE(c.target.transport->admit(c.to_source, tag));
      const PostId write = c.write(tag);
      transfers.emplace_back(write, c.notify(fmt::format("{}", t), tag));
      if (t % 3 == 0) c.source.poll(), c.target.poll();
    }
    ASSERT_TRUE(drive({&c.source, &c.target}, [&] { return c.source.count<Completed>() >= 40; })) << "seed " << seed;
    for (int i = 0; i < 50; ++i) c.source.poll(), c.target.poll();
    ASSERT_EQ(c.source.count<Completed>(), 40u) << "seed " << seed;
    for (const Notice& notice : c.target.all<Notice>()) {
      EXPECT_TRUE(c.source.completed(transfers[notice.tag.value - 100].first)->delivered) << "seed " << seed << "\n"
                                                                                          << c.source.text();
    }
  }
}

}  // namespace
}  // namespace kvloom
