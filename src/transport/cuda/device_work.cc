#include "kvloom/transport/cuda/device_work.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kvloom/transport/cuda/contexts.h"

namespace kvloom::cuda {

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
  const auto word = gpu->gate_words().take(gpu->driver());
  if (!word) return tl::unexpected(word.error());
  return std::shared_ptr<StreamGate>(new StreamGate(std::move(gpu), *word));
}

StreamGate::~StreamGate() {
  over();
  gpu_->gate_words().put_back(word_);
}

Expected<void> StreamGate::wait(CUstream stream, LayerId layer) {
  if (layer.value < 0 || layer.value >= static_cast<std::int64_t>(GateWords::kSpan) - 1)
    return fail(Code::invalid_argument, "a stream's wait for layer {}", layer.value);
  const std::uint32_t wanted = static_cast<std::uint32_t>(layer.value) + 1;
  const auto nothing_is_freed = gpu_->contexts().hold_frees();
  {
    const std::lock_guard lock(mutex_);
    if (wanted > risen_ && gpu_->contexts().crowded())
      return fail(Code::exhausted, "{} mappings of lost peers wait for gates to open: wait for layer {} on the host this time",
                  gpu_->contexts().put_off(), layer.value);
    waited_ = std::max(waited_, wanted);
    if (wanted > risen_ && !std::exchange(shut_, true)) gpu_->contexts().gate_shut();
  }
  const Current here = gpu_->current();
  return gpu_->check(gpu_->driver().cuStreamWaitValue32(stream, word_.device, word_.base + wanted, CU_STREAM_WAIT_VALUE_GEQ),
                     "a stream's wait for layer {}", layer.value);
}

void StreamGate::rise(std::uint32_t by) {
  bool opens = false;
  {
    const std::lock_guard lock(mutex_);
    if (by <= risen_) return;
    risen_ = by;
    std::atomic_ref(*word_.host).store(word_.base + by, std::memory_order_release);
    if (shut_ && risen_ >= waited_) opens = std::exchange(shut_, false);
  }
  if (opens) gpu_->contexts().gate_opened();
}

void StreamGate::landed(LayerId layer) { rise(static_cast<std::uint32_t>(layer.value) + 1); }

void StreamGate::over() { rise(GateWords::kSpan); }

}  // namespace kvloom::cuda
