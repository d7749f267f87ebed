#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/endpoint/cluster.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing_cluster::Cluster;
using testing_cluster::request;
using testing_cluster::Request;

struct Pair {
  CacheShape shape;
  std::string prefill, decode;
};

std::vector<Pair> pairs() {
  return {{shapes::mla(), "cp=8:layers", "dcp=4"},
          {shapes::gqa(8), "tp=2", "tp=4"},
          {shapes::gqa(2), "pp=2", "tp=2"},
          {shapes::dsa(), "cp=2:layers", "dcp=2:stripe=1"},
          {shapes::hybrid(), "tp=1", "tp=2"},
          {shapes::stateful(), "tp=2", "tp=1"},
          {shapes::drafted(), "cp=2:layers", "dcp=2,draft:replicated"},
          {shapes::mla(), "cp=2:zigzag", "dcp=2"}};
}

// ---- the job ----

TEST(Endpoints, MoveAnyShardingToAnyOtherWhileItIsComputed) {
  for (const Pair& pair : pairs())
    for (const bool source_first : {true, false}) {
      Cluster cluster(pair.shape, pair.prefill, pair.decode);
      const Request r = request(37, 10, 5);
      if (source_first) {
        cluster.offer(r);
        cluster.compute_all(r);
        cluster.begin(r);
      } else {
        cluster.begin(r);
        cluster.offer(r);
        cluster.compute_all(r);
      }
      ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); })) << pair.prefill << " to " << pair.decode;
      EXPECT_TRUE(cluster.landed(r)) << pair.prefill << " to " << pair.decode;
    }
}

TEST(Endpoints, TellLayersInOrderWhileLaterOnesAreStillToBeComputed) {
  Cluster cluster(shapes::mla(4), "tp=1", "tp=1");
  const Request r = request(8);
  cluster.begin(r);
  cluster.offer(r);
  for (std::int32_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(cluster.decode[0]->layers(r.key).size(), static_cast<std::size_t>(layer));
    cluster.compute(r, LayerId(layer), 0, 8);
    ASSERT_TRUE(cluster.drive([&] { return cluster.decode[0]->layers(r.key).size() == static_cast<std::size_t>(layer) + 1; }));
    EXPECT_EQ(cluster.decode[0]->layers(r.key).back(), LayerId(layer));
  }
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_TRUE(cluster.landed(r));
}

// ---- devices ----

struct CountingGate final : LayerGate {
  std::vector<LayerId> layers;
  int overs = 0;
  void landed(LayerId layer) override { layers.push_back(layer); }
  void over() override { ++overs; }
};

struct LaterWork final : DeviceWork {
  Expected<bool> state = false;
  Expected<bool> is_done() override { return state; }
};

TEST(Endpoints, AGateOpensWithEachLayerAndOnceForAllWithTheEnd) {
  for (const bool cancelled : {false, true}) {
    Cluster cluster(shapes::mla(), "cp=2:layers", "tp=1");
    Request r = request(8);
    const auto gate = std::make_shared<CountingGate>();
    r.gate = gate;
    cluster.begin(r);
    cluster.offer(r);
    cluster.compute(r, LayerId(0), 0, 8);
    ASSERT_TRUE(cluster.drive([&] { return gate->layers.size() == 1; }));
    EXPECT_EQ(gate->overs, 0);
    if (cancelled)
      cluster.decode[0]->endpoint->cancel(r.key, "enough");
    else
      for (std::int32_t layer = 1; layer < 5; ++layer) cluster.compute(r, LayerId(layer), 0, 8);
    ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
    EXPECT_EQ(gate->overs, 1);
    EXPECT_EQ(gate->layers.size(), cancelled ? 1U : 5U);
  }
}

