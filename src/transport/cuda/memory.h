// memory.h: memory that the CUDA transport moves: ours, lent or allocated, and a peer's, mapped.  Stage: carry.
// GPU memory travels between processes as its allocator allows: by IPC handle (cudaMalloc, PyTorch's default), by the file descriptors of its
// parts (VMM: expandable segments), host memory as a memfd. A region lies anywhere inside an allocation, and over any number of VMM parts.
// Law: what a peer says of its memory is checked against what the driver says of it before a copy reads it: a fault would end our context.
// Thread: the transport's.
#pragma once

#include <memory>
#include <span>

#include "kvloom/transport/cuda/gpu.h"
#include "kvloom/transport/shm/device.h"

namespace kvloom::cuda {

// cudaMalloc'ed, zeroed.  @error exhausted
Expected<std::shared_ptr<shm::LocalMemory>> allocate_on_gpu(const GpuPtr& gpu, Bytes length);
// A pinned memfd.  @error exhausted
Expected<std::shared_ptr<shm::LocalMemory>> allocate_pinned(const GpuPtr& gpu, Bytes length);

// GPU memory of this GPU, or host memory, which is pinned for as long as it is lent. Where peers can't read it, why_not says which setting of
// the allocator helps.  @error invalid_argument: another GPU's memory, or less of it than was said; exhausted: can't be pinned
Expected<std::shared_ptr<shm::LocalMemory>> lend(const GpuPtr& gpu, std::span<std::byte> memory);

// @error parse, out_of_range: what the peer says does not fit what its memory is; unsupported: no peer access between the two GPUs, or a GPU
// that is not visible here; unavailable: the memory is gone
Expected<std::unique_ptr<shm::PeerMemory>> map(const GpuPtr& gpu, shm::Offer offer);

}  // namespace kvloom::cuda
