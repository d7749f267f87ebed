#include "kvloom/tools/worker.h"

#include "kvloom/tools/worker_parts.h"

namespace kvloom {

Expected<void> run_worker(const WorkerSpec& spec, Channel& channel) {
  return spec.prefill ? run_prefill_worker(spec, channel) : run_decode_worker(spec, channel);
}

}  // namespace kvloom
