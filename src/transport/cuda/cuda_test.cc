#include "kvloom/transport/cuda/cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "kvloom/transport/cuda/choice.h"
#include "kvloom/transport/cuda/device_work.h"
#include "kvloom/transport/cuda/words.h"
#include "tests/cuda/cuda_world.h"
#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

using testing::HasSubstr;

ConformanceCase cuda_case(std::string name, CudaWorldOptions options) {
  return {std::move(name), [options] { return std::make_unique<CudaWorld>(options); }, kCudaAbilities};
}

CudaWorldOptions world_of(bool fake) {
  CudaWorldOptions out;
  out.fake = fake;
  return out;
}

// GPU memory of each kind, host memory on either side, rings and limits that are always full.
std::vector<ConformanceCase> cases(bool fake) {
  CudaWorldOptions parts = world_of(fake), host_source = world_of(fake), tiny = world_of(fake);
  parts.memory = MemoryKind::parts;
  host_source.transport.allocate_on_host = true;
  tiny.transport.slots = tiny.transport.answers = 16;
  tiny.transport.copies = {.in_flight = Bytes(1 << 20), .blocks = 1};
  return {cuda_case("allocated", world_of(fake)), cuda_case("in_parts", parts), cuda_case("host_source", host_source),
          cuda_case("tiny_rings", tiny)};
}

// In a process of its own each endpoint is the first of its world, so both have GPU 0.
std::vector<ConformanceCase> process_cases(bool fake) {
  std::vector<ConformanceCase> out = cases(fake);
  CudaWorldOptions host_target = world_of(fake);
  host_target.memory = MemoryKind::host;  // no source: in one process a test would use it as one
  out.push_back(cuda_case("host_target", host_target));
  return out;
}

std::vector<ConformanceCase> where_there(std::vector<ConformanceCase> all) {
  return gpus() > 0 ? std::move(all) : std::vector<ConformanceCase>();
}

INSTANTIATE_TEST_SUITE_P(CudaFake, TransportConformance, testing::ValuesIn(cases(true)), conformance_name);
INSTANTIATE_TEST_SUITE_P(CudaFake, ProcessConformance, testing::ValuesIn(process_cases(true)), conformance_name);
INSTANTIATE_TEST_SUITE_P(Gpu, TransportConformance, testing::ValuesIn(where_there(cases(false))), conformance_name);
INSTANTIATE_TEST_SUITE_P(Gpu, ProcessConformance, testing::ValuesIn(where_there(process_cases(false))), conformance_name);

TEST(Cuda, SaysWhetherAGpuIsTested) {
  if (gpus() == 0) std::puts("no GPU: the cases Gpu/* are not there");
}

// ---- choice ----

Run pages(std::int64_t bytes, std::int64_t count, std::int64_t source_step, std::int64_t target_step) {
  return {Bytes(0), Bytes(0), Bytes(bytes), count, Bytes(source_step), Bytes(target_step)};
}

TEST(CudaChoice, GivesProgressionsToTheEngineAndTheRestToTheKernel) {
  constexpr std::int64_t kPage = 36'864;
  EXPECT_EQ(choose(pages(kPage, 1000, kPage, 4 * kPage)).way, Way::engine);
  EXPECT_EQ(choose(pages(kPage, 1000, -kPage, -4 * kPage)).way, Way::engine) << "falling on both sides";
  EXPECT_EQ(choose(pages(kPage, 1, 0, 0)).way, Way::kernel) << "a call costs more than the page";
  EXPECT_EQ(choose(pages(kPage, 1000, kPage, -kPage)).way, Way::kernel) << "no 2-D copy runs both ways";
  EXPECT_EQ(choose(pages(kPage, 1000, 0, kPage)).way, Way::kernel);
  EXPECT_EQ(choose(pages(32 << 20, 1, 0, 0)).way, Way::engine);
  EXPECT_EQ(choose(pages(576, 16, 4 * 576, 576)).way, Way::kernel);
  EXPECT_EQ(explain(pages(kPage, 1000, kPage, 4 * kPage)),
            "copy engine (2-D): 96.1 us beside 159.4 us by the kernel (its SMs counted)");
  EXPECT_EQ(explain(pages(kPage, 10, kPage, -kPage)), "copy kernel: no 2-D copy has these steps");
}

// ---- words ----

