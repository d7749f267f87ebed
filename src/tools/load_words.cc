#include "kvloom/tools/load_words.h"

#include <CLI/CLI.hpp>

#include "kvloom/tools/transport_words.h"

namespace kvloom {

void add_load_options(CLI::App& verb, LoadWords& words) {
  verb.add_option(
          "--load", words.prefill,
          "What a layer of prefill is: sleep (takes --layer-time) or gemm (cuda: bf16 matrix products of a dense model of 14B "
          "parameters, by cuBLAS) [sleep]")
      ->check(CLI::IsMember({"sleep", "gemm"}));
  verb.add_option("--decode-load", words.decode,
                  "What the GPUs of decode compute meanwhile: none or gemm (cuda: steps that read such a model's weights) [none]")
      ->check(CLI::IsMember({"none", "gemm"}));
  verb.add_option("--cublas", words.cublas,
                  "For gemm: the file libcublas.so.13 or .12, or its folder (default: as the loader finds it)")
      ->type_name("PATH");
}

Expected<void> check_load(const LoadWords& words, const TransportWords& transport, bool stream) {
  const char* said = words.prefill_computes() ? "--load gemm" : words.decode_computes() ? "--decode-load gemm" : nullptr;
  if (said == nullptr && !words.cublas.empty())
    return fail(Code::invalid_argument, "--cublas is for --load gemm and --decode-load gemm");
  if (said == nullptr) return {};
  if (!stream) return fail(Code::invalid_argument, "{} is for run --stream", said);
  if (transport.name != "cuda")
    return fail(Code::invalid_argument, "{} is for --transport cuda; this is {}", said, transport.name);
  return {};
}

}  // namespace kvloom