TEST(Endpoints, ALayerLeavesOnceItsDeviceHasComputedIt) {
  Cluster cluster(shapes::mla(), "tp=1", "tp=1");
  const Request r = request(8);
  cluster.begin(r);
  cluster.offer(r);
  const auto work = std::make_shared<LaterWork>();
  cluster.compute(r, LayerId(0), 0, 8, work);
  for (int turn = 0; turn < 50; ++turn) cluster.poll();
  EXPECT_TRUE(cluster.decode[0]->layers(r.key).empty());
  work->state = true;
  ASSERT_TRUE(cluster.drive([&] { return cluster.decode[0]->layers(r.key).size() == 1; }));
  const auto broken = std::make_shared<LaterWork>();
  broken->state = fail(Code::io, "the GPU broke down");
  cluster.compute(r, LayerId(1), 0, 8, broken);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_THAT(cluster.decode[0]->find<TargetEnded>(r.key)->why.message,
              testing::HasSubstr("layer 1 was not computed: the GPU broke down"));
}

TEST(Endpoints, ManyRequestsAtOnceKeepTheirBytesApart) {
  Cluster cluster(shapes::gqa(2), "cp=2:layers", "dcp=2", 5);
  std::vector<Request> all;
  for (int i = 0; i < 6; ++i) all.push_back(request(9 + 4 * i, 5, i, "req-" + std::to_string(i)));
  for (const Request& r : all) {
    cluster.begin(r);
    cluster.offer(r);
  }
  for (const Request& r : all) cluster.compute_all(r);
  for (const Request& r : all) {
    ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
    EXPECT_TRUE(cluster.landed(r));
  }
}

TEST(Endpoints, APayloadRidesWithCompletion) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "tp=1");
  Request r = request(12);
  r.payload = true;
  ASSERT_TRUE(cluster.serves(r));
  const auto& payloads = cluster.decode[0]->find<TargetEnded>(r.key)->payloads;
  ASSERT_EQ(payloads.size(), 2U);
  for (const auto& [rank, bytes] : payloads)
    EXPECT_EQ(bytes, (std::vector{std::byte{42}, std::byte{static_cast<unsigned char>(rank.value)}}));
}

// ---- cases of others' software ----

// A write was reported done before its bytes were visible; with five transfers at once to one peer bytes were damaged.
TEST(Cases, Case23_WhatIsToldAsLandedIsThereInThatMoment) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    Cluster cluster(shapes::gqa(2), "tp=2", "tp=1", seed);  // the transport delivers in any order that it may
    std::vector<Request> all;
    for (int i = 0; i < 5; ++i) all.push_back(request(14 + i, 5, 0, "req-" + std::to_string(i)));
    for (const Request& r : all) {
      cluster.begin(r);
      cluster.offer(r);
    }
    auto& d = *cluster.decode[0];
    auto& cache = *d.memories[0]->cache;
    std::size_t seen = 0;
    const auto check = [&] {
      for (; seen < d.events.size(); ++seen) {
        const auto* layer = std::get_if<LayerLanded>(&d.events[seen]);
        if (layer == nullptr) continue;
        const auto& r = *std::find_if(all.begin(), all.end(), [&](const Request& of) { return of.key == layer->key; });
        ASSERT_EQ(cache.check(r.number, 0, layer->layer, 0, r.tokens, r.tokens, d.tables.at(r.key)[0]), -1);
      }
    };
    for (std::int64_t begin = 0; begin < 18; begin += 5)
      for (std::int32_t layer = 0; layer < 3; ++layer)
        for (const Request& r : all) {
          if (begin < r.tokens) cluster.compute(r, LayerId(layer), begin, std::min(begin + 5, r.tokens));
          cluster.poll();
          check();
        }
    ASSERT_TRUE(cluster.drive([&] {
      check();
      return std::all_of(all.begin(), all.end(), [&](const Request& r) { return cluster.over(r); });
    }));
    EXPECT_EQ(std::count_if(d.events.begin(), d.events.end(),
                            [](const TargetEvent& e) { return std::holds_alternative<LayerLanded>(e); }),
              15);
  }
}