TEST(CudaWords, TravelAndRefuseWhatTheyAreNot) {
  Words words{.kind = Words::Kind::vmm, .offset = 4096};
  ASSERT_TRUE(words.add_part(4 << 20));
  ASSERT_TRUE(words.add_part(2 << 20));
  ASSERT_TRUE(words.add_part(2 << 20));
  const auto back = decode(encode(words));
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(back->sizes, 2U);
  EXPECT_EQ(back->parts[1].count, 2U);
  EXPECT_EQ(back->offset, 4096U);
  auto bytes = encode(words);
  bytes.pop_back();
  EXPECT_THAT(decode(bytes).error().message, HasSubstr("B of words about memory"));
  words.kind = static_cast<Words::Kind>(9);
  EXPECT_THAT(decode(encode(words)).error().message, HasSubstr("memory of kind 9"));
  words.kind = Words::Kind::vmm;
  words.sizes = 33;
  EXPECT_THAT(decode(encode(words)).error().message, HasSubstr("parts of 33 sizes"));
  words.sizes = 0;
  EXPECT_THAT(decode(encode(words)).error().message, HasSubstr("no parts"));
}

TEST(CudaWords, KeepPartsOfSoManySizes) {
  Words words;
  for (std::uint64_t i = 1; i <= Words::kMostSizes; ++i) EXPECT_TRUE(words.add_part(i));
  EXPECT_THAT(words.add_part(1).error().message, HasSubstr("lend it in several regions"));
}

// ---- jobs that are cut ----

TEST(CudaCopies, CutJobsMoveTheSameBytes) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> source(4000), slow(4000), cut(4000);
    fill(source, static_cast<std::uint64_t>(round));
    std::vector<CopyJob> jobs, to_cut, whole;
    std::int64_t total = 0, at = 0;
    for (int j = 0; j < 3; ++j) {
      const auto bytes = static_cast<std::int64_t>(1 + random() % 60), count = static_cast<std::int64_t>(1 + random() % 8);
      const bool falls = random() % 2 == 0 && count > 1;
      const std::int64_t step = count == 1 ? 0 : (falls ? -1 : 1) * (bytes + static_cast<std::int64_t>(random() % 20));
      const std::int64_t begin = at + (falls ? -step * (count - 1) : 0);
      jobs.push_back({slow.data(), source.data(), {Bytes(begin), Bytes(begin), Bytes(bytes), count, Bytes(step), Bytes(step)}});
      total += bytes * count;
      at += (bytes + 20) * count;
    }
    const auto from = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(total + 1));
    const auto to = from + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(total - from + 1));
    copy_range(copy_kernels().front(), jobs, from, to);
    to_cut = jobs;
    for (CopyJob& job : to_cut) job.target = cut.data();
    cut_jobs(to_cut, from, to, whole);
    std::int64_t moved = 0;
    for (const CopyJob& job : whole) moved += job.run.total().value;
    EXPECT_EQ(moved, to - from);
    copy_range(copy_kernels().front(), whole, 0, moved);
    EXPECT_EQ(cut, slow) << "bytes " << from << " to " << to;
  }
}

// ---- what runs beside us ----

class CudaBeside : public testing::Test {
 protected:
  CudaBeside() : world_(CudaWorldOptions{}) {
    source_.transport = world_.endpoint({});
    target_.transport = world_.endpoint({});
    const auto id = source_.transport->connect(target_.transport->address());
    EXPECT_TRUE(id) << id.error().message;
    to_target_ = *id;
    EXPECT_TRUE(drive({&source_, &target_}, [&] { return source_.count<PeerUp>() == 1 && target_.count<PeerUp>() == 1; }));
    to_source_ = target_.all<PeerUp>()[0].peer;
    from_ = *source_.transport->allocate(Bytes(kBytes));
    memory_ = world_.memory(Bytes(kBytes));
    to_ = *target_.transport->register_memory(memory_->span());
    remote_ = *source_.transport->import_region(to_target_, *target_.transport->export_region(to_.id()));
    sent_ = world_.put_random(from_.memory(), 1);
    EXPECT_TRUE(target_.transport->admit(to_source_, kTag));
  }
  ~CudaBeside() override { fake::release_all(); }

  PostId write() { return source_.transport->write({from_.id(), remote_, kTag, runs_}); }
  void turn(int times = 20) {
    for (int i = 0; i < times; ++i) {
      source_.poll();
      target_.poll();
    }
  }
  Expected<Bytes> outcome(PostId post) { return source_.completed(post)->delivered; }

