// device_work.h: an engine's CUDA streams, as sessions see them: events after which a layer is computed, and gates where a decode stream waits
// for layers.  Stage: carry.
// Nothing on the engine's stream waits for a host thread of ours but at a gate, which opens with the layer or with the end of the transfer,
// whichever comes first.
#pragma once

#include "kvloom/transport/cuda/gpu.h"
#include "kvloom/transport/device_work.h"

namespace kvloom::cuda {

// All that was put on `stream` before this was made.  Thread: the engine's makes it, the session's asks.
class StreamWork final : public DeviceWork {
 public:
  // Records an event.  @error io
  static Expected<std::shared_ptr<StreamWork>> record(const GpuPtr& gpu, CUstream stream);
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;
  ~StreamWork() override;
  Expected<bool> is_done() override;

 private:
  StreamWork(GpuPtr gpu, CUevent event) : gpu_(std::move(gpu)), event_(event) {}
  GpuPtr gpu_;
  CUevent event_;
};

// For one transfer. Give it with the Want; then each stream waits for the layers that it reads.
class StreamGate final : public LayerGate {
 public:
  // @error exhausted: no pinned memory
  static Expected<std::shared_ptr<StreamGate>> make(GpuPtr gpu);
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;
  ~StreamGate() override;  // @pre no stream waits here any more

  // What is put on `stream` from now on begins once the layer has landed, or the transfer has ended.  Thread: the engine's
  Expected<void> wait(CUstream stream, LayerId layer) const;

  void landed(LayerId layer) override;
  void over() override;

 private:
  StreamGate(GpuPtr gpu, void* memory, CUdeviceptr address)
      : gpu_(std::move(gpu)), word_(static_cast<std::uint32_t*>(memory)), address_(address) {}
  GpuPtr gpu_;
  std::uint32_t* word_;  // pinned: layers from 0 on that have landed
  CUdeviceptr address_;
};

}  // namespace kvloom::cuda
