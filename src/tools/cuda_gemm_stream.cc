#include "kvloom/tools/cuda_gemm_stream.h"

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "kvloom/tools/run_control.h"

namespace kvloom {
namespace {

constexpr std::int64_t kLoadElement = 2;                     // bytes of bf16
constexpr std::int64_t kWorkspace = 64 << 20;                // of cuBLAS: its text asks for 32 MiB on Hopper
constexpr std::size_t kRandomBytes = std::size_t{64} << 20;  // bytes of random numbers, which are repeated
constexpr std::size_t kLeftFree = 2;                         // layers' weights that are given back where memory is short
constexpr std::chrono::seconds kLoadPatience{600};           // for a stream that does not come to its mark
constexpr std::int64_t kLookNs = 100'000'000;                // between two looks at the stream for errors

// bf16 of either sign, from 1/8 to 2.
std::vector<std::uint16_t> random_numbers(std::size_t bytes) {
  std::vector<std::uint16_t> out(bytes / kLoadElement);
  std::minstd_rand random(1);
  for (std::uint16_t& number : out) {
    const auto drawn = static_cast<std::uint32_t>(random()) >> 8;
    number = static_cast<std::uint16_t>((drawn & 0x8000) | ((0x7c + (drawn >> 7 & 3)) << 7) | (drawn & 0x7f));
  }
  return out;
}

}  // namespace

Expected<std::unique_ptr<GemmStream>> GemmStream::make(cuda::GpuPtr gpu, std::shared_ptr<const Blas> blas,
                                                       const ModelSizes& sizes, const LoadLimits& limits,
                                                       std::vector<LoadBuffer> buffers, std::int64_t most_layers) {
  std::unique_ptr<GemmStream> out(new GemmStream(std::move(gpu), std::move(blas)));
  const cuda::Current here = out->gpu_->current();
  if (auto ok = out->set_up(); !ok) return tl::unexpected(ok.error());
  for (const LoadBuffer buffer : buffers) {
    const std::int64_t bytes = room(buffer, sizes, limits) * kLoadElement;
    const auto memory = out->allocate(bytes);
    if (!memory) return tl::unexpected(memory.error());
    out->buffers_[buffer] = *memory;
    out->bytes_[buffer] = bytes;
  }
  const std::int64_t weight_bytes = room(LoadBuffer::weights, sizes, limits) * kLoadElement;
  if (auto ok = out->allocate_weights(weight_bytes, most_layers); !ok) return tl::unexpected(ok.error());
  if (auto ok = out->fill(weight_bytes); !ok) return tl::unexpected(ok.error());
  return out;
}

GemmStream::~GemmStream() {
  const cuda::Current here = gpu_->current();
  const cuda::Driver& driver = gpu_->driver();
  if (stream_ != nullptr) driver.cuStreamSynchronize(stream_);
  if (handle_ != nullptr) blas_->destroy(handle_);
  for (const CUevent event : events_) driver.cuEventDestroy(event);
  for (const CUdeviceptr memory : allocations_) driver.cuMemFree(memory);
  if (pinned_ != nullptr) driver.cuMemFreeHost(pinned_);
  if (stream_ != nullptr) driver.cuStreamDestroy(stream_);
}

Expected<void> GemmStream::set_up() {
  const cuda::Driver& driver = gpu_->driver();
  if (auto ok = gpu_->check(driver.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0), "a load's stream"); !ok)
    return ok;
  if (auto ok = gpu_->check(
          driver.cuMemHostAlloc(&pinned_, sizeof(std::uint32_t), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
          "a load's word");
      !ok)
    return ok;
  *static_cast<std::uint32_t*>(pinned_) = 0;
  if (auto ok = gpu_->check(driver.cuMemHostGetDevicePointer(&word_, pinned_, 0), "a load's word, seen by the GPU"); !ok)
    return ok;
  if (auto ok = check_blas(blas_->create(&handle_), "starting cuBLAS"); !ok) return ok;
  if (auto ok = check_blas(blas_->set_stream(handle_, stream_), "giving cuBLAS a stream"); !ok) return ok;
  const auto workspace = allocate(kWorkspace);
  if (!workspace) return tl::unexpected(workspace.error());
  return check_blas(blas_->set_workspace(handle_, reinterpret_cast<void*>(*workspace), kWorkspace), "giving cuBLAS memory");
}

Expected<CUdeviceptr> GemmStream::allocate(std::int64_t bytes) {
  CUdeviceptr memory = 0;
  const cuda::Driver& driver = gpu_->driver();
  if (const CUresult result = driver.cuMemAlloc(&memory, static_cast<std::size_t>(bytes)); result != CUDA_SUCCESS)
    return fail(result == CUDA_ERROR_OUT_OF_MEMORY ? Code::exhausted : Code::io,
                "{} B for a load on GPU {}, beside its cache: {}", bytes, gpu_->ordinal(), cuda::to_string(driver, result));
  allocations_.push_back(memory);
  return memory;
}

// With so much left for others that kLeftFree layers more would have fitted.
Expected<void> GemmStream::allocate_weights(std::int64_t bytes, std::int64_t most_layers) {
  most_layers += static_cast<std::int64_t>(kLeftFree);
  while (static_cast<std::int64_t>(weights_.size()) < most_layers) {
    const auto memory = allocate(bytes);
    if (!memory && weights_.empty()) return tl::unexpected(memory.error());
    if (!memory) break;
    weights_.push_back(*memory);
  }
  for (std::size_t i = 0; i < kLeftFree && weights_.size() > 1; ++i) {
    gpu_->driver().cuMemFree(weights_.back());
    weights_.pop_back();
    allocations_.pop_back();
  }
  return {};
}

// Random numbers into the first weights, and from there into all the rest.
Expected<void> GemmStream::fill(std::int64_t weight_bytes) {
  const std::vector<std::uint16_t> numbers = random_numbers(std::min(kRandomBytes, static_cast<std::size_t>(weight_bytes)));
  const auto bytes = static_cast<std::int64_t>(numbers.size()) * kLoadElement;
  if (auto ok =
          gpu_->check(gpu_->driver().cuMemcpyHtoDAsync(weights_[0], numbers.data(), static_cast<std::size_t>(bytes), stream_),
                      "filling a load");
      !ok)
    return ok;
  if (auto ok = copy_over(weights_[0] + static_cast<CUdeviceptr>(bytes), weight_bytes - bytes, weights_[0], bytes); !ok)
    return ok;
  for (std::size_t layer = 1; layer < weights_.size(); ++layer)
    if (auto ok = copy_over(weights_[layer], weight_bytes, weights_[0], weight_bytes); !ok) return ok;
  for (const auto& [buffer, memory] : buffers_)
    if (auto ok = copy_over(memory, bytes_[buffer], weights_[0], weight_bytes); !ok) return ok;
  return gpu_->check(gpu_->driver().cuStreamSynchronize(stream_), "filling a load");
}

Expected<void> GemmStream::copy_over(CUdeviceptr to, std::int64_t bytes, CUdeviceptr from, std::int64_t from_bytes) {
  for (std::int64_t at = 0; at < bytes; at += from_bytes)
    if (auto ok = gpu_->check(gpu_->driver().cuMemcpyAsync(to + static_cast<CUdeviceptr>(at), from,
                                                           static_cast<std::size_t>(std::min(from_bytes, bytes - at)), stream_),
                              "filling a load");
        !ok)
      return ok;
  return {};
}

Expected<void> GemmStream::put(std::span<const Product> products, std::size_t layer) {
  const cuda::Current here = gpu_->current();
  for (const Product& product : products)
    if (auto ok = run(product, weights_[layer % weights_.size()]); !ok) return ok;
  return {};
}

void* GemmStream::address(const Operand& operand, CUdeviceptr weights) const {
  const CUdeviceptr base = operand.buffer == LoadBuffer::weights ? weights : buffers_.at(operand.buffer);
  return reinterpret_cast<void*>(base + static_cast<CUdeviceptr>(operand.offset * kLoadElement));
}

Expected<void> GemmStream::run(const Product& p, CUdeviceptr weights) {
  const float zero = 0;
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  const int transposed = p.a_transposed ? kBlasTransposed : kBlasNotTransposed;
  const void* const a = address(p.a, weights);
  const void* const b = address(p.b, weights);
  void* const c = address(p.c, weights);
  const BlasStatus status =
      p.batch == 1 ? blas_->gemm(handle_, transposed, kBlasNotTransposed, narrow(p.m), narrow(p.n), narrow(p.k), &p.scale, a,
                                 kBlasBf16, narrow(p.a.lead), b, kBlasBf16, narrow(p.b.lead), &zero, c, kBlasBf16,
                                 narrow(p.c.lead), kBlasComputeFloat, kBlasDefault)
                   : blas_->gemm_strided_batched(handle_, transposed, kBlasNotTransposed, narrow(p.m), narrow(p.n), narrow(p.k),
                                                 &p.scale, a, kBlasBf16, narrow(p.a.lead), p.a.stride, b, kBlasBf16,
                                                 narrow(p.b.lead), p.b.stride, &zero, c, kBlasBf16, narrow(p.c.lead), p.c.stride,
                                                 narrow(p.batch), kBlasComputeFloat, kBlasDefault);
  if (status == 0) [[likely]]
    return {};
  return check_blas(status, "a product");
}

Expected<void> GemmStream::check_blas(BlasStatus status, const char* what) const {
  if (status == 0) return {};
  const char* text = blas_->status_text(status);
  return fail(Code::io, "{} on GPU {}: {}", what, gpu_->ordinal(), text != nullptr ? text : "an unknown status");
}

Expected<void> GemmStream::event() {
  const cuda::Current here = gpu_->current();
  if (events_used_ == events_.size()) {
    CUevent made = nullptr;
    if (auto ok = gpu_->check(gpu_->driver().cuEventCreate(&made, CU_EVENT_DEFAULT), "an event"); !ok) return ok;
    events_.push_back(made);
  }
  return gpu_->check(gpu_->driver().cuEventRecord(events_[events_used_++], stream_), "recording an event");
}

Expected<std::uint32_t> GemmStream::mark() {
  const cuda::Current here = gpu_->current();
  const std::uint32_t next = marks_ + 1;
  if (auto ok = gpu_->check(gpu_->driver().cuStreamWriteValue32(stream_, word_, next, CU_STREAM_WRITE_VALUE_DEFAULT), "a mark");
      !ok)
    return tl::unexpected(ok.error());
  return marks_ = next;
}

Expected<std::int64_t> GemmStream::wait(std::uint32_t mark) {
  const std::atomic_ref word(*static_cast<std::uint32_t*>(pinned_));
  const std::int64_t begun = now_ns();
  for (std::int64_t now = begun, looked = begun;; now = now_ns()) {
    if (static_cast<std::int32_t>(word.load(std::memory_order_acquire) - mark) >= 0) return now_ns();
    if (now - looked < kLookNs) continue;
    looked = now;
    const cuda::Current here = gpu_->current();
    const CUresult result = gpu_->driver().cuStreamQuery(stream_);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
      return tl::unexpected(gpu_->check(result, "the load of GPU {}", gpu_->ordinal()).error());
    if (now - begun > std::chrono::nanoseconds(kLoadPatience).count())
      return fail(Code::deadline, "the load of GPU {} takes more than {} s", gpu_->ordinal(), kLoadPatience.count());
  }
}

Expected<std::vector<double>> GemmStream::times() {
  const cuda::Current here = gpu_->current();
  std::vector<double> out;
  for (std::size_t i = 1; i < events_used_; ++i) {
    float milliseconds = 0;
    if (auto ok = gpu_->check(blas_->elapsed(&milliseconds, events_[i - 1], events_[i]), "the time of a load"); !ok)
      return tl::unexpected(ok.error());
    out.push_back(static_cast<double>(milliseconds));
  }
  events_used_ = 0;
  return out;
}

}  // namespace kvloom
