#include "kvloom/tools/tables.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "kvloom/tools/machine.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"

namespace kvloom {

std::int64_t columns_needed(const GroupSide& side, Rank rank, std::int64_t tokens, std::int64_t total) {
  const Place& at = side.places[static_cast<std::size_t>(rank.value)];
  if (!at.holds || side.layer_parts[static_cast<std::size_t>(at.layers)].empty()) return 0;
  if (side.kind == GroupKind::state) return 1;
  return ceil_div(side.tokens.part(at.tokens, total).count_below(tokens), side.layout.page_tokens());
}

namespace {

enum class Whose : std::uint8_t { prefill, decode };

const char* to_string(Whose whose) { return whose == Whose::prefill ? "prefill" : "decode"; }
PageTable::Use use_of(Whose whose) { return whose == Whose::prefill ? PageTable::Use::source : PageTable::Use::target; }

// The pages of one table before they are checked, and the pool that they are from.
struct Pages {
  std::vector<PageId> pages;
  std::int64_t pool = 0;
};

// One group on one side, with what is needed to make its tables.
struct Slot {
  Whose whose;
  const GroupSide& side;
  std::int64_t tokens, total;

  std::int32_t ranks() const { return static_cast<std::int32_t>(side.places.size()); }
  std::int64_t columns(Rank rank) const { return columns_needed(side, rank, tokens, total); }
  std::int64_t most_columns() const {
    std::int64_t most = 0;
    for (std::int32_t rank = 0; rank < ranks(); ++rank) most = std::max(most, columns(Rank(rank)));
    return most;
  }
  // Whole pages of every part, where ids are virtual.
  std::int64_t rounded_pool(std::int64_t pool) const {
    return side.tokens.rule == TokenRule::value ? ceil_div(pool, side.tokens.parts) * side.tokens.parts : pool;
  }
  // The sentence of a table's error, after where it stands.
  tl::unexpected<Error> refuse(const std::string& name, Error error, std::optional<std::int32_t> rank) const {
    const std::string of_rank = rank ? fmt::format(" rank {}", *rank) : "";
    error.message = fmt::format("{}{}{} group {}: {}", name, to_string(whose), of_rank, side.name, error.message);
    return tl::unexpected(std::move(error));
  }
};

Expected<GroupTables> shared_table(const Slot& slot, Pages pages, const std::string& name = {}) {
  auto table = PageTable::make(std::move(pages.pages), slot.rounded_pool(pages.pool), use_of(slot.whose));
  if (!table) return slot.refuse(name, table.error(), std::nullopt);
  std::vector<PageTable> tables;
  tables.push_back(std::move(*table));
  return GroupTables(std::move(tables), std::vector<std::size_t>(static_cast<std::size_t>(slot.ranks()), 0));
}

// `pages_of` is asked only for ranks that hold something of the group; the others share an empty table.
Expected<GroupTables> table_per_rank(const Slot& slot, const std::function<Expected<Pages>(Rank)>& pages_of,
                                     const std::string& name = {}) {
  std::vector<PageTable> tables(1);
  std::vector<std::size_t> of_rank;
  for (std::int32_t rank = 0; rank < slot.ranks(); ++rank) {
    if (slot.columns(Rank(rank)) == 0) {
      of_rank.push_back(0);
      continue;
    }
    Expected<Pages> pages = pages_of(Rank(rank));
    if (!pages) return slot.refuse(name, pages.error(), rank);
    auto table = PageTable::make(std::move(pages->pages), slot.rounded_pool(pages->pool), use_of(slot.whose));
    if (!table) return slot.refuse(name, table.error(), rank);
    of_rank.push_back(tables.size());
    tables.push_back(std::move(*table));
  }
  return GroupTables(std::move(tables), std::move(of_rank));
}

using MakeGroup = std::function<Expected<GroupTables>(const Slot&)>;

Expected<RequestTables> tables_by(const Plan& plan, std::int64_t tokens, const MakeGroup& make) {
  if (auto ok = check_table_memory(plan, tokens); !ok) return tl::unexpected(ok.error());
  RequestTables out;
  for (const GroupPlan& group : plan.groups()) {
    auto prefill = make({Whose::prefill, *group.source, tokens, plan.total()});
    if (!prefill) return tl::unexpected(prefill.error());
    auto decode = make({Whose::decode, *group.target, tokens, plan.total()});
    if (!decode) return tl::unexpected(decode.error());
    out.prefill.push_back(std::move(*prefill));
    out.decode.push_back(std::move(*decode));
  }
  return out;
}

Expected<GroupTables> identity_group(const Slot& slot) {
  Pages pages{std::vector<PageId>(static_cast<std::size_t>(slot.most_columns())), slot.most_columns()};
  for (std::size_t i = 0; i < pages.pages.size(); ++i) pages.pages[i] = PageId(static_cast<std::int64_t>(i));
  return shared_table(slot, std::move(pages));
}

// ---- random tables ----

// SplitMix64 (Steele, Lea, Flood 2014): std::shuffle and std distributions differ from library to library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }  // n is far below 2^64: the bias is nothing

