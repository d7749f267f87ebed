#include "kvloom/transport/cuda/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/words.h"

namespace kvloom::cuda {
namespace {

using shm::LocalMemory;
using shm::Offer;

CUdeviceptr address_of(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }
std::byte* memory_at(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

// What the driver knows of an address.
struct About {
  unsigned type = 0;  // CUmemorytype; 0: nothing
  int ordinal = -1;
  CUdeviceptr begin = 0;  // of the allocation
  std::size_t bytes = 0;
  unsigned legacy_ipc = 0;
};

Expected<About> ask_about(const Gpu& gpu, CUdeviceptr address) {
  About out;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                 CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                 CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&out.type, &out.ordinal, &out.begin, &out.bytes, &out.legacy_ipc};
  if (auto ok =
          gpu.check(gpu.driver().cuPointerGetAttributes(std::size(names), names, values, address), "asking about {:#x}", address);
      !ok)
    return tl::unexpected(ok.error());
  return out;
}

std::shared_ptr<Loans::Loan> loan_of(const Gpu& gpu, std::span<std::byte> memory) {
  return gpu.contexts().loans().lend(address_of(memory.data()), memory.size());
}

class Lent final : public LocalMemory {
 public:
  Lent(const Gpu& gpu, std::span<std::byte> memory, std::optional<Offer> offer, std::string why_not)
      : memory_(memory), offer_(std::move(offer)), why_not_(std::move(why_not)), loan_(loan_of(gpu, memory)) {}
  std::span<std::byte> memory() const override { return memory_; }
  const Offer* offer() const override { return offer_ ? &*offer_ : nullptr; }
  std::string why_not() const override { return why_not_; }
  void take_back() override { loan_->end(); }

 private:
  std::span<std::byte> memory_;
  std::optional<Offer> offer_;
  std::string why_not_;
  std::shared_ptr<Loans::Loan> loan_;  // owners: this, and who reads it in this process
};

// Ends as contexts.h has it: its destructor frees, or unpins.
template <class Memory>
std::shared_ptr<LocalMemory> freed_in_time(const GpuPtr& gpu, std::unique_ptr<Memory> memory) {
  return {memory.release(),
          [gpu](Memory* ended) { gpu->contexts().give_back(std::shared_ptr<void>(std::shared_ptr<Memory>(ended))); }};
}

class Pinned final : public LocalMemory {
 public:
  Pinned(std::span<std::byte> memory, std::unique_ptr<Pins::Pin> pin) : memory_(memory), pin_(std::move(pin)) {}
  std::span<std::byte> memory() const override { return memory_; }
  const Offer* offer() const override { return nullptr; }
  std::string why_not() const override {
    return "it is host memory of its owner; cuda writes read memory from allocate(), or GPU memory";
  }

 private:
  std::span<std::byte> memory_;
  std::unique_ptr<Pins::Pin> pin_;  // null: its owner has pinned it
};

class PinnedMemfd final : public LocalMemory {
 public:
  PinnedMemfd(GpuPtr gpu, shm::SharedMemory memory) : gpu_(std::move(gpu)), mapping_(std::move(memory.mapping)) {
    offer_.length = Bytes(static_cast<std::int64_t>(mapping_.memory().size()));
    offer_.words = encode(Words{.kind = Words::Kind::host});
    offer_.descriptors.push_back(std::move(memory.fd));
  }
  PinnedMemfd(const PinnedMemfd&) = delete;
  PinnedMemfd& operator=(const PinnedMemfd&) = delete;
  ~PinnedMemfd() override {
    if (!pinned_) return;
    const Current here = gpu_->current();
    gpu_->driver().cuMemHostUnregister(mapping_.memory().data());
  }
  Expected<void> pin() {
    const Current here = gpu_->current();
    const auto memory = mapping_.memory();
    auto ok = check(gpu_->driver(), gpu_->driver().cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE),
                    fmt::format("pinning {} B of host memory (ulimit -l?)", memory.size()), Code::exhausted);
    pinned_ = ok.has_value();
    return ok;
  }
  std::span<std::byte> memory() const override { return mapping_.memory(); }
  const Offer* offer() const override { return &offer_; }

