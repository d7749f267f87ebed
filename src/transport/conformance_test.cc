
#include "tests/conformance/conformance.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

namespace kvloom {

using testing::HasSubstr;

std::string conformance_name(const testing::TestParamInfo<ConformanceCase>& info) { return info.param.name; }
void PrintTo(const ConformanceCase& c, std::ostream* out) { *out << c.name; }

namespace {

class HostMemory final : public ConformanceMemory {
 public:
  explicit HostMemory(Bytes length) : bytes_(std::make_unique<std::byte[]>(size(length))), length_(size(length)) {}
  std::span<std::byte> span() const override { return {bytes_.get(), length_}; }

 private:
  static std::size_t size(Bytes length) { return static_cast<std::size_t>(length.value); }

  std::unique_ptr<std::byte[]> bytes_;
  std::size_t length_;
};

}  // namespace

std::unique_ptr<ConformanceMemory> ConformanceWorld::memory(Bytes length) { return std::make_unique<HostMemory>(length); }

void ConformanceWorld::put(std::span<std::byte> to, std::span<const std::byte> bytes) { std::ranges::copy(bytes, to.begin()); }

std::vector<std::byte> ConformanceWorld::get(std::span<const std::byte> from) { return {from.begin(), from.end()}; }

std::vector<std::byte> ConformanceWorld::put_random(std::span<std::byte> to, std::uint64_t seed) {
  std::vector<std::byte> bytes(to.size());
  fill(bytes, seed);
  put(to, bytes);
  return bytes;
}

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> out(text.size());
  if (!text.empty()) std::memcpy(out.data(), text.data(), text.size());
  return out;
}

const Completed* Party::completed(PostId post) const {
  for (const Event& event : events) {
    const auto* done = std::get_if<Completed>(&event);
    if (done != nullptr && done->post == post) return done;
  }
  return nullptr;
}

std::string Party::text() const {
  std::string out;
  for (const Event& event : events) out += to_string(event) + "\n";
  return out;
}

bool drive(std::vector<Party*> sides, const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    for (Party* side : sides) side->poll();
  }
  return true;
}

bool stands_still(ConformanceWorld& world, std::span<const std::byte> memory, std::span<const std::byte> still,
                  std::vector<Party*> sides) {
  for (int round = 0; round < 5; ++round) {
    if (!std::ranges::equal(world.get(memory), still)) return false;
    for (int i = 0; i < 20; ++i) {
      for (Party* side : sides) side->poll();
    }
  }
  return std::ranges::equal(world.get(memory), still);
}

void copy_slowly(std::span<std::byte> target, std::span<const std::byte> source, std::span<const Run> runs) {
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < run.count; ++i) {
      const auto to = static_cast<std::size_t>((run.target_offset + run.target_step * i).value);
      const auto from = static_cast<std::size_t>((run.source_offset + run.source_step * i).value);
      const auto bytes = static_cast<std::size_t>(run.bytes.value);
      std::ranges::copy(source.subspan(from, bytes), target.subspan(to, bytes).begin());
    }
  }
}

void fill(std::span<std::byte> memory, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < memory.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(memory.data() + i, &word, std::min<std::size_t>(8, memory.size() - i));
  }
}

std::vector<Run> random_runs(std::mt19937_64& random, Bytes source, Bytes target, int count, std::int64_t most) {
  std::vector<Run> runs;
  std::int64_t at = 0;
  for (int i = 0; i < count; ++i) {
    const auto bytes = static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(most));
    at += static_cast<std::int64_t>(random() % 100);
    if (at + bytes > target.value) break;
    const auto from = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(source.value - bytes + 1));
    runs.push_back({Bytes(from), Bytes(at), Bytes(bytes)});
    at += bytes;
  }
  std::shuffle(runs.begin(), runs.end(), random);
  return runs;
}

std::vector<std::byte> ConformancePair::after(std::span<const Run> runs) const {
  std::vector<std::byte> out = landed();
  copy_slowly(out, sent, runs);
  return out;
}

ConformanceWorld& TransportConformance::world() {
  if (world_ == nullptr) world_ = GetParam().world();
  return *world_;
}

Party TransportConformance::side(std::string_view hello) { return {world().endpoint(bytes_of(hello)), {}}; }

std::pair<PeerId, PeerId> TransportConformance::connect(Party& a, Party& b) {
  const std::size_t before = b.count<PeerUp>();
  const auto id = a.transport->connect(b.transport->address());
  EXPECT_TRUE(id.has_value()) << to_string(id.error());
  const auto up = [&] {
    const auto ups = a.all<PeerUp>();
    return std::any_of(ups.begin(), ups.end(), [&](const PeerUp& e) { return e.peer == *id; }) && b.count<PeerUp>() > before;
  };
  EXPECT_TRUE(drive({&a, &b}, up));
  return {*id, b.all<PeerUp>().back().peer};
}

