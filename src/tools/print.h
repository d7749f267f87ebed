// print.h: numbers and tables for people.  Stage: tools.  Tools that read our output take --json, which rounds nothing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "kvloom/base/units.h"

namespace kvloom {

// 0-9 | 0-2,6-74/4 (every 4th) | 3,5 | none
std::string ids_text(std::span<const std::int64_t> ids);
std::string ids_text(const std::vector<LayerId>& layers);

// 576 B | 36.0 KiB | 1.25 GiB
std::string bytes_text(double bytes);
inline std::string bytes_text(Bytes bytes) { return bytes_text(static_cast<double>(bytes.value)); }
// 16,384
std::string count_text(std::int64_t count);
// 1.2 us, 74 ms
std::string time_text(double nanoseconds);

// Rows under a header, columns as wide as they need; those of numbers stand to the right.
class TextTable {
 public:
  enum class Align : std::uint8_t { left, right };
  struct Column {
    std::string name;
    Align align = Align::right;
  };

  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // @pre one cell a column
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  // Every line begins with `indent` spaces.
  void print(std::FILE* out, std::size_t indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace kvloom
