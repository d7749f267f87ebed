// What copies run beside us, and what is told of them.
#include "kvloom/transport/cuda/copy_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "kvloom/transport/cuda/choice.h"
#include "kvloom/transport/cuda/cuda.h"
#include "tests/cuda/cuda_world.h"
#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

using testing::HasSubstr;

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

TEST_F(CudaLists, ThatAreLostCostTheirPeerWhateverComesNext) {
  fake::fail_next("cuLaunchKernel", CUDA_ERROR_INVALID_VALUE);
  { const Region other = *target_.transport->allocate(Bytes(4096)); }  // its end drains, which is to close the list
  runs_.resize(1);
  const PostId next = write();
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(next) != nullptr && target_.count<PeerDown>() == 1; }));
  EXPECT_FALSE(outcome(posts_.back())) << "it was listed, and its list never went";
  EXPECT_FALSE(outcome(next));
}

TEST_F(CudaBeside, KernelsThatAreLostAreMissedWhileAListIsOpen) {
  runs_.clear();
  for (std::int64_t i = 0; i < 512; ++i) runs_.push_back({Bytes(4096 * i), Bytes(4096 * (511 - i)), Bytes(4096)});
  for (int i = 0; i < 2; ++i) {
    fake::fail_next("cuLaunchKernel", CUDA_SUCCESS);  // the call does nothing
    write();
    turn();
  }
  const PostId listed = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(listed) != nullptr; }));
  EXPECT_FALSE(outcome(listed));
  EXPECT_THAT(target_.all<PeerDown>()[0].reason.message, HasSubstr("has not said that copy 1 is done"));
}

TEST_F(CudaLists, AreWholeWhateverTheyAreOf) {
  // 3,000 runs of as many kinds, which are items; then as many of one kind as go into a list alone.
  Runs odd, narrow;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < 3000; ++i, at += 70) odd.push_back({Bytes(at), Bytes(at), Bytes(20 + i % 50)});
  for (std::int64_t i = 0; i < 12'000; ++i) narrow.push_back({Bytes(at + 16 * i), Bytes(at + 16 * (i * 7 % 12'000)), Bytes(16)});
  const auto there = [&](const Runs& runs) {
    const auto is = world_.get(memory_->span());
    return std::ranges::all_of(runs, [&](const auto& run) {
      return std::memcmp(&is[static_cast<std::size_t>(run.target_offset.value)],
                         &sent_[static_cast<std::size_t>(run.source_offset.value)],
                         static_cast<std::size_t>(run.bytes.value)) == 0;
    });
  };
  std::vector<std::pair<PostId, const Runs*>> posts;
  for (const Runs* runs : {&odd, &narrow, &narrow}) {
    posts.emplace_back(source_.transport->write({from_.id(), remote_, kTag, *runs}), runs);
    turn();
  }
  while (source_.completed(posts.back().first) == nullptr) {
    ASSERT_GT(fake::release(1), 0U);
    turn();
    for (const auto& [post, runs] : posts) {
      if (source_.completed(post) == nullptr) continue;
      ASSERT_TRUE(outcome(post) && there(*runs)) << "told before it is there";
    }
  }
}

TEST_F(CudaLists, OfKindsThatTakeTurnsHaveFewKernels) {
  fake::release_all();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(posts_.back()) != nullptr; }));
  const std::int64_t before = target().counts().kernel_launches;
  const auto want = landed();  // all of it is there: the same bytes come again, of every other stretch the halves
  for (std::size_t i = 0; i < runs_.size(); ++i)
    if (i / 16 % 2 == 1) runs_[i].bytes = Bytes(2048);
  const PostId post = write();
  ASSERT_TRUE(drive({&source_, &target_}, [&] { return source_.completed(post) != nullptr; }));
  EXPECT_LE(target().counts().kernel_launches, before + 33) << "64 stretches of 16";
  EXPECT_EQ(world_.get(memory_->span()), want);
}

TEST_F(CudaLists, MayBeClosedByALenderWhileTheirReaderPolls) {
  std::atomic<bool> over = false;
  std::thread reader([&] {
    target_.transport->take_over();
    while (!over) target_.poll();
  });
  from_ = Region();
  const auto fenced = source_.transport->fence(to_target_);
  EXPECT_EQ(fake::held(), 0U);
  over = true;
  reader.join();
  target_.transport->take_over();
  EXPECT_TRUE(fenced);
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

}  // namespace
}  // namespace kvloom::cuda