std::unique_ptr<ConformancePair> TransportConformance::pair(Bytes source, Bytes target) {
  auto p = std::make_unique<ConformancePair>(world());
  p->source = side();
  p->target = side();
  std::tie(p->to_target, p->to_source) = connect(p->source, p->target);
  p->from = *p->source.transport->allocate(source);
  p->memory = world().memory(target);
  p->sent = world().put_random(p->from.memory(), 1);
  world().put_random(p->memory->span(), 2);
  p->to = *p->target.transport->register_memory(p->memory->span());
  p->remote = *p->source.transport->import_region(p->to_target, *p->target.transport->export_region(p->to.id()));
  EXPECT_TRUE(p->target.transport->admit(p->to_source, kTag));
  p->source.events.clear();
  p->target.events.clear();
  return p;
}

namespace {

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Pages of the same size from anywhere to anywhere else.
std::vector<Run> pages(std::int64_t count, std::int64_t bytes, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < count; ++i)
    runs.push_back({Bytes(i * bytes), Bytes(order[static_cast<std::size_t>(i)] * bytes), Bytes(bytes)});
  return runs;
}

struct Bad {
  Run run;
  std::string words;
};

TEST_P(TransportConformance, SaysWhatItCanDo) {
  const Party s = side();
  const Abilities has = s.transport->abilities();
  const Abilities& wants = GetParam().abilities;
  EXPECT_EQ(has.name, wants.name);
  EXPECT_EQ(has.can_fence_frozen_peer, wants.can_fence_frozen_peer);
  EXPECT_EQ(has.can_revoke, wants.can_revoke);
  EXPECT_EQ(has.needs_target_progress, wants.needs_target_progress);
  EXPECT_EQ(has.source_must_be_allocated, wants.source_must_be_allocated);
  EXPECT_EQ(has.crosses_processes, wants.crosses_processes);
  EXPECT_EQ(has.crosses_hosts, wants.crosses_hosts);
  EXPECT_GE(has.max_notice_bytes, Bytes(64 << 10));
  const Cost cost = s.transport->cost();
  EXPECT_GT(cost.of(1, 1, 1, Bytes(1 << 20)), cost.of(1, 1, 1, Bytes(1 << 10)));
}

TEST_P(TransportConformance, TellsBothSidesWhoTheOtherIs) {
  Party a = side("prefill 3");
  Party b = side("decode 1");
  const auto [to_b, to_a] = connect(a, b);
  ASSERT_EQ(a.count<PeerUp>(), 1u);
  ASSERT_EQ(b.count<PeerUp>(), 1u);
  EXPECT_EQ(a.all<PeerUp>()[0].peer, to_b);
  EXPECT_EQ(a.all<PeerUp>()[0].hello, bytes_of("decode 1"));
  EXPECT_EQ(b.all<PeerUp>()[0].peer, to_a);
  EXPECT_EQ(b.all<PeerUp>()[0].hello, bytes_of("prefill 3"));
}

TEST_P(TransportConformance, SaysAnotherHelloOnEachConnection) {
  Party a = side("prefill 3");
  Party b = side("decode 1");
  const auto hello = bytes_of("connection 7");
  ASSERT_TRUE(a.transport->connect(b.transport->address(), hello));
  ASSERT_TRUE(drive({&a, &b}, [&] { return b.count<PeerUp>() == 1 && a.count<PeerUp>() == 1; }));
  EXPECT_EQ(b.all<PeerUp>()[0].hello, hello);
  EXPECT_EQ(a.all<PeerUp>()[0].hello, bytes_of("decode 1"));
}

TEST_P(TransportConformance, RefusesToConnectToNobody) {
  Party a = side();
  Party gone = side();
  const std::string address = gone.transport->address();
  gone.transport.reset();
  EXPECT_EQ(a.transport->connect(address).error().code, Code::unavailable);
  EXPECT_FALSE(a.transport->connect("nonsense"));
}

TEST_P(TransportConformance, EveryByteLandsAndNothingElseIsTouched) {
  auto p = pair();
  const auto seed = static_cast<std::uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(testing::Message() << "--gtest_random_seed=" << seed);
  std::mt19937_64 random(seed);
  for (const std::int64_t most : {1, 63, 600, 5000, 40000}) {
    const auto runs = random_runs(random, p->from.length(), p->to.length(), 500, most);
    const auto want = p->after(runs);
    const PostId post = p->source.transport->write(p->write(runs));
    ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
    const Bytes total =
        std::accumulate(runs.begin(), runs.end(), Bytes(0), [](Bytes sum, const auto& run) { return sum + run.total(); });
    EXPECT_EQ(p->source.completed(post)->delivered, total) << p->source.text();
    ASSERT_TRUE(p->landed() == want) << "pieces of up to " << most << " B";
  }
}

