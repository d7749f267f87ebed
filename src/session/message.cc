#include "kvloom/session/message.h"

#include <string_view>

#include "kvloom/plan/text.h"

namespace kvloom {
namespace {

// Names and reasons are a peer's words: what would break a log's line, move a cursor or end a quotation prints as \x1b.
std::string printed(std::string_view words) {
  std::string out;
  for (const char c : words) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || c == '"' || c == '\\')
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out;
}

std::string text(const Grant& m) {
  return fmt::format("grant {} target={} tokens=[{}, {}) tag={}", to_string(m.key), m.target.value, m.range.begin, m.range.end,
                     m.tag.value);
}
std::string text(const Accepted& m) { return fmt::format("accepted {} source={}", to_string(m.key), m.source.value); }
std::string text(const Failed& m) {
  return fmt::format("failed {} source={} reason=\"{}: {}\"", to_string(m.key), m.source.value, to_string(m.code),
                     printed(m.reason));
}
std::string text(const Cancel& m) {
  return fmt::format("cancel {} target={} reason=\"{}\"", to_string(m.key), m.target.value, printed(m.reason));
}
std::string text(const Quiesced& m) { return fmt::format("quiesced {} source={}", to_string(m.key), m.source.value); }

}  // namespace

std::string to_string(const TransferKey& key) { return fmt::format("{}#{}", printed(key.name), key.epoch.value); }

PlanDigest digest_of(const Plan& plan) {
  const std::string hex = digest(plan);
  return {std::stoull(hex.substr(0, 16), nullptr, 16), std::stoull(hex.substr(16), nullptr, 16)};
}

std::string to_string(const Message& message) {
  return std::visit([](const auto& m) { return text(m); }, message);
}

}  // namespace kvloom
