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
            "copy engine (2-D): 96.1 us beside 159.5 us by the kernel (its SMs counted)");
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
