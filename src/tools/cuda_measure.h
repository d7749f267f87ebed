// cuda_measure.h: how fast GPU memory goes from one transport to another, beside one contiguous copy of the same bytes in the same run.
// Stage: tools.  Two threads of one process, a source's and a target's; two GPUs where there are two, else one with itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/transport/cuda/copy_limits.h"

namespace kvloom {

struct GpuCopyRow {
  std::string name;
  std::int64_t bytes = 0, pieces = 0;
  double gb_per_s = 0;
  double contiguous_gb_per_s = 0;  // in the same run, in turns
  double ratio = 0;
  int sms = 0;  // that the copy takes: blocks of the kernel; 0: copy engines alone
};

struct GpuMeasurement {
  std::string hardware;  // "NVIDIA H200, GPU 0 to GPU 1"
  std::vector<GpuCopyRow> rows;
  double latency_us_p50 = 0,
         latency_us_p99 = 0;  // from an event of the engine's stream to the notice at the target, behind one page
};

// By `limits`; rows of all SMs take as many blocks as there are.
// @error unsupported: no GPU, or a build without CUDA, with what to do; exhausted: less GPU memory than `bytes` on each side
Expected<GpuMeasurement> measure_gpu_copies(std::int64_t bytes, int repeats, const cuda::CopyLimits& limits);

}  // namespace kvloom