TEST_P(TransportConformance, CarriesStridedRunsForwardsAndBackwards) {
  auto p = pair();
  const Runs runs{
      {Bytes(100), Bytes(7), Bytes(576), 100, Bytes(1152), Bytes(576)},              // gathers every second row
      {Bytes(900'000), Bytes(200'000), Bytes(4608), 20, Bytes(-4608), Bytes(9216)},  // source backwards
      {Bytes(0), Bytes(1'000'000), Bytes(33), 1000, Bytes(64), Bytes(-100)},         // target backwards
      {Bytes(500), Bytes(500'000), Bytes(128), 300, Bytes(0), Bytes(128)},           // one row many times
      {Bytes(1'048'575), Bytes(1'048'575), Bytes(1)},                                // the last byte
  };
  const auto want = p->after(runs);
  const PostId post = p->source.transport->write(p->write(runs));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_TRUE(p->source.completed(post)->delivered) << p->source.text();
  EXPECT_TRUE(p->landed() == want);
}

TEST_P(TransportConformance, CompletesExactlyOnceAndNeverInsideTheCall) {
  auto p = pair();
  const auto runs = pages(16, 4096, 3);
  const Runs outside{{Bytes(0), Bytes(1 << 20), Bytes(1)}};
  std::vector<PostId> posts;
  for (int i = 0; i < 50; ++i) {
    p->target.poll();
    posts.push_back(p->source.transport->write(p->write(runs)));
    posts.push_back(p->source.transport->notify(p->to_target, kTag, bytes_of("x")));
    posts.push_back(p->source.transport->write(p->write(outside, Tag(1000 + static_cast<std::uint64_t>(i)))));
  }
  EXPECT_TRUE(p->source.events.empty());
  EXPECT_TRUE(std::is_sorted(posts.begin(), posts.end()));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() >= posts.size(); }));
  for (int i = 0; i < 100; ++i) p->source.poll(), p->target.poll();
  std::vector<PostId> completed;
  for (const Completed& done : p->source.all<Completed>()) completed.push_back(done.post);
  std::sort(completed.begin(), completed.end());
  EXPECT_EQ(completed, posts);
}

TEST_P(TransportConformance, ANoticeArrivesWhenItsWritesAreVisible) {
  auto p = pair();
  std::mt19937_64 random(4);
  for (int round = 0; round < 30; ++round) {
    const auto first = random_runs(random, p->from.length(), Bytes(500'000), 40, 3000);
    auto second = random_runs(random, p->from.length(), Bytes(500'000), 40, 3000);
    for (auto& run : second) run.target_offset += Bytes(500'000);
    auto want = p->after(first);
    copy_slowly(want, p->sent, second);
    p->source.transport->write(p->write(first));
    p->source.transport->write(p->write(second));
    p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
    p->target.events.clear();
    ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->target.count<Notice>() > 0; }));
    ASSERT_TRUE(p->landed() == want) << "round " << round;
    ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 3; }));
    p->source.events.clear();
  }
}

TEST_P(TransportConformance, WhatIsToldIsWholeHoweverLittleAPollCopies) {
  constexpr std::size_t kParts = 16;
  constexpr std::int64_t kPart = 64 << 10;
  auto p = pair();
  std::vector<Runs> parts(kParts, pages(kPart / 512, 512, 20));
  auto want = p->landed();
  for (std::size_t i = 0; i < kParts; ++i) {
    for (auto& run : parts[i]) {
      run.source_offset += Bytes(kPart * static_cast<std::int64_t>(i));
      run.target_offset += Bytes(kPart * static_cast<std::int64_t>(i));
    }
    copy_slowly(want, p->sent, parts[i]);
    ASSERT_TRUE(p->target.transport->admit(p->to_source, Tag(1000 + i)));
    p->source.transport->write(p->write(parts[i], Tag(1000 + i)));
    p->source.transport->notify(p->to_target, Tag(1000 + i), bytes_of("landed"));
  }
  const auto whole = [&](Tag tag) {
    const std::size_t at = (tag.value - 1000) * kPart;
    return std::ranges::equal(world().get(p->memory->span().subspan(at, kPart)), std::span(want).subspan(at, kPart));
  };
  std::size_t told = 0;
  ASSERT_TRUE(drive({}, [&] {
    p->target.poll({.copy = Bytes(10'000)});
    for (const Notice& notice : p->target.all<Notice>()) EXPECT_TRUE(whole(notice.tag)) << to_string(notice);
    p->source.poll();
    for (const Completed& done : p->source.all<Completed>()) EXPECT_TRUE(done.delivered && whole(done.tag)) << to_string(done);
    told += p->target.count<Notice>() + p->source.count<Completed>();
    p->source.events.clear();
    p->target.events.clear();
    return told == 3 * kParts;
  }));
}

TEST_P(TransportConformance, NoticesComeInOrderAndWhole) {
  auto p = pair();
  std::vector<std::vector<std::byte>> sent;
  for (std::size_t i = 0; i < 200; ++i) {
    sent.emplace_back(i * 7);
    fill(sent.back(), i);
    p->source.transport->notify(p->to_target, kTag, sent.back());
  }
  sent.emplace_back(static_cast<std::size_t>(p->source.transport->abilities().max_notice_bytes.value));
  fill(sent.back(), 9);
  p->source.transport->notify(p->to_target, kTag, sent.back());
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->target.count<Notice>() == sent.size(); }));
  const auto notices = p->target.all<Notice>();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(notices[i].payload, sent[i]) << i;
    EXPECT_EQ(notices[i].peer, p->to_source);
    EXPECT_EQ(notices[i].tag, kTag);
  }
}