  static constexpr std::int64_t kBytes = 4 << 20;  // more than goes with a kernel, so: by a copy engine
  CudaWorld world_;
  Party source_, target_;
  PeerId to_target_, to_source_;
  std::unique_ptr<ConformanceMemory> memory_;
  Region from_, to_;
  RemoteRegion remote_;
  std::vector<std::byte> sent_;
  Runs runs_ = {{Bytes(0), Bytes(0), Bytes(kBytes)}};
};

TEST_F(CudaBeside, NothingIsToldBeforeTheCopyIsDone) {
  fake::hold();
  const PostId post = write();
  const PostId notice = source_.transport->notify(to_target_, kTag, bytes_of("landed"));
  turn();
  EXPECT_EQ(source_.completed(post), nullptr);
  EXPECT_EQ(target_.count<Notice>(), 0U);
  EXPECT_FALSE(target_.transport->arm()) << "who waits for a copy must not sleep: nothing rings";
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(notice) != nullptr; }));
  EXPECT_EQ(*outcome(post), Bytes(kBytes));
  EXPECT_EQ(target_.count<Notice>(), 1U);
  EXPECT_EQ(world_.get(memory_->span()), sent_);
}

TEST_F(CudaBeside, ARevokeWaitsForCopiesAndTellsNothingOfThem) {
  fake::hold();
  const PostId post = write();
  source_.transport->notify(to_target_, kTag, bytes_of("landed"));
  turn();
  ASSERT_TRUE(target_.transport->revoke(to_source_, kTag));
  EXPECT_EQ(fake::held(), 0U) << "no copy runs any more";
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr; }));
  EXPECT_FALSE(outcome(post));
  turn();
  EXPECT_EQ(target_.count<Notice>(), 0U);
}

TEST_F(CudaBeside, ARevokeWaitsAlsoWhereAnotherWriteOfTheTagWasRefused) {
  fake::hold();
  write();
  source_.transport->write({from_.id(), RemoteRegion{to_target_, RegionId(99), Bytes(kBytes)}, kTag, runs_});
  turn();
  EXPECT_GT(fake::held(), 0U);
  ASSERT_TRUE(target_.transport->revoke(to_source_, kTag));
  EXPECT_EQ(fake::held(), 0U);
}

TEST_F(CudaBeside, AStartThatFailsHalfWayLeavesNothingRunning) {
  runs_ = {{Bytes(0), Bytes(0), Bytes(8192), 256, Bytes(8192), Bytes(8192)}, {Bytes(2 << 20), Bytes(2 << 20), Bytes(2 << 20)}};
  for (auto& run : runs_) ASSERT_EQ(choose(run).way, Way::engine);
  fake::hold();
  fake::fail_next("cuMemcpyAsync", CUDA_ERROR_INVALID_VALUE);  // of the second: the first is a 2-D copy
  write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return target_.count<PeerDown>() == 1; }));
  EXPECT_EQ(fake::calls("cuMemcpy2DAsync"), 1) << "the first had begun";
  EXPECT_EQ(fake::held(), 0U);
}

TEST_F(CudaBeside, ACopyThatIsNeverSaidToBeDoneIsNotWaitedForEver) {
  fake::fail_next("cuStreamWriteValue32", CUDA_SUCCESS);  // the call does nothing
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr && target_.count<PeerDown>() == 1; }));
  EXPECT_FALSE(outcome(post));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("has not said that copy 1 is done"));
}

TEST(CudaCopies, MarksGoOnPast32Bits) {
  constexpr std::uint64_t kRound = std::uint64_t{1} << 32;
  EXPECT_EQ(marks_done(0, 0), 0U);
  EXPECT_EQ(marks_done(7, 5), 5U);
  EXPECT_EQ(marks_done(kRound + 3, 0xffffffff), kRound - 1);
  EXPECT_EQ(marks_done(5 * kRound, 0), 5 * kRound);
  EXPECT_EQ(marks_done((kRound >> 1) + 9, static_cast<std::uint32_t>((kRound >> 1) + 8)), (kRound >> 1) + 8);
}

TEST_F(CudaBeside, AFenceWaitsForCopies) {
  fake::hold();
  write();
  turn();
  EXPECT_GT(fake::held(), 0U);
  ASSERT_TRUE(target_.transport->fence(to_source_));
  EXPECT_EQ(fake::held(), 0U);
}

TEST_F(CudaBeside, ARegionThatIsTakenBackIsNotWrittenAnyMore) {
  fake::hold();
  write();
  turn();
  to_ = Region();
  EXPECT_EQ(fake::held(), 0U);
}

