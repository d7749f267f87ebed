#include "kvloom/tools/cuda_rank_gpu.h"

namespace kvloom {

Expected<cuda::GpuPtr> open_rank_gpu(const TransportWords& words, bool prefill, Rank rank) {
  auto driver = cuda::Driver::load();
  if (!driver) return tl::unexpected(driver.error());
  int visible = 0;
  if (auto ok = cuda::check(**driver, (*driver)->cuDeviceGetCount(&visible), "counting GPUs"); !ok)
    return tl::unexpected(ok.error());
  if (visible == 0) return fail(Code::unsupported, "no GPU is visible to this process (nvidia-smi; CUDA_VISIBLE_DEVICES)");
  return cuda::Gpu::open(std::move(*driver), gpu_of(words, prefill, rank, visible));
}

}  // namespace kvloom
