// cuda_load.h: real work for the GPUs of ranks, beside which a transfer has to hide: the products of model_load.h by cuBLAS.  Stage: tools.
// cuda_load.cc where CUDA is built, else cuda_load_none.cc: CMake picks.
// A rank's load has a stream, weights and buffers of its own, beside the rank's cache, in the same context, as an engine has them. Each rank
// computes the layers of a whole model, whatever its sharding.
// Times of layers and steps are of the GPU's own clock (events), ends of chunks of CLOCK_MONOTONIC, by a word that the stream writes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvloom/tools/load_words.h"
#include "kvloom/tools/transport_words.h"
#include "kvloom/transport/device_work.h"

namespace kvloom {

// Thread: one, the engine's. Errors of all: io, the GPU broke down.
class PrefillLoad {
 public:
  virtual ~PrefillLoad() = default;
  // Puts layers on the stream; all but `wait` come back at once. A chunk begins behind what is there already.
  virtual Expected<void> begin_chunk() = 0;
  virtual Expected<void> layer(std::int64_t begin, std::int64_t end) = 0;
  // What was put there so far.
  virtual Expected<std::shared_ptr<DeviceWork>> computed() = 0;
  virtual Expected<std::uint32_t> mark() = 0;
  // Until the stream has come to the mark: burns a core, as engines that wait for their GPU do.  Returns when: CLOCK_MONOTONIC, ns
  virtual Expected<std::int64_t> wait(std::uint32_t mark) = 0;
  // Milliseconds of each layer since the last call, in order.  @pre all of it was waited for
  virtual Expected<std::vector<double>> layer_times() = 0;
};

// Thread: one starts and stops; a thread of its own computes between.
class DecodeLoad {
 public:
  virtual ~DecodeLoad() = default;
  virtual std::int64_t step_bytes() const = 0;  // that each step reads
  virtual void start() = 0;
  // Milliseconds of each step since start, but the first.  @error io
  virtual Expected<std::vector<double>> stop() = 0;
};

// `context`: tokens of the longest request.
// @error unsupported: no CUDA, no cuBLAS, with what to do; exhausted: no GPU memory beside the cache
Expected<std::unique_ptr<PrefillLoad>> open_prefill_load(const LoadWords& words, const TransportWords& transport, Rank rank,
                                                         std::int64_t context);
// The weights of as many of the model's layers as there is memory for.  @error as open_prefill_load
Expected<std::unique_ptr<DecodeLoad>> open_decode_load(const LoadWords& words, const TransportWords& transport, Rank rank);

}  // namespace kvloom