TEST_F(CudaBeside, ACopyThatFailsCostsItsPeerAndSaysWhy) {
  fake::fail_next("cuMemcpyAsync", CUDA_ERROR_INVALID_VALUE);
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr && target_.count<PeerDown>() == 1; }));
  EXPECT_FALSE(outcome(post));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("copying 4194304 B: CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(CudaBeside, AGpuThatBreaksDownIsNoticed) {
  fake::hold();
  const PostId post = write();
  turn();
  fake::fail_when_run("cuMemcpyAsync", CUDA_ERROR_ECC_UNCORRECTABLE);
  const PostId next = write();
  turn();
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return target_.count<PeerDown>() == 1 && source_.completed(next) != nullptr; }));
  EXPECT_TRUE(outcome(post).has_value() || source_.completed(post) != nullptr);
  EXPECT_FALSE(outcome(next));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("CUDA_ERROR_ECC_UNCORRECTABLE"));
}

// Pages in no order, more than go with their kernel.
class CudaLists : public CudaBeside {
 protected:
  static constexpr std::int64_t kPage = 4096, kPages = kBytes / kPage;
  CudaLists() {
    runs_.clear();
    for (std::int64_t i = 0; i < kPages; ++i)
      runs_.push_back({Bytes(kPage * i), Bytes(kPage * (i * 389 % kPages)), Bytes(kPage)});
    fake::hold();
    for (int i = 0; i < kPosts; ++i) {
      posts_.push_back(write());
      turn();
    }
  }
  CudaTransport& target() { return dynamic_cast<CudaTransport&>(*target_.transport); }
  std::vector<std::byte> landed() {
    std::vector<std::byte> want(sent_.size());
    copy_slowly(want, sent_, runs_);
    return want;
  }

  static constexpr int kPosts = 6;
  std::vector<PostId> posts_;
};

TEST_F(CudaLists, GrowWhileTwoKernelsAreUnderWay) {
  EXPECT_EQ(target().counts().kernel_launches, 2);
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(posts_.back()) != nullptr; }));
  for (const PostId post : posts_) EXPECT_EQ(*outcome(post), Bytes(kBytes));
  EXPECT_EQ(target().counts().kernel_launches, 3) << "one for all that came meanwhile";
  EXPECT_EQ(target().counts().items, kPosts * kPages);
  EXPECT_EQ(world_.get(memory_->span()), landed());
}

TEST_F(CudaLists, ThatAreOpenAreCopiedBeforeARegionEnds) {
  to_ = Region();
  EXPECT_EQ(fake::held(), 0U);
  EXPECT_EQ(world_.get(memory_->span()), landed());
  fake::release_all();
  turn();
  EXPECT_EQ(target().counts().kernel_launches, 3);
}

TEST_F(CudaLists, ThatAreOpenAreCopiedBeforeTheirSourceEndsInThisProcess) {
  from_ = Region();                                   // open writes still have its memory
  ASSERT_TRUE(source_.transport->fence(to_target_));  // and now nobody has
  EXPECT_EQ(fake::held(), 0U);
  fake::release_all();
  turn();
  EXPECT_EQ(target().counts().kernel_launches, 3) << "and nothing was begun any more";
}

TEST_F(CudaLists, ThatTheDriverRefusesCostTheirPeer) {
  fake::fail_next("cuLaunchKernel", CUDA_ERROR_INVALID_VALUE);
  fake::release_all();
  ASSERT_TRUE(
      drive({&source_, &target_}, [&] { return source_.completed(posts_.back()) != nullptr && target_.count<PeerDown>() == 1; }));
  EXPECT_FALSE(outcome(posts_.back()));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("the copy kernel, 4096 items: CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(CudaLists, OfRunsThatAreNotAlignedAreCutWhereAlignmentEnds) {
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(posts_.back()) != nullptr; }));
  const std::int64_t before = target().counts().kernel_launches;
  for (std::size_t i = 300; i < 320; ++i) runs_[i].source_offset -= Bytes(4);
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr; }));
  EXPECT_EQ(target().counts().kernel_launches, before + 2) << "16 B up to run 300, 4 B from there on";
  EXPECT_EQ(world_.get(memory_->span()), landed());
}