// The source evicted pages before the asynchronous sender had read them.
TEST(Cases, Case33_ASourcesPagesAreKeptWhileTheyAreRead) {
  Cluster cluster(shapes::mla(), "tp=1", "tp=1");
  const Request r = request(16);
  auto& p = *cluster.prefill[0];
  cluster.begin(r);
  cluster.offer(r);
  cluster.compute(r, LayerId(0), 0, 16);
  ASSERT_TRUE(cluster.drive([&] { return !cluster.decode[0]->layers(r.key).empty(); }));
  for (std::int32_t layer = 1; layer < 5; ++layer) cluster.compute(r, LayerId(layer), 0, 16);
  for (int turn = 0; turn < 200; ++turn) p.endpoint->poll(0ns, p.events);  // its target does not run
  p.endpoint->cancel(r.key, "evicted");
  for (int turn = 0; turn < 200; ++turn) p.endpoint->poll(0ns, p.events);
  EXPECT_EQ(p.find<SourceReleased>(r.key), nullptr);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
}

// Several layers share one buffer: the next one overwrote it while the one before was still being sent.
TEST(Cases, Case35_ALayersPagesMayBeOverwrittenOnceItIsReleased) {
  Cluster cluster(shapes::mla(5), "tp=1", "dcp=2");
  const Request r = request(24);
  auto& p = *cluster.prefill[0];
  cluster.begin(r);
  cluster.offer(r);
  for (std::int32_t layer = 0; layer < 5; ++layer) {
    cluster.compute(r, LayerId(layer), 0, 24);
    const auto released = [&] {
      return std::any_of(p.events.begin(), p.events.end(), [&](const SourceEvent& event) {
        const auto* of = std::get_if<LayerReleased>(&event);
        return of != nullptr && of->layer == LayerId(layer);
      });
    };
    ASSERT_TRUE(cluster.drive(released));
    auto& bytes = p.memory->cache->bytes(0, LayerId(layer));
    std::fill(bytes.begin(), bytes.end(), std::uint8_t{0});
  }
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_TRUE(cluster.landed(r));
}

// ---- per request, not per cluster ----

TEST(Endpoints, OnePrefillGroupServesDecodeGroupsOfAnyShardingAtTheSameTime) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=4:layers");
  cluster.add_decode(7);
  cluster.describe("dcp=4", 0);
  cluster.describe("tp=1", 4);
  cluster.describe("dcp=2", 5);
  std::vector<Request> all = {request(30, 8, 0, "to dcp=4"), request(30, 8, 0, "to tp=1"), request(30, 8, 3, "to dcp=2")};
  all[0].decode = {0, 1, 2, 3};
  all[1].decode = {4};
  all[2].decode = {5, 6};
  for (const Request& r : all) {
    cluster.begin(r);
    cluster.offer(r);
  }
  for (const Request& r : all) cluster.compute_all(r);
  for (const Request& r : all) {
    ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); })) << r.key.name;
    EXPECT_TRUE(cluster.landed(r)) << r.key.name;
  }
}

TEST(Endpoints, ADecodeGroupChangesItsShardingBetweenTwoRequests) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(4);
  cluster.describe("dcp=2", 0);
  cluster.describe("dcp=2", 2);
  cluster.describe("dcp=4");
  std::vector<Request> all = {request(20, 8, 0, "a"), request(20, 8, 0, "b"), request(20, 8, 0, "c")};
  all[0].decode = {0, 1};
  all[1].decode = {2, 3};
  all[2].geometry = 1;
  for (const Request& r : all) {
    cluster.begin(r);
    cluster.offer(r);
    cluster.compute_all(r);
    ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); })) << r.key.name;
    EXPECT_TRUE(cluster.landed(r)) << r.key.name;
  }
  EXPECT_EQ(cluster.prefill[0]->endpoint->peers(), 4U);  // nobody connected anew
}

// ---- ends ----

TEST(Endpoints, ACancelledTransferGivesBackItsPagesOnBothSides) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "dcp=2");
  const Request r = request(16);
  cluster.begin(r);
  cluster.offer(r);
  cluster.compute(r, LayerId(0), 0, 16);
  ASSERT_TRUE(cluster.drive([&] { return !cluster.decode[0]->layers(r.key).empty(); }));
  for (auto& d : cluster.decode) d->endpoint->cancel(r.key, "its user left");
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  for (auto& d : cluster.decode) EXPECT_EQ(d->find<TargetEnded>(r.key)->outcome, Outcome::cancelled);
  for (auto& p : cluster.prefill) {
    EXPECT_EQ(p->find<SourceEnded>(r.key)->outcome, Outcome::cancelled);
    EXPECT_THAT(p->find<SourceEnded>(r.key)->why.message, testing::HasSubstr("its user left"));
  }
  Request next = request(16, 4, 0, "next");
  EXPECT_TRUE(cluster.serves(next));
}

