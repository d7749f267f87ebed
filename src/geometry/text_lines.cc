#include "kvloom/geometry/text_lines.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvloom {
namespace {

constexpr std::size_t kShown = 160;  // bytes of a line in an error

std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte >= 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return text.size() > kShown ? out + "..." : out;
}

}  // namespace

std::string quoted_line(std::string_view line) { return "'" + shown(line) + "'"; }

std::vector<TextLine> split_lines(std::string_view text) {
  std::vector<TextLine> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.push_back({lines.size() + 1, text.substr(0, end)});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

tl::unexpected<Error> unlike(const TextLine& line, const std::string& expected) {
  return fail(Code::parse, "line {}: found '{}', expected {}", line.number, shown(line.text), expected);
}

Expected<void> check_same(std::string_view text, std::string_view canonical) {
  if (text == canonical) return {};
  for (std::size_t number = 1;; ++number) {
    const std::size_t end = text.find('\n'), canonical_end = canonical.find('\n');
    const TextLine found{number, text.substr(0, end)};
    const std::string_view expected = canonical.substr(0, canonical_end);
    if (canonical.empty()) return unlike(found, "the end of the text");
    if (text.empty()) return fail(Code::parse, "line {}: found the end of the text, expected '{}'", number, shown(expected));
    if (found.text != expected) return unlike(found, quoted_line(expected));
    if (end == std::string_view::npos)
      return fail(Code::parse, "line {}: found no end of the line, expected one after '{}'", number, shown(expected));
    text.remove_prefix(end + 1);
    canonical.remove_prefix(canonical_end + 1);
  }
}

std::string list_text(std::span<const std::int32_t> numbers) {
  if (numbers.empty()) return "none";
  std::string out;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i + 1;  // of an even run from i
    if (last < numbers.size())
      while (last + 1 < numbers.size() && numbers[last + 1] - numbers[last] == numbers[i + 1] - numbers[i]) ++last;
    const std::int32_t step = last < numbers.size() ? numbers[i + 1] - numbers[i] : 0;
    if (i != 0) out += ',';
    if (step == 1) {
      out += fmt::format("{}-{}", numbers[i], numbers[last]);
    } else if (step > 1 && last >= i + 2) {
      out += fmt::format("{}-{}/{}", numbers[i], numbers[last], step);
    } else {
      out += fmt::format("{}", numbers[i]);
      last = i;
    }
    i = last + 1;
  }
  return out;
}

std::string text_digest(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string digest_line(std::string_view text) { return fmt::format("digest {}\n", text_digest(text)); }

}  // namespace kvloom
