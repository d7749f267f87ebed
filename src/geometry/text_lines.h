// text_lines.h: the lines that the text forms of sides and plans are made of.  Stage: describe.  Values only.
// A text form is read by its few lines that carry values; then the value is printed again, and the first line that differs is
// the error.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

struct TextLine {
  std::size_t number = 0;  // from 1
  std::string_view text;   // borrowed, without its end
};

std::vector<TextLine> split_lines(std::string_view text);

// "line 7: found 'x', expected y", long and unprintable things shortened.
tl::unexpected<Error> unlike(const TextLine& line, const std::string& expected);

std::string quoted_line(std::string_view line);

// The first line of `text` that is not as `canonical` has it.
Expected<void> check_same(std::string_view text, std::string_view canonical);

// Ascending numbers as ranges: "0-2,6-74/4"; "none" where there is none.
std::string list_text(std::span<const std::int32_t> numbers);

// "digest <32 hex digits>\n" of `text`, for its last line.
std::string digest_line(std::string_view text);
std::string text_digest(std::string_view text);

// The lines from `words` to the last place, and the side back from exactly such lines.
void append_side(std::string& out, const Side& side);
Expected<Side> read_side(std::span<const TextLine> lines);

}  // namespace kvloom
