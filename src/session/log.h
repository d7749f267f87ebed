// log.h: where sentences about what happened go.  Stage: stream.  A seam: whoever builds an endpoint passes a sink; nothing logs
// by itself.
// A line is one event: time (UTC, milliseconds), who, level, words:
//   2026-03-01T12:04:53.123Z kvloom[prefill 3] warning transfer req-7#2: decode rank 1 is gone
// Law: whatever a peer put into the words, a line has no control character, and ends once.
// Thread: a sink is called by several.  Time: the wall clock, read by a sink for its line.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>

namespace kvloom {

enum class LogLevel : std::uint8_t { debug, info, warning, error };
const char* to_string(LogLevel level);

// Empty: nobody wants to know.
using LogSink = std::function<void(LogLevel level, std::string_view words)>;

// One line with its end.
std::string log_line(std::chrono::system_clock::time_point at, std::string_view who, LogLevel level, std::string_view words);

// Writes each line that is no less than `least`, in one call, so that lines of threads do not mix; what cannot be written is
// lost. @pre the file outlives the sink
LogSink file_log(std::FILE* file, std::string who, LogLevel least = LogLevel::info);
LogSink stderr_log(std::string who, LogLevel least = LogLevel::info);

}  // namespace kvloom
