#include "kvloom/tools/verb.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

namespace kvloom {

ExitCode exit_code(const Error& error) {
  switch (error.code) {
    case Code::invalid_argument:
    case Code::parse:
    case Code::unsupported:
    case Code::out_of_range:
    case Code::overflow: return kBadUsage;
    case Code::exhausted:
    case Code::unavailable:
    case Code::deadline:
    case Code::cancelled:
    case Code::io: return kJobFailed;
  }
  return kJobFailed;
}

CLI::App* add_verb(CLI::App& app, Context& context, const std::string& name, const std::string& summary,
                   const std::string& examples, VerbBody body) {
  CLI::App* verb = app.add_subcommand(name, summary);
  verb->footer(examples);
  verb->callback([&context, name, body = std::move(body)] {
    context.verb = name;
    context.body = body;
  });
  return verb;
}

// ---- numbers ----

Expected<std::int64_t> parse_count(const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (whole && error == std::errc::result_out_of_range)
    return fail(Code::overflow, "{} is out of range: {} to {} are possible", text, least, most);
  if (!whole || error != std::errc()) return fail(Code::parse, "'{}' is not a whole number", text);
  if (value < least) return fail(Code::invalid_argument, "{} is too small: it must be {} or more", value, least);
  if (value > most) return fail(Code::invalid_argument, "{} is too large: at most {}", value, most);
  return value;
}

namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr std::array kUnits = {Unit{"", 1},      Unit{"B", 1},
                               Unit{"kB", 1e3},  Unit{"KiB", 1024.0},
                               Unit{"MB", 1e6},  Unit{"MiB", 1048576.0},
                               Unit{"GB", 1e9},  Unit{"GiB", 1073741824.0},
                               Unit{"TB", 1e12}, Unit{"TiB", 1099511627776.0}};

// Stores what `parse` makes of an option's word, or refuses it in the parser's words.
template <class Parse>
CLI::Option* add_parsed(CLI::App& verb, const std::string& names, std::int64_t& value, const std::string& what, Parse parse) {
  const std::string name = names.substr(0, names.find(','));
  return verb.add_option_function<std::string>(
      names,
      [&value, name, parse](const std::string& text) {
        const Expected<std::int64_t> parsed = parse(text);
        if (!parsed) throw CLI::ValidationError(name, parsed.error().message);
        value = *parsed;
      },
      what);
}

}  // namespace

CLI::Option* add_count(CLI::App& verb, const std::string& names, std::int64_t& value, const std::string& what, std::int64_t least,
                       std::int64_t most) {
  return add_parsed(verb, names, value, what, [least, most](const std::string& text) { return parse_count(text, least, most); })
      ->type_name("N");
}

Expected<std::int64_t> parse_bytes(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  for (const Unit& known : kUnits) {
    if (error != std::errc() || unit != known.name) continue;
    const double bytes = std::floor(number * known.bytes);
    if (!(bytes >= 1)) return fail(Code::invalid_argument, "{} is too small: it must be 1 byte or more", text);
    if (bytes >= 0x1p62) return fail(Code::overflow, "{} is too large for 64 bits", text);
    return static_cast<std::int64_t>(bytes);
  }
  return fail(Code::parse, "'{}' is not a number of bytes: write 80GiB, 512MiB, 1.5GB or plain bytes", text);
}

CLI::Option* add_bytes(CLI::App& verb, const std::string& names, std::int64_t& value, const std::string& what) {
  return add_parsed(verb, names, value, what, parse_bytes)->type_name("BYTES");
}

Expected<std::int64_t> parse_duration(const std::string& text) {
  std::size_t used = 0;
  double number = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec == std::errc()) used = static_cast<std::size_t>(read.ptr - text.data());
  const std::string unit = text.substr(used);
  const double scale = unit == "ns" ? 1 : unit == "us" ? 1e3 : unit == "ms" ? 1e6 : unit == "s" ? 1e9 : 0;
  if (used == 0 || scale == 0 || !(number >= 0))
    return fail(Code::parse, "'{}' is not a length of time: write 2ms, 500us, 1.5s", text);
  constexpr double kMost = 86400e9;
  if (number * scale > kMost) return fail(Code::out_of_range, "'{}' is longer than a day", text);
  return static_cast<std::int64_t>(number * scale);
}

CLI::Option* add_duration(CLI::App& verb, const std::string& names, std::int64_t& nanoseconds, const std::string& what) {
  return add_parsed(verb, names, nanoseconds, what, parse_duration)->type_name("TIME");
}

CLI::Option* add_log(CLI::App& verb, LogLevel& least) {
  return verb
      .add_option_function<std::string>(
          "--log",
          [&least](const std::string& text) {
            for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error})
              if (text == to_string(level)) {
                least = level;
                return;
              }
            throw CLI::ValidationError("--log", fmt::format("'{}' is no level: write debug, info, warning or error", text));
          },
          "What the processes of ranks say on the error output: lines of this level and above (default: error)")
      ->type_name("LEVEL");
}

// ---- files ----

namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

}  // namespace

Expected<std::string> read_file(const std::string& name, std::int64_t most) {
  const File file(std::fopen(name.c_str(), "rbe"));
  if (!file) return fail(Code::invalid_argument, "{}: can't be read: {}", name, std::strerror(errno));
  struct stat status {};
  if (fstat(fileno(file.get()), &status) == 0 && S_ISDIR(status.st_mode))
    return fail(Code::invalid_argument, "{}: is a folder, not a file", name);
  std::string text;
  std::array<char, 1 << 16> part{};
  while (const std::size_t n = std::fread(part.data(), 1, part.size(), file.get())) {
    text.append(part.data(), n);
    if (static_cast<std::int64_t>(text.size()) > most)
      return fail(Code::invalid_argument, "{}: is larger than {} bytes", name, most);
  }
  if (std::ferror(file.get()) != 0) return fail(Code::invalid_argument, "{}: can't be read: {}", name, std::strerror(errno));
  return text;
}

Expected<void> write_file(const std::string& name, const std::string& text) {
  struct stat status {};
  const bool special =
      stat(name.c_str(), &status) == 0 && !S_ISREG(status.st_mode);  // /dev/stdout, a pipe: nothing to rename there
  const std::string beside = special ? name : fmt::format("{}.{}.part", name, getpid());
  File file(std::fopen(beside.c_str(), "wbe"));
  if (!file) return fail(Code::io, "{}: can't be written: {}", name, std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  const bool closed = std::fclose(file.release()) == 0;
  if (written && closed && (special || std::rename(beside.c_str(), name.c_str()) == 0)) return {};
  const int reason = errno;
  if (!special) unlink(beside.c_str());
  return fail(Code::io, "{}: can't be written: {}", name, std::strerror(reason));
}

}  // namespace kvloom
