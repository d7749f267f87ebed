// device_work.h: an engine's CUDA streams, as sessions see them: events after which a layer is computed, and gates where a decode stream waits
// for layers.  Stage: carry.
// Nothing on the engine's stream waits for a host thread of ours but at a gate, which opens with the layer or with the end of the transfer,
// whichever comes first.
// While a stream waits at a gate, this process must free nothing on its GPUs and load no kernels there but through the transport, which
// knows (contexts.h): such a call waits for the stream, and the transport's copies for the call (docs/gpu.md).
#pragma once

#include <mutex>

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
  ~StreamGate() override;  // it is over

  // What is put on `stream` from now on begins once the layer has landed, or the transfer has ended.  Thread: the engine's
  // @error exhausted: much memory of lost peers waits for gates to open: wait on the host this time (wait_layer); io
  Expected<void> wait(CUstream stream, LayerId layer);

  void landed(LayerId layer) override;
  void over() override;

 private:
  StreamGate(GpuPtr gpu, GateWords::Word word) : gpu_(std::move(gpu)), word_(word) {}
  void rise(std::uint32_t by);

  GpuPtr gpu_;
  GateWords::Word word_;  // base + layers from 0 on that have landed
  std::mutex mutex_;
  std::uint32_t waited_ = 0, risen_ = 0;  // above base: the most that a stream waits for; what stands there
  bool shut_ = false;                     // a stream may wait: counted
};

}  // namespace kvloom::cuda