TEST_P(TransportConformance, RefusesANoticeThatIsTooLong) {
  auto p = pair();
  const std::int64_t most = p->source.transport->abilities().max_notice_bytes.value;
  const std::vector<std::byte> payload(static_cast<std::size_t>(most) + 1);
  const PostId post = p->source.transport->notify(p->to_target, kTag, payload);
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_THAT(to_string(p->source.completed(post)->delivered.error()),
              HasSubstr(fmt::format("a notice of {} bytes; the most is {}", most + 1, most)));
  EXPECT_TRUE(p->target.count<Notice>() == 0);
}

TEST_P(TransportConformance, AnEmptyBatchIsDelivered) {
  auto p = pair();
  const auto before = p->landed();
  const PostId post = p->source.transport->write(p->write());
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_EQ(p->source.completed(post)->delivered, Bytes(0));
  EXPECT_TRUE(p->landed() == before);
}

TEST_P(TransportConformance, RefusesARunOutsideOfARegionWithItsValues) {
  auto p = pair(Bytes(10'000), Bytes(5'000));
  const auto before = p->landed();
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::vector<Bad> all{
      {{Bytes(9'990), Bytes(0), Bytes(20)}, "run 1 of 2: source bytes [9990, 10010) are outside of the region's [0, 10000)"},
      {{Bytes(0), Bytes(4'000), Bytes(400), 3, Bytes(400), Bytes(400)},
       "target bytes [4000, 5200) are outside of the region's [0, 5000)"},
      {{Bytes(0), Bytes(500), Bytes(400), 3, Bytes(400), Bytes(-400)}, "target bytes [-300, 900)"},
      {{Bytes(-1), Bytes(0), Bytes(1)}, "source bytes [-1, 0)"},
      {{Bytes(0), Bytes(0), Bytes(100), 3, Bytes(0), Bytes(50)}, "target step=50 bytes=100 count=3: pieces overlap"},
      {{Bytes(0), Bytes(0), Bytes(0)}, "bytes=0 count=1: both must be positive"},
      {{Bytes(0), Bytes(0), Bytes(1), -1}, "bytes=1 count=-1: both must be positive"},
      {{Bytes(0), Bytes(0), Bytes(8), huge, Bytes(8), Bytes(8)}, "does not fit 64 bits"},
      {{Bytes(huge), Bytes(0), Bytes(8)}, "does not fit 64 bits"},
  };
  std::uint64_t tag = 100;
  for (const Bad& bad : all) {
    const Runs runs{{Bytes(0), Bytes(0), Bytes(10)}, bad.run};
    ASSERT_TRUE(p->target.transport->admit(p->to_source, Tag(++tag)));
    const PostId post = p->source.transport->write(p->write(runs, Tag(tag)));
    ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
    ASSERT_FALSE(p->source.completed(post)->delivered) << bad.words;
    EXPECT_THAT(p->source.completed(post)->delivered.error().message, HasSubstr(bad.words));
  }
  EXPECT_TRUE(p->landed() == before);
  EXPECT_TRUE(p->source.count<PeerDown>() == 0) << "one bad operation does not cost the peer";
}

TEST_P(TransportConformance, RefusesAKeyThatIsNonsense) {
  auto p = pair();
  EXPECT_EQ(p->source.transport->import_region(p->to_target, bytes_of("nonsense")).error().code, Code::parse);
  EXPECT_EQ(p->source.transport->import_region(p->to_target, {}).error().code, Code::parse);
  EXPECT_EQ(p->source.transport->import_region(PeerId(99), *p->target.transport->export_region(p->to.id())).error().code,
            Code::unavailable);
  EXPECT_EQ(p->source.transport->export_region(RegionId(99)).error().code, Code::invalid_argument);
}

TEST_P(TransportConformance, NoNoticeFollowsAWriteThatFailed) {
  auto p = pair();
  const Runs outside{{Bytes(0), Bytes(1 << 20), Bytes(1)}};
  p->source.transport->write(p->write(outside));
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  EXPECT_THAT(to_string(p->source.completed(notice)->delivered.error()), HasSubstr("tag 77"));
  const PostId later = p->source.transport->notify(p->to_target, kTag, bytes_of("its owner knows"));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(later) != nullptr; }));
  ASSERT_EQ(p->target.count<Notice>(), 1u);
  EXPECT_EQ(p->target.all<Notice>()[0].payload, bytes_of("its owner knows"));
}

TEST_P(TransportConformance, TakesNothingOfATagThatIsNotAdmitted) {
  if (!GetParam().abilities.can_revoke) GTEST_SKIP() << "takes all tags";
  auto p = pair();
  const auto before = p->landed();
  const auto runs = pages(10, 4096, 5);
  p->source.transport->write(p->write(runs, Tag(5)));
  p->source.transport->notify(p->to_target, Tag(5), bytes_of("landed"));
  const PostId fine = p->source.transport->notify(p->to_target, kTag, bytes_of("other tags go on"));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 3; }));
  for (const Completed& done : p->source.all<Completed>()) {
    if (done.post == fine) continue;
    ASSERT_FALSE(done.delivered);
    EXPECT_THAT(done.delivered.error().message, HasSubstr("tag 5"));
  }
  EXPECT_TRUE(p->landed() == before);
  EXPECT_EQ(p->target.count<Notice>(), 1u);
}