TEST_F(CudaBeside, AFewPagesGoWithTheirKernel) {
  auto& transport = dynamic_cast<CudaTransport&>(*target_.transport);
  runs_.clear();
  for (std::int64_t i = 0; i < 4; ++i) runs_.push_back({Bytes(36'864 * i), Bytes(36'864 * (3 - i)), Bytes(36'864)});
  const std::int64_t lists = fake::calls("cuMemcpyHtoDAsync"), marks = fake::calls("cuStreamWriteValue32");
  fake::hold();
  const PostId post = write();
  turn();
  EXPECT_EQ(fake::held(), 1U) << "one call, which says itself that it is done";
  EXPECT_EQ(source_.completed(post), nullptr);
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr; }));
  EXPECT_TRUE(outcome(post));
  EXPECT_EQ(transport.counts().kernel_launches, 1);
  EXPECT_EQ(transport.counts().engine_calls, 0);
  EXPECT_EQ(fake::calls("cuMemcpyHtoDAsync"), lists);
  EXPECT_EQ(fake::calls("cuStreamWriteValue32"), marks);
  auto want = std::vector<std::byte>(sent_.size());
  copy_slowly(want, sent_, runs_);
  EXPECT_TRUE(std::ranges::equal(world_.get(memory_->span().first(4 * 36'864)), std::span(want).first(4 * 36'864)));
}

TEST_F(CudaBeside, AFewPagesThatTheDriverRefusesCostTheirPeer) {
  runs_ = {{Bytes(0), Bytes(0), Bytes(36'864)}};
  fake::fail_next("cuLaunchKernel", CUDA_ERROR_INVALID_VALUE);
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr && target_.count<PeerDown>() == 1; }));
  EXPECT_FALSE(outcome(post));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("the copy kernel, 9 items: CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(CudaBeside, ProgressionsGoToTheEngineAndScatteredPagesToTheKernel) {
  auto& transport = dynamic_cast<CudaTransport&>(*target_.transport);
  runs_ = {{Bytes(0), Bytes(0), Bytes(256), 8000, Bytes(512), Bytes(512)}};
  for (std::int64_t i = 0; i < 8; ++i) runs_.push_back({Bytes(256 + 4096 * i), Bytes(256 + 4096 * (7 - i)), Bytes(256)});
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr; }));
  ASSERT_TRUE(outcome(post)) << outcome(post).error().message;
  EXPECT_EQ(transport.counts().kernel_launches, 1);
  EXPECT_EQ(transport.counts().by_engine, Bytes(256 * 8000));
  EXPECT_EQ(transport.counts().by_kernel, Bytes(256 * 8));
}

// ---- from where to where ----

// All bytes of one region go from a source to a target of other kinds than those of the conformance suite.
void expect_all_bytes(CudaWorld& world) {
  constexpr std::int64_t kBytes = 3 << 20;
  Party source{world.endpoint({}), {}}, target{world.endpoint({}), {}};
  const auto id = source.transport->connect(target.transport->address());
  ASSERT_TRUE(drive({&source, &target}, [&] { return target.count<PeerUp>() == 1 && source.count<PeerUp>() == 1; }));
  Region from = *source.transport->allocate(Bytes(kBytes));
  const auto memory = world.memory(Bytes(kBytes));
  Region to = *target.transport->register_memory(memory->span());
  const auto remote = *source.transport->import_region(*id, *target.transport->export_region(to.id()));
  ASSERT_TRUE(target.transport->admit(target.all<PeerUp>()[0].peer, kTag));
  const auto sent = world.put_random(from.memory(), 9);
  const Runs runs{{Bytes(0), Bytes(1 << 20), Bytes(1 << 20), 2, Bytes(2 << 20), Bytes(-(1 << 20))},
                  {Bytes(1 << 20), Bytes(2 << 20), Bytes(1 << 20)}};
  const PostId post = source.transport->write({from.id(), remote, kTag, runs});
  ASSERT_TRUE(drive({&source, &target}, [&] { return source.completed(post) != nullptr; }));
  ASSERT_TRUE(source.completed(post)->delivered) << source.text() << target.text();
  std::vector<std::byte> want(sent.size());
  copy_slowly(want, sent, runs);
  EXPECT_EQ(world.get(memory->span()), want);
}

TEST(CudaPairs, OneGpuReadsAnother) {
  CudaWorldOptions two;
  two.target_device = 1;
  CudaWorld world(two);
  expect_all_bytes(world);
}

TEST(CudaPairs, AGpuIsReadIntoHostMemory) {
  CudaWorldOptions host;
  host.memory = MemoryKind::host;
  CudaWorld world(host);
  expect_all_bytes(world);
}

