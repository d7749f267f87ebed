// transport_words.h: the words that say what carries the bytes of ranks, and which GPU a rank takes.  Stage: tools.  Values only.
// Ranks are forked, and CUDA does not survive a fork: nothing here asks a driver, so the process that forks may call all of it.
#pragma once

#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace CLI {
class App;
}

namespace kvloom {

struct TransportWords {
  std::string name = "shm";                    // or "cuda"
  int copy_threads = 1;                        // shm: of a decode rank
  std::vector<int> prefill_gpus, decode_gpus;  // cuda: ordinals, which the ranks of a side take in turn; empty: see gpu_of

  // Caches are in host memory: the naive way and memcpy mean something beside it.
  bool on_host() const { return name == "shm"; }
};

// --transport, --prefill-gpus, --decode-gpus.
void add_transport_options(CLI::App& verb, TransportWords& words);

// @error invalid_argument: no such transport (the known ones are named), GPUs for one that has none; unsupported: not built
Expected<void> check_transport(const TransportWords& words);

// The ordinal of the GPU of a rank where a process sees `visible` of them. What is not said: prefill takes the first half in turn, decode the
// second half; where there is one only, both take it.  @pre visible > 0
int gpu_of(const TransportWords& words, bool prefill, Rank rank, int visible);

}  // namespace kvloom