TEST_P(TransportConformance, NothingOfATagLandsAfterRevoke) {
  if (!GetParam().abilities.can_revoke) GTEST_SKIP() << "can't revoke";
  auto p = pair(Bytes(4 << 20), Bytes(4 << 20));
  const auto runs = pages(1024, 4096, 6);
  const PostId post = p->source.transport->write(p->write(runs));
  p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  for (int i = 0; i < 20; ++i) p->source.poll(), p->target.poll({.copy = Bytes(50'000)});
  const bool finished = p->source.completed(post) != nullptr;
  ASSERT_TRUE(p->target.transport->revoke(p->to_source, kTag));
  const auto still = p->landed();
  const std::size_t notices = p->target.count<Notice>();
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  EXPECT_TRUE(stands_still(world(), p->memory->span(), still, {&p->source, &p->target}));
  EXPECT_EQ(p->target.count<Notice>(), notices);
  if (!finished && p->landed() != p->after(runs)) {
    EXPECT_FALSE(p->source.completed(post)->delivered);
  }
  ASSERT_TRUE(p->target.transport->admit(p->to_source, Tag(8)));
  const PostId next = p->source.transport->write(p->write(runs, Tag(8)));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(next) != nullptr; }));
  EXPECT_TRUE(p->source.completed(next)->delivered) << "other tags of the peer go on";
}

