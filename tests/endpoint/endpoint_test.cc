#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/wire.h"
#include "kvloom/session/wire.h"
#include "tests/endpoint/cluster.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing_cluster::Cluster;
using testing_cluster::Request;

Request request(std::int64_t tokens, std::int64_t chunk = 1 << 20, std::int64_t prefix = 0, std::string name = "req") {
  Request out;
  out.key = {std::move(name), Epoch(1)};
  out.tokens = tokens;
  out.chunk = chunk;
  out.prefix = prefix;
  out.number = static_cast<std::int64_t>(std::hash<std::string>()(out.key.name) % 1000);
  return out;
}

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
      Cluster cluster(pair.shape);
      cluster.add_prefill(pair.prefill);
      cluster.add_decode(static_cast<std::size_t>(cluster.side(pair.decode)->ranks()));
      cluster.describe(pair.decode);
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
  Cluster cluster(shapes::mla(4));
  cluster.add_prefill("tp=1");
  cluster.add_decode(1);
  cluster.describe("tp=1");
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

TEST(Endpoints, ManyRequestsAtOnceKeepTheirBytesApart) {
  Cluster cluster(shapes::gqa(2), 5);
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(2);
  cluster.describe("dcp=2");
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
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(1);
  cluster.describe("tp=1");
  Request r = request(12);
  r.payload = true;
  cluster.begin(r);
  cluster.offer(r);
  cluster.compute_all(r);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_TRUE(cluster.landed(r));
  const auto& payloads = cluster.decode[0]->find<TargetEnded>(r.key)->payloads;
  ASSERT_EQ(payloads.size(), 2U);
  for (const auto& [rank, bytes] : payloads)
    EXPECT_EQ(bytes, (std::vector{std::byte{42}, std::byte{static_cast<unsigned char>(rank.value)}}));
}

// ---- cases of others' software ----

// A write was reported done before its bytes were visible; with five transfers at once to one peer bytes were damaged.
TEST(Cases, Case23_WhatIsToldAsLandedIsThereInThatMoment) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    Cluster cluster(shapes::gqa(2), seed);  // the transport delivers in any order that it may
    cluster.add_prefill("tp=2");
    cluster.add_decode(1);
    cluster.describe("tp=1");
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
  Cluster cluster(shapes::mla());
  cluster.add_prefill("tp=1");
  cluster.add_decode(1);
  cluster.describe("tp=1");
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
  Cluster cluster(shapes::mla(5));
  cluster.add_prefill("tp=1");
  cluster.add_decode(2);
  cluster.describe("dcp=2");
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
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(2);
  cluster.describe("dcp=2");
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
  cluster.begin(next);
  cluster.offer(next);
  cluster.compute_all(next);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(next); }));
  EXPECT_TRUE(cluster.landed(next));
}

TEST(Endpoints, AnEngineThatPreemptsFailsItsTargetsWithItsReason) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(1);
  cluster.describe("tp=1");
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
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(1);
  cluster.describe("tp=1");
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
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(2);
  cluster.describe("dcp=2");
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
  const auto decoded = [&](const Request& r) {
    return std::all_of(cluster.decode.begin(), cluster.decode.end(),
                       [&](const auto& d) { return d->template find<TargetReleased>(r.key) != nullptr; });
  };
  ASSERT_TRUE(cluster.drive([&] { return decoded(before) && cluster.prefill[0]->find<SourceReleased>(before.key) != nullptr; }));
  for (auto& d : cluster.decode) {
    EXPECT_EQ(d->find<TargetEnded>(before.key)->outcome, Outcome::failed);
    EXPECT_THAT(d->find<TargetEnded>(before.key)->why.message, testing::HasSubstr("prefill rank 1"));
  }
  const Request after = request(16, 4, 0, "after");
  cluster.begin(after);
  cluster.offer(after);
  cluster.compute_all(after);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(after); }));
  EXPECT_TRUE(cluster.landed(after));
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

// ---- hostile and mistaken peers ----

