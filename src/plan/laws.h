// laws.h: what is true of every plan, as checkers that any test may run on any plan.  Stage: compile.
// Each holds the plan against the element-by-element oracle (plan/oracle.h), which shares nothing with compile.  An error says
// the first element for which the law is broken.
// total       every wanted element of every target rank is on exactly one path
// faithful    what a path carries, its source rank holds and its target rank wants
// in bounds   a path's layers, heads and tokens exist; its families ascend and are disjoint
// conserving  the bytes of all paths are the bytes wanted
// canonical   equal sides give equal plans
// reversible  a plan the other way exists too, and where no side has replicas it is the same boxes, mirrored
// balanced    replicas of one source differ by at most one (consumer, layer)
// A plan is address-free by its type: no page table goes in. bind/laws.h checks that none comes to matter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom::laws {

// A request that a law is checked on.  Where tokens are too many to enumerate, `tokens` says which to look at.
struct Request {
  std::int64_t total = 1;
  std::int64_t prefix = 0;
  std::vector<std::int64_t> tokens;  // below total
};

// Every token of a request of `total`.
Request whole(std::int64_t total, std::int64_t prefix = 0);
// The tokens around what could go wrong: both ends, the prefix, and the places given; for totals too large to enumerate.
Request sampled(std::int64_t total, std::int64_t prefix, std::span<const std::int64_t> near);

// @pre for all: the plan is good for request.total, and that is the total that it was compiled for if any
Expected<void> check_total(const Plan& plan, const Request& request);
Expected<void> check_faithful(const Plan& plan, const Request& request);
Expected<void> check_in_bounds(const Plan& plan);
Expected<void> check_conserving(const Plan& plan, const Request& request);
Expected<void> check_canonical(const Plan& plan);
Expected<void> check_reversible(const Plan& plan, const Request& request);
Expected<void> check_balanced(const Plan& plan);
// All of them.
Expected<void> check_plan(const Plan& plan, const Request& request);

// Which virtual page a plan's checkers suppose in a column, where ownership is by page value.
std::int64_t supposed_page(std::int64_t column);

// Members of a set by walking it.  @pre a bounded set with few members
std::vector<std::int64_t> members(const StridedSet& set);
// How often the families name the token, by division alone.
std::int64_t times_in(std::span<const StridedSet> families, std::int64_t token);

}  // namespace kvloom::laws
