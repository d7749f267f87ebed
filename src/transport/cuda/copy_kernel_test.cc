// What only a GPU can show of the copy kernels: that a graph takes one, and that the other says when it is done.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kvloom/transport/copy.h"
#include "kvloom/transport/cuda/copy_items.h"
#include "kvloom/transport/cuda/gpu.h"
#include "tests/cuda/cuda_world.h"

namespace kvloom::cuda {
namespace {

constexpr std::int64_t kKernelPage = 36'864, kKernelPages = 96;

// Source and target in GPU memory, a stream, and lists of pages in random order.
class GpuKernel : public testing::Test {
 protected:
  void SetUp() override {
    if (gpus() == 0) return;
    driver_ = *Driver::load();
    gpu_ = *Gpu::open(driver_, 0);
    const Current here = gpu_->current();
    ASSERT_EQ(driver_->cuMemAlloc(&source_, kBytes), CUDA_SUCCESS);
    ASSERT_EQ(driver_->cuMemAlloc(&target_, kBytes), CUDA_SUCCESS);
    ASSERT_EQ(driver_->cuMemAlloc(&list_, kListBytes), CUDA_SUCCESS);
    ASSERT_EQ(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  }
  void TearDown() override {
    if (gpu_ == nullptr) return;
    const Current here = gpu_->current();
    driver_->cuStreamDestroy(stream_);
    for (const CUdeviceptr memory : {source_, target_, list_}) driver_->cuMemFree(memory);
  }

  bool there() const {
    if (gpu_ == nullptr) std::puts("no GPU");
    return gpu_ != nullptr;
  }

  std::vector<CopyItem> items(std::int64_t pages, std::uint32_t most, std::uint64_t seed) const {
    std::vector<std::int64_t> from(static_cast<std::size_t>(kKernelPages)), to(from.size());
    std::iota(from.begin(), from.end(), 0);
    std::iota(to.begin(), to.end(), 0);
    std::mt19937_64 random(seed);
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    std::vector<CopyItem> out;
    for (std::size_t i = 0; i < static_cast<std::size_t>(pages); ++i) {
      const CopyJob job{reinterpret_cast<std::byte*>(target_),
                        reinterpret_cast<const std::byte*>(source_),
                        {Bytes(from[i] * kKernelPage), Bytes(to[i] * kKernelPage), Bytes(kKernelPage)}};
      append_items({&job, 1}, 0, kKernelPage, out, most);
    }
    return out;
  }

  void put_source(std::uint64_t seed) {
    sent_.resize(kBytes);
    fill(sent_, seed);
    ASSERT_EQ(driver_->cuMemcpyHtoD(source_, sent_.data(), kBytes), CUDA_SUCCESS);
    const std::vector<std::byte> empty(kBytes);
    ASSERT_EQ(driver_->cuMemcpyHtoD(target_, empty.data(), kBytes), CUDA_SUCCESS);
  }
  // The items, and nothing else, are in place.
  bool landed(std::span<const CopyItem> items) {
    std::vector<std::byte> want(kBytes), is(kBytes);
    for (const CopyItem& item : items)
      std::memcpy(want.data() + (item.target - target_), sent_.data() + (item.source - source_), item.bytes);
    return driver_->cuMemcpyDtoH(is.data(), target_, kBytes) == CUDA_SUCCESS && is == want;
  }

  static constexpr std::size_t kBytes = static_cast<std::size_t>(kKernelPage * kKernelPages), kListBytes = 1 << 20;
  std::shared_ptr<const Driver> driver_;
  GpuPtr gpu_;
  CUdeviceptr source_ = 0, target_ = 0, list_ = 0;
  CUstream stream_ = nullptr;
  std::vector<std::byte> sent_;
};

// Of the driver, what only this test calls.
template <class Call>
Call* driver_call(const char* name) {
  return reinterpret_cast<Call*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), name));
}

