// Fair and bounded, with real endpoints: what leaves a prefill rank is what its pacer lets go, whoever is slow. The pacer's own laws are
// pacer_test.cc's. Prefill's clock stands until a test moves it; what was written is what the transport saw.
#include <gtest/gtest.h>

#include "tests/endpoint/cluster.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing_cluster::Cluster;
using testing_cluster::request;
using testing_cluster::Request;

constexpr std::int32_t kLayers = 5;
constexpr std::int64_t kTokens = 40;
constexpr Bytes kLayer{2 * kTokens};  // of one request

class Pace : public testing::Test {
 protected:
  // One prefill rank, and decode ranks that each are a group of their own.
  void start(std::size_t decode_ranks) {
    cluster.source_options.clock = [this] { return clock; };
    cluster.add_prefill("tp=1");
    cluster.add_decode(decode_ranks);
    for (std::size_t n = 0; n < decode_ranks; ++n) cluster.describe("tp=1", n);
  }
  Request to(std::size_t rank, const std::string& name) {
    Request out = request(kTokens, kTokens, 0, name);
    out.decode = {rank};
    cluster.begin(out);
    cluster.offer(out);
    return out;
  }
  void compute_rest(const Request& r) {
    for (std::int32_t layer = 1; layer < kLayers; ++layer) cluster.compute(r, LayerId(layer), 0, kTokens);
  }
  // The first layer of each is there, and prefill knows it: grants are here, and nothing is under way.
  void land_first_layers(const std::vector<Request>& all) {
    for (const Request& r : all) cluster.compute(r, LayerId(0), 0, kTokens);
    ASSERT_TRUE(cluster.drive([&] { return delivered() == kLayer * static_cast<std::int64_t>(all.size()); }));
  }

  Bytes delivered() const { return cluster.prefill[0]->endpoint->counts().delivered; }
  Bytes written(std::size_t rank) {
    Bytes out;
    for (const Posted& posted : cluster.world().posted())
      if (posted.to == cluster.decode[rank]->transport->address())
        for (const auto& run : posted.runs) out += run.total();
    return out;
  }

  Instant clock = 1s;
  Cluster cluster{shapes::mla(kLayers)};
};

TEST_F(Pace, ATargetThatDoesNotReadHoldsUpNobodyElseAndIsSentNoMoreThanItsShare) {
  constexpr Bytes kShare = kLayer * 2;
  cluster.source_options.pace.in_flight_each = kShare;
  start(2);
  const std::vector<Request> slow = {to(0, "a"), to(0, "b"), to(0, "c")};
  land_first_layers(slow);
  const Bytes before = written(0);
  cluster.decode[0]->sleeps = true;
  for (const Request& r : slow) compute_rest(r);
  const Request lives = to(1, "lives");
  cluster.compute_all(lives);
  ASSERT_TRUE(cluster.drive([&] {
    EXPECT_LE(written(0) - before, kShare);
    return cluster.over(lives);
  }));
  EXPECT_TRUE(cluster.landed(lives));
  EXPECT_EQ(written(0) - before, kShare);

  const Bytes others = delivered() - before;
  cluster.decode[0]->sleeps = false;
  ASSERT_TRUE(cluster.drive([&] {
    EXPECT_LE(written(0) - (delivered() - others), kShare);
    return std::all_of(slow.begin(), slow.end(), [&](const Request& r) { return cluster.over(r); });
  }));
  for (const Request& r : slow) EXPECT_TRUE(cluster.landed(r));
}

TEST_F(Pace, ARateHoldsPostsBackUntilTheirTimeHasCome) {
  cluster.source_options.pace.burst = kLayer * 4;
  cluster.source_options.pace.bytes_per_second = kLayer.value;
  start(1);
  const Request r = to(0, "r");
  land_first_layers({r});
  compute_rest(r);  // two posts of a layer that go at once, and one of two, joined behind them: a layer is left of the burst
  const auto written_after = [&](std::chrono::nanoseconds time) {
    clock += time;
    for (int turn = 0; turn < 100; ++turn) cluster.poll();
    return written(0);
  };
  EXPECT_EQ(written_after(0ms), kLayer * 3);
  EXPECT_EQ(written_after(999ms), kLayer * 3);
  EXPECT_EQ(written_after(1ms), kLayer * 5);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_TRUE(cluster.landed(r));
}

}  // namespace
}  // namespace kvloom