 private:
  GpuPtr gpu_;
  shm::Mapping mapping_;
  Offer offer_;
  bool pinned_ = false;
};

class Allocated final : public LocalMemory {
 public:
  Allocated(GpuPtr gpu, std::span<std::byte> memory, Offer offer)
      : gpu_(std::move(gpu)), memory_(memory), offer_(std::move(offer)), loan_(loan_of(*gpu_, memory)) {}
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;
  ~Allocated() override {
    loan_->end();  // a peer of this process may be fenced off, and copy on
    const Current here = gpu_->current();
    gpu_->driver().cuMemFree(address_of(memory_.data()));
  }
  std::span<std::byte> memory() const override { return memory_; }
  const Offer* offer() const override { return &offer_; }

 private:
  GpuPtr gpu_;
  std::span<std::byte> memory_;
  Offer offer_;
  std::shared_ptr<Loans::Loan> loan_;  // owners: this, and who reads it in this process
};

Expected<Offer> ipc_offer(const Gpu& gpu, std::span<std::byte> memory, const About& about) {
  Words words{.kind = Words::Kind::ipc, .uuid = gpu.uuid()};
  if (auto ok = gpu.check(gpu.driver().cuIpcGetMemHandle(&words.ipc, about.begin), "an IPC handle"); !ok)
    return tl::unexpected(ok.error());
  words.address = address_of(memory.data());
  words.offset = words.address - about.begin;
  return Offer{Bytes(static_cast<std::int64_t>(memory.size())), encode(words), {}};
}

// ---- VMM: memory of parts, each with a handle ----

struct Part {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
};

// Handles that were retained, until this ends.
class Retained {
 public:
  explicit Retained(const Gpu& gpu) : gpu_(gpu) {}
  Retained(const Retained&) = delete;
  Retained& operator=(const Retained&) = delete;
  ~Retained() {
    for (const CUmemGenericAllocationHandle handle : handles_) gpu_.driver().cuMemRelease(handle);
  }
  std::optional<CUmemGenericAllocationHandle> at(CUdeviceptr address) {
    CUmemGenericAllocationHandle handle = 0;
    if (gpu_.driver().cuMemRetainAllocationHandle(&handle, memory_at(address)) != CUDA_SUCCESS) return std::nullopt;
    handles_.push_back(handle);
    return handle;
  }