TEST(Endpoints, WhatAllDecodeRanksHadLeftBeforeItWasOfferedIsOverAtOnce) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "dcp=2");
  const Request met = request(16, 4, 0, "met"), left = request(16, 4, 0, "left");
  ASSERT_TRUE(cluster.serves(met));
  cluster.begin(left);
  for (auto& d : cluster.decode) d->endpoint->cancel(left.key, "its user left");
  ASSERT_TRUE(cluster.drive([&] { return cluster.decoded(left); }));
  cluster.offer(left);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(left); }));
  for (auto& p : cluster.prefill) EXPECT_EQ(p->find<SourceEnded>(left.key)->outcome, Outcome::cancelled);
}

TEST(Endpoints, SidesThatDoNotFitAreOverOnBothSidesAtOnce) {
  Cluster cluster(shapes::gqa(4));
  cluster.add_prefill("tp=2");
  cluster.another_model(shapes::gqa(2));
  cluster.add_decode(2);
  cluster.describe("tp=2");
  Request offered = request(16, 4, 0, "offered"), later = request(16, 4, 0, "later");
  for (Request* r : {&offered, &later}) r->time = 1h;
  cluster.offer(offered);
  cluster.begin(offered);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(offered); }));
  cluster.begin(later);
  ASSERT_TRUE(cluster.drive([&] { return cluster.decoded(later); }));
  cluster.offer(later);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(later); }));
  for (const Request& r : {offered, later}) {
    for (auto& d : cluster.decode) EXPECT_EQ(d->find<TargetEnded>(r.key)->outcome, Outcome::failed);
    for (auto& p : cluster.prefill) {
      EXPECT_EQ(p->find<SourceEnded>(r.key)->outcome, Outcome::cancelled);
      EXPECT_THAT(p->find<SourceEnded>(r.key)->why.message, testing::HasSubstr("prefill has 4 heads, decode 2"));
    }
  }
}

TEST(Endpoints, AnEngineThatPreemptsFailsItsTargetsWithItsReason) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "tp=1");
  const Request r = request(16);
  cluster.begin(r);
  cluster.offer(r);
  cluster.prefill[1]->endpoint->cancel(r.key, "preempted: out of pages");
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  const auto* ended = cluster.decode[0]->find<TargetEnded>(r.key);
  EXPECT_EQ(ended->outcome, Outcome::failed);
  EXPECT_THAT(ended->why.message, testing::HasSubstr("prefill rank 1: preempted: out of pages"));
}

TEST(Endpoints, NameWhoDidNotAnswerWhenTimeIsUp) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "tp=1");
  cluster.prefill[1]->endpoint.reset();
  Request r = request(16);
  r.time = 300ms;
  auto& d = *cluster.decode[0];
  const std::vector<SourceAddress> sources = {{cluster.prefill[0]->endpoint->address(), ""}, {"tcp://127.0.0.1:9", ""}};
  ASSERT_TRUE(d.endpoint->begin({r.key, d.geometries[0], sources, {0, 16}, {{{}, 96}}, r.time}));
  ASSERT_TRUE(cluster.drive([&] { return d.find<TargetReleased>(r.key) != nullptr; }));
  EXPECT_EQ(d.find<TargetEnded>(r.key)->why.code, Code::deadline);
  EXPECT_THAT(d.find<TargetEnded>(r.key)->why.message,
              testing::HasSubstr("time is up; prefill rank 1 at tcp://127.0.0.1:9: no answer"));
}

