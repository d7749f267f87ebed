// Peers that talk nonsense, lie or are not who they were said to be, and engines that ask for what can't be: refused, with a sentence that says
// what is wrong, at no cost to anybody else.
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
using testing_cluster::request;
using testing_cluster::Request;

// ---- hostile and mistaken peers ----

TEST(Endpoints, NonsenseIsRefusedAndCostsNobodyElse) {
  Cluster cluster(shapes::mla(), "tp=1", "tp=1");
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
  EXPECT_TRUE(cluster.serves(r));
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

// ---- the engine's mistakes ----

TEST(Endpoints, BadInputIsRefusedAndSaysWhatIsWrong) {
  Cluster cluster(shapes::mla(), "tp=1", "tp=1");
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
  struct Gate final : LayerGate {
    bool open = false;
    void landed(LayerId) override {}
    void over() override { open = true; }
  };
  const auto gate = std::make_shared<Gate>();
  EXPECT_FALSE(begin([&](Want& w) {
    w.gate = gate;
    w.time = 0ns;
  }));
  EXPECT_TRUE(gate->open) << "nobody waits for what was refused";
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.tables.clear(); }), "0 page tables for 1 cache groups"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.tables[0].pages = {PageId(96)}; }), "group latent"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.sources.clear(); }), "0 prefill ranks are named: 1 to 4096 can be"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.sources.resize(4097, w.sources[0]); }), "4097 prefill ranks are named"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.range.end = (std::int64_t{1} << 48) + 1; }), "at most 2^48"));
  EXPECT_TRUE(
      shapes::says(begin([](Want& w) { w.tables[0].pages.assign(kMaxPages + 1, kNoPage); }), "at most 4194304 go in a grant"));
  EXPECT_TRUE(shapes::says(begin([](Want& w) { w.sources = {{"nonsense", ""}}; }), "control socket \"nonsense\""));
  LocalCache large = d.memories[0]->local;
  large.tensors.resize(kMaxTensors + 1);
  EXPECT_TRUE(shapes::says(d.endpoint->describe(large), "65537 tensors of one geometry: at most 65536 can be told"));
  large = d.memories[0]->local;
  large.tensors.resize(1);
  auto& parts = large.tensors[0].parts;
  parts.resize(kMaxTensorParts + 1, parts[0]);
  EXPECT_TRUE(shapes::says(d.endpoint->describe(large), "262145 parts of tensors of one geometry: at most 262144 can be told"));
  parts.pop_back();
  EXPECT_TRUE(shapes::says(d.endpoint->describe(large), "at most 8388608 can be told; describe fewer regions or tensors"));
  cluster.offer(r);
  EXPECT_TRUE(shapes::says(p.endpoint->offer({r.key, 10s, false}), "has been offered before"));
  EXPECT_TRUE(shapes::says(p.endpoint->set_table(r.key, 1, {}), "group 1 of 1"));
  EXPECT_TRUE(p.endpoint->set_table(r.key, 0, {{PageId(3), PageId(4)}, 96}));
  EXPECT_TRUE(shapes::says(p.endpoint->set_table(r.key, 0, {{PageId(3), PageId(5)}, 96}), "a table only grows"));
}

TEST(Endpoints, PrefillRanksThatAreNotWhoTheRequestSaysFailIt) {
  Cluster cluster(shapes::mla(), "cp=2:layers", "tp=1");
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