 private:
  const Gpu& gpu_;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

// The parts under [begin, end), whole ones. The driver does not say where a part begins: found by steps of the granularity.
std::vector<Part> parts_of(Retained& retained, std::size_t step, CUdeviceptr begin, CUdeviceptr end) {
  CUdeviceptr at = begin / step * step;
  const auto first = retained.at(at);
  if (!first) return {};
  while (at >= step && retained.at(at - step) == first) at -= step;
  std::vector<Part> out;
  for (;; at += step) {
    const auto handle = retained.at(at);
    const bool goes_on = handle && !out.empty() && out.back().handle == *handle;
    if (!goes_on && at >= end) return out;
    if (!handle) return {};
    if (goes_on)
      out.back().bytes += step;
    else
      out.push_back({*handle, at, step});
  }
}

Expected<Offer> vmm_offer(const Gpu& gpu, std::span<std::byte> memory) {
  CUmemAllocationProp wish = {};
  wish.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wish.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal()};
  std::size_t step = 0;
  if (auto ok =
          gpu.check(gpu.driver().cuMemGetAllocationGranularity(&step, &wish, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "a granularity");
      !ok)
    return tl::unexpected(ok.error());
  Retained retained(gpu);
  const CUdeviceptr begin = address_of(memory.data());
  const std::vector<Part> parts = parts_of(retained, step, begin, begin + memory.size());
  if (parts.empty())
    return fail(
        Code::unsupported,
        "memory of a pool (cudaMallocAsync) can't be shared with other processes: PYTORCH_CUDA_ALLOC_CONF=backend:native, or "
        "cudaMalloc");
  rlimit limit = {};
  constexpr std::size_t kOthers = 64;  // descriptors that the process needs besides
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && parts.size() + kOthers > limit.rlim_cur)
    return fail(Code::exhausted, "memory of {} VMM parts needs as many descriptors, and ulimit -n is {}", parts.size(),
                limit.rlim_cur);
  Words words{.kind = Words::Kind::vmm, .uuid = gpu.uuid(), .offset = begin - parts.front().begin};
  Offer offer{Bytes(static_cast<std::int64_t>(memory.size())), {}, {}};
  for (const Part& part : parts) {
    int fd = -1;
    if (const CUresult result =
            gpu.driver().cuMemExportToShareableHandle(&fd, part.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        result != CUDA_SUCCESS)
      return fail(
          Code::unsupported,
          "VMM memory that was not made to be exported ({}): PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or a PyTorch "
          "that makes its segments with file descriptors",
          to_string(gpu.driver(), result));
    offer.descriptors.emplace_back(fd);
    if (auto ok = words.add_part(part.bytes); !ok) return tl::unexpected(ok.error());
  }
  offer.words = encode(words);
  return offer;
}

// On a stream of its own: the default one may wait at a gate of the engine's.
Expected<void> zero(const Gpu& gpu, CUdeviceptr address, std::size_t bytes) {
  const Driver& driver = gpu.driver();
  CUstream stream = nullptr;
  if (auto ok = gpu.check(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "a stream"); !ok) return ok;
  CUresult result = driver.cuMemsetD8Async(address, 0, bytes, stream);
  if (result == CUDA_SUCCESS) result = driver.cuStreamSynchronize(stream);
  driver.cuStreamDestroy(stream);
  return gpu.check(result, "zeroing {} B", bytes);
}

}  // namespace

Expected<std::shared_ptr<LocalMemory>> allocate_on_gpu(const GpuPtr& gpu, Bytes length) {
  const Current here = gpu->current();
  const auto bytes = static_cast<std::size_t>(length.value);
  CUdeviceptr address = 0;
  if (auto ok = check(gpu->driver(), gpu->driver().cuMemAlloc(&address, bytes),
                      fmt::format("{} B on GPU {} ({})", length.value, gpu->ordinal(), gpu->name()), Code::exhausted);
      !ok)
    return tl::unexpected(ok.error());
  const std::span<std::byte> memory(memory_at(address), bytes);
  const auto about = ask_about(*gpu, address);
  auto offer = about ? ipc_offer(*gpu, memory, *about) : tl::unexpected(about.error());
  auto out = freed_in_time(gpu, std::make_unique<Allocated>(gpu, memory, offer ? std::move(*offer) : Offer{}));
  if (!offer) return tl::unexpected(offer.error());
  if (auto ok = zero(*gpu, address, bytes); !ok) return tl::unexpected(ok.error());
  return out;
}

Expected<std::shared_ptr<LocalMemory>> allocate_pinned(const GpuPtr& gpu, Bytes length) {
  auto memory = shm::make_shared_memory("kvloom-pinned", length, shm::Sharing::to_pin);
  if (!memory) return tl::unexpected(memory.error());
  const auto span = memory->mapping.memory();
  if (madvise(span.data(), span.size(), MADV_POPULATE_WRITE) != 0 && errno == ENOMEM)
    return fail(Code::exhausted, "no {} B of shared memory", length.value);
  auto out = std::make_unique<PinnedMemfd>(gpu, std::move(*memory));
  if (auto ok = out->pin(); !ok) return tl::unexpected(ok.error());
  return freed_in_time(gpu, std::move(out));
}

Expected<std::shared_ptr<LocalMemory>> lend(const GpuPtr& gpu, std::span<std::byte> memory) {
  const Current here = gpu->current();
  const auto about = ask_about(*gpu, address_of(memory.data()));
  if (!about) return tl::unexpected(about.error());
  if (about->type != CU_MEMORYTYPE_DEVICE && about->type != CU_MEMORYTYPE_UNIFIED) {
    auto pin = gpu->contexts().pins().pin(gpu, memory);
    if (!pin) return tl::unexpected(pin.error());
    return std::make_shared<Pinned>(memory, std::move(*pin));
  }
  if (about->ordinal != gpu->ordinal())
    return fail(Code::invalid_argument, "memory of GPU {}, lent to a transport of GPU {}: make one for each", about->ordinal,
                gpu->ordinal());
  if (about->legacy_ipc != 0) {
    const std::size_t offset = address_of(memory.data()) - about->begin;
    if (offset > about->bytes || memory.size() > about->bytes - offset)
      return fail(Code::invalid_argument, "{} B at {} of an allocation of {} B", memory.size(), offset, about->bytes);
  }
  auto offer = about->legacy_ipc != 0 ? ipc_offer(*gpu, memory, *about) : vmm_offer(*gpu, memory);
  if (!offer) return std::make_shared<Lent>(*gpu, memory, std::nullopt, offer.error().message);
  return std::make_shared<Lent>(*gpu, memory, std::move(*offer), "");
}

}  // namespace kvloom::cuda
