#include "tests/cuda/cuda_world.h"

#include <unistd.h>

#include <cstring>

#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

void must(const Gpu& gpu, CUresult result, const char* what) {
  const auto ok = gpu.check(result, "{}", what);
  EXPECT_TRUE(ok) << ok.error().message;
}

class AllocatedMemory final : public ConformanceMemory {
 public:
  AllocatedMemory(GpuPtr gpu, std::size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
    const Current here = gpu_->current();
    must(*gpu_, gpu_->driver().cuMemAlloc(&address_, bytes), "cuMemAlloc");
    must(*gpu_, gpu_->driver().cuMemsetD8Async(address_, 0, bytes, nullptr), "cuMemsetD8Async");
    must(*gpu_, gpu_->driver().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  }
  ~AllocatedMemory() override {
    const Current here = gpu_->current();
    gpu_->driver().cuMemFree(address_);  // fails where a test has broken the GPU
  }
  std::span<std::byte> span() const override { return {reinterpret_cast<std::byte*>(address_), bytes_}; }

 private:
  GpuPtr gpu_;
  std::size_t bytes_;
  CUdeviceptr address_ = 0;
};

// As an allocator with expandable segments has it: one range of addresses, parts of two sizes; what is handed out begins inside of the first.
class PartsMemory final : public ConformanceMemory {
 public:
  PartsMemory(GpuPtr gpu, std::size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
    const Current here = gpu_->current();
    const Driver& driver = gpu_->driver();
    CUmemAllocationProp wish = {};
    wish.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wish.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    wish.location = {CU_MEM_LOCATION_TYPE_DEVICE, {gpu_->ordinal()}};
    std::size_t step = 0;
    must(*gpu_, driver.cuMemGetAllocationGranularity(&step, &wish, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "granularity");
    for (std::size_t part = 2 * step; total_ < kOffset + bytes; part = step) {
      parts_.push_back(part);
      total_ += part;
    }
    must(*gpu_, driver.cuMemAddressReserve(&base_, total_, 0, 0, 0), "cuMemAddressReserve");
    CUdeviceptr at = base_;
    for (const std::size_t part : parts_) {
      CUmemGenericAllocationHandle handle = 0;
      must(*gpu_, driver.cuMemCreate(&handle, part, &wish, 0), "cuMemCreate");
      must(*gpu_, driver.cuMemMap(at, part, 0, handle, 0), "cuMemMap");
      must(*gpu_, driver.cuMemRelease(handle), "cuMemRelease");
      at += part;
    }
    CUmemAccessDesc access = {};
    access.location = wish.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    must(*gpu_, driver.cuMemSetAccess(base_, total_, &access, 1), "cuMemSetAccess");
    must(*gpu_, driver.cuMemsetD8Async(base_, 0, total_, nullptr), "cuMemsetD8Async");
    must(*gpu_, driver.cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  }
  ~PartsMemory() override {
    const Current here = gpu_->current();
    CUdeviceptr at = base_;
    for (const std::size_t part : parts_) {
      must(*gpu_, gpu_->driver().cuMemUnmap(at, part), "cuMemUnmap");
      at += part;
    }
    must(*gpu_, gpu_->driver().cuMemAddressFree(base_, total_), "cuMemAddressFree");
  }
  std::span<std::byte> span() const override { return {reinterpret_cast<std::byte*>(base_ + kOffset), bytes_}; }

 private:
  static constexpr std::size_t kOffset = 4096;
  GpuPtr gpu_;
  std::size_t bytes_;
  std::vector<std::size_t> parts_;
  std::size_t total_ = 0;
  CUdeviceptr base_ = 0;
};

}  // namespace

const Abilities kCudaAbilities{.name = "cuda",
                               .can_fence_frozen_peer = true,
                               .can_revoke = true,
                               .needs_target_progress = true,
                               .source_must_be_allocated = false,
                               .crosses_processes = true};

int gpus() {
  int count = 0;
  while (access(fmt::format("/dev/nvidia{}", count).c_str(), R_OK | W_OK) == 0) ++count;
  return count;
}

CudaWorld::CudaWorld(CudaWorldOptions options) : options_(std::move(options)) {
  if (options_.fake) fake::reset();
  auto driver = options_.fake ? Expected<std::shared_ptr<const Driver>>(fake_driver()) : Driver::load();
  EXPECT_TRUE(driver) << driver.error().message;
  driver_ = std::move(*driver);
}

CudaWorld::~CudaWorld() {
  for (const auto& [ordinal, stream] : streams_) {
    const Current here = gpu(ordinal)->current();
    driver_->cuStreamDestroy(stream);
  }
}

const GpuPtr& CudaWorld::gpu(int ordinal) {
  if (gpus_.size() <= static_cast<std::size_t>(ordinal)) gpus_.resize(static_cast<std::size_t>(ordinal) + 1);
  GpuPtr& gpu = gpus_[static_cast<std::size_t>(ordinal)];
  if (gpu == nullptr) gpu = *Gpu::open(driver_, ordinal);
  return gpu;
}

CUstream CudaWorld::stream(int ordinal) {
  CUstream& stream = streams_[ordinal];
  if (stream == nullptr) {
    const Current here = gpu(ordinal)->current();
    must(*gpu(ordinal), driver_->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "a stream");
  }
  return stream;
}

std::unique_ptr<Transport> CudaWorld::endpoint(std::vector<std::byte> hello) {
  CudaOptions options = options_.transport;
  options.listen = "*";
  options.hello = std::move(hello);
  options.driver = driver_;
  options.device = endpoints_++ % 2 == 0 ? options_.source_device : options_.target_device;
  auto made = CudaTransport::make(std::move(options));
  EXPECT_TRUE(made) << made.error().message;
  return std::move(*made);
}

std::unique_ptr<ConformanceMemory> CudaWorld::memory(Bytes length) {
  const auto bytes = static_cast<std::size_t>(length.value);
  if (options_.memory == MemoryKind::host) return ConformanceWorld::memory(length);
  if (options_.memory == MemoryKind::parts) return std::make_unique<PartsMemory>(gpu(options_.target_device), bytes);
  return std::make_unique<AllocatedMemory>(gpu(options_.target_device), bytes);
}

std::optional<int> CudaWorld::gpu_of(const std::byte* at) {
  unsigned type = 0;
  int ordinal = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* values[] = {&type, &ordinal};
  const Current here = gpu()->current();
  must(*gpu(), driver_->cuPointerGetAttributes(2, names, values, reinterpret_cast<CUdeviceptr>(at)), "asking about memory");
  return type == CU_MEMORYTYPE_DEVICE ? std::optional(ordinal) : std::nullopt;
}

// Memory of parts is only its own GPU's to touch.
void CudaWorld::put(std::span<std::byte> to, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const auto owner = gpu_of(to.data());
  if (!owner) return ConformanceWorld::put(to, bytes);
  const CUstream own = stream(*owner);
  const Current here = gpu(*owner)->current();
  must(*gpu(*owner), driver_->cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to.data()), bytes.data(), bytes.size(), own),
       "put");
  must(*gpu(*owner), driver_->cuStreamSynchronize(own), "put");
}

std::vector<std::byte> CudaWorld::get(std::span<const std::byte> from) {
  if (from.empty()) return {};
  const auto owner = gpu_of(from.data());
  if (!owner) return ConformanceWorld::get(from);
  std::vector<std::byte> out(from.size());
  const CUstream own = stream(*owner);
  const Current here = gpu(*owner)->current();
  must(*gpu(*owner), driver_->cuMemcpyDtoHAsync(out.data(), reinterpret_cast<CUdeviceptr>(from.data()), from.size(), own), "get");
  must(*gpu(*owner), driver_->cuStreamSynchronize(own), "get");
  return out;
}

}  // namespace kvloom::cuda
