#include "kvloom/tools/job.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "kvloom/geometry/model_config.h"
#include "kvloom/tools/verb.h"

namespace kvloom {

void add_job_options(CLI::App& verb, JobWords& words, bool both_sides) {
  const std::string otherwise = both_sides ? "" : " [one rank]";
  verb.add_option("--model", words.model, "The model's Hugging Face config.json")->required()->type_name("FILE");
  verb.add_option("--prefill", words.prefill,
                  "How prefill shards its cache: tp=8, cp=8:layers, pp=4:20,20,20,18, ..." + otherwise)
      ->required(both_sides)
      ->type_name("WORDS");
  verb.add_option("--decode", words.decode, "How decode shards its cache: dcp=4, tp=8,dcp=4, dcp=8:stripe=1, ..." + otherwise)
      ->required(both_sides)
      ->type_name("WORDS");
  add_count(verb, "--tokens", words.tokens, "Tokens of the request", 1, kMaxTokens);
  add_count(verb, "--prefix", words.prefix, "First tokens that decode has already [0]", 0, kMaxTokens);
  verb.add_option("--kv-cache-dtype,--kv-dtype", words.kv_dtype, "auto (as the config says), bf16, fp8 or fp8-dsa [auto]")
      ->type_name("DTYPE");
  add_count(verb, "--page-tokens", words.page_tokens, "Tokens of a page where the words say no page=P [64]", 1, 1 << 20);
}

namespace {

// "--prefill: sentence", with the marked word in the lines below.
tl::unexpected<Error> named(const char* option, Error error) {
  error.message = fmt::format("{}: {}", option, error.message);
  return tl::unexpected(std::move(error));
}

Expected<std::shared_ptr<const Side>> make_side(const char* option, const std::string& words, const CacheShape& shape,
                                                std::int64_t page_tokens) {
  const auto sharding = Sharding::parse(words);
  if (!sharding) return named(option, sharding.error());
  auto side = Side::make(shape, *sharding, page_tokens);
  if (!side) return named(option, side.error());
  return std::make_shared<const Side>(std::move(*side));
}

// "samples/glm-5.2.json" names the model glm-5.2.
std::string model_name(const std::string& file) {
  const std::string base = file.substr(file.find_last_of('/') + 1);
  const std::size_t dot = base.rfind(".json");
  return dot == std::string::npos || dot == 0 ? base : base.substr(0, dot);
}

}  // namespace

Expected<Job> make_job(const JobWords& words) {
  if (words.tokens != 0 && words.prefix > words.tokens)
    return fail(Code::invalid_argument, "--prefix {} is beyond the request's --tokens {}", words.prefix, words.tokens);
  if (words.tokens == 0 && words.prefix != 0)
    return fail(Code::invalid_argument, "--prefix {} without --tokens: say how many tokens the request has", words.prefix);
  const auto dtype = parse_kv_dtype(words.kv_dtype);
  if (!dtype) return named("--kv-cache-dtype", dtype.error());
  const auto text = read_file(words.model, 64 << 20);
  if (!text) return named("--model", text.error());
  auto shape = read_model_config(*text, *dtype, model_name(words.model));
  if (!shape) return named("--model", shape.error());
  auto prefill = make_side("--prefill", words.prefill, *shape, words.page_tokens);
  if (!prefill) return tl::unexpected(prefill.error());
  auto decode = make_side("--decode", words.decode, *shape, words.page_tokens);
  if (!decode) return tl::unexpected(decode.error());
  std::optional<std::int64_t> tokens;
  if (words.tokens != 0) tokens = words.tokens;
  return Job{std::move(*shape), std::move(*prefill), std::move(*decode), tokens, words.prefix};
}

}  // namespace kvloom
