// config_fields.h: a JSON config as fields whose errors name their path.  Stage: describe.  Values only; takes text, opens no
// file. The text is hostile: bounded in size and depth, and every number is asked for with its bounds. The JSON library stays
// in the .cc. A field that is wrong is remembered (the first one) and reads as the least that it may be, so that a reader goes
// straight down and asks once, at its end, whether anything was wrong. Until then what it has read only has to be safe, not
// meaningful.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

struct ConfigDocument;

// One object of a document, borrowed: it lives no longer than the Config it comes from. null is absent: Hugging Face writes both.
class ConfigFields {
 public:
  using Words = std::span<const char* const>;

  bool has(const char* key) const;

  // @post in [least, most]       @error missing, not an integer, out of bounds
  std::int64_t number(const char* key, std::int64_t least, std::int64_t most) const;
  std::int64_t number_or(const char* key, std::int64_t least, std::int64_t most, std::int64_t otherwise) const;
  std::int64_t count(const char* key, std::int64_t most) const { return number(key, 1, most); }
  std::int64_t count_or(const char* key, std::int64_t most, std::int64_t otherwise) const {
    return number_or(key, 1, most, otherwise);
  }

  bool flag_or(const char* key, bool otherwise) const;
  std::size_t word(const char* key, Words possible) const;  // the index in `possible`
  ConfigFields object(const char* key) const;

  // Lists and strings with one entry for each of the model's layers.
  // @post [layers]               @error another length, an entry that is not possible, by its index
  std::vector<std::int64_t> numbers(const char* key, std::int64_t layers, std::int64_t least, std::int64_t most) const;
  std::vector<std::size_t> words(const char* key, std::int64_t layers, Words possible) const;
  std::vector<std::size_t> letters(const char* key, std::int64_t layers, std::string_view possible) const;

  // Layers by number, in any order, counted from 1.
  // @post counted from 0         @error one that stands twice or is out of bounds
  std::vector<std::int32_t> layers_from_1(const char* key, std::int64_t layers) const;

  bool is_empty_list(const char* key) const;
  bool all_ones(const char* key) const;      // a list of nothing but 1
  std::string shown(const char* key) const;  // for error messages: short, printable
  void refuse(Code code, std::string_view key, std::string_view why) const;

 private:
  friend class Config;
  ConfigFields(const void* object, std::string path, ConfigDocument& document);

  const void* object_;        // the JSON library's object
  std::string path_;          // "" or "text_config."
  ConfigDocument* document_;  // remembers the first thing that is wrong
};

// Owns the parsed text.
class Config {
 public:
  // `name` stands before every error.  @error parse: not JSON, with the place; not an object; too large or too deep
  static Expected<Config> parse(std::string_view text, std::string_view name);
  Config(Config&&) noexcept;
  Config& operator=(Config&&) noexcept;
  ~Config();

  ConfigFields root() const;
  const std::optional<Error>& wrong() const;

 private:
  explicit Config(std::unique_ptr<ConfigDocument> document);
  std::unique_ptr<ConfigDocument> document_;
};

}  // namespace kvloom
