// request_trace.h: a trace of requests: when each came and how long it was.  Stage: tools.  Values only; the caller reads the file.
// One JSON object a line: {"timestamp": ms, "input_length": tokens, ...}, as the published traces of Mooncake have them; other fields are passed over.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

struct TraceRequest {
  double at_ms = 0;
  std::int64_t tokens = 0;
};

// The first `most` requests.  `name` stands before every error.
// @error parse: a line that is no such object, with its number; invalid_argument: no request at all
Expected<std::vector<TraceRequest>> parse_trace(std::string_view text, std::size_t most, const std::string& name);

}  // namespace kvloom