TEST_F(GpuKernel, IsTakenByAGraphAndCopiesWithEachLaunch) {
  if (!there()) return;
  const Current here = gpu_->current();
  // Most pages by where they are, the others as items.
  const auto all = items(kKernelPages, kAlikeItemBytes, 1);
  const std::size_t parts = kKernelPage / kAlikeItemBytes, runs = 90;
  std::vector<RunAddress> addresses;
  for (std::size_t run = 0; run < runs; ++run) addresses.push_back({all[run * parts].source, all[run * parts].target});
  const std::span<const CopyItem> rest = std::span(all).subspan(runs * parts);
  CopyList list = list_of({Bytes(0), Bytes(0), Bytes(kKernelPage)}, 16).value();
  ASSERT_EQ(list.parts, parts);
  list.runs = list_;
  list.run_count = runs;
  list.items = list_ + runs * sizeof(RunAddress);
  list.item_count = static_cast<std::uint32_t>(rest.size());
  ASSERT_EQ(driver_->cuMemcpyHtoD(list.runs, addresses.data(), runs * sizeof(RunAddress)), CUDA_SUCCESS);
  ASSERT_EQ(driver_->cuMemcpyHtoD(list.items, rest.data(), rest.size_bytes()), CUDA_SUCCESS);
  auto* const begin = driver_call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2");
  auto* const end = driver_call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture");
  auto* const instantiate = driver_call<CUresult(CUgraphExec*, CUgraph, unsigned long long)>("cuGraphInstantiateWithFlags");
  auto* const launch = driver_call<CUresult(CUgraphExec, CUstream)>("cuGraphLaunch");
  ASSERT_TRUE(begin != nullptr && end != nullptr && instantiate != nullptr && launch != nullptr);

  CUgraph graph = nullptr;
  CUgraphExec ready = nullptr;
  void* arguments[] = {&list};
  ASSERT_EQ(begin(stream_, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(driver_->cuLaunchKernel(gpu_->copy_list(), 8, 1, 1, 1024, 1, 1, 0, stream_, arguments, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(end(stream_, &graph), CUDA_SUCCESS);
  ASSERT_EQ(instantiate(&ready, graph, 0), CUDA_SUCCESS);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    put_source(round);
    ASSERT_EQ(launch(ready, stream_), CUDA_SUCCESS);
    ASSERT_EQ(driver_->cuStreamSynchronize(stream_), CUDA_SUCCESS);
    EXPECT_TRUE(landed(all)) << "launch " << round;
  }
  driver_call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(ready);
  driver_call<CUresult(CUgraph)>("cuGraphDestroy")(graph);
}

TEST_F(GpuKernel, OfFewItemsSaysThatItIsDoneWhateverItsBlocks) {
  if (!there()) return;
  const Current here = gpu_->current();
  void* pinned = nullptr;
  ASSERT_EQ(driver_->cuMemHostAlloc(&pinned, sizeof(std::uint32_t), CU_MEMHOSTALLOC_DEVICEMAP), CUDA_SUCCESS);
  auto* const word = static_cast<volatile std::uint32_t*>(pinned);
  *word = 0;
  FewItems few;
  few.done.counter = list_;
  ASSERT_EQ(driver_->cuMemHostGetDevicePointer(reinterpret_cast<CUdeviceptr*>(&few.done.word), pinned, 0), CUDA_SUCCESS);
  const std::vector<std::byte> zero(sizeof(std::uint32_t));
  ASSERT_EQ(driver_->cuMemcpyHtoD(list_, zero.data(), zero.size()), CUDA_SUCCESS);
  for (unsigned blocks = 1; blocks <= 8; ++blocks)
    for (const std::int64_t pages : {1, 2, 4}) {
      const auto list = items(pages, pages == 1 ? kFewItemBytes : kItemBytes, blocks);
      ASSERT_LE(list.size(), kFewItems);
      std::copy(list.begin(), list.end(), few.items);
      few.count = static_cast<std::uint32_t>(list.size());
      ++few.done.mark;
      put_source(few.done.mark);
      void* arguments[] = {&few};
      ASSERT_EQ(driver_->cuLaunchKernel(gpu_->copy_few(), blocks, 1, 1, 256, 1, 1, 0, stream_, arguments, nullptr), CUDA_SUCCESS);
      ASSERT_EQ(driver_->cuStreamSynchronize(stream_), CUDA_SUCCESS);
      EXPECT_EQ(*word, few.done.mark) << blocks << " blocks, " << pages << " pages";
      EXPECT_TRUE(landed(list)) << blocks << " blocks, " << pages << " pages";
    }
  driver_->cuMemFreeHost(pinned);
}

}  // namespace
}  // namespace kvloom::cuda
