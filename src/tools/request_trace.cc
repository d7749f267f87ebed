#include "kvloom/tools/request_trace.h"

#include <nlohmann/json.hpp>

namespace kvloom {

Expected<std::vector<TraceRequest>> parse_trace(std::string_view text, std::size_t most, const std::string& name) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
  std::vector<TraceRequest> out;
  for (std::size_t number = 1; !text.empty() && out.size() < most; ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto read = nlohmann::json::parse(line, nullptr, false);
    if (!read.is_object()) return fail(Code::parse, "{} line {}: not a JSON object", name, number);
    const auto tokens = read.find("input_length");
    if (tokens == read.end() || !tokens->is_number_integer() || tokens->get<std::int64_t>() < 1 ||
        tokens->get<std::int64_t>() > kMostTokens)
      return fail(Code::parse, "{} line {}: \"input_length\" must be tokens, from 1 to 2^40", name, number);
    const auto at = read.find("timestamp");
    if (at != read.end() && !at->is_number())
      return fail(Code::parse, "{} line {}: \"timestamp\" must be milliseconds", name, number);
    out.push_back({at == read.end() ? 0.0 : at->get<double>(), tokens->get<std::int64_t>()});
  }
  if (out.empty()) return fail(Code::invalid_argument, "{}: no request in it", name);
  return out;
}

}  // namespace kvloom
