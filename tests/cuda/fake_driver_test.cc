// The fake driver is held to what the CUDA transport needs of a real one, by the words of cuda.h.
#include "tests/cuda/fake_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "kvloom/transport/copy.h"
#include "kvloom/transport/cuda/copy_items.h"

namespace kvloom::cuda {
namespace {

class FakeDriver : public testing::Test {
 protected:
  FakeDriver() {
    fake::reset();
    for (int gpu = 0; gpu < 2; ++gpu) cu.cuDevicePrimaryCtxRetain(&contexts[static_cast<std::size_t>(gpu)], gpu);
    cu.cuCtxPushCurrent(contexts[0]);
  }
  ~FakeDriver() override { fake::reset(); }

  CUdeviceptr allocate(std::size_t bytes) const {
    CUdeviceptr at = 0;
    EXPECT_EQ(cu.cuMemAlloc(&at, bytes), CUDA_SUCCESS);
    return at;
  }
  CUstream stream() const {
    CUstream out = nullptr;
    EXPECT_EQ(cu.cuStreamCreateWithPriority(&out, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    return out;
  }
  void write(CUdeviceptr at, const std::vector<std::byte>& bytes) const {
    ASSERT_EQ(cu.cuMemcpyHtoD(at, bytes.data(), bytes.size()), CUDA_SUCCESS);
  }
  std::vector<std::byte> read(CUdeviceptr at, std::size_t bytes) const {
    std::vector<std::byte> out(bytes);
    EXPECT_EQ(cu.cuMemcpyDtoH(out.data(), at, bytes), CUDA_SUCCESS);
    return out;
  }
  // VMM memory of GPU 0, mapped and readable there.
  CUdeviceptr map(CUmemGenericAllocationHandle handle, std::size_t bytes) const {
    CUdeviceptr at = 0;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    EXPECT_EQ(cu.cuMemAddressReserve(&at, bytes, 0, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuMemMap(at, bytes, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuMemSetAccess(at, bytes, &access, 1), CUDA_SUCCESS);
    return at;
  }
  CUmemGenericAllocationHandle create(std::size_t bytes, CUmemAllocationHandleType type) const {
    CUmemAllocationProp wish = {};
    wish.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wish.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wish.requestedHandleTypes = type;
    CUmemGenericAllocationHandle out = 0;
    EXPECT_EQ(cu.cuMemCreate(&out, bytes, &wish, 0), CUDA_SUCCESS);
    return out;
  }

  const std::shared_ptr<const Driver> driver = fake_driver();
  const Driver& cu = *driver;
  std::array<CUcontext, 2> contexts{};
};

std::vector<std::byte> counted(std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 7 + i / 256);
  return out;
}

// In a forked child, which must return true.
bool in_child(const std::function<bool()>& what) {
  const pid_t pid = fork();
  if (pid == 0) _exit(what() ? 0 : 1);
  int status = 1;
  waitpid(pid, &status, 0);
  return status == 0;
}

TEST_F(FakeDriver, ErrorsAreSentences) {
  EXPECT_EQ(check(cu, CUDA_ERROR_OUT_OF_MEMORY, "4096 bytes on GPU 1", Code::exhausted).error().message,
            "4096 bytes on GPU 1: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_EQ(check(cu, CUDA_ERROR_UNKNOWN, Code::io, "GPU {}", 1).error().message, "GPU 1: CUDA_ERROR_UNKNOWN (unknown error)");
  EXPECT_TRUE(check(cu, CUDA_SUCCESS, "nothing"));
}

TEST_F(FakeDriver, CurrentPutsTheFormerContextBack) {
  {
    const Current here(cu, contexts[1]);
    EXPECT_EQ(here.result(), CUDA_SUCCESS);
    allocate(100);
  }
  int ordinal = -1;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* values[] = {&ordinal};
  cu.cuPointerGetAttributes(1, names, values, allocate(100));
  EXPECT_EQ(ordinal, 0);
  EXPECT_EQ(Current(cu, nullptr).result(), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(FakeDriver, SaysWhatAnAddressIs) {
  unsigned type = 0, legacy = 0, shareable = 0;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                 CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&type, &legacy, &shareable, &begin, &bytes};
  const auto ask = [&](CUdeviceptr at) { ASSERT_EQ(cu.cuPointerGetAttributes(5, names, values, at), CUDA_SUCCESS); };

  const CUdeviceptr plain = allocate(5000);
  ask(plain + 4999);
  EXPECT_EQ(std::tuple(type, legacy, shareable, begin, bytes), std::tuple(CU_MEMORYTYPE_DEVICE, 1U, 0U, plain, 5000U));
  const std::size_t size = std::size_t{4} << 20;
  const CUdeviceptr vmm = map(create(size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), size);
  ask(vmm + 100);
  EXPECT_EQ(std::tuple(type, legacy, shareable, begin, bytes), std::tuple(CU_MEMORYTYPE_DEVICE, 0U, 1U, vmm, size));
  std::vector<std::byte> host(100);
  const auto at = reinterpret_cast<CUdeviceptr>(host.data());
  ask(at);
  EXPECT_EQ(type, 0U) << "nobody registered it";
  ASSERT_EQ(cu.cuMemHostRegister(host.data(), host.size(), 0), CUDA_SUCCESS);
  ask(at);
  EXPECT_EQ(type, unsigned{CU_MEMORYTYPE_HOST});
  EXPECT_EQ(cu.cuMemHostRegister(host.data() + 50, 10, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(cu.cuMemHostUnregister(host.data()), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemHostUnregister(host.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

TEST_F(FakeDriver, RefusesCopiesOfWhatIsNotThere) {
  const CUdeviceptr a = allocate(4096), b = allocate(4096);
  EXPECT_EQ(cu.cuMemcpyAsync(a, b, 4096, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemcpyAsync(a + 1, b, 4096, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuMemcpyAsync(a, 0x1000, 1, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuMemFree(a + 1), CUDA_ERROR_INVALID_VALUE);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = b;
  copy.dstDevice = a;
  copy.srcPitch = 1000;
  copy.dstPitch = 500;
  copy.WidthInBytes = 100;
  copy.Height = 5;
  EXPECT_EQ(cu.cuMemcpy2DAsync(&copy, nullptr), CUDA_ERROR_INVALID_VALUE) << "row 4 ends at 4100";
  copy.srcPitch = 900;
  const auto bytes = counted(4096);
  write(b, bytes);
  EXPECT_EQ(cu.cuMemcpy2DAsync(&copy, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(read(a + 2000, 100), std::vector<std::byte>(bytes.begin() + 3600, bytes.begin() + 3700));
  copy.dstPitch = 99;
  EXPECT_EQ(cu.cuMemcpy2DAsync(&copy, nullptr), CUDA_ERROR_INVALID_VALUE) << "wider than its pitch";
}

TEST_F(FakeDriver, CudaMallocMemoryIsSharedByIpcHandles) {
  const CUdeviceptr at = allocate(10'000);
  const auto bytes = counted(10'000);
  write(at, bytes);
  CUipcMemHandle handle = {};
  ASSERT_EQ(cu.cuIpcGetMemHandle(&handle, at), CUDA_SUCCESS);
  CUdeviceptr own = 0;
  EXPECT_EQ(cu.cuIpcOpenMemHandle(&own, handle, 1), CUDA_ERROR_INVALID_CONTEXT) << "of this very process";
  EXPECT_TRUE(in_child([&] {
    CUdeviceptr theirs = 0, again = 0;
    if (cu.cuIpcOpenMemHandle(&theirs, handle, 1) != CUDA_SUCCESS || cu.cuIpcOpenMemHandle(&again, handle, 1) != CUDA_SUCCESS)
      return false;
    const bool same = theirs == again && read(theirs, 10'000) == bytes;
    write(theirs + 9'999, {std::byte{77}});
    return same && cu.cuIpcCloseMemHandle(theirs) == CUDA_SUCCESS && fake::live().opened == 1 &&
           cu.cuIpcCloseMemHandle(theirs) == CUDA_SUCCESS && fake::live().opened == 0;
  }));
  EXPECT_EQ(read(at + 9'999, 1)[0], std::byte{77}) << "one memory";
  cu.cuMemFree(at);
  allocate(10'000);  // may get the same descriptor
  EXPECT_TRUE(in_child([&] {
    CUdeviceptr theirs = 0;
    return cu.cuIpcOpenMemHandle(&theirs, handle, 1) == CUDA_ERROR_INVALID_HANDLE;
  }));
}

TEST_F(FakeDriver, VmmMemoryIsSharedByDescriptors) {
  const std::size_t size = std::size_t{2} << 20;
  const CUmemGenericAllocationHandle handle = create(size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  const CUdeviceptr at = map(handle, size);
  ASSERT_EQ(cu.cuMemRelease(handle), CUDA_SUCCESS);
  CUmemGenericAllocationHandle retained = 0;
  ASSERT_EQ(cu.cuMemRetainAllocationHandle(&retained, reinterpret_cast<void*>(at + 5)), CUDA_SUCCESS);
  EXPECT_EQ(retained, handle);
  int fd = -1;
  ASSERT_EQ(cu.cuMemExportToShareableHandle(&fd, retained, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  const auto bytes = counted(size);
  write(at, bytes);
  EXPECT_TRUE(in_child([&] {
    CUmemGenericAllocationHandle theirs = 0;
    if (cu.cuMemImportFromShareableHandle(&theirs, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS)
      return false;
    return read(map(theirs, size), size) == bytes;
  }));
  EXPECT_EQ(cu.cuMemImportFromShareableHandle(&retained, reinterpret_cast<void*>(0), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            CUDA_ERROR_INVALID_VALUE)
      << "standard input is no memory";
  close(fd);
  EXPECT_EQ(cu.cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemUnmap(at, size), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemcpyAsync(at, at + 100, 10, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuMemAddressFree(at, size), CUDA_SUCCESS);
  EXPECT_EQ(fake::live(), (fake::Live{.contexts = 2}));
}

TEST_F(FakeDriver, VmmMemoryThatWasNotMadeToBeExportedIsNot) {
  int fd = -1;
  const auto handle = create(std::size_t{2} << 20, CU_MEM_HANDLE_TYPE_NONE);
  EXPECT_EQ(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeDriver, HeldOperationsRunOneByOneAndInOrder) {
  const CUdeviceptr a = allocate(8), b = allocate(8);
  const CUstream one = stream(), two = stream();
  CUevent event = nullptr;
  cu.cuEventCreate(&event, 0);
  fake::hold();
  cu.cuMemsetD8Async(a, 1, 8, one);
  cu.cuEventRecord(event, one);
  cu.cuStreamWaitEvent(two, event, 0);
  cu.cuMemcpyAsync(b, a, 8, two);
  EXPECT_EQ(fake::held(), 4U);
  EXPECT_EQ(cu.cuStreamQuery(one), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(fake::release(1), 1U);
  EXPECT_EQ(read(a, 1)[0], std::byte{1});
  EXPECT_EQ(cu.cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cu.cuStreamSynchronize(two), CUDA_SUCCESS) << "runs what it waits for";
  EXPECT_EQ(read(b, 8), std::vector<std::byte>(8, std::byte{1}));
  EXPECT_EQ(cu.cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(fake::held(), 0U);
}

TEST_F(FakeDriver, StreamsWaitForWords) {
  const CUdeviceptr word = allocate(4), at = allocate(4);
  const CUstream waits = stream();
  cu.cuStreamWaitValue32(waits, word, 3, CU_STREAM_WAIT_VALUE_GEQ);
  cu.cuMemsetD8Async(at, 9, 4, waits);
  EXPECT_EQ(cu.cuStreamQuery(waits), CUDA_ERROR_NOT_READY);
  cu.cuStreamWriteValue32(stream(), word, 3, 0);
  EXPECT_EQ(cu.cuStreamQuery(waits), CUDA_SUCCESS);
  EXPECT_EQ(read(at, 1)[0], std::byte{9});
}

TEST_F(FakeDriver, SaysWhichCallsAShutGateWouldHaveKept) {
  const CUdeviceptr word = allocate(4), other = allocate(4);
  cu.cuStreamWaitValue32(stream(), word, 1, CU_STREAM_WAIT_VALUE_GEQ);
  allocate(4096);
  cu.cuStreamDestroy(stream());
  EXPECT_TRUE(fake::stuck().empty()) << "these wait for nobody";
  EXPECT_EQ(cu.cuMemFree(other), CUDA_SUCCESS);
  EXPECT_EQ(fake::stuck(), std::vector<std::string>{"cuMemFree"});
  cu.cuStreamWriteValue32(stream(), word, 1, 0);
  EXPECT_EQ(cu.cuMemFree(word), CUDA_SUCCESS);
  EXPECT_EQ(fake::stuck().size(), 1U) << "the word is written";
}

TEST_F(FakeDriver, MemoryThatGoesWhileACopyIsHeldBreaksTheGpu) {
  const CUdeviceptr a = allocate(8), b = allocate(8);
  fake::hold();
  ASSERT_EQ(cu.cuMemcpyAsync(a, b, 8, nullptr), CUDA_SUCCESS);
  cu.cuMemFree(b);
  EXPECT_EQ(cu.cuStreamSynchronize(nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cu.cuMemFree(a), CUDA_ERROR_ILLEGAL_ADDRESS) << "and so does every call from now on";
  const Current other(cu, contexts[1]);
  allocate(8);
}

TEST_F(FakeDriver, FailsWhereATestWishes) {
  const CUdeviceptr a = allocate(8);
  fake::fail_next("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
  CUdeviceptr at = 0;
  EXPECT_EQ(cu.cuMemAlloc(&at, 8), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cu.cuMemAlloc(&at, 8), CUDA_SUCCESS);
  EXPECT_EQ(fake::calls("cuMemAlloc"), 3);
  fake::fail_when_run("cuMemcpyAsync", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(cu.cuMemcpyAsync(a, at, 8, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamQuery(nullptr), CUDA_ERROR_LAUNCH_FAILED);
}

TEST_F(FakeDriver, RunsTheCopyKernel) {
  const std::size_t bytes = 100'000;
  const CUdeviceptr from = allocate(bytes), to = allocate(bytes);
  write(from, counted(bytes));
  const CopyJob job{reinterpret_cast<std::byte*>(to),
                    reinterpret_cast<const std::byte*>(from),
                    {Bytes(64), Bytes(36'000), Bytes(576), 60, Bytes(1152), Bytes(-600)}};
  std::vector<CopyItem> items;
  append_items({&job, 1}, 0, job.run.total().value, items);
  const CUdeviceptr list = allocate(items.size() * sizeof(CopyItem));
  ASSERT_EQ(cu.cuMemcpyHtoD(list, items.data(), items.size() * sizeof(CopyItem)), CUDA_SUCCESS);
  CUmodule module = nullptr;
  CUfunction kernel = nullptr;
  ASSERT_EQ(cu.cuModuleLoadData(&module, "image"), CUDA_SUCCESS);
  ASSERT_EQ(cu.cuModuleGetFunction(&kernel, module, "kvloom_copy_list"), CUDA_SUCCESS);
  CopyList words;
  words.items = list;
  words.item_count = static_cast<std::uint32_t>(items.size());
  void* parameters[] = {&words};
  ASSERT_EQ(cu.cuLaunchKernel(kernel, 8, 1, 1, 1024, 1, 1, 0, nullptr, parameters, nullptr), CUDA_SUCCESS);
  std::vector<std::byte> want(bytes);
  const auto source = counted(bytes);
  for (std::size_t i = 0; i < 60; ++i) std::memcpy(want.data() + 36'000 - i * 600, source.data() + 64 + i * 1152, 576);
  EXPECT_EQ(read(to, bytes), want);
  const Current other(cu, contexts[1]);
  EXPECT_EQ(cu.cuLaunchKernel(kernel, 8, 1, 1, 1024, 1, 1, 0, nullptr, parameters, nullptr), CUDA_ERROR_INVALID_HANDLE)
      << "a kernel of another GPU";
}

TEST_F(FakeDriver, KernelsNeedPeerAccessAndEnginesDoNot) {
  const CUdeviceptr near = allocate(8);
  const Current other(cu, contexts[1]);
  const CUdeviceptr far = allocate(8);
  EXPECT_EQ(cu.cuMemcpyAsync(far, near, 8, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWriteValue32(nullptr, near, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuCtxEnablePeerAccess(contexts[0], 0), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuCtxEnablePeerAccess(contexts[0], 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  EXPECT_EQ(cu.cuStreamWriteValue32(nullptr, near, 1, 0), CUDA_SUCCESS);
}

}  // namespace
}  // namespace kvloom::cuda
