// cuda_world.h: GPUs for the conformance suite and for tests of the CUDA transport: the machine's own, or those of fake_driver.h.  Tests only.
// Memory comes as engines have it: cudaMalloc'ed, in parts (expandable segments), or the host's.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "kvloom/transport/cuda/cuda.h"
#include "tests/conformance/conformance.h"

namespace kvloom::cuda {

// How many the machine has. Asks the file system only: a process that will fork must not start CUDA.
int gpus();

enum class MemoryKind : std::uint8_t { allocated, parts, host };

struct CudaWorldOptions {
  bool fake = true;
  MemoryKind memory = MemoryKind::allocated;
  int source_device = 0, target_device = 0;  // endpoints alternate: the first is the source's
  CudaOptions transport;
};

class CudaWorld final : public ConformanceWorld {
 public:
  explicit CudaWorld(CudaWorldOptions options);
  ~CudaWorld() override;

  std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) override;
  std::unique_ptr<ConformanceMemory> memory(Bytes length) override;
  void put(std::span<std::byte> to, std::span<const std::byte> bytes) override;
  std::vector<std::byte> get(std::span<const std::byte> from) override;

  const GpuPtr& gpu(int ordinal = 0);
  CUstream stream(int ordinal = 0);

 private:
  std::optional<int> gpu_of(const std::byte* at);  // none: host memory

  CudaWorldOptions options_;
  std::shared_ptr<const Driver> driver_;
  std::vector<GpuPtr> gpus_;         // by ordinal, once used
  std::map<int, CUstream> streams_;  // by ordinal
  int endpoints_ = 0;
};

extern const Abilities kCudaAbilities;

}  // namespace kvloom::cuda
