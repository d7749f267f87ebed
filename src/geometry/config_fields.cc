#include "kvloom/geometry/config_fields.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace kvloom {

using Json = nlohmann::json;

struct ConfigDocument {
  std::string name;
  Json json;
  std::optional<Error> wrong;
};

namespace {

constexpr std::size_t kMaxText = std::size_t{4} << 20;  // bytes; real configs have up to 1 MiB (lists of unquantised modules)
constexpr int kMaxDepth = 64;

std::string place(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const auto start = before.rfind('\n');
  return fmt::format("byte {} (line {}, column {})", byte, line, start == std::string_view::npos ? byte + 1 : byte - start);
}

// The first bracket that nests deeper than any config does. Looked for before parsing, so that nothing recurses into it.
std::optional<std::size_t> too_deep(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') {
      ++i;
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && (c == '{' || c == '[')) {
      if (++depth > kMaxDepth) return i;
    } else if (!quoted && (c == '}' || c == ']')) {
      --depth;
    }
  }
  return std::nullopt;
}

std::string shown_value(const Json& value) {
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 40 ? text.substr(0, 37) + "..." : text;
}

const Json& at(const void* object, const char* key) { return (*static_cast<const Json*>(object))[key]; }
std::string item(std::string_view key, std::size_t i) { return fmt::format("{}[{}]", key, i); }

std::string bounds(std::int64_t least, std::int64_t most) {
  return least == most ? fmt::format("{}", least) : fmt::format("from {} to {}", least, most);
}

// The reading of single values; the owner's fields and lists both come here, lists with a key such as "layer_types[3]".
std::int64_t integer(const ConfigFields& owner, const Json& value, std::string_view key, std::int64_t least, std::int64_t most) {
  if (!value.is_number_integer()) {
    owner.refuse(Code::invalid_argument, key,
                 fmt::format("is {}; it must be an integer {}", shown_value(value), bounds(least, most)));
    return least;
  }
  const bool huge = value.is_number_unsigned() && !std::in_range<std::int64_t>(value.get<std::uint64_t>());
  const std::int64_t number = huge ? 0 : value.get<std::int64_t>();
  if (!huge && number >= least && number <= most) return number;
  owner.refuse(Code::invalid_argument, key, fmt::format("is {}; it must be {}", shown_value(value), bounds(least, most)));
  return least;
}

std::size_t choice(const ConfigFields& owner, const Json& value, std::string_view key, ConfigFields::Words possible) {
  const auto* text = value.get_ptr<const std::string*>();
  const auto found =
      std::find_if(possible.begin(), possible.end(), [&](const char* word) { return text != nullptr && *text == word; });
  if (found != possible.end()) return static_cast<std::size_t>(found - possible.begin());
  owner.refuse(Code::invalid_argument, key, fmt::format("is {}; possible: {}", shown_value(value), fmt::join(possible, ", ")));
  return 0;
}

}  // namespace

ConfigFields::ConfigFields(const void* object, std::string path, ConfigDocument& document)
    : object_(object), path_(std::move(path)), document_(&document) {}

bool ConfigFields::has(const char* key) const {
  const auto* json = static_cast<const Json*>(object_);
  const auto found = json->find(key);
  return found != json->end() && !found->is_null();
}

std::int64_t ConfigFields::number(const char* key, std::int64_t least, std::int64_t most) const {
  if (has(key)) return integer(*this, at(object_, key), key, least, most);
  refuse(Code::invalid_argument, key, fmt::format("is missing; it must be an integer {}", bounds(least, most)));
  return least;
}

std::int64_t ConfigFields::number_or(const char* key, std::int64_t least, std::int64_t most, std::int64_t otherwise) const {
  return has(key) ? number(key, least, most) : otherwise;
}

bool ConfigFields::flag_or(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  const Json& value = at(object_, key);
  if (value.is_boolean()) return value.get<bool>();
  refuse(Code::invalid_argument, key, fmt::format("is {}; it must be true or false", shown_value(value)));
  return otherwise;
}

std::size_t ConfigFields::word(const char* key, Words possible) const {
  if (has(key)) return choice(*this, at(object_, key), key, possible);
  refuse(Code::invalid_argument, key, fmt::format("is missing; possible: {}", fmt::join(possible, ", ")));
  return 0;
}

ConfigFields ConfigFields::object(const char* key) const {
  static const Json empty = Json::object();
  const bool usable = has(key) && at(object_, key).is_object();
  if (!usable) refuse(Code::invalid_argument, key, fmt::format("is {}; it must be an object", has(key) ? shown(key) : "missing"));
  return {usable ? &at(object_, key) : &empty, path_ + key + ".", *document_};
}

namespace {
// The entries of a list of one entry a layer, or nothing.
const Json* list(const ConfigFields& owner, const void* object, const char* key, std::int64_t layers) {
  const bool there = owner.has(key);
  if (there && at(object, key).is_array() && at(object, key).size() == static_cast<std::size_t>(layers)) return &at(object, key);
  owner.refuse(Code::invalid_argument, key,
               fmt::format("is {}; it must be an array with one entry for each of num_hidden_layers={}",
                           there ? owner.shown(key) : "missing", layers));
  return nullptr;
}
}  // namespace

