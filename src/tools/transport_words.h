// transport_words.h: the words that say what carries the bytes of ranks, and which GPU a rank takes.  Stage: tools.  Values only.
// Ranks are forked, and CUDA does not survive a fork: nothing here asks a driver, so the process that forks may call all of it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/transport/cuda/copy_limits.h"

namespace CLI {
class App;
}

namespace kvloom {

// What is said of --copy-blocks, --copy-priority, --copy-in-flight; each in its range.
struct CopyWords {
  cuda::CopyLimits limits;
  std::string said;  // the first option that was; empty: none
};

struct TransportWords {
  std::string name = "shm";                    // or "cuda"
  int copy_threads = 1;                        // shm: of a decode rank
  std::vector<int> prefill_gpus, decode_gpus;  // cuda: ordinals, which the ranks of a side take in turn; empty: see gpu_of
  CopyWords copies;                            // cuda

  // Caches are in host memory: the naive way and memcpy mean something beside it.
  bool on_host() const { return name == "shm"; }
};

// --copy-blocks, --copy-priority, --copy-in-flight.  @pre `words` stays where it is
void add_copy_options(CLI::App& verb, CopyWords& words);
// @error invalid_argument: one of them was said, and `transport` is not cuda
Expected<void> check_copies(const CopyWords& words, const std::string& transport);
// "copies by at most 8 blocks of the kernel, of priority 0, 256 MiB in flight", and as JSON.
std::string copies_text(const cuda::CopyLimits& limits);
nlohmann::json copies_json(const cuda::CopyLimits& limits);

// --transport, --prefill-gpus, --decode-gpus, and the above.
void add_transport_options(CLI::App& verb, TransportWords& words);

// @error invalid_argument: no such transport (the known ones are named), GPUs or copies for one that has none; unsupported: not built
Expected<void> check_transport(const TransportWords& words);

// The ordinal of the GPU of a rank where a process sees `visible` of them. What is not said: prefill takes the first half in turn, decode the
// second half; where there is one only, both take it.  @pre visible > 0
int gpu_of(const TransportWords& words, bool prefill, Rank rank, int visible);

}  // namespace kvloom
