// cuda_gemm_stream.h: a stream of one GPU that runs lists of products (model_load.h), with their buffers, their times and its ends.  Stage: tools.
//
//   put, put, event, put, ..., mark: all come back at once; wait(mark): until the stream has written that mark into a pinned word
//
// Buffers hold random numbers of about 1, not zeros: what a product of zeros takes is less power, and so more clock.
// Owner: a load.  Thread: one at a time.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "kvloom/tools/cuda_blas.h"
#include "kvloom/tools/model_load.h"
#include "kvloom/transport/cuda/gpu.h"

namespace kvloom {

class GemmStream {
 public:
  // With the weights of up to `most_layers` layers: as many as there is memory for, less a part that is left free.
  // @error exhausted: not even one; io
  static Expected<std::unique_ptr<GemmStream>> make(cuda::GpuPtr gpu, std::shared_ptr<const Blas> blas, const ModelSizes& sizes,
                                                    const LoadLimits& limits, std::vector<LoadBuffer> buffers,
                                                    std::int64_t most_layers);
  GemmStream(const GemmStream&) = delete;
  GemmStream& operator=(const GemmStream&) = delete;
  ~GemmStream();

  const cuda::GpuPtr& gpu() const { return gpu_; }
  CUstream stream() const { return stream_; }
  std::size_t layers() const { return weights_.size(); }

  // With the weights of layer `layer` % layers().
  Expected<void> put(std::span<const Product> products, std::size_t layer);
  Expected<void> event();
  Expected<std::uint32_t> mark();
  // Returns when: CLOCK_MONOTONIC, ns.
  Expected<std::int64_t> wait(std::uint32_t mark);
  // Milliseconds from each event to the next, of those since the last call.  @pre all of it was waited for
  Expected<std::vector<double>> times();

 private:
  GemmStream(cuda::GpuPtr gpu, std::shared_ptr<const Blas> blas) : gpu_(std::move(gpu)), blas_(std::move(blas)) {}
  Expected<void> set_up();
  Expected<CUdeviceptr> allocate(std::int64_t bytes);
  Expected<void> allocate_weights(std::int64_t bytes, std::int64_t most_layers);
  Expected<void> fill(std::int64_t weight_bytes);
  Expected<void> copy_over(CUdeviceptr to, std::int64_t bytes, CUdeviceptr from, std::int64_t from_bytes);
  Expected<void> run(const Product& product, CUdeviceptr weights);
  void* address(const Operand& operand, CUdeviceptr weights) const;
  Expected<void> check_blas(BlasStatus status, const char* what) const;

  cuda::GpuPtr gpu_;                  // shared with the rank's transport
  std::shared_ptr<const Blas> blas_;  // shared with other loads
  BlasHandle handle_ = nullptr;
  CUstream stream_ = nullptr;
  std::vector<CUdeviceptr> allocations_;  // all of them
  std::vector<CUdeviceptr> weights_;      // [layers]
  std::map<LoadBuffer, CUdeviceptr> buffers_;
  std::map<LoadBuffer, std::int64_t> bytes_;  // of buffers_
  void* pinned_ = nullptr;                    // the word
  CUdeviceptr word_ = 0;                      // the same, as the GPU sees it
  std::uint32_t marks_ = 0;
  std::vector<CUevent> events_;
  std::size_t events_used_ = 0;
};

}  // namespace kvloom