TEST(Endpoints, ARestartedPrefillRankIsServedUnderItsNewIncarnation) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "dcp=2");
  const Request before = request(16);
  cluster.begin(before);
  cluster.offer(before);
  cluster.compute(before, LayerId(0), 0, 16);
  ASSERT_TRUE(cluster.drive([&] { return !cluster.decode[0]->layers(before.key).empty(); }));
  const std::string address = cluster.prefill[1]->endpoint->address();
  const auto side = cluster.prefill[1]->memory->side;
  cluster.prefill[1] = nullptr;
  cluster.prefill[1] = std::make_unique<testing_cluster::Prefill>();
  cluster.start_prefill(1, side, Rank(1), address);
  ASSERT_TRUE(
      cluster.drive([&] { return cluster.decoded(before) && cluster.prefill[0]->find<SourceReleased>(before.key) != nullptr; }));
  for (auto& d : cluster.decode) {
    EXPECT_EQ(d->find<TargetEnded>(before.key)->outcome, Outcome::failed);
    EXPECT_THAT(d->find<TargetEnded>(before.key)->why.message, testing::HasSubstr("prefill rank 1"));
  }
  const Request after = request(16, 4, 0, "after");
  EXPECT_TRUE(cluster.serves(after));
}

TEST(Endpoints, ADecodeRankThatDiesCostsItsOwnTransfersOnly) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(2);
  cluster.describe("tp=1", 0);
  cluster.describe("tp=1", 1);
  Request dies = request(16, 4, 0, "dies"), lives = request(16, 4, 0, "lives");
  dies.decode = {0};
  lives.decode = {1};
  for (const Request& r : {dies, lives}) {
    cluster.begin(r);
    cluster.offer(r);
    cluster.compute(r, LayerId(0), 0, 16);
  }
  ASSERT_TRUE(cluster.drive([&] { return !cluster.decode[0]->layers(dies.key).empty(); }));
  cluster.decode[0]->endpoint.reset();
  cluster.decode[0]->memories.clear();
  cluster.decode[0]->transport.reset();
  for (std::int32_t layer = 1; layer < 5; ++layer) cluster.compute(lives, LayerId(layer), 0, 16);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(lives); }));
  EXPECT_TRUE(cluster.landed(lives));
  for (auto& p : cluster.prefill) {
    ASSERT_NE(p->find<SourceReleased>(dies.key), nullptr);
    EXPECT_EQ(p->find<SourceEnded>(dies.key)->outcome, Outcome::failed);
    EXPECT_THAT(p->find<SourceEnded>(dies.key)->why.message, testing::HasSubstr("decode rank 0"));
  }
}

// ---- keys ----

TEST(Endpoints, WithKeysOnlyThoseOnTheListAreServed) {
  const CurveKeys server = make_curve_keys(), known = make_curve_keys(), other = make_curve_keys();
  for (const bool is_known : {true, false}) {
    Cluster cluster(shapes::mla());
    cluster.source_options.control.keys = server;
    cluster.source_options.control.clients = {known.public_key};
    cluster.target_options.keys = is_known ? known : other;
    cluster.add_prefill("tp=1");
    cluster.add_decode(1);
    cluster.describe("tp=1");
    Request r = request(16, 4);
    if (!is_known) r.time = 300ms;
    cluster.begin(r);
    cluster.offer(r);
    cluster.compute_all(r);
    ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
    EXPECT_EQ(static_cast<bool>(cluster.landed(r)), is_known);
  }
}

TEST(ControlServer, ListensOnThisMachineOnlyUnlessToldOtherwise) {
  ControlServerOptions options;
  options.address = "tcp://0.0.0.0:*";
  EXPECT_TRUE(shapes::says(ControlServer::make(options), "open to other machines without keys: give CURVE keys"));
  options.open_to_all = true;
  EXPECT_TRUE(ControlServer::make(options));
  options.open_to_all = false;
  options.keys = make_curve_keys();
  EXPECT_TRUE(ControlServer::make(options));
  options.keys->secret_key = "short";
  EXPECT_TRUE(shapes::says(ControlServer::make(options), "the secret key is no CURVE key"));
  EXPECT_FALSE(ControlServer::make({"nonsense", {}, {}, true}));
  const auto taken = ControlServer::make({});
  ASSERT_TRUE(taken);
  EXPECT_EQ(ControlServer::make({(*taken)->address(), {}, {}, false}).error().code, Code::unavailable);
}

}  // namespace
}  // namespace kvloom
