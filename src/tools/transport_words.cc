#include "kvloom/tools/transport_words.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <string_view>

#include "kvloom/tools/cuda_ranks.h"

namespace kvloom {
namespace {

constexpr int kMostGpus = 1024;

// "0" or "0,1"
Expected<std::vector<int>> parse_gpus(const std::string& text) {
  std::vector<int> out;
  std::string_view rest = text;
  for (;;) {
    const std::string_view word = rest.substr(0, rest.find(','));
    int ordinal = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), ordinal);
    if (error != std::errc() || end != word.data() + word.size() || ordinal < 0 || ordinal >= kMostGpus)
      return fail(Code::parse, "'{}' is no list of GPUs: write 0, or 0,1", text);
    out.push_back(ordinal);
    if (word.size() == rest.size()) return out;
    rest.remove_prefix(word.size() + 1);
  }
}

void add_gpus(CLI::App& verb, const std::string& name, std::vector<int>& gpus, const std::string& what) {
  verb.add_option_function<std::string>(
          name,
          [&gpus, name](const std::string& text) {
            auto parsed = parse_gpus(text);
            if (!parsed) throw CLI::ValidationError(name, parsed.error().message);
            gpus = std::move(*parsed);
          },
          what)
      ->type_name("GPUS");
}

}  // namespace

void add_transport_options(CLI::App& verb, TransportWords& words) {
  verb.add_option("--transport", words.name, "What carries: shm (host memory) or cuda (GPU memory)")
      ->type_name("TRANSPORT")
      ->capture_default_str();
  add_gpus(verb, "--prefill-gpus", words.prefill_gpus,
           "cuda: GPUs that prefill ranks take in turn, as 0,1 (default: the first half of those that are visible)");
  add_gpus(verb, "--decode-gpus", words.decode_gpus, "cuda: GPUs that decode ranks take in turn (default: the second half)");
}

Expected<void> check_transport(const TransportWords& words) {
  if (words.name == "cuda") {
    auto built = cuda_is_built();
    if (!built) built.error().message = "--transport cuda: " + built.error().message;
    return built;
  }
  if (words.name != "shm") return fail(Code::invalid_argument, "--transport: '{}' is not known here: shm or cuda", words.name);
  if (!words.prefill_gpus.empty() || !words.decode_gpus.empty())
    return fail(Code::invalid_argument, "{} is for --transport cuda; this is shm",
                words.prefill_gpus.empty() ? "--decode-gpus" : "--prefill-gpus");
  return {};
}

int gpu_of(const TransportWords& words, bool prefill, Rank rank, int visible) {
  const std::vector<int>& said = prefill ? words.prefill_gpus : words.decode_gpus;
  const auto turn = static_cast<std::size_t>(rank.value);
  if (!said.empty()) return said[turn % said.size()];
  const int half = visible / 2;
  const int first = prefill ? 0 : half, count = prefill ? std::max(half, 1) : visible - half;
  return first + rank.value % count;
}

}  // namespace kvloom
