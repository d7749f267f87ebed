#include "kvloom/tools/print.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kvloom {

std::string ids_text(std::span<const std::int64_t> ids) {
  std::string text;
  for (std::size_t i = 0; i < ids.size();) {
    // The longest stretch with one step: of 1 from two ids on, of more from three on.
    std::size_t end = i + 1;
    const std::int64_t step = end < ids.size() ? ids[end] - ids[i] : 1;
    while (end < ids.size() && ids[end] - ids[end - 1] == step) ++end;
    if (end - i < (step == 1 ? 2U : 3U)) end = i + 1;
    if (!text.empty()) text += ',';
    text += fmt::format("{}", ids[i]);
    if (end - i > 1) text += fmt::format("-{}", ids[end - 1]);
    if (end - i > 1 && step != 1) text += fmt::format("/{}", step);
    i = end;
  }
  return text.empty() ? "none" : text;
}

std::string ids_text(const std::vector<LayerId>& layers) {
  std::vector<std::int64_t> ids;
  ids.reserve(layers.size());
  for (const LayerId layer : layers) ids.push_back(layer.value);
  return ids_text(ids);
}

std::string bytes_text(double bytes) {
  constexpr std::array kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kNames.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0)
    return fmt::format("{} B", bytes == std::floor(bytes) ? fmt::format("{:.0f}", bytes) : fmt::format("{:.1f}", bytes));
  return fmt::format("{:.{}f} {}", bytes, bytes < 10 ? 2 : bytes < 100 ? 1 : 0, kNames[unit]);
}

std::string count_text(std::int64_t count) {
  std::string digits = fmt::format("{}", count);
  for (std::int64_t at = static_cast<std::int64_t>(digits.size()) - 3; at > (count < 0 ? 1 : 0); at -= 3)
    digits.insert(static_cast<std::size_t>(at), ",");
  return digits;
}

std::string time_text(double nanoseconds) {
  if (nanoseconds < 1e3) return fmt::format("{:.0f} ns", nanoseconds);
  if (nanoseconds < 1e6) return fmt::format("{:.1f} us", nanoseconds / 1e3);
  if (nanoseconds < 1e9) return fmt::format("{:.1f} ms", nanoseconds / 1e6);
  return fmt::format("{:.2f} s", nanoseconds / 1e9);
}

void TextTable::print(std::FILE* out, std::size_t indent) const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.name.size());
  for (const auto& row : rows_)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  const auto line = [&](auto&& cell) {
    std::string text(indent, ' ');
    for (std::size_t c = 0; c < columns_.size(); ++c)
      text += columns_[c].align == Align::left ? fmt::format("{:<{}}  ", cell(c), widths[c])
                                               : fmt::format("{:>{}}  ", cell(c), widths[c]);
    text.erase(text.find_last_not_of(' ') + 1);
    fmt::print(out, "{}\n", text);
  };
  line([&](std::size_t c) { return columns_[c].name; });
  for (const auto& row : rows_) line([&](std::size_t c) { return row[c]; });
}

}  // namespace kvloom
