// The reader's side of memory.h.
#include <sys/mman.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/memory.h"
#include "kvloom/transport/cuda/words.h"

namespace kvloom::cuda {
namespace {

using shm::Offer;
using shm::PeerMemory;

std::span<const std::byte> span_at(CUdeviceptr address, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

// [offset, offset + length) lies in an allocation of `bytes`: the numbers are a peer's.
Expected<void> check_within(std::uint64_t offset, Bytes length, std::uint64_t bytes) {
  const auto wanted = static_cast<std::uint64_t>(length.value);
  if (offset > bytes || wanted > bytes - offset)
    return fail(Code::out_of_range, "{} B at {} of an allocation of {} B", wanted, offset, bytes);
  return {};
}

Expected<void> check_peer_access(const Gpu& gpu, const std::array<std::byte, 16>& uuid) {
  const auto ordinal = gpu.ordinal_of(uuid);
  if (!ordinal) return tl::unexpected(ordinal.error());
  if (*ordinal == gpu.ordinal()) return {};
  CUdevice other = 0;
  int can = 0;
  if (auto ok = gpu.check(gpu.driver().cuDeviceGet(&other, *ordinal), "opening GPU {}", *ordinal); !ok) return ok;
  if (auto ok = gpu.check(gpu.driver().cuDeviceCanAccessPeer(&can, gpu.device(), other), "asking about peer access"); !ok)
    return ok;
  if (can == 0)
    return fail(Code::unsupported, "GPU {} can't read GPU {}: no NVLink or PCIe peer access (nvidia-smi topo -p2p r)",
                gpu.ordinal(), *ordinal);
  return {};
}

// What unmaps when it ends, which is when contexts.h says.
template <class Memory>
class InTime final : public PeerMemory {
 public:
  explicit InTime(GpuPtr gpu, std::shared_ptr<Memory> memory) : gpu_(std::move(gpu)), memory_(std::move(memory)) {}
  InTime(const InTime&) = delete;
  InTime& operator=(const InTime&) = delete;
  ~InTime() override { gpu_->contexts().give_back(std::move(memory_)); }
  std::span<const std::byte> memory() const override { return memory_->memory(); }
  Memory& kept() { return *memory_; }

 private:
  GpuPtr gpu_;
  std::shared_ptr<Memory> memory_;  // owners: this, then Contexts
};

template <class Memory, class... Arguments>
std::unique_ptr<InTime<Memory>> unmapped_in_time(const GpuPtr& gpu, Arguments&&... arguments) {
  return std::make_unique<InTime<Memory>>(gpu, std::make_shared<Memory>(gpu, std::forward<Arguments>(arguments)...));
}

// ---- IPC handle ----

class PeerIpc final : public PeerMemory {
 public:
  PeerIpc(GpuPtr gpu, CUdeviceptr base, std::span<const std::byte> memory) : gpu_(std::move(gpu)), base_(base), memory_(memory) {}
  PeerIpc(const PeerIpc&) = delete;
  PeerIpc& operator=(const PeerIpc&) = delete;
  ~PeerIpc() override {
    const Current here = gpu_->current();
    gpu_->driver().cuIpcCloseMemHandle(base_);
  }
  std::span<const std::byte> memory() const override { return memory_; }

 private:
  GpuPtr gpu_;
  CUdeviceptr base_;
  std::span<const std::byte> memory_;
};

// Memory of this very process: a handle can't be opened where it was made.
class PeerOurs final : public PeerMemory {
 public:
  PeerOurs(std::span<const std::byte> memory, std::unique_ptr<Loans::Borrowed> borrowed)
      : memory_(memory), borrowed_(std::move(borrowed)) {}
  std::span<const std::byte> memory() const override { return borrowed_->ended() ? std::span<const std::byte>() : memory_; }

 private:
  std::span<const std::byte> memory_;
  std::unique_ptr<Loans::Borrowed> borrowed_;
};

Expected<std::unique_ptr<PeerMemory>> map_ours(const GpuPtr& gpu, const Words& words, Bytes length) {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  // Not cuMemGetAddressRange: that knows the current context's memory only, and this may be another GPU's.
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&base, &bytes};
  if (auto ok = gpu->check(gpu->driver().cuPointerGetAttributes(std::size(names), names, values, words.address),
                           "memory at {:#x}", words.address);
      !ok)
    return tl::unexpected(ok.error());
  if (auto ok = check_within(words.address - base, length, bytes); !ok) return tl::unexpected(ok.error());
  const auto bytes_lent = static_cast<std::size_t>(length.value);
  auto borrowed = gpu->contexts().loans().borrow(words.address, bytes_lent);
  if (borrowed == nullptr)
    return fail(Code::unavailable, "{} B at {:#x} of this process are lent no more", length.value, words.address);
  const auto ordinal = gpu->ordinal_of(words.uuid);
  if (!ordinal) return tl::unexpected(ordinal.error());
  if (*ordinal != gpu->ordinal()) {
    auto other = Gpu::open(gpu->driver_owner(), *ordinal);  // retained for as long as its memory lives: its owner's
    if (!other) return tl::unexpected(other.error());
    const CUresult result = gpu->driver().cuCtxEnablePeerAccess((*other)->context(), 0);
    if (result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
      if (auto ok = gpu->check(result, "reading GPU {} from GPU {}", *ordinal, gpu->ordinal()); !ok)
        return tl::unexpected(ok.error());
  }
  return std::make_unique<PeerOurs>(span_at(words.address, bytes_lent), std::move(borrowed));
}

Expected<std::unique_ptr<PeerMemory>> map_ipc(const GpuPtr& gpu, const Words& words, const Offer& offer) {
  if (!offer.descriptors.empty()) return fail(Code::parse, "an IPC handle with descriptors");
  if (offer.pid == getpid()) return map_ours(gpu, words, offer.length);
  CUdeviceptr base = 0;
  if (auto ok = check(gpu->driver(), gpu->driver().cuIpcOpenMemHandle(&base, words.ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                      "opening an IPC handle (is the peer's memory still there, and in the same container?)", Code::unavailable);
      !ok)
    return tl::unexpected(ok.error());
  const auto length = static_cast<std::size_t>(offer.length.value);
  auto out = unmapped_in_time<PeerIpc>(gpu, base, span_at(base + words.offset, length));
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  if (auto ok = gpu->check(gpu->driver().cuMemGetAddressRange(&begin, &bytes, base), "the size of a peer's memory"); !ok)
    return tl::unexpected(ok.error());
  if (auto ok = check_within(words.offset, offer.length, bytes); !ok) return tl::unexpected(ok.error());
  return out;
}

// ---- VMM ----

class PeerVmm final : public PeerMemory {
 public:
  explicit PeerVmm(GpuPtr gpu) : gpu_(std::move(gpu)) {}
  PeerVmm(const PeerVmm&) = delete;
  PeerVmm& operator=(const PeerVmm&) = delete;
  ~PeerVmm() override {
    const Current here = gpu_->current();
    const Driver& driver = gpu_->driver();
    CUdeviceptr at = base_;
    for (const std::size_t bytes : mapped_) {
      driver.cuMemUnmap(at, bytes);
      at += bytes;
    }
    if (base_ != 0) driver.cuMemAddressFree(base_, reserved_);
  }
  std::span<const std::byte> memory() const override { return memory_; }

  Expected<void> map(const Words& words, const Offer& offer) {
    const Driver& driver = gpu_->driver();
    std::uint64_t total = 0, count = 0;
    for (std::uint32_t i = 0; i < words.sizes; ++i) {
      const auto [bytes, parts] = words.parts[i];
      const auto sum = checked_multiply(bytes, parts);
      if (bytes == 0 || parts == 0 || !sum || *sum > kMostBytes - total)
        return fail(Code::parse, "{} parts of {} B", parts, bytes);
      total += *sum;
      count += parts;
    }
    if (count != offer.descriptors.size())
      return fail(Code::parse, "{} parts with {} descriptors", count, offer.descriptors.size());
    if (auto ok = check_within(words.offset, offer.length, total); !ok) return ok;
    if (auto ok = gpu_->check(driver.cuMemAddressReserve(&base_, total, 0, 0, 0), "{} B of addresses", total); !ok) return ok;
    reserved_ = total;
    auto descriptor = offer.descriptors.begin();
    CUdeviceptr at = base_;
    for (std::uint32_t i = 0; i < words.sizes; ++i)
      for (std::uint64_t n = 0; n < words.parts[i].count; ++n, ++descriptor, at += words.parts[i].bytes)
        if (auto ok = map_part(*descriptor, at, words.parts[i].bytes); !ok) return ok;
    CUmemAccessDesc access = {};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {gpu_->ordinal()}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;  // PROT_READ alone is refused for imported memory
    if (auto ok = gpu_->check(driver.cuMemSetAccess(base_, total, &access, 1), "reading {} B of a peer", total); !ok) return ok;
    memory_ = span_at(base_ + words.offset, static_cast<std::size_t>(offer.length.value));
    return {};
  }

 private:
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;

  static std::optional<std::uint64_t> checked_multiply(std::uint64_t a, std::uint64_t b) {
    std::uint64_t out = 0;
    if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
    return out;
  }

  Expected<void> map_part(const shm::Fd& descriptor, CUdeviceptr at, std::size_t bytes) {
    const Driver& driver = gpu_->driver();
    CUmemGenericAllocationHandle handle = 0;
    const auto fd = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor.get()));
    if (auto ok = check(driver, driver.cuMemImportFromShareableHandle(&handle, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                        "importing a part of a peer's memory", Code::unavailable);
        !ok)
      return ok;
    const CUresult mapped = driver.cuMemMap(at, bytes, 0, handle, 0);
    driver.cuMemRelease(handle);  // the mapping keeps it
    if (auto ok = gpu_->check(mapped, "mapping {} B of a peer", bytes); !ok) return ok;
    mapped_.push_back(bytes);
    return {};
  }

  GpuPtr gpu_;
  CUdeviceptr base_ = 0;
  std::size_t reserved_ = 0;
  std::vector<std::size_t> mapped_;  // parts, from base_ on
  std::span<const std::byte> memory_;
};

// ---- host ----

class PeerHost final : public PeerMemory {
 public:
  static Expected<std::unique_ptr<PeerMemory>> map(const GpuPtr& gpu, const Offer& offer) {
    if (offer.descriptors.size() != 1) return fail(Code::parse, "host memory with {} descriptors", offer.descriptors.size());
    auto mapping = shm::map_peer_memory(offer.descriptors.front(), offer.length, shm::Sharing::to_pin);
    if (!mapping) return tl::unexpected(mapping.error());
    const auto memory = mapping->memory();
    if (auto ok = check(gpu->driver(), gpu->driver().cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE),
                        fmt::format("pinning {} B of a peer (ulimit -l?)", memory.size()), Code::exhausted);
        !ok)
      return tl::unexpected(ok.error());
    return unmapped_in_time<PeerHost>(gpu, std::move(*mapping));
  }
  PeerHost(GpuPtr gpu, shm::Mapping mapping) : gpu_(std::move(gpu)), mapping_(std::move(mapping)) {}
  PeerHost(const PeerHost&) = delete;
  PeerHost& operator=(const PeerHost&) = delete;
  ~PeerHost() override {
    const Current here = gpu_->current();
    gpu_->driver().cuMemHostUnregister(mapping_.memory().data());
  }
  std::span<const std::byte> memory() const override { return mapping_.memory(); }

 private:
  GpuPtr gpu_;
  shm::Mapping mapping_;
};

}  // namespace

Expected<std::unique_ptr<PeerMemory>> map(const GpuPtr& gpu, Offer offer) {
  const auto words = decode(offer.words);
  if (!words) return tl::unexpected(words.error());
  const Current here = gpu->current();
  if (words->kind == Words::Kind::host) return PeerHost::map(gpu, offer);
  if (auto ok = check_peer_access(*gpu, words->uuid); !ok) return tl::unexpected(ok.error());
  if (words->kind == Words::Kind::ipc) return map_ipc(gpu, *words, offer);
  auto memory = unmapped_in_time<PeerVmm>(gpu);
  if (auto ok = memory->kept().map(*words, offer); !ok) return tl::unexpected(ok.error());
  return memory;
}

}  // namespace kvloom::cuda