std::vector<std::int64_t> ConfigFields::numbers(const char* key, std::int64_t layers, std::int64_t least,
                                                std::int64_t most) const {
  std::vector<std::int64_t> out(static_cast<std::size_t>(layers), least);
  if (const Json* entries = list(*this, object_, key, layers))
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = integer(*this, (*entries)[i], item(key, i), least, most);
  return out;
}

std::vector<std::size_t> ConfigFields::words(const char* key, std::int64_t layers, Words possible) const {
  std::vector<std::size_t> out(static_cast<std::size_t>(layers), 0);
  if (const Json* entries = list(*this, object_, key, layers))
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = choice(*this, (*entries)[i], item(key, i), possible);
  return out;
}

std::vector<std::size_t> ConfigFields::letters(const char* key, std::int64_t layers, std::string_view possible) const {
  std::vector<std::size_t> out(static_cast<std::size_t>(layers), 0);
  const auto* text = has(key) ? at(object_, key).get_ptr<const std::string*>() : nullptr;
  if (text == nullptr || text->size() != out.size()) {
    refuse(Code::invalid_argument, key,
           fmt::format("is {}; it must be a string of num_hidden_layers={} letters",
                       text       ? fmt::format("a string of {}", text->size())
                       : has(key) ? shown(key)
                                  : "missing",
                       layers));
    return out;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto found = possible.find((*text)[i]);
    if (found != std::string_view::npos)
      out[i] = found;
    else
      refuse(Code::invalid_argument, item(key, i),
             fmt::format("is {}; possible: {}", shown_value(text->substr(i, 1)), fmt::join(possible, ", ")));
  }
  return out;
}

std::vector<std::int32_t> ConfigFields::layers_from_1(const char* key, std::int64_t layers) const {
  std::vector<std::int32_t> out;
  if (!has(key) || !at(object_, key).is_array() || at(object_, key).size() > static_cast<std::size_t>(layers)) {
    refuse(Code::invalid_argument, key,
           fmt::format("is {}; it must be an array of at most num_hidden_layers={} layer numbers",
                       has(key) ? shown(key) : "missing", layers));
    return out;
  }
  std::vector<bool> seen(static_cast<std::size_t>(layers), false);
  for (const Json& entry : at(object_, key)) {
    const auto layer = static_cast<std::size_t>(integer(*this, entry, item(key, out.size()), 1, layers) - 1);
    if (seen[layer])
      refuse(Code::invalid_argument, item(key, out.size()), fmt::format("is {}, which stands twice", shown_value(entry)));
    seen[layer] = true;
    out.push_back(static_cast<std::int32_t>(layer));
  }
  return out;
}

bool ConfigFields::is_empty_list(const char* key) const {
  return has(key) && at(object_, key).is_array() && at(object_, key).empty();
}

bool ConfigFields::all_ones(const char* key) const {
  if (!has(key) || !at(object_, key).is_array()) return false;
  const Json& entries = at(object_, key);
  return std::all_of(entries.begin(), entries.end(), [](const Json& entry) { return entry == 1; });
}

std::string ConfigFields::shown(const char* key) const { return has(key) ? shown_value(at(object_, key)) : "missing"; }

void ConfigFields::refuse(Code code, std::string_view key, std::string_view why) const {
  if (!document_->wrong)
    document_->wrong = Error{code, Scope::operation, fmt::format("{}: {}{} {}", document_->name, path_, key, why)};
}

Config::Config(std::unique_ptr<ConfigDocument> document) : document_(std::move(document)) {}
Config::Config(Config&&) noexcept = default;
Config& Config::operator=(Config&&) noexcept = default;
Config::~Config() = default;

ConfigFields Config::root() const { return {&document_->json, "", *document_}; }
const std::optional<Error>& Config::wrong() const { return document_->wrong; }

Expected<Config> Config::parse(std::string_view text, std::string_view name) {
  if (text.size() > kMaxText) return fail(Code::parse, "{}: has {} bytes; a config has at most {}", name, text.size(), kMaxText);
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
    return fail(Code::parse, "{}: is empty; a config is one JSON object", name);
  if (const auto deep = too_deep(text))
    return fail(Code::parse, "{}: nests deeper than {} levels at {}", name, kMaxDepth, place(text, *deep));
  auto document = std::make_unique<ConfigDocument>();
  document->name = name;
  try {
    document->json = Json::parse(text.begin(), text.end());
  } catch (const Json::parse_error& error) {
    const std::size_t byte = error.byte > 0 ? error.byte - 1 : 0;
    if (byte >= text.size()) return fail(Code::parse, "{}: not JSON: ends too early, at {}", name, place(text, text.size()));
    return fail(Code::parse, "{}: not JSON: cannot be read on from {}", name, place(text, byte));
  } catch (const Json::exception&) {
    return fail(Code::parse, "{}: not JSON: holds a number that no 64 bits hold", name);  // such as 1e999
  }
  if (!document->json.is_object())
    return fail(Code::parse, "{}: is {}; a config is one JSON object", name, shown_value(document->json));
  return Config(std::move(document));
}

}  // namespace kvloom