TEST(Endpoints, NonsenseIsRefusedAndCostsNobodyElse) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("tp=1");
  cluster.add_decode(1);
  cluster.describe("tp=1");
  ControlContext context;
  auto stranger = ControlClient::make(context, {cluster.prefill[0]->endpoint->address(), {}, ""});
  ASSERT_TRUE(stranger);
  const std::vector<std::uint8_t> nonsense = {1, 2, 3};
  std::vector<Told> answers;
  const auto say = [&](std::span<const std::uint8_t> bytes) {
    answers.clear();
    ASSERT_TRUE((*stranger)->send(bytes));
    ASSERT_TRUE(cluster.drive([&] {
      while (const auto answer = (*stranger)->receive()) answers.push_back(decode_told(*answer).value());
      return !answers.empty();
    }));
  };
  say(nonsense);
  EXPECT_EQ(std::get<Refused>(answers[0].what).code, Code::parse);
  say(encode_message(Cancel{{"req", Epoch(1)}, Rank(0), "not mine"}));
  EXPECT_TRUE(std::holds_alternative<HelloFirst>(answers[0].what));
  const ConnectionToken token{1, 2};
  say(encode_told({token, Hello{1, 0, Rank(0), "stranger", "loopback:99"}}));
  EXPECT_THAT(std::get<Refused>(answers[0].what).reason, testing::HasSubstr("its transport can't be reached"));
  say(encode_told({token, Ping{}}));
  EXPECT_TRUE(std::holds_alternative<HelloFirst>(answers[0].what));
  const Request r = request(16, 4);
  cluster.begin(r);
  cluster.offer(r);
  cluster.compute_all(r);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  EXPECT_TRUE(cluster.landed(r));
}

TEST(Endpoints, AGrantNamesItsOwnersMemoryOnly) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("tp=1");
  auto& p = *cluster.prefill[0];
  sim::Random random(3);
  auto transport = cluster.world().endpoint({});
  testing_cluster::RankMemory memory(cluster.side("tp=1"), Rank(0), *transport, random);
  ControlContext context;
  auto client = *ControlClient::make(context, {p.endpoint->address(), {}, ""});
  const ConnectionToken token{7, 8};
  std::vector<Event> events;
  std::vector<Said> said;
  const auto drive_until = [&](const std::function<bool()>& until) {
    return cluster.drive([&] {
      transport->poll({}, events);
      while (const auto bytes = client->receive()) said.push_back(decode_said(*bytes).value());
      return until();
    });
  };
  client->send(encode_told({token, Hello{1, 0, Rank(0), "", transport->address()}}));
  ASSERT_TRUE(drive_until([&] { return said.size() == 1; }));
  const auto plan = compile(*memory.side, *memory.side).value();
  Grant grant{{"req", Epoch(1)}, Rank(0), digest_of(plan), {0, 8}, 10s, Tag(1), {{{PageId(0), PageId(1)}, 96}}, GeometryId(1)};
  const auto answer_to = [&](const Grant& what) -> std::string {
    said.clear();
    client->send(encode_message(what));
    EXPECT_TRUE(drive_until([&] { return !said.empty(); }));
    const auto* failed = std::get_if<Failed>(std::get_if<Message>(said.data()));
    return failed == nullptr ? "accepted" : failed->reason;
  };
  EXPECT_EQ(answer_to(grant), "geometry 1 has not been told on this connection");
  Geometry geometry{GeometryId(1), Rank(0), encode_side(*memory.side), {}, memory.local.tensors};
  for (const Region& region : memory.regions)
    geometry.regions.push_back({region.length(), transport->export_region(region.id()).value()});
  Geometry lies = geometry;
  lies.id = GeometryId(2);
  lies.tensors[0].parts[0].length += Bytes(1);
  for (const Geometry& told : {geometry, lies}) client->send(encode_told({token, told}));
  grant.geometry = GeometryId(2);
  EXPECT_THAT(answer_to(grant), testing::HasSubstr("geometry 2 was refused: group 0 layer 0"));
  grant.geometry = GeometryId(1);
  grant.target = Rank(1);
  EXPECT_THAT(answer_to(grant), testing::HasSubstr("geometry 1 is of rank 0, the grant of rank 1"));
  grant.target = Rank(0);
  grant.digest.low ^= 1;
  EXPECT_THAT(answer_to(grant), testing::HasSubstr("the two sides make another plan here"));
  grant.digest.low ^= 1;
  EXPECT_EQ(answer_to(grant), "accepted");
  // A pool that is larger than the memory: refused when it is bound, and nothing is written.
  Grant far = grant;
  far.key.name = "far";
  far.tables[0] = {{PageId(1 << 20), PageId(1 << 21)}, 1 << 22};
  EXPECT_EQ(answer_to(far), "accepted");
  const Request r = request(8, 8, 0, "far");
  cluster.offer(r);
  said.clear();
  for (std::int32_t layer = 0; layer < 5; ++layer) cluster.compute(r, LayerId(layer), 0, 8);
  const auto failed = [&]() -> const Failed* {
    for (const Said& each : said)
      if (const auto* message = std::get_if<Message>(&each))
        if (const auto* why = std::get_if<Failed>(message)) return why;
    return nullptr;
  };
  ASSERT_TRUE(drive_until([&] { return failed() != nullptr; }));
  EXPECT_THAT(failed()->reason, testing::HasSubstr("lie in no region"));
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

