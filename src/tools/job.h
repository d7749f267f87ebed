// job.h: the words that describe, plan and run share, and what they mean: a model and its two sides.  Stage: tools.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvloom/base/error.h"
#include "kvloom/geometry/cache_shape.h"
#include "kvloom/geometry/side.h"
#include "kvloom/plan/plan.h"

namespace CLI {
class App;
}

namespace kvloom {

inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;  // of a request, on the command line

// As the user wrote them.
struct JobWords {
  std::string model;                              // a file
  std::string prefill = "tp=1", decode = "tp=1";  // sharding words
  std::int64_t tokens = 0;                        // 0: not said
  std::int64_t prefix = 0;                        // tokens that decode has already
  std::string kv_dtype = "auto";
  std::int64_t page_tokens = 64;  // where the words say none
};

// --model, --prefill, --decode, --tokens, --prefix, --kv-cache-dtype, --page-tokens.
// `both_sides`: --prefill and --decode have to be said; else a side that is not said is one rank.
void add_job_options(CLI::App& verb, JobWords& words, bool both_sides);

struct Job {
  CacheShape shape;
  std::shared_ptr<const Side> prefill, decode;  // shared with the plans made of them; never changed
  std::optional<std::int64_t> tokens;
  std::int64_t prefix = 0;

  // What decode asks for.  @pre tokens
  TokenRange range() const { return {prefix, *tokens}; }
  // For compile: the tokens, or any number of them.
  std::int64_t total() const { return tokens.value_or(kUnbounded); }
};

// @error a file that can't be read, a config that is refused, words that don't fit the model (the word is marked), a prefix
//        beyond the tokens
Expected<Job> make_job(const JobWords& words);

}  // namespace kvloom