TEST_P(TransportConformance, NothingLandsAfterTheTargetFenced) {
  auto p = pair(Bytes(4 << 20), Bytes(4 << 20));
  const auto runs = pages(1024, 4096, 7);
  const PostId post = p->source.transport->write(p->write(runs));
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  for (int i = 0; i < 10; ++i) p->source.poll(), p->target.poll({.copy = Bytes(50'000)});
  ASSERT_TRUE(p->target.transport->fence(p->to_source));
  ASSERT_TRUE(p->target.transport->fence(p->to_source)) << "twice is fine";
  const auto still = p->landed();
  ASSERT_TRUE(
      drive({&p->source, &p->target}, [&] { return p->source.count<PeerDown>() > 0 && p->target.count<PeerDown>() > 0; }));
  EXPECT_TRUE(stands_still(world(), p->memory->span(), still, {&p->source, &p->target}));
  EXPECT_EQ(p->source.count<PeerDown>(), 1u);
  EXPECT_EQ(p->target.count<PeerDown>(), 1u);
  ASSERT_EQ(p->source.count<Completed>(), 2u);
  EXPECT_TRUE(std::holds_alternative<PeerDown>(p->source.events.back()));
  if (p->target.count<Notice>() == 0) {
    EXPECT_FALSE(p->source.completed(notice)->delivered);
  }
  if (p->source.completed(post)->delivered) {
    EXPECT_TRUE(p->landed() == p->after(runs));
  }
}

TEST_P(TransportConformance, NothingIsToldAsLandedAfterTheSourceFenced) {
  auto p = pair(Bytes(4 << 20), Bytes(4 << 20));
  const auto runs = pages(1024, 4096, 8);
  p->source.transport->write(p->write(runs));
  p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  ASSERT_TRUE(p->source.transport->fence(p->to_target));
  world().put_random(p->from.memory(), 99);  // used again
  ASSERT_TRUE(
      drive({&p->source, &p->target}, [&] { return p->source.count<PeerDown>() > 0 && p->target.count<PeerDown>() > 0; }));
  EXPECT_TRUE(stands_still(world(), p->memory->span(), p->landed(), {&p->source, &p->target}));
  EXPECT_TRUE(p->target.count<Notice>() == 0);
  ASSERT_EQ(p->source.count<Completed>(), 2u);
  for (const Completed& done : p->source.all<Completed>()) EXPECT_FALSE(done.delivered);
}

TEST_P(TransportConformance, AWriteToAPeerThatIsGoneIsNeverDelivered) {
  auto p = pair();
  const auto runs = pages(16, 4096, 9);
  const PostId before = p->source.transport->write(p->write(runs));
  p->to = {};
  p->target.transport.reset();
  const PostId after = p->source.transport->write(p->write(runs));
  ASSERT_TRUE(drive({&p->source}, [&] { return p->source.count<PeerDown>() > 0 && p->source.completed(after) != nullptr; }));
  const PostId later = p->source.transport->write(p->write(runs));
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("x"));
  ASSERT_TRUE(drive({&p->source}, [&] { return p->source.count<Completed>() == 4; }));
  for (const PostId post : {before, after, later, notice}) EXPECT_FALSE(p->source.completed(post)->delivered) << p->source.text();
  EXPECT_EQ(p->source.completed(later)->delivered.error().code, Code::unavailable);
  EXPECT_EQ(p->source.count<PeerDown>(), 1u);
}

TEST_P(TransportConformance, TheTargetLearnsThatItsSourceIsGone) {
  auto p = pair();
  const auto runs = pages(16, 4096, 9);
  p->source.transport->write(p->write(runs));
  p->from = {};
  p->source.transport.reset();
  ASSERT_TRUE(drive({&p->target}, [&] { return p->target.count<PeerDown>() > 0; }));
  EXPECT_EQ(p->target.all<PeerDown>()[0].peer, p->to_source);
}

TEST_P(TransportConformance, AWriteIntoARegionThatIsGoneFails) {
  auto p = pair();
  p->to = {};
  const auto before = p->landed();
  const auto runs = pages(16, 4096, 9);
  const PostId post = p->source.transport->write(p->write(runs));
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  ASSERT_FALSE(p->source.completed(post)->delivered);
  EXPECT_THAT(p->source.completed(post)->delivered.error().message, HasSubstr("the target has no region"));
  EXPECT_FALSE(p->source.completed(notice)->delivered);
  EXPECT_TRUE(p->target.count<Notice>() == 0);
  EXPECT_TRUE(p->landed() == before);
}

TEST_P(TransportConformance, NothingLandsInARegionThatWasTakenBackMidWrite) {
  auto p = pair(Bytes(4 << 20), Bytes(4 << 20));
  const auto runs = pages(1024, 4096, 18);
  const auto want = p->after(runs);
  const PostId post = p->source.transport->write(p->write(runs));
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  for (int i = 0; i < 10; ++i) p->source.poll(), p->target.poll({.copy = Bytes(50'000)});
  p->to = {};
  const auto still = p->landed();
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  EXPECT_TRUE(stands_still(world(), p->memory->span(), still, {&p->source, &p->target}));
  EXPECT_TRUE(!p->source.completed(post)->delivered || still == want);
  EXPECT_TRUE(!p->source.completed(notice)->delivered || p->source.completed(post)->delivered);
}

TEST_P(TransportConformance, AWriteWhoseSourceGoesMidWriteIsWholeOrFails) {
  auto p = pair(Bytes(4 << 20), Bytes(4 << 20));
  const auto runs = pages(1024, 4096, 19);
  const auto want = p->after(runs);
  const PostId post = p->source.transport->write(p->write(runs));
  p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  for (int i = 0; i < 10; ++i) p->source.poll(), p->target.poll({.copy = Bytes(50'000)});
  p->from = {};
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  EXPECT_TRUE(!p->source.completed(post)->delivered || p->landed() == want);
  EXPECT_TRUE(p->target.count<Notice>() == 0 || p->source.completed(post)->delivered);
  EXPECT_TRUE(p->source.count<PeerDown>() == 0 && p->target.count<PeerDown>() == 0) << p->source.text();
}

TEST_P(TransportConformance, RefusesToWriteFromARegionThatIsGone) {
  auto p = pair();
  const Write write = p->write();
  p->from = {};
  const PostId post = p->source.transport->write(write);
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_THAT(to_string(p->source.completed(post)->delivered.error()), HasSubstr("no source region"));
}

TEST_P(TransportConformance, RegionsComeAndGo) {
  auto p = pair();
  for (int i = 0; i < 50; ++i) {
    Region region = *p->source.transport->allocate(Bytes(8192));
    const auto sent = world().put_random(region.memory(), static_cast<std::uint64_t>(i));
    const Runs runs{{Bytes(0), Bytes(0), Bytes(8192)}};
    const PostId post = p->source.transport->write({region.id(), p->remote, kTag, runs});
    ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
    ASSERT_TRUE(p->source.completed(post)->delivered) << p->source.text();
    ASSERT_TRUE(world().get(p->memory->span().first(sent.size())) == sent);
  }
}

TEST_P(TransportConformance, ARegionIsWhatWasRegisteredAndNoByteMore) {
  auto p = pair();
  const auto memory = world().memory(Bytes(300'000));
  auto want = world().put_random(memory->span(), 16);
  const Region part = *p->target.transport->register_memory(memory->span().subspan(100'100, 100'000));
  ASSERT_EQ(part.length(), Bytes(100'000));
  const auto remote = p->source.transport->import_region(p->to_target, *p->target.transport->export_region(part.id()));
  const Runs runs{{Bytes(7), Bytes(0), Bytes(99'000)}, {Bytes(200'000), Bytes(99'000), Bytes(1000)}};
  copy_slowly(std::span(want).subspan(100'100), p->sent, runs);
  const PostId post = p->source.transport->write({p->from.id(), *remote, kTag, runs});
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_EQ(p->source.completed(post)->delivered, Bytes(100'000)) << p->source.text();
  EXPECT_TRUE(world().get(memory->span()) == want);
}

TEST_P(TransportConformance, RegisteredMemoryIsASourceUnlessAbilitiesSayNo) {
  const bool refused = GetParam().abilities.source_must_be_allocated;
  auto p = pair();
  const auto memory = world().memory(Bytes(300'000));
  const auto sent = world().put_random(memory->span(), 17);
  const Region part = *p->source.transport->register_memory(memory->span().subspan(100'100, 100'000));
  const Runs runs{{Bytes(99'999), Bytes(0), Bytes(1)}, {Bytes(0), Bytes(1), Bytes(99'999)}};
  auto want = p->landed();
  if (!refused) copy_slowly(want, std::span(sent).subspan(100'100), runs);
  const PostId post = p->source.transport->write({part.id(), p->remote, kTag, runs});
  const PostId notice = p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2; }));
  EXPECT_EQ(p->source.completed(post)->delivered.has_value(), !refused) << p->source.text();
  EXPECT_EQ(p->source.completed(notice)->delivered.has_value(), !refused) << p->source.text();
  EXPECT_TRUE(p->landed() == want);
  if (refused) {
    EXPECT_THAT(to_string(p->source.completed(post)->delivered.error()), HasSubstr("writes read memory from allocate()"));
  }
}

TEST_P(TransportConformance, ABatchOfAnyLengthPasses) {
  const std::int64_t count = 100'000;
  auto p = pair(Bytes(count * 64), Bytes(count * 64));
  const auto runs = pages(count, 64, 10);
  const auto want = p->after(runs);
  const PostId post = p->source.transport->write(p->write(runs));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; }));
  EXPECT_EQ(p->source.completed(post)->delivered, Bytes(count * 64)) << p->source.text();
  EXPECT_TRUE(p->landed() == want);
}

TEST_P(TransportConformance, ManyOpenOperationsPass) {
  auto p = pair();
  const Runs runs{{Bytes(0), Bytes(0), Bytes(100)}};
  for (int i = 0; i < 2000; ++i) p->source.transport->write(p->write(runs));
  ASSERT_TRUE(drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 2000; }));
}

TEST_P(TransportConformance, BothDirectionsAtOnceDoNotBlockEachOther) {
  auto p = pair(Bytes(2 << 20), Bytes(2 << 20));
  Region back_from = *p->target.transport->allocate(Bytes(2 << 20));
  Region back_to = *p->source.transport->allocate(Bytes(2 << 20));
  const auto sent_back = world().put_random(back_from.memory(), 3);
  const auto remote = p->target.transport->import_region(p->to_source, *p->source.transport->export_region(back_to.id()));
  ASSERT_TRUE(p->source.transport->admit(p->to_target, kTag));
  const auto runs = pages(32'768, 64, 11);
  const auto want = p->after(runs);
  std::vector<std::byte> want_back(sent_back.size());
  copy_slowly(want_back, sent_back, runs);
  for (int i = 0; i < 3; ++i) {
    p->source.transport->write(p->write(runs));
    p->target.transport->write({back_from.id(), *remote, kTag, runs});
  }
  ASSERT_TRUE(
      drive({&p->source, &p->target}, [&] { return p->source.count<Completed>() == 3 && p->target.count<Completed>() == 3; }));
  EXPECT_TRUE(p->landed() == want);
  EXPECT_TRUE(world().get(back_to.memory()) == want_back);
}

TEST_P(TransportConformance, ServesManyPeers) {
  constexpr std::size_t kPeers = 20;
  constexpr std::int64_t kShare = 64 << 10;
  Party target = side();
  Region to = *target.transport->allocate(Bytes(kPeers * kShare));
  std::vector<Party> sources(kPeers);
  std::vector<Region> from(kPeers);
  std::vector<std::byte> want(kPeers * kShare);
  std::vector<Party*> all{&target};
  const auto runs = pages(kShare / 1024, 1024, 12);
  std::vector<Runs> shifted(kPeers, runs);
  for (std::size_t i = 0; i < kPeers; ++i) {
    sources[i] = side();
    all.push_back(&sources[i]);
    const auto [to_target, to_source] = connect(sources[i], target);
    ASSERT_TRUE(target.transport->admit(to_source, kTag));
    from[i] = *sources[i].transport->allocate(Bytes(kShare));
    for (auto& run : shifted[i]) run.target_offset += Bytes(kShare * static_cast<std::int64_t>(i));
    copy_slowly(want, world().put_random(from[i].memory(), i), shifted[i]);
    const auto remote = sources[i].transport->import_region(to_target, *target.transport->export_region(to.id()));
    sources[i].transport->write({from[i].id(), *remote, kTag, shifted[i]});
  }
  ASSERT_TRUE(drive(all, [&] {
    return std::all_of(sources.begin(), sources.end(), [](const Party& s) { return s.count<Completed>() == 1; });
  }));
  for (const Party& source : sources) EXPECT_TRUE(source.all<Completed>()[0].delivered);
  EXPECT_TRUE(world().get(to.memory()) == want);
}

TEST_P(TransportConformance, OnePeersEndIsNotTheOthers) {
  auto p = pair();
  Party other = side();
  connect(other, p->target);
  other.transport.reset();
  const auto runs = pages(16, 4096, 13);
  const PostId post = p->source.transport->write(p->write(runs));
  ASSERT_TRUE(
      drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr && p->target.count<PeerDown>() > 0; }));
  EXPECT_TRUE(p->source.completed(post)->delivered);
}

TEST_P(ProcessConformance, AWaitingPollWakesForAWriteOfAnotherThread) {
  auto p = pair();
  const auto runs = pages(16, 4096, 14);
  const auto want = p->after(runs);
  constexpr std::chrono::milliseconds kLong{5000};
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<bool> finished = false;  // the answers may leave in a later poll than the one that tells the notice
  std::thread target([&] {
    p->target.transport->take_over();
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    const auto told = [&] { return p->target.count<Notice>() > 0; };
    while (!(finished && told()) && std::chrono::steady_clock::now() < deadline)
      p->target.poll({.wait = told() ? std::chrono::milliseconds(1) : kLong});
  });
  p->source.transport->write(p->write(runs));
  p->source.transport->notify(p->to_target, kTag, bytes_of("landed"));
  const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
  while (p->source.count<Completed>() < 2 && std::chrono::steady_clock::now() < deadline) p->source.poll({.wait = kLong});
  finished = true;
  target.join();
  p->target.transport->take_over();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong) << "it woke because its time was over";
  EXPECT_TRUE(p->landed() == want);
  EXPECT_EQ(p->source.count<Completed>(), 2u);
  EXPECT_EQ(p->target.count<Notice>(), 1u);
}

TEST_P(TransportConformance, LeavesNoDescriptorBehind) {
  const auto live = [&] {
    auto p = pair();
    const auto runs = pages(16, 4096, 15);
    const PostId post = p->source.transport->write(p->write(runs));
    return drive({&p->source, &p->target}, [&] { return p->source.completed(post) != nullptr; });
  };
  ASSERT_TRUE(live());  // a device's driver keeps its own from the first use on
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(live());
  EXPECT_EQ(open_descriptors(), before);
}

TEST_P(TransportConformance, ACallOfAnotherThreadIsOurOwnBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        auto p = pair();
        std::thread([&] { p->source.transport->write(p->write()); }).join();
      },
      "Transport::write was called by a thread that does not own the transport");
}

}  // namespace
}  // namespace kvloom