// ---- the engine's mistakes ----

TEST(Endpoints, BadInputIsRefusedAndSaysWhatIsWrong) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("tp=1");
  cluster.add_decode(1);
  cluster.describe("tp=1");
  auto& d = *cluster.decode[0];
  auto& p = *cluster.prefill[0];
  const Request r = request(16);
  const auto begin = [&](auto change) {
    Want want{r.key, d.geometries[0], cluster.addresses(), {0, 16}, {{{PageId(0)}, 96}}, 10s};
    change(want);
    return d.endpoint->begin(std::move(want));
  };
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.key.name.clear(); }), "a transfer's name has 1 to 256 B"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.geometry = GeometryId(9); }), "geometry 9 is not described"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.range = {17, 16}; }), "tokens [17, 16)"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.time = 0ns; }), "a time of 0 ns"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.tables.clear(); }), "0 page tables for 1 cache groups"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.tables[0].pages = {PageId(96)}; }), "group latent"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.sources.clear(); }), "no prefill rank is named"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.sources = {{"nonsense", ""}}; }), "control socket \"nonsense\""));
  cluster.offer(r);
  EXPECT_TRUE(shapes::says(p.endpoint->offer({r.key, 10s, false}), "has been offered before"));
  EXPECT_TRUE(shapes::says(p.endpoint->set_table(r.key, 1, {}), "group 1 of 1"));
  EXPECT_TRUE(p.endpoint->set_table(r.key, 0, {{PageId(3), PageId(4)}, 96}));
  EXPECT_TRUE(shapes::says(p.endpoint->set_table(r.key, 0, {{PageId(3), PageId(5)}, 96}), "a table only grows"));
}

TEST(Endpoints, PrefillRanksThatAreNotWhoTheRequestSaysFailIt) {
  Cluster cluster(shapes::mla());
  cluster.add_prefill("cp=2:layers");
  cluster.add_decode(1);
  cluster.describe("tp=1");
  auto& d = *cluster.decode[0];
  const auto why = [&](const std::string& name, std::vector<SourceAddress> sources) {
    const TransferKey key{name, Epoch(1)};
    EXPECT_TRUE(d.endpoint->begin({key, d.geometries[0], std::move(sources), {0, 4}, {{{PageId(0)}, 96}}, 10s}));
    EXPECT_TRUE(cluster.drive([&] { return d.find<TargetReleased>(key) != nullptr; }));
    return d.find<TargetEnded>(key)->why.message;
  };
  const auto all = cluster.addresses();
  EXPECT_THAT(why("swapped", {all[1], all[0]}), testing::HasSubstr("but says that it is rank"));
  EXPECT_THAT(why("too few", {all[0]}), testing::HasSubstr("1 prefill ranks are named, but they say that they are 2"));
}

}  // namespace
}  // namespace kvloom
