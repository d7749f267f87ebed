#include "kvloom/tools/cuda_ranks.h"

#include "kvloom/tools/cuda_rank_gpu.h"
#include "kvloom/transport/cuda/cuda.h"
#include "kvloom/transport/cuda/device_work.h"

extern const unsigned char kvloom_check_kernel_fatbin[];  // check_kernel.cu, embedded (cmake/kvloom_cuda.cmake)

namespace kvloom {
namespace {

// The GPU of a rank, with a stream of ours that waits for no other.
class RankGpu final : public RankDevice {
 public:
  static Expected<std::shared_ptr<RankGpu>> make(cuda::GpuPtr gpu) {
    std::shared_ptr<RankGpu> out(new RankGpu(std::move(gpu)));
    const cuda::Gpu& of = *out->gpu_;
    const cuda::Current here = of.current();
    if (auto ok = of.check(of.driver().cuStreamCreateWithPriority(&out->stream_, CU_STREAM_NON_BLOCKING, 0), "a rank's stream");
        !ok)
      return tl::unexpected(ok.error());
    return out;
  }
  RankGpu(const RankGpu&) = delete;
  RankGpu& operator=(const RankGpu&) = delete;
  ~RankGpu() override {
    if (stream_ == nullptr) return;
    const cuda::Current here = gpu_->current();
    gpu_->driver().cuStreamDestroy(stream_);
    if (scratch_ != 0) gpu_->driver().cuMemFree(scratch_);
    if (checks_ != nullptr) gpu_->driver().cuModuleUnload(checks_);
  }

  std::string name() const override { return fmt::format("GPU {}, {}", gpu_->ordinal(), gpu_->name()); }

  Expected<void> put(std::byte* to, std::span<const std::byte> from) override {
    const cuda::Current here = gpu_->current();
    const auto address = reinterpret_cast<CUdeviceptr>(to);
    if (auto ok = gpu_->check(gpu_->driver().cuMemcpyHtoDAsync(address, from.data(), from.size(), stream_), "{} B to GPU {}",
                              from.size(), gpu_->ordinal());
        !ok)
      return ok;
    return wait();
  }

  Expected<void> get(std::span<std::byte> to, const std::byte* from) override {
    const cuda::Current here = gpu_->current();
    const auto address = reinterpret_cast<CUdeviceptr>(from);
    if (auto ok = gpu_->check(gpu_->driver().cuMemcpyDtoHAsync(to.data(), address, to.size(), stream_), "{} B from GPU {}",
                              to.size(), gpu_->ordinal());
        !ok)
      return ok;
    return wait();
  }

  Expected<std::int64_t> count_wrong(const std::byte* there, std::span<const std::byte> expected) override {
    const cuda::Current here = gpu_->current();
    if (auto ok = make_room(expected.size()); !ok) return tl::unexpected(ok.error());
    const cuda::Driver& driver = gpu_->driver();
    std::uint64_t wrong = 0, bytes = expected.size();
    CUdeviceptr got = reinterpret_cast<CUdeviceptr>(there), right = scratch_ + kCount, count = scratch_;
    void* arguments[] = {&got, &right, &bytes, &count};
    constexpr unsigned kBlocks = 256, kThreads = 256;
    for (const CUresult result :
         {driver.cuMemsetD8Async(count, 0, sizeof(wrong), stream_),
          driver.cuMemcpyHtoDAsync(right, expected.data(), bytes, stream_),
          driver.cuLaunchKernel(count_wrong_, kBlocks, 1, 1, kThreads, 1, 1, 0, stream_, arguments, nullptr),
          driver.cuMemcpyDtoHAsync(&wrong, count, sizeof(wrong), stream_)})
      if (auto ok = gpu_->check(result, "checking {} B on GPU {}", bytes, gpu_->ordinal()); !ok)
        return tl::unexpected(ok.error());
    if (auto ok = wait(); !ok) return tl::unexpected(ok.error());
    return static_cast<std::int64_t>(wrong);
  }

  Expected<std::shared_ptr<DeviceWork>> computed() override { return cuda::StreamWork::record(gpu_, stream_); }

 private:
  explicit RankGpu(cuda::GpuPtr gpu) : gpu_(std::move(gpu)) {}

  // A copy from pageable memory may come back before it is on the GPU.
  Expected<void> wait() const {
    return gpu_->check(gpu_->driver().cuStreamSynchronize(stream_), "copies between GPU {} and its host", gpu_->ordinal());
  }

  // For expected bytes, behind the count; and the kernel that counts.
  Expected<void> make_room(std::size_t bytes) {
    const cuda::Driver& driver = gpu_->driver();
    if (checks_ == nullptr) {
      if (auto ok = gpu_->check(driver.cuModuleLoadData(&checks_, kvloom_check_kernel_fatbin), "loading the kernel that checks");
          !ok)
        return ok;
      if (auto ok = gpu_->check(driver.cuModuleGetFunction(&count_wrong_, checks_, "kvloom_count_wrong"), "finding it"); !ok)
        return ok;
    }
    if (bytes <= room_) return {};
    if (scratch_ != 0) driver.cuMemFree(std::exchange(scratch_, 0));
    room_ = 0;
    if (auto ok =
            gpu_->check(driver.cuMemAlloc(&scratch_, bytes + kCount), "{} B to check a cache on GPU {}", bytes, gpu_->ordinal());
        !ok)
      return ok;
    room_ = bytes;
    return {};
  }

  static constexpr std::size_t kCount = 256;  // bytes before what is expected

  cuda::GpuPtr gpu_;
  CUstream stream_ = nullptr;
  CUmodule checks_ = nullptr;
  CUfunction count_wrong_ = nullptr;
  CUdeviceptr scratch_ = 0;
  std::size_t room_ = 0;
};

}  // namespace

Expected<void> cuda_is_built() { return {}; }

Expected<RankTransport> open_cuda(const TransportWords& words, bool prefill, Rank rank) {
  auto gpu = open_rank_gpu(words, prefill, rank);
  if (!gpu) return tl::unexpected(gpu.error());
  CudaOptions options;
  options.device = (*gpu)->ordinal();
  options.driver = (*gpu)->driver_owner();
  options.copies = words.copies.limits;
  if (!prefill) options.listen = "*";
  auto device = RankGpu::make(std::move(*gpu));
  if (!device) return tl::unexpected(device.error());
  auto made = CudaTransport::make(std::move(options));
  if (!made) return tl::unexpected(made.error());
  return RankTransport(std::move(*made), std::move(*device));
}

}  // namespace kvloom
