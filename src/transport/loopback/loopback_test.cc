#include "kvloom/transport/loopback/loopback.h"

#include <gtest/gtest.h>

#include "tests/conformance/conformance.h"

namespace kvloom {
namespace {

class LoopbackConformance : public ConformanceWorld {
 public:
  explicit LoopbackConformance(std::optional<std::uint64_t> seed) : world_(seed ? LoopbackWorld(*seed) : LoopbackWorld()) {}
  std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) override { return world_.endpoint(std::move(hello)); }

 private:
  LoopbackWorld world_;
};

ConformanceCase loopback_case(std::string name, std::optional<std::uint64_t> seed) {
  return {std::move(name),
          [seed] { return std::make_unique<LoopbackConformance>(seed); },
          {.name = "loopback", .can_fence_frozen_peer = true, .can_revoke = true, .needs_target_progress = true}};
}

INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
                         testing::Values(loopback_case("in_order", std::nullopt), loopback_case("reordered_1", 1),
                                         loopback_case("reordered_2", 2)),
                         conformance_name);

struct Couple {
  explicit Couple(LoopbackWorld& world) {
    source.transport = world.endpoint({});
    target.transport = world.endpoint({});
    to_target = *source.transport->connect(target.transport->address());
    drive({&source, &target}, [&] { return target.count<PeerUp>() > 0; });
    to_source = target.all<PeerUp>()[0].peer;
    from = *source.transport->allocate(Bytes(4096));
    to = *target.transport->allocate(Bytes(4096));
    remote = *source.transport->import_region(to_target, *target.transport->export_region(to.id()));
    (void)target.transport->admit(to_source, Tag(1));
  }
  Party source;
  Party target;
  PeerId to_target;
  PeerId to_source;
  Region from;
  Region to;
  RemoteRegion remote;
};

TEST(Loopback, RecordsWhatWasPosted) {
  LoopbackWorld world;
  Couple c(world);
  const Runs runs{{Bytes(0), Bytes(64), Bytes(32)}, {Bytes(32), Bytes(0), Bytes(16)}};
  const PostId write = c.source.transport->write({c.from.id(), c.remote, Tag(1), runs});
  const PostId notice = c.source.transport->notify(c.to_target, Tag(1), bytes_of("landed"));
  ASSERT_EQ(world.posted().size(), 2u);
  EXPECT_EQ(world.posted()[0].post, write);
  EXPECT_EQ(world.posted()[0].from, c.source.transport->address());
  EXPECT_EQ(world.posted()[0].to, c.target.transport->address());
  EXPECT_EQ(world.posted()[0].runs, runs);
  EXPECT_FALSE(world.posted()[0].notice);
  EXPECT_EQ(world.posted()[1].post, notice);
  EXPECT_EQ(world.posted()[1].notice, bytes_of("landed"));
}

// The order in which 20 writes are completed.
std::vector<std::uint64_t> order_of(LoopbackWorld world) {
  Couple c(world);
  for (int i = 0; i < 20; ++i) c.source.transport->write({c.from.id(), c.remote, Tag(1), {}});
  drive({&c.source, &c.target}, [&] { return c.source.count<Completed>() == 20; });
  std::vector<std::uint64_t> order;
  for (const Completed& done : c.source.all<Completed>()) order.push_back(done.post.value);
  return order;
}

TEST(Loopback, ASeedReordersAndRepeatsItself) {
  const auto plain = order_of(LoopbackWorld());
  EXPECT_TRUE(std::is_sorted(plain.begin(), plain.end()));
  const auto seven = order_of(LoopbackWorld(7));
  EXPECT_FALSE(std::is_sorted(seven.begin(), seven.end()));
  EXPECT_EQ(seven, order_of(LoopbackWorld(7)));
  EXPECT_NE(seven, order_of(LoopbackWorld(8)));
}

}  // namespace
}  // namespace kvloom
