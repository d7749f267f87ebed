// queue_pool.h: copy queues of a transport, used again by its next connections.  Stage: carry.
// To make one pins memory (milliseconds), and to free it waits for all of the GPU's work (contexts.h): so a connection gives its queue back
// here, and few are ever freed before the transport ends.
// Owner: a transport's device, which outlives the connections.  Thread: the transport's.
#pragma once

#include <memory>
#include <vector>

#include "kvloom/transport/cuda/copy_queue.h"

namespace kvloom::cuda {

class QueuePool {
 public:
  QueuePool(GpuPtr gpu, CopyLimits limits, CopyCounts& counts) : gpu_(std::move(gpu)), limits_(limits), counts_(counts) {}
  QueuePool(const QueuePool&) = delete;
  QueuePool& operator=(const QueuePool&) = delete;
  ~QueuePool();

  // @error as GpuCopyQueue::make    @pre this outlives it
  Expected<std::unique_ptr<shm::CopyQueue>> take();

  // Of a connection that has ended: drained.
  void put_back(std::unique_ptr<GpuCopyQueue> queue);

 private:
  static constexpr std::size_t kMostIdle = 16;  // a few MiB of pinned and of GPU memory each

  GpuPtr gpu_;
  CopyLimits limits_;
  CopyCounts& counts_;
  std::vector<std::unique_ptr<GpuCopyQueue>> idle_;
};

}  // namespace kvloom::cuda
