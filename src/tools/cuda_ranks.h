// cuda_ranks.h: ranks whose caches are in GPU memory.  Stage: tools.  cuda_ranks.cc where CUDA is built, else cuda_ranks_none.cc: CMake picks.
#pragma once

#include "kvloom/tools/rank_transport.h"

namespace kvloom {

// Asks no driver.  @error unsupported: it is not, with what to do
Expected<void> cuda_is_built();

// On the rank's GPU (gpu_of).  @pre the process was not forked from one that called CUDA
// @error as CudaTransport::make; unsupported: not built, no GPU is visible
Expected<RankTransport> open_cuda(const TransportWords& words, bool prefill, Rank rank);

}  // namespace kvloom
