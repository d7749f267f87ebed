#include "kvloom/transport/cuda/device_work.h"

#include <atomic>

namespace kvloom::cuda {
namespace {

constexpr std::uint32_t kOver = 0x7fffffff;  // above every layer, as the stream compares: by the sign of the difference

}  // namespace

Expected<std::shared_ptr<StreamWork>> StreamWork::record(const GpuPtr& gpu, CUstream stream) {
  const Current here = gpu->current();
  CUevent event = nullptr;
  if (auto ok = gpu->check(gpu->driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "an event"); !ok)
    return tl::unexpected(ok.error());
  std::shared_ptr<StreamWork> out(new StreamWork(gpu, event));
  if (auto ok = gpu->check(gpu->driver().cuEventRecord(event, stream), "recording an event"); !ok)
    return tl::unexpected(ok.error());
  return out;
}

StreamWork::~StreamWork() {
  const Current here = gpu_->current();
  gpu_->driver().cuEventDestroy(event_);
}

Expected<bool> StreamWork::is_done() {
  const Current here = gpu_->current();
  const CUresult result = gpu_->driver().cuEventQuery(event_);
  if (result == CUDA_ERROR_NOT_READY) return false;
  if (auto ok = gpu_->check(result, "an event of the engine"); !ok) return tl::unexpected(ok.error());
  return true;
}

Expected<std::shared_ptr<StreamGate>> StreamGate::make(GpuPtr gpu) {
  const Current here = gpu->current();
  void* memory = nullptr;
  CUdeviceptr address = 0;
  const Driver& driver = gpu->driver();
  if (auto ok = gpu->check(
          driver.cuMemHostAlloc(&memory, sizeof(std::uint32_t), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP), "a gate");
      !ok)
    return tl::unexpected(ok.error());
  *static_cast<std::uint32_t*>(memory) = 0;
  if (auto ok = gpu->check(driver.cuMemHostGetDevicePointer(&address, memory, 0), "a gate seen by the GPU"); !ok) {
    driver.cuMemFreeHost(memory);
    return tl::unexpected(ok.error());
  }
  return std::shared_ptr<StreamGate>(new StreamGate(std::move(gpu), memory, address));
}

StreamGate::~StreamGate() {
  const Current here = gpu_->current();
  gpu_->driver().cuMemFreeHost(word_);
}

Expected<void> StreamGate::wait(CUstream stream, LayerId layer) const {
  const Current here = gpu_->current();
  return gpu_->check(
      gpu_->driver().cuStreamWaitValue32(stream, address_, static_cast<std::uint32_t>(layer.value) + 1, CU_STREAM_WAIT_VALUE_GEQ),
      "a stream's wait for layer {}", layer.value);
}

void StreamGate::landed(LayerId layer) {
  std::atomic_ref(*word_).store(static_cast<std::uint32_t>(layer.value) + 1, std::memory_order_release);
}

void StreamGate::over() { std::atomic_ref(*word_).store(kOver, std::memory_order_release); }

}  // namespace kvloom::cuda
