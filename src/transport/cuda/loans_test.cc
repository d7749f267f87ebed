// Two transports of one process: what one reads of the other's memory, and when the other takes it back.
#include "kvloom/transport/cuda/loans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cuda/cuda_world.h"
#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

using testing::HasSubstr;

// A source of one transport and a target of another, on the same GPU or on two, in this process.
class CudaLoans : public testing::TestWithParam<int> {
 protected:
  CudaLoans() : world(world_of_two(GetParam())) {
    source.transport = world.endpoint({});
    target.transport = world.endpoint({});
    const auto id = source.transport->connect(target.transport->address());
    EXPECT_TRUE(drive({&source, &target}, [&] { return source.count<PeerUp>() == 1 && target.count<PeerUp>() == 1; }));
    peer = *id;
    const Current here = world.gpu(0)->current();
    EXPECT_EQ(driver().cuMemAlloc(&engines, kBytes), CUDA_SUCCESS);
    from = *source.transport->register_memory({reinterpret_cast<std::byte*>(engines), kBytes});
    memory = world.memory(Bytes(kBytes));
    to = *target.transport->register_memory(memory->span());
    remote = *source.transport->import_region(peer, *target.transport->export_region(to.id()));
    EXPECT_TRUE(target.transport->admit(target.all<PeerUp>()[0].peer, kTag));
  }
  ~CudaLoans() override { fake::release_all(); }

  static CudaWorldOptions world_of_two(int target_device) {
    CudaWorldOptions out;
    out.target_device = target_device;
    return out;
  }
  const Driver& driver() { return world.gpu(0)->driver(); }
  PostId write() { return source.transport->write({from.id(), remote, kTag, runs}); }
  void turn() {
    for (int i = 0; i < 20; ++i) {
      source.poll();
      target.poll();
    }
  }
  // As an engine that shrinks its cache.
  void take_back() {
    from = Region();
    const Current here = world.gpu(0)->current();
    EXPECT_EQ(driver().cuMemFree(engines), CUDA_SUCCESS);
  }
  // The GPU of the target works on: nothing has read what was not there.
  void expect_sound() {
    fake::release_all();
    const Current here = world.gpu(GetParam())->current();
    EXPECT_EQ(driver().cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  }

  static constexpr std::size_t kBytes = 8 << 20;
  CudaWorld world;
  Party source, target;
  PeerId peer;
  CUdeviceptr engines = 0;
  std::unique_ptr<ConformanceMemory> memory;
  Region from, to;
  RemoteRegion remote;
  Runs runs = {{Bytes(0), Bytes(0), Bytes(kBytes)}};
};

TEST_P(CudaLoans, MemoryThatIsTakenBackIsNotReadByCopiesUnderWay) {
  fake::hold();
  write();
  turn();
  EXPECT_GT(fake::held(), 0U);
  take_back();
  EXPECT_EQ(fake::held(), 0U) << "they ended before the region did";
  expect_sound();
}

TEST_P(CudaLoans, WritesThatHaveNotBegunFailAndDoNoHarm) {
  const PostId post = write();
  source.poll();  // it stands in the ring, and the target has not looked
  take_back();
  ASSERT_TRUE(drive({&source, &target}, [&] { return source.completed(post) != nullptr; }));
  EXPECT_FALSE(source.completed(post)->delivered);
  expect_sound();
}

TEST_P(CudaLoans, AWriteThatABudgetHasCutReadsNoMore) {
  const PostId post = write();
  source.poll();
  target.poll({.copy = Bytes(1 << 20)});
  take_back();
  ASSERT_TRUE(drive({&source, &target}, [&] { return source.completed(post) != nullptr && target.count<PeerDown>() == 1; }));
  EXPECT_FALSE(source.completed(post)->delivered);
  EXPECT_THAT(target.all<PeerDown>()[0].reason.message, HasSubstr("took back memory that writes of it still read"));
  expect_sound();
}

TEST_P(CudaLoans, OtherRegionsOfThePeerAreReadOn) {
  Region other = *source.transport->allocate(Bytes(kBytes));
  const auto sent = world.put_random(other.memory(), 3);
  ASSERT_TRUE(drive({&source, &target}, [&, post = write()] { return source.completed(post) != nullptr; }));
  take_back();
  const PostId post = source.transport->write({other.id(), remote, kTag, runs});
  ASSERT_TRUE(drive({&source, &target}, [&] { return source.completed(post) != nullptr; }));
  EXPECT_TRUE(source.completed(post)->delivered) << source.text();
  EXPECT_EQ(world.get(memory->span()), sent);
}

TEST_P(CudaLoans, MemoryThatIsLentTwiceIsReadForTheSecondRegion) {
  Region again = *source.transport->register_memory({reinterpret_cast<std::byte*>(engines), kBytes});
  ASSERT_TRUE(drive({&source, &target}, [&, post = write()] { return source.completed(post) != nullptr; }));
  from = Region();
  const PostId post = source.transport->write({again.id(), remote, kTag, runs});
  ASSERT_TRUE(drive({&source, &target}, [&] { return source.completed(post) != nullptr; }));
  EXPECT_TRUE(source.completed(post)->delivered) << source.text();
}

TEST_P(CudaLoans, AllocatedMemoryThatGoesWithAFencedPeerIsNotReadEither) {
  Region own = *source.transport->allocate(Bytes(kBytes));
  fake::hold();
  source.transport->write({own.id(), remote, kTag, runs});
  turn();
  EXPECT_GT(fake::held(), 0U);
  ASSERT_TRUE(source.transport->fence(peer));
  own = Region();
  EXPECT_EQ(fake::held(), 0U);
  expect_sound();
}

std::string gpus_of_case(const testing::TestParamInfo<int>& of) { return of.param == 0 ? "on_one_gpu" : "on_two"; }
INSTANTIATE_TEST_SUITE_P(Fake, CudaLoans, testing::Values(0, 1), gpus_of_case);

}  // namespace
}  // namespace kvloom::cuda
