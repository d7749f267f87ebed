#include "kvloom/session/message.h"

#include "kvloom/plan/text.h"

namespace kvloom {
namespace {

std::string text(const Grant& m) {
  return fmt::format("grant {} target={} tokens=[{}, {}) tag={}", to_string(m.key), m.target.value, m.range.begin, m.range.end,
                     m.tag.value);
}
std::string text(const Accepted& m) { return fmt::format("accepted {} source={}", to_string(m.key), m.source.value); }
std::string text(const Failed& m) {
  return fmt::format("failed {} source={} reason=\"{}: {}\"", to_string(m.key), m.source.value, to_string(m.code),
                     printable(m.reason));
}
std::string text(const Cancel& m) {
  return fmt::format("cancel {}{} target={} reason=\"{}\"", m.whole ? "whole " : "", to_string(m.key), m.target.value,
                     printable(m.reason));
}
std::string text(const Quiesced& m) { return fmt::format("quiesced {} source={}", to_string(m.key), m.source.value); }

}  // namespace

std::string printable(std::string_view words, std::string_view also) {
  std::string out;
  for (const char c : words) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || also.find(c) != std::string_view::npos)
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out;
}

std::string to_string(const TransferKey& key) { return fmt::format("{}#{}", printable(key.name), key.epoch.value); }

PlanDigest digest_of(const Plan& plan) {
  const std::string hex = digest(plan);
  return {std::stoull(hex.substr(0, 16), nullptr, 16), std::stoull(hex.substr(16), nullptr, 16)};
}

std::string to_string(const Message& message) {
  return std::visit([](const auto& m) { return text(m); }, message);
}

}  // namespace kvloom
