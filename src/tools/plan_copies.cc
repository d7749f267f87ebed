#include "kvloom/tools/plan_copies.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "kvloom/bind/bind.h"
#include "kvloom/tools/cuda_gpus.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/tables.h"

namespace kvloom {
namespace {

constexpr std::size_t kMostShapes = 3;      // of a path that are told, those with the most bytes
constexpr std::size_t kMostPathsNamed = 4;  // of those with the same answer

struct Order {
  const char* name;
  const char* tables;  // as --tables has it
};
constexpr std::array kOrders = {Order{"pages in order", "identity"}, Order{"pages in no order", "random:1"}};

// Runs that are told as one: as large, and copied by the same way. Their steps may differ: in no order any two pages are a progression, of steps
// of one sign, which a 2-D copy could take, or of two.
struct RunShape {
  Run run;
  std::set<std::string> whys;  // the first one has the figures, where any run has
  std::int64_t runs = 0, bytes = 0;
};

std::string shape_text(const RunShape& shape) {
  const std::string pieces = shape.run.count == 1
                                 ? fmt::format("{} B", count_text(shape.run.bytes.value))
                                 : fmt::format("{} x {} B", count_text(shape.run.count), count_text(shape.run.bytes.value));
  return fmt::format("{} run{} of {}", count_text(shape.runs), shape.runs == 1 ? "" : "s", pieces);
}

std::string why_text(const RunShape& shape) {
  return fmt::format("{}{}", *shape.whys.begin(), shape.whys.size() > 1 ? ", where the steps allow a 2-D copy" : "");
}

// Of one layer, those with the most bytes first.
Expected<std::vector<RunShape>> run_shapes(const Plan& plan, const Path& path, const RequestTables& tables, TokenRange range) {
  const auto group = static_cast<std::size_t>(path.group);
  auto bound = bind(plan, path, tables.prefill[group].of(path.source), tables.decode[group].of(path.target), range);
  if (!bound) return tl::unexpected(bound.error());
  std::map<std::tuple<std::int64_t, std::int64_t, std::string>, RunShape> shapes;  // by piece, count, way
  std::array<Run, 256> runs;
  while (const std::size_t n = bound->next(runs))
    for (std::size_t i = 0; i < n; ++i) {
      const Run& run = runs[i];
      auto way = explain_gpu_copy(run);
      if (!way) return tl::unexpected(way.error());
      RunShape& shape = shapes[{run.bytes.value, run.count, way->substr(0, way->find(':'))}];
      shape.run = run;
      shape.whys.insert(std::move(*way));
      ++shape.runs;
      shape.bytes += run.total().value;
    }
  std::vector<RunShape> out;
  for (const auto& [key, shape] : shapes) out.push_back(shape);
  std::stable_sort(out.begin(), out.end(), [](const RunShape& a, const RunShape& b) { return a.bytes > b.bytes; });
  return out;
}

Expected<std::string> path_text(const Plan& plan, const Path& path, const std::vector<RequestTables>& tables, TokenRange range) {
  std::string out;
  for (std::size_t i = 0; i < kOrders.size(); ++i) {
    const auto shapes = run_shapes(plan, path, tables[i], range);
    if (!shapes) return tl::unexpected(shapes.error());
    for (const RunShape& shape : std::span(*shapes).first(std::min(shapes->size(), kMostShapes)))
      out += fmt::format("    {}: {}: {}\n", kOrders[i].name, shape_text(shape), why_text(shape));
    if (shapes->size() > kMostShapes)
      out += fmt::format("    {}: and {} other shapes of fewer bytes\n", kOrders[i].name, shapes->size() - kMostShapes);
    if (shapes->empty()) out += fmt::format("    {}: nothing of these tokens\n", kOrders[i].name);
  }
  return out;
}

std::string paths_text(const std::vector<std::string>& names) {
  const std::span some = std::span(names).first(std::min(names.size(), kMostPathsNamed));
  const std::string list = fmt::format("{}", fmt::join(some, ", "));
  return names.size() == some.size() ? list : fmt::format("{} and {} more", list, names.size() - some.size());
}

}  // namespace

Expected<std::string> explain_copies(const Plan& plan, std::int64_t tokens, TokenRange range,
                                     const std::optional<std::pair<Rank, Rank>>& only) {
  std::vector<RequestTables> tables;
  for (const Order& order : kOrders) {
    auto made = make_tables(plan, tokens, order.tables);
    if (!made) return tl::unexpected(made.error());
    tables.push_back(std::move(*made));
  }
  std::vector<std::pair<std::string, std::vector<std::string>>> answers;  // and the paths that have each
  for (const Path& path : plan.paths()) {
    if (only && *only != std::pair(path.source, path.target)) continue;
    auto text = path_text(plan, path, tables, range);
    if (!text) return tl::unexpected(text.error());
    const GroupPlan& group = plan.groups()[static_cast<std::size_t>(path.group)];
    const auto at = std::find_if(answers.begin(), answers.end(), [&](const auto& answer) { return answer.first == *text; });
    auto& names = at != answers.end() ? at->second : answers.emplace_back(std::move(*text), std::vector<std::string>()).second;
    names.push_back(fmt::format("{}:{} {}", path.source.value, path.target.value, group.target->name));
  }
  std::string out = fmt::format("By cuda, a layer of a request of {} tokens, each run alone:\n", count_text(tokens));
  for (const auto& [text, names] : answers) out += fmt::format("  {}\n{}", paths_text(names), text);
  if (answers.empty()) out += "  nothing goes there\n";
  return out;
}

}  // namespace kvloom
