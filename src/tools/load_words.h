// load_words.h: the words that say what GPUs compute beside a streamed transfer.  Stage: tools.  Values only.
#pragma once

#include <string>

#include "kvloom/base/error.h"

namespace CLI {
class App;
}

namespace kvloom {

struct TransportWords;

struct LoadWords {
  std::string prefill = "sleep";  // or "gemm": a layer's matrix products on the GPU of each prefill rank
  std::string decode = "none";    // or "gemm": steps that read a model's weights, on the GPU of each decode rank
  std::string cublas;             // a library or its folder; empty: as the loader finds it

  bool prefill_computes() const { return prefill == "gemm"; }
  bool decode_computes() const { return decode == "gemm"; }
  bool any() const { return prefill_computes() || decode_computes(); }
};

// --load, --decode-load, --cublas.
void add_load_options(CLI::App& verb, LoadWords& words);

// @error invalid_argument: a load without GPUs, or without --stream
Expected<void> check_load(const LoadWords& words, const TransportWords& transport, bool stream);

}  // namespace kvloom
