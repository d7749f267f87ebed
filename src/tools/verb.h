// verb.h: what every verb of the command line is made of.  Stage: tools.  Each verb has a file of its own that offers
//   void add_describe(CLI::App& app, Context& context);
// which adds a sub-command, its options and its body; main.cc lists these functions. A body says how it went by its return value:
// nothing throws but CLI11 while it parses, and nothing exits but main.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>

#include "kvloom/base/error.h"
#include "kvloom/session/log.h"

// CLI11 is one large header, compiled anew by each file that includes it: the files of verbs do, nobody else.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kvloom {

enum ExitCode : int {
  kFine = 0,
  kJobFailed = 1,  // the words were right, but what they asked for did not work out
  kBadUsage = 2,   // words, files or numbers that can never be right
};

// Ends with an exit code, or with an error that main prints on `err` as "kvloom VERB: sentence".
using VerbBody = std::function<Expected<ExitCode>()>;

// What main builds and passes to the verbs. Results go to `out`, everything that is said beside them to `err`.
struct Context {
  std::FILE* out = stdout;
  std::FILE* err = stderr;
  bool out_is_terminal = false;  // progress bars and colours only there
  bool err_is_terminal = false;
  std::string verb;  // the one that the user chose, once the words are parsed
  VerbBody body;     // and what main is to run
};

// io, exhausted, unavailable, deadline, cancelled: the job failed. All other codes blame the input.
ExitCode exit_code(const Error& error);

// Adds `name` to the app: one line of summary, and a text of examples for the end of its help. Add options to what it returns;
// what they are stored in has to be owned by `body` (a shared_ptr that it captures), since add_verb's caller is gone when it runs.
CLI::App* add_verb(CLI::App& app, Context& context, const std::string& name, const std::string& summary,
                   const std::string& examples, VerbBody body);

// "--tokens T": a whole number in [least, most]; what else is said there is refused in our words.
CLI::Option* add_count(CLI::App& verb, const std::string& names, std::int64_t& value, const std::string& what,
                       std::int64_t least = 1, std::int64_t most = std::numeric_limits<std::int64_t>::max());
// "--memory 80GiB": bytes, with an optional unit: B, kB, KiB, MB, MiB, GB, GiB, TB, TiB.
CLI::Option* add_bytes(CLI::App& verb, const std::string& names, std::int64_t& value, const std::string& what);

// A whole number in [least, most].  @error parse, overflow, invalid_argument; the sentence has the text
Expected<std::int64_t> parse_count(const std::string& text, std::int64_t least, std::int64_t most);

// 12, 80GiB, 1.5GB.  @error parse, overflow; the sentence has the text
Expected<std::int64_t> parse_bytes(const std::string& text);

// "--layer-time 2ms": a length of time, with its unit: ns, us, ms, s.
CLI::Option* add_duration(CLI::App& verb, const std::string& names, std::int64_t& nanoseconds, const std::string& what);

// "--log debug": the least level of lines that the processes of ranks write to the error output.
CLI::Option* add_log(CLI::App& verb, LogLevel& least);

// 2ms, 1.5s.  @error parse, out_of_range; the sentence has the text
Expected<std::int64_t> parse_duration(const std::string& text);

// A file's text.  @error invalid_argument: cannot be read, is a folder, or is over `most` bytes: with its name and why
Expected<std::string> read_file(const std::string& name, std::int64_t most = std::int64_t{1} << 30);
// Beside the old one first, then renamed: a reader never sees half a file.  @error io
Expected<void> write_file(const std::string& name, const std::string& text);

// ---- the verbs ----

void add_describe(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_run(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_simulate(CLI::App& app, Context& context);
void add_soak(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);
void add_completion(CLI::App& app, Context& context);

}  // namespace kvloom
