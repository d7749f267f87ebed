#include "kvloom/tools/transport_words.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>

#include "kvloom/tools/cuda_ranks.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"

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

constexpr int kMostPriority = 1000;  // on the command line; each GPU has a range of its own, which its process checks

Expected<std::int64_t> in_flight_bytes(const std::string& text) {
  auto bytes = parse_bytes(text);
  if (!bytes) return bytes;
  if (*bytes < cuda::kLeastInFlight.value || *bytes > cuda::kMostInFlight.value)
    return fail(Code::invalid_argument, "{} is not in {}..{}", text, bytes_text(cuda::kLeastInFlight),
                bytes_text(cuda::kMostInFlight));
  return bytes;
}

void add_limit(CLI::App& verb, CopyWords& words, const std::string& name, const std::string& type, const std::string& what,
               std::function<Expected<void>(const std::string&)> take) {
  verb.add_option_function<std::string>(
          name,
          [&words, name, take = std::move(take)](const std::string& text) {
            if (const auto taken = take(text); !taken) throw CLI::ValidationError(name, taken.error().message);
            if (words.said.empty()) words.said = name;
          },
          what)
      ->type_name(type);
}

}  // namespace

void add_copy_options(CLI::App& verb, CopyWords& words) {
  cuda::CopyLimits& limits = words.limits;
  const auto whole = [](int& to, std::int64_t least, std::int64_t most) {
    return [&to, least, most](const std::string& text) {
      return parse_count(text, least, most).map([&to](std::int64_t value) { to = static_cast<int>(value); });
    };
  };
  add_limit(verb, words, "--copy-blocks", "N",
            fmt::format("cuda: blocks of the copy kernel, so many SMs at most [{}]", limits.blocks),
            whole(limits.blocks, 1, cuda::kMostBlocks));
  add_limit(verb, words, "--copy-priority", "N",
            fmt::format("cuda: of the streams that copy, 0 to -5 on most GPUs; lower goes first [{}]", limits.priority),
            whole(limits.priority, -kMostPriority, kMostPriority));
  add_limit(verb, words, "--copy-in-flight", "BYTES",
            fmt::format("cuda: copies of one peer that are under way [{}]", bytes_text(limits.in_flight)),
            [&limits](const std::string& text) {
              return in_flight_bytes(text).map([&limits](std::int64_t value) { limits.in_flight = Bytes(value); });
            });
}

Expected<void> check_copies(const CopyWords& words, const std::string& transport) {
  if (words.said.empty() || transport == "cuda") return {};
  return fail(Code::invalid_argument, "{} is for --transport cuda; this is {}", words.said, transport);
}

std::string copies_text(const cuda::CopyLimits& limits) {
  return fmt::format("copies by at most {} blocks of the kernel, of priority {}, {} in flight", limits.blocks, limits.priority,
                     bytes_text(limits.in_flight));
}

nlohmann::json copies_json(const cuda::CopyLimits& limits) {
  return {{"blocks", limits.blocks}, {"priority", limits.priority}, {"in_flight", limits.in_flight.value}};
}

void add_transport_options(CLI::App& verb, TransportWords& words) {
  verb.add_option("--transport", words.name, "What carries: shm (host memory) or cuda (GPU memory)")
      ->type_name("TRANSPORT")
      ->capture_default_str();
  add_gpus(verb, "--prefill-gpus", words.prefill_gpus,
           "cuda: GPUs that prefill ranks take in turn, as 0,1 (default: the first half of those that are visible)");
  add_gpus(verb, "--decode-gpus", words.decode_gpus, "cuda: GPUs that decode ranks take in turn (default: the second half)");
  add_copy_options(verb, words.copies);
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
  return check_copies(words.copies, words.name);
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