 private:
  std::uint64_t state_;
};

std::uint64_t seed_of(std::uint64_t seed, const Slot& slot, std::int64_t rank) {
  Random mix(seed);
  std::uint64_t out = mix.next();
  const auto add = [&](std::uint64_t value) { out = Random(out ^ value).next(); };
  add(slot.whose == Whose::prefill ? 1 : 2);
  for (const char c : slot.side.name) add(static_cast<unsigned char>(c));
  add(static_cast<std::uint64_t>(rank));
  return out;
}

// The first `columns` of a permutation of the pool.
Pages random_pages(const Slot& slot, std::int64_t columns, std::uint64_t seed) {
  const std::int64_t pool = slot.rounded_pool(columns + columns / 8 + 8);
  std::vector<PageId> pages(static_cast<std::size_t>(pool));
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = PageId(static_cast<std::int64_t>(i));
  Random random(seed);
  for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i)
    std::swap(pages[i], pages[i + random.below(pages.size() - i)]);
  pages.resize(static_cast<std::size_t>(columns));
  return {std::move(pages), pool};
}

// ---- tables from a file ----

using Json = nlohmann::json;

tl::unexpected<Error> wrong(const std::string& sentence) { return fail(Code::parse, "{}", sentence); }

Expected<Pages> read_pages(const Json& list, std::optional<std::int64_t> pool) {
  Pages out;
  if (!list.is_array()) return wrong(fmt::format("expected a list of page ids, found {}", list.type_name()));
  std::int64_t largest = -1;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Json& entry = list[i];
    if (entry.is_null()) {
      out.pages.push_back(kNoPage);
      continue;
    }
    const bool fits =
        entry.is_number_integer() && !(entry.is_number_unsigned() && entry.get<std::uint64_t>() >= (std::uint64_t{1} << 62));
    if (!fits || entry.get<std::int64_t>() < 0)
      return wrong(fmt::format("page table: column {} is {}, not a page id (0 or more, or null for no page)", i,
                               entry.dump().substr(0, 40)));
    out.pages.emplace_back(entry.get<std::int64_t>());
    largest = std::max(largest, entry.get<std::int64_t>());
  }
  out.pool = pool.value_or(largest + 1);
  return out;
}

Expected<std::optional<std::int64_t>> read_pool(const Json& object) {
  const auto at = object.find("pool");
  if (at == object.end()) return std::nullopt;
  const bool fits = at->is_number_unsigned() && at->get<std::uint64_t>() < (std::uint64_t{1} << 62);
  if (!fits) return wrong(fmt::format("\"pool\" is {}, not a number of pages", at->dump().substr(0, 40)));
  return at->get<std::int64_t>();
}

bool is_rank(const std::string& text, std::int32_t ranks) {
  std::int32_t rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  return error == std::errc() && end == text.data() + text.size() && rank >= 0 && rank < ranks &&
         (text.size() == 1 || text[0] != '0');
}

// {"0": [...], "1": [...], "pool": N} or {"pages": [...], "pool": N}.
Expected<GroupTables> read_object(const Slot& slot, const Json& object, const std::string& name) {
  const auto pool = read_pool(object);
  if (!pool) return slot.refuse(name, pool.error(), std::nullopt);
  for (const auto& [key, value] : object.items())
    if (key != "pool" && key != "pages" && !is_rank(key, slot.ranks()))
      return slot.refuse(name,
                         Error{Code::parse, Scope::operation,
                               fmt::format("'{}' is no rank of 0 to {}, nor pages or pool", key, slot.ranks() - 1)},
                         std::nullopt);
  if (const auto shared = object.find("pages"); shared != object.end()) {
    auto pages = read_pages(*shared, *pool);
    if (!pages) return slot.refuse(name, pages.error(), std::nullopt);
    return shared_table(slot, std::move(*pages), name);
  }
  if (slot.side.tokens.rule == TokenRule::value)
    return slot.refuse(name,
                       Error{Code::invalid_argument, Scope::operation, "ownership by page value needs one table for all ranks"},
                       std::nullopt);
  return table_per_rank(
      slot,
      [&](Rank rank) -> Expected<Pages> {
        const auto at = object.find(fmt::format("{}", rank.value));
        if (at == object.end()) return wrong("the file has tables for other ranks, but none for this one");
        return read_pages(*at, *pool);
      },
      name);
}

