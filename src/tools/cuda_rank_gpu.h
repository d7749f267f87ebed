// cuda_rank_gpu.h: the GPU of a rank, by its words (gpu_of).  Stage: tools.  For the cuda_* tools.
#pragma once

#include "kvloom/tools/transport_words.h"
#include "kvloom/transport/cuda/gpu.h"

namespace kvloom {

// @pre the process was not forked from one that called CUDA    @error unsupported: no driver, no GPU is visible; as cuda::Gpu::open
Expected<cuda::GpuPtr> open_rank_gpu(const TransportWords& words, bool prefill, Rank rank);

}  // namespace kvloom
