// measure.h: what each path of a plan moves for one request, counted.  Stage: tools.
// For the tables, JSON and pictures of plan and run.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"
#include "kvloom/tools/tables.h"

namespace kvloom {

// Counts of all layers together, but `tokens` and `pages`, which are those of each layer.
struct Moved {
  std::int64_t tokens = 0;
  std::int64_t pages = 0;  // of the target
  std::int64_t bytes = 0;
  std::int64_t runs = 0;
  std::int64_t pieces = 0;  // a run of count n has n
};

struct MeasuredGroup {
  Path path;  // lives as long as the plan
  std::vector<LayerId> layers;
  Moved moved;  // zeros where the request's length is not known
};

// Everything from one source rank to one target rank.
struct MeasuredPath {
  Rank source, target;
  std::vector<LayerId> layers;  // of all groups
  Moved moved;                  // tokens and pages: of the group that has most
  std::vector<MeasuredGroup> groups;
};

// By source, then target. Without tables: which paths there are, counts 0.  @cost O(pages) a path with tables
Expected<std::vector<MeasuredPath>> measure(const Plan& plan, const RequestTables* tables, TokenRange range);

// If every decode rank were sent all tokens of the layers and heads that it holds, to keep its part of them.
Bytes naive_bytes(const Plan& plan, TokenRange range);

// The tokens of a path in `range`, as sets: "1024+64/256*60", and "page%4=1" where a side owns tokens by the value of their page.
std::string tokens_text(const Plan& plan, const Path& path, TokenRange range);
// "0-9", or "all" where it is all heads of the group.
std::string heads_text(const GroupSide& side, const StridedSet& heads);

// Source, target, layers, tokens, pages, bytes, runs, bytes per run; the first `most` paths, and how many more there are.
void print_paths(std::FILE* out, const std::vector<MeasuredPath>& paths, std::size_t most);
// What each rank sends and receives: least, most and mean of each side.
void print_balance(std::FILE* out, const Plan& plan, const std::vector<MeasuredPath>& paths);

}  // namespace kvloom
