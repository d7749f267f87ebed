// main.cc: the kvloom command.  Stage: tools.  Parses the words, runs the verb that they name, turns its outcome into an exit
// code.
// KVLOOM_VERSION comes from the build.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kMainExamples =
    "Examples:\n"
    "  kvloom describe --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4\n"
    "  kvloom plan --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --html plan.html\n"
    "  kvloom doctor\n"
    "\n"
    "Exit codes: 0 fine, 1 the job failed, 2 bad usage.";

void add_verbs(CLI::App& app, Context& context) {
  add_describe(app, context);
  add_plan(app, context);
  add_run(app, context);
  add_bench(app, context);
  add_simulate(app, context);
  add_soak(app, context);
  add_doctor(app, context);
  add_completion(app, context);
}

// Letters to add, drop or change to make one word of the other (Levenshtein).
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t kept = diagonal + static_cast<std::size_t>(a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({kept, row[j - 1] + 1, row[j] + 1});
    }
  }
  return row.back();
}

const CLI::App* verb_of(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? nullptr : parsed.front();
}

// What could have stood there: the verb's options, or the verbs.
std::vector<std::string> known_words(const CLI::App& app) {
  std::vector<std::string> words;
  if (const CLI::App* verb = verb_of(app); verb != nullptr) {
    for (const CLI::Option* option : verb->get_options())
      for (const std::string& name : option->get_lnames()) words.push_back("--" + name);
  } else {
    for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; })) words.push_back(one->get_name());
  }
  return words;
}

std::string unknown_word(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining(true);
  const auto option = std::find_if(rest.begin(), rest.end(), [](const std::string& word) { return word.rfind('-', 0) == 0; });
  const std::string word = option != rest.end() ? *option : rest.empty() ? "" : rest.front();
  std::string text = fmt::format("unknown {} {}",
                                 option != rest.end()      ? "option"
                                 : verb_of(app) != nullptr ? "word"
                                                           : "verb",
                                 word);
  const std::vector<std::string> known = known_words(app);
  const auto nearest = std::min_element(known.begin(), known.end(),
                                        [&](const auto& a, const auto& b) { return distance(word, a) < distance(word, b); });
  if (nearest != known.end() && distance(word, *nearest) <= 2) text += fmt::format("; did you mean {}?", *nearest);
  return text;
}

// CLI11's words for what it refuses, in ours where they are hard to read.
std::string words_of(const CLI::App& app, const CLI::ParseError& error) {
  std::string text = error.what();
  const auto is = [&](CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); };
  if (is(CLI::ExitCodes::ArgumentMismatch)) return text.substr(0, text.find_first_of(": ")) + " wants one value";
  if (is(CLI::ExitCodes::RequiredError) && verb_of(app) == nullptr)
    return app.remaining(true).empty() ? "say what to do: a verb is required" : unknown_word(app);
  if (is(CLI::ExitCodes::ExtrasError)) return unknown_word(app);
  if (is(CLI::ExitCodes::ExcludesError))
    return text.substr(0, text.find(" excludes ")) + " can't be said beside " + text.substr(text.find(" excludes ") + 10);
  return text;
}

// Error messages may have several lines (the marked word); all of them go out as they are.
ExitCode say(const Context& context, const std::string& verb, const std::string& sentence, ExitCode code) {
  fmt::print(context.err, "kvloom{}{}: {}\n", verb.empty() ? "" : " ", verb, sentence);
  return code;
}

ExitCode refuse(const CLI::App& app, const Context& context, const CLI::ParseError& error) {
  const std::string verb = verb_of(app) == nullptr ? "" : verb_of(app)->get_name();
  say(context, verb, words_of(app, error), kBadUsage);
  fmt::print(context.err, "See 'kvloom {}{}--help'.\n", verb, verb.empty() ? "" : " ");
  return kBadUsage;
}

ExitCode run_verb(const Context& context) {
  const Expected<ExitCode> ended = context.body();
  if (std::fflush(context.out) != 0 || std::ferror(context.out) != 0)
    return say(context, context.verb, fmt::format("can't write the result: {}", std::strerror(errno)), kJobFailed);
  if (!ended) return say(context, context.verb, ended.error().message, exit_code(ended.error()));
  return *ended;
}

ExitCode run(int argc, char** argv) {
  Context context;
  context.out_is_terminal = isatty(STDOUT_FILENO) == 1;
  context.err_is_terminal = isatty(STDERR_FILENO) == 1;
  CLI::App app(
      "kvloom moves a request's KV cache from the ranks that compute it to the ranks that use it, resharding on the way.",
      "kvloom");
  app.set_version_flag("--version", "kvloom " KVLOOM_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  add_verbs(app, context);
  app.footer(kMainExamples);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help, --version
    app.exit(wanted);
    return kFine;
  } catch (const CLI::ParseError& error) {
    return refuse(app, context, error);
  }
  return run_verb(context);
}

}  // namespace
}  // namespace kvloom

int main(int argc, char** argv) {
  try {
    return kvloom::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("kvloom: not enough memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvloom: %s\n", error.what());
  }
  return kvloom::kJobFailed;
}
