#include "kvloom/tools/cuda_gpus.h"
#include "kvloom/tools/cuda_ranks.h"

namespace kvloom {

Expected<std::string> explain_gpu_copy(const Run&) { return tl::unexpected(cuda_is_built().error()); }

GpuLook look_at_gpus() {
  GpuLook out;
  out.why = cuda_is_built().error().message;
  return out;
}

}  // namespace kvloom
