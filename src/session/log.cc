#include "kvloom/session/log.h"

#include <fmt/chrono.h>

#include "kvloom/session/message.h"

namespace kvloom {

const char* to_string(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return "debug";
    case LogLevel::info: return "info";
    case LogLevel::warning: return "warning";
    case LogLevel::error: return "error";
  }
  return "?";
}

// Quotation marks and backslashes stay: what stands between them was made printable by who put it there.
std::string log_line(std::chrono::system_clock::time_point at, std::string_view who, LogLevel level, std::string_view words) {
  const auto second = std::chrono::floor<std::chrono::seconds>(at);
  const auto rest = std::chrono::floor<std::chrono::milliseconds>(at - second);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z kvloom[{}] {} {}\n", fmt::gmtime(std::chrono::system_clock::to_time_t(second)),
                     rest.count(), printable(who, ""), to_string(level), printable(words, ""));
}

LogSink file_log(std::FILE* file, std::string who, LogLevel least) {
  return [file, who = std::move(who), least](LogLevel level, std::string_view words) {
    if (level < least) return;
    const std::string line = log_line(std::chrono::system_clock::now(), who, level, words);
    std::fwrite(line.data(), 1, line.size(), file);
    std::fflush(file);
  };
}

LogSink stderr_log(std::string who, LogLevel least) { return file_log(stderr, std::move(who), least); }

}  // namespace kvloom
