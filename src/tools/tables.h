// tables.h: the page tables of one request, for `plan --runs` and `run`.  Stage: tools.  Values only; the caller reads the file.
// In a file: {"prefill": {GROUP: PAGES, ...}, "decode": {GROUP: PAGES, ...}}, where PAGES is a list of page ids (null: no page)
// that all ranks of the side share, or an object of rank to list, or {"pages": list}; objects may say "pool": N, the pages of a
// rank's pool. Else a pool ends after the largest id that the table names. A side or group that is not named has the identity:
// column i is page i.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/page_table.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

// Columns that hold `tokens` tokens of the request on `rank`. Rule `value`: those of all ranks. A state takes one.
// 0: the rank has nothing.
std::int64_t columns_needed(const GroupSide& side, Rank rank, std::int64_t tokens, std::int64_t total);

// One group's tables on one side: ranks that share a table share the object.
class GroupTables {
 public:
  GroupTables() = default;
  GroupTables(std::vector<PageTable> tables, std::vector<std::size_t> of_rank)
      : tables_(std::move(tables)), of_rank_(std::move(of_rank)) {}
  const PageTable& of(Rank rank) const { return tables_[of_rank_[static_cast<std::size_t>(rank.value)]]; }

 private:
  std::vector<PageTable> tables_;
  std::vector<std::size_t> of_rank_;  // [ranks]
};

struct RequestTables {
  std::vector<GroupTables> prefill, decode;  // [plan groups]
};

// @error exhausted: more entries than this machine's memory would take, said before any is made
Expected<void> check_table_memory(const Plan& plan, std::int64_t tokens);

// All three: `tokens` is the request's length; tables hold [0, tokens).
Expected<RequestTables> identity_tables(const Plan& plan, std::int64_t tokens);
// Every prefill rank has its own random pages, decode ranks share theirs (as ranks of one engine do); pools are an eighth larger
// than needed. Rule `value` shares one table on either side: ids are virtual there. The same seed gives the same tables everywhere.
Expected<RequestTables> random_tables(const Plan& plan, std::int64_t tokens, std::uint64_t seed);
// `name` stands before every error.
Expected<RequestTables> parse_tables(const Plan& plan, std::int64_t tokens, std::string_view json, const std::string& name);

// The words of --tables: "identity", "random:SEED", or the name of a file.
Expected<RequestTables> make_tables(const Plan& plan, std::int64_t tokens, const std::string& words);

}  // namespace kvloom
