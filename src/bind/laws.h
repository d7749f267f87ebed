// laws.h: what is true of every binding, as checkers that any test may run on any plan with any page tables.  Stage: bind.
// The runs are taken apart byte by byte and held against the element-by-element oracle (plan/oracle.h).  An error says the first
// byte for which a law is broken.
// bind          each wanted byte of each target page is written once, from the source byte of the same element; no other byte is
// streaming     next() gives the same runs into a buffer of two as into a large one, and after rewind(); bytes() is their sum
// fewest        no two runs that follow each other could be one run
// template      the runs of a piece of tokens are its bytes, each once
// address-free  no binding changes the plan
#pragma once

#include <cstdint>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/bind.h"
#include "kvloom/bind/page_table.h"
#include "kvloom/plan/plan.h"

namespace kvloom::laws {

// One request's page tables.
struct RequestTables {
  std::vector<std::vector<PageTable>> source, target;  // [groups of the plan, ranks of the side]
};

// Random pages of pools that have some more pages than needed.  Ranks that take turns by page value share one table.
RequestTables random_tables(const Plan& plan, std::int64_t total, std::uint64_t seed);
// Column c is page c.
RequestTables identity_tables(const Plan& plan, std::int64_t total);

// All laws but template, for all paths.  @pre few bytes; `tables` reach to range.end
Expected<void> check_bind(const Plan& plan, const RequestTables& tables, TokenRange range);
Expected<void> check_template(const PageLayout& source, const PageLayout& target, const HeadSlice& heads,
                              const TokenPiece& piece);

// All runs that are left, through a buffer of `room`.  @pre room >= 2
std::vector<Run> drain(BoundPath& path, std::size_t room);
// Two runs that follow each other and could be one.
bool joinable(const Run& a, const Run& b);

}  // namespace kvloom::laws
