#include "kvloom/transport/cuda/cuda.h"

#include <sys/resource.h>

#include <algorithm>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/queue_pool.h"
#include "kvloom/transport/shm/incoming.h"

namespace kvloom {
namespace {

class GpuDevice final : public shm::Device {
 public:
  GpuDevice(cuda::GpuPtr gpu, cuda::CopyLimits limits, bool allocate_on_host, std::shared_ptr<cuda::CopyCounts> counts)
      : gpu_(std::move(gpu)),
        limits_(limits),
        allocate_on_host_(allocate_on_host),
        counts_(std::move(counts)),
        queues_(gpu_, limits_, *counts_) {
    gpu_->contexts().add_transport();
  }
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;
  ~GpuDevice() override { gpu_->contexts().remove_transport(); }

  Abilities abilities() const override {
    return {.name = "cuda",
            .can_fence_frozen_peer = true,
            .can_revoke = true,
            .needs_target_progress = true,
            .source_must_be_allocated = false,
            .crosses_processes = true,
            .crosses_hosts = false,
            .copy_a_poll = limits_.in_flight,
            .max_notice_bytes = shm::kMostNotice};
  }
  // A launch, what words a run, a piece, a byte over NVLink: docs/gpu.md.
  Cost cost() const override { return {.per_post = 6000, .per_run = 12, .per_piece = 1, .per_byte = 0.0028}; }
  std::uint64_t protocol() const override { return kProtocol; }
  std::size_t most_descriptors() const override {
    rlimit limit = {};
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? std::min<std::size_t>(limit.rlim_cur / 4, kMostParts) : 256;
  }

  Expected<std::shared_ptr<shm::LocalMemory>> allocate(Bytes length) override {
    return allocate_on_host_ ? cuda::allocate_pinned(gpu_, length) : cuda::allocate_on_gpu(gpu_, length);
  }
  Expected<std::shared_ptr<shm::LocalMemory>> lend(std::span<std::byte> memory) override { return cuda::lend(gpu_, memory); }
  Expected<std::unique_ptr<shm::PeerMemory>> map(shm::Offer offer) override { return cuda::map(gpu_, std::move(offer)); }
  Expected<std::unique_ptr<shm::CopyQueue>> queue() override { return queues_.take(); }

 private:
  static constexpr std::size_t kMostParts = 65536;
  static constexpr std::uint64_t kProtocol = 0x6b766c6f6f6d0103;  // "kvloom", cuda, version 3: others are not spoken to

  cuda::GpuPtr gpu_;
  cuda::CopyLimits limits_;
  bool allocate_on_host_;
  std::shared_ptr<cuda::CopyCounts> counts_;
  cuda::QueuePool queues_;
};

constexpr std::size_t kFreesAPoll = 4;  // each waits for what the GPU has to do

Expected<void> check_limits(const cuda::CopyLimits& limits) {
  if (limits.blocks < 1 || limits.blocks > cuda::kMostBlocks)
    return fail(Code::invalid_argument, "{} blocks of the copy kernel are not in 1..{}", limits.blocks, cuda::kMostBlocks);
  if (limits.in_flight < cuda::kLeastInFlight || limits.in_flight > cuda::kMostInFlight)
    return fail(Code::invalid_argument, "{} B of copies in flight are not in {}..{} (1 MiB to 64 GiB)", limits.in_flight.value,
                cuda::kLeastInFlight.value, cuda::kMostInFlight.value);
  return {};
}

// CUDA takes any number, and silently makes another of it.
Expected<void> check_priority(const cuda::Gpu& gpu, int priority) {
  int last = 0, first = 0;
  const cuda::Current here = gpu.current();
  if (auto ok =
          gpu.check(gpu.driver().cuCtxGetStreamPriorityRange(&last, &first), "asking GPU {} for its priorities", gpu.ordinal());
      !ok)
    return ok;
  if (priority < first || priority > last)
    return fail(Code::invalid_argument, "copy priority {} is not in {}..{}, those of GPU {}; {} goes first", priority, first,
                last, gpu.ordinal(), first);
  return {};
}

}  // namespace

Expected<std::unique_ptr<CudaTransport>> CudaTransport::make(CudaOptions options) {
  if (auto ok = check_limits(options.copies); !ok) return tl::unexpected(ok.error());
  if (options.driver == nullptr) {
    auto driver = cuda::Driver::load();
    if (!driver) return tl::unexpected(driver.error());
    options.driver = std::move(*driver);
  }
  const cuda::CopyLimits copies = options.copies;
  const bool on_host = options.allocate_on_host;
  auto gpu = cuda::Gpu::open(std::move(options.driver), options.device);
  if (!gpu) return tl::unexpected(gpu.error());
  if (auto ok = check_priority(**gpu, options.copies.priority); !ok) return tl::unexpected(ok.error());
  auto ends = open(std::move(options), "cuda");
  if (!ends) return tl::unexpected(ends.error());
  auto counts = std::make_shared<cuda::CopyCounts>();
  auto device = std::make_unique<GpuDevice>(*gpu, copies, on_host, counts);
  return std::unique_ptr<CudaTransport>(
      new CudaTransport(std::move(*ends), std::move(device), std::move(*gpu), std::move(counts)));
}

// A lender of this process drains our queues from its own thread (loans.h), and that may begin copies.
cuda::CopyCounts CudaTransport::counts() const {
  const auto reading = gpu_->contexts().loans().reading();
  return *counts_;
}

bool CudaTransport::poll(PollLimit limit, std::vector<Event>& events) {
  gpu_->contexts().free_some(kFreesAPoll);
  return RingTransport::poll(limit, events);
}

std::optional<int> CudaTransport::arm() {
  if (gpu_->contexts().can_free()) return std::nullopt;
  return RingTransport::arm();
}

}  // namespace kvloom
