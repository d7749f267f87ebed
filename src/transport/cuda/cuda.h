// cuda.h: the transport between processes of one host whose caches are in GPU memory.  Stage: carry.  shm/ring_transport.h over a GPU.
// The target's GPU reads the source's memory over NVLink (or PCIe, or on one GPU), with its own streams: copy engines for pages at a constant
// step, a kernel of few blocks for the rest. So a frozen or dead source can't write, and fencing is to drain our own streams (docs/gpu.md).
// Regions: GPU memory of `device`, by whichever allocator, or host memory, which is pinned. One transport for each GPU of a process.
// Thread: one (transport.h). What the GPU does beside it is waited for by poll alone; while copies run, `arm` gives nothing: poll on.
#pragma once

#include <memory>

#include "kvloom/transport/cuda/copy_queue.h"
#include "kvloom/transport/shm/ring_transport.h"

namespace kvloom {

struct CudaOptions : shm::RingOptions {
  CudaOptions() { slots = 16384; }  // a run takes one, and a GPU has more under way

  int device = 0;                 // ordinal, as CUDA_VISIBLE_DEVICES leaves them
  bool allocate_on_host = false;  // allocate() gives pinned host memory
  cuda::CopyLimits copies;
  std::shared_ptr<const cuda::Driver> driver;  // shared with everything made here; null: the machine's own
};

class CudaTransport final : public shm::RingTransport {
 public:
  // @error as ShmTransport::make; invalid_argument: copies that can't be, with what can; unsupported: no driver, no such GPU
  static Expected<std::unique_ptr<CudaTransport>> make(CudaOptions options);

  const cuda::Gpu& gpu() const { return *gpu_; }
  const cuda::GpuPtr& gpu_owner() const { return gpu_; }
  cuda::CopyCounts counts() const;

  // As RingTransport; and frees what was put off while a stream waited at a gate (cuda/contexts.h), a little a poll.
  bool poll(PollLimit limit, std::vector<Event>& events) override;
  std::optional<int> arm() override;

 private:
  CudaTransport(Ends ends, std::unique_ptr<shm::Device> device, cuda::GpuPtr gpu, std::shared_ptr<cuda::CopyCounts> counts)
      : RingTransport(std::move(ends), std::move(device)), gpu_(std::move(gpu)), counts_(std::move(counts)) {}

  cuda::GpuPtr gpu_;
  std::shared_ptr<cuda::CopyCounts> counts_;  // shared with the device, which counts
};

}  // namespace kvloom