Expected<GroupTables> read_group(const Slot& slot, const Json& document, const std::string& name) {
  const auto side = document.find(to_string(slot.whose));
  if (side == document.end()) return identity_group(slot);
  const auto group = side->find(slot.side.name);
  if (group == side->end()) return identity_group(slot);
  if (group->is_object()) return read_object(slot, *group, name);
  auto pages = read_pages(*group, std::nullopt);
  if (!pages) return slot.refuse(name, pages.error(), std::nullopt);
  return shared_table(slot, std::move(*pages), name);
}

// Every name in the file is one that the plan knows.
Expected<void> check_names(const Plan& plan, const Json& document, const std::string& name) {
  if (!document.is_object())
    return fail(Code::parse, "{}expected {{\"prefill\": {{GROUP: [ids]}}, \"decode\": ...}}, found {}", name,
                document.type_name());
  for (const auto& [side, groups] : document.items()) {
    if (side != "prefill" && side != "decode") return fail(Code::parse, "{}'{}' is no side: prefill or decode", name, side);
    if (!groups.is_object())
      return fail(Code::parse, "{}{}: expected an object of groups, found {}", name, side, groups.type_name());
    for (const auto& entry : groups.items()) {
      const std::string& group = entry.key();
      const bool known =
          std::any_of(plan.groups().begin(), plan.groups().end(), [&](const GroupPlan& g) { return g.target->name == group; });
      if (known) continue;
      std::string names;
      for (const GroupPlan& g : plan.groups()) names += (names.empty() ? "" : ", ") + g.target->name;
      return fail(Code::parse, "{}{}: the plan has no group '{}': it has {}", name, side, group, names);
    }
  }
  return {};
}

}  // namespace

Expected<void> check_table_memory(const Plan& plan, std::int64_t tokens) {
  std::int64_t entries = 0;
  for (const GroupPlan& group : plan.groups()) {
    const Slot from{Whose::prefill, *group.source, tokens, plan.total()}, to{Whose::decode, *group.target, tokens, plan.total()};
    for (std::int32_t rank = 0; rank < from.ranks(); ++rank) entries += from.columns(Rank(rank));
    entries += to.most_columns();
  }
  const auto usable = read_memory().usable();
  const double needed = static_cast<double>(entries) * 1.25 * static_cast<double>(sizeof(PageId));
  if (usable && needed > static_cast<double>(*usable))
    return fail(Code::exhausted,
                "--tokens {}: page tables of {} entries take {}, but {} of memory are free: use fewer tokens or larger pages",
                tokens, count_text(entries), bytes_text(needed), bytes_text(static_cast<double>(*usable)));
  return {};
}

Expected<RequestTables> identity_tables(const Plan& plan, std::int64_t tokens) { return tables_by(plan, tokens, identity_group); }

Expected<RequestTables> random_tables(const Plan& plan, std::int64_t tokens, std::uint64_t seed) {
  return tables_by(plan, tokens, [&](const Slot& slot) -> Expected<GroupTables> {
    if (slot.whose == Whose::decode || slot.side.tokens.rule == TokenRule::value)
      return shared_table(slot, random_pages(slot, slot.most_columns(), seed_of(seed, slot, -1)));
    return table_per_rank(slot, [&](Rank rank) -> Expected<Pages> {
      return random_pages(slot, slot.columns(rank), seed_of(seed, slot, rank.value));
    });
  });
}

Expected<RequestTables> parse_tables(const Plan& plan, std::int64_t tokens, std::string_view json, const std::string& name) {
  const std::string prefix = name.empty() ? "" : name + ": ";
  Json document;
  try {
    document = Json::parse(json);
  } catch (const Json::exception& error) {
    return fail(Code::parse, "{}not JSON: {}", prefix, error.what());
  }
  if (auto ok = check_names(plan, document, prefix); !ok) return tl::unexpected(ok.error());
  return tables_by(plan, tokens, [&](const Slot& slot) { return read_group(slot, document, prefix); });
}

Expected<RequestTables> make_tables(const Plan& plan, std::int64_t tokens, const std::string& words) {
  if (words == "identity") return identity_tables(plan, tokens);
  constexpr std::string_view kRandom = "random:";
  if (words.rfind(kRandom, 0) == 0) {
    const std::string seed_text = words.substr(kRandom.size());
    std::uint64_t seed = 0;
    const auto [end, error] = std::from_chars(seed_text.data(), seed_text.data() + seed_text.size(), seed);
    if (error != std::errc() || end != seed_text.data() + seed_text.size())
      return fail(Code::parse, "--tables {}: '{}' is not a seed: a whole number below 2^64", words, seed_text);
    return random_tables(plan, tokens, seed);
  }
  const auto text = read_file(words);
  if (!text) {
    Error error = text.error();
    error.message = fmt::format("--tables: {} (or say identity, or random:SEED)", error.message);
    return tl::unexpected(std::move(error));
  }
  return parse_tables(plan, tokens, *text, words);
}

}  // namespace kvloom