TEST(GpuPairs, WorkOnTheMachinesOwn) {
  if (gpus() == 0) {
    std::puts("no GPU");
    return;
  }
  for (const MemoryKind memory : {MemoryKind::allocated, MemoryKind::parts, MemoryKind::host})
    for (int target = 0; target < std::min(gpus(), 2); ++target) {
      CudaWorldOptions options = world_of(false);
      options.memory = memory;
      options.target_device = target;
      CudaWorld world(options);
      expect_all_bytes(world);
    }
}

// ---- what can't be done ----

TEST(Cuda, SaysWhatIsMissing) {
  fake::reset();
  CudaOptions options;
  options.driver = fake_driver();
  options.device = 7;
  EXPECT_THAT(CudaTransport::make(options).error().message, HasSubstr("GPU 7 of 2"));
  options.device = 0;
  options.copies.blocks = 0;
  EXPECT_THAT(CudaTransport::make(options).error().message, HasSubstr("0 blocks of the copy kernel are not in 1..1024"));
  options.copies = {.in_flight = Bytes(4096)};
  EXPECT_THAT(CudaTransport::make(options).error().message, HasSubstr("4096 B of copies in flight are not in 1048576.."));
  for (const int priority : {-6, 1}) {
    options.copies = {.priority = priority};
    EXPECT_THAT(CudaTransport::make(options).error().message, HasSubstr("is not in -5..0, those of GPU 0; -5 goes first"));
  }
  options.copies = {.priority = -5};
  EXPECT_TRUE(CudaTransport::make(options));
}

TEST(Cuda, RefusesMemoryOfAnotherGpuAndPeersThatItCantRead) {
  CudaWorldOptions far;
  far.source_device = 1;
  CudaWorld world(far);
  Party source{world.endpoint({}), {}}, target{world.endpoint({}), {}};
  const auto memory = world.memory(Bytes(4096));  // of GPU 0
  EXPECT_THAT(source.transport->register_memory(memory->span()).error().message,
              HasSubstr("memory of GPU 0, lent to a transport of GPU 1"));
  fake::set_peer_access(false);
  const auto id = source.transport->connect(target.transport->address());
  ASSERT_TRUE(drive({&source, &target}, [&] { return target.count<PeerUp>() == 1; }));
  Region from = *source.transport->allocate(Bytes(4096)), to = *target.transport->register_memory(memory->span());
  const auto remote = *source.transport->import_region(*id, *target.transport->export_region(to.id()));
  ASSERT_TRUE(target.transport->admit(target.all<PeerUp>()[0].peer, kTag));
  const Runs runs = {{Bytes(0), Bytes(0), Bytes(4096)}};
  source.transport->write({from.id(), remote, kTag, runs});
  ASSERT_TRUE(drive({&source, &target}, [&] { return target.count<PeerDown>() == 1; }));
  EXPECT_THAT(target.all<PeerDown>()[0].reason.message, HasSubstr("GPU 0 can't read GPU 1: no NVLink or PCIe peer access"));
}

// ---- an engine's streams ----

TEST(CudaDeviceWork, IsDoneWhenItsStreamIs) {
  CudaWorld world(CudaWorldOptions{});
  const auto memory = world.memory(Bytes(64));
  fake::hold();
  {
    const Current here = world.gpu()->current();
    ASSERT_EQ(world.gpu()->driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory->span().data()), 1, 64, world.stream()),
              CUDA_SUCCESS);
  }
  const auto work = StreamWork::record(world.gpu(), world.stream());
  ASSERT_TRUE(work) << work.error().message;
  EXPECT_FALSE(*(*work)->is_done());
  fake::release_all();
  EXPECT_TRUE(*(*work)->is_done());
}

TEST(CudaGate, OpensWithTheLayerOrWithTheEnd) {
  for (const bool lands : {true, false}) {
    CudaWorld world(CudaWorldOptions{});
    const auto gate = *StreamGate::make(world.gpu());
    const auto memory = world.memory(Bytes(64));
    fake::hold();
    ASSERT_TRUE(gate->wait(world.stream(), LayerId(3)));
    const Current here = world.gpu()->current();
    ASSERT_EQ(world.gpu()->driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory->span().data()), 1, 64, world.stream()),
              CUDA_SUCCESS);
    gate->landed(LayerId(2));
    EXPECT_EQ(fake::release(10), 0U) << "layer 3 is not there";
    if (lands)
      gate->landed(LayerId(3));
    else
      gate->over();
    EXPECT_EQ(fake::release(10), 2U);
    fake::release_all();
  }
}

}  // namespace
}  // namespace kvloom::cuda
