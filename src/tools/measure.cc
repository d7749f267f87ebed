#include "kvloom/tools/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "kvloom/bind/bind.h"
#include "kvloom/tools/print.h"

namespace kvloom {
namespace {

const Place& place_of(const GroupSide& side, Rank rank) { return side.places[static_cast<std::size_t>(rank.value)]; }

// Columns of the target's table that a path writes: families step evenly in the target's positions, so most are found without
// a walk.
class TouchedColumns {
 public:
  TouchedColumns(const GroupSide& side, const StridedSet& positions, std::size_t columns)
      : page_(side.layout.page_tokens()), positions_(positions), touched_(columns, false) {}

  void add(const StridedSet& family) {
    const std::int64_t start = family.start(), at = positions_.count_below(start);
    const std::int64_t step = family.count() > 1 ? positions_.count_below(start + family.stride()) - at : 0;
    const std::int64_t inner = family.flat() ? 0 : positions_.count_below(start + family.inner_stride()) - at;
    const std::int64_t block =
        (family.inner_count() - 1) * inner + family.length();  // positions from a block's first to its last
    const bool dense = inner <= page_;
    if (dense && step <= page_) return mark(at, (family.count() - 1) * step + block);
    for (std::int64_t k = 0; k < family.count(); ++k) {
      if (dense) {
        mark(at + k * step, block);
        continue;
      }
      for (std::int64_t i = 0; i < family.inner_count(); ++i) mark(at + k * step + i * inner, family.length());
    }
  }
  const std::vector<bool>& touched() const { return touched_; }

 private:
  void mark(std::int64_t position, std::int64_t length) {
    for (std::int64_t column = position / page_; column <= (position + length - 1) / page_; ++column)
      touched_[static_cast<std::size_t>(column)] = true;
  }

  std::int64_t page_;
  const StridedSet& positions_;
  std::vector<bool> touched_;
};

std::int64_t count_pages(const Plan& plan, const Path& path, const PageTable& table, TokenRange wanted_range) {
  const GroupSide& side = *plan.groups()[static_cast<std::size_t>(path.group)].target;
  const Place& at = place_of(side, path.target);
  const StridedSet positions = side.tokens.part(at.tokens, plan.total());
  TouchedColumns columns(side, positions, table.pages().size());
  for (const StridedSet& family : path.tokens)
    for (const StridedSet& part : clip(family, wanted_range.begin, wanted_range.end)) columns.add(part);
  std::int64_t pages = 0;
  for (std::size_t i = 0; i < table.pages().size(); ++i) {
    const bool mine = side.tokens.rule != TokenRule::value || table.pages()[i].value % side.tokens.parts == at.tokens;
    if (columns.touched()[i] && mine) ++pages;
  }
  return pages;
}

Expected<Moved> count_moved(const Plan& plan, const Path& path, const RequestTables& tables, TokenRange range) {
  const auto group = static_cast<std::size_t>(path.group);
  const PageTable &source = tables.prefill[group].of(path.source), &target = tables.decode[group].of(path.target);
  auto bound = bind(plan, path, source, target, range);
  if (!bound) return tl::unexpected(bound.error());
  Moved moved;
  std::array<Run, 256> runs;
  while (const std::size_t n = bound->next(runs)) {
    moved.runs += static_cast<std::int64_t>(n);
    for (std::size_t i = 0; i < n; ++i) moved.pieces += runs[i].count;
  }
  const std::int64_t layers = path.layers.size();
  moved.runs *= layers;
  moved.pieces *= layers;
  moved.bytes = bound->bytes().value * layers;
  moved.tokens = bound->bytes().value / path.row_bytes;
  moved.pages = count_pages(plan, path, target, wanted(*plan.groups()[group].target, range));
  return moved;
}

void add(MeasuredPath& path, MeasuredGroup group) {
  std::vector<LayerId> layers;
  std::set_union(path.layers.begin(), path.layers.end(), group.layers.begin(), group.layers.end(), std::back_inserter(layers));
  path.layers = std::move(layers);
  path.moved.tokens = std::max(path.moved.tokens, group.moved.tokens);
  path.moved.pages = std::max(path.moved.pages, group.moved.pages);
  path.moved.bytes += group.moved.bytes;
  path.moved.runs += group.moved.runs;
  path.moved.pieces += group.moved.pieces;
  path.groups.push_back(std::move(group));
}

}  // namespace

Expected<std::vector<MeasuredPath>> measure(const Plan& plan, const RequestTables* tables, TokenRange range) {
  std::vector<MeasuredPath> out;
  for (const Path& path : plan.paths()) {
    MeasuredGroup group{path, plan.layer_ids(path), {}};
    if (tables != nullptr) {
      auto moved = count_moved(plan, path, *tables, range);
      if (!moved) return tl::unexpected(moved.error());
      if (moved->bytes == 0) continue;  // this request has nothing for that path
      group.moved = *moved;
    }
    if (out.empty() || out.back().source != path.source || out.back().target != path.target)
      out.push_back({path.source, path.target, {}, {}, {}});
    add(out.back(), std::move(group));
  }
  return out;
}

Bytes naive_bytes(const Plan& plan, TokenRange range) {
  Bytes sum;
  for (const GroupPlan& group : plan.groups()) {
    const GroupSide& side = *group.target;
    const TokenRange want = wanted(side, range);
    for (const Place& at : side.places) {
      if (!at.holds) continue;
      std::int64_t row = 0;
      for (const PlaneShape& plane : side.planes) row += plane.bytes;
      sum += Bytes((want.end - want.begin) * row * side.layer_parts[static_cast<std::size_t>(at.layers)].size() *
                   side.head_parts[static_cast<std::size_t>(at.heads)].size());
    }
  }
  return sum;
}

std::string tokens_text(const Plan& plan, const Path& path, TokenRange range) {
  const GroupPlan& group = plan.groups()[static_cast<std::size_t>(path.group)];
  const TokenRange want = wanted(*group.target, range);
  std::vector<StridedSet> sets;
  for (const StridedSet& family : path.tokens) {
    if (want.end == kUnbounded && want.begin == 0) {
      sets.push_back(family);
      continue;
    }
    for (const StridedSet& part : clip(family, want.begin, want.end)) sets.push_back(part);
  }
  std::string text = to_string(sets), owners;
  const auto add_owner = [&](const char* side_name, const GroupSide& side, const GroupSide& other, Rank rank) {
    if (side.tokens.rule != TokenRule::value) return;
    if (!owners.empty()) owners += " & ";
    if (other.tokens.rule == TokenRule::value) owners += fmt::format("{} ", side_name);
    owners += fmt::format("page%{}={}", side.tokens.parts, place_of(side, rank).tokens);
  };
  add_owner("prefill", *group.source, *group.target, path.source);
  add_owner("decode", *group.target, *group.source, path.target);
  return owners.empty() ? text : text + " & " + owners;
}

std::string heads_text(const GroupSide& side, const StridedSet& heads) {
  if (heads.size() == side.heads) return "all";
  return heads.size() == 1 ? fmt::format("{}", heads.start()) : fmt::format("{}-{}", heads.start(), heads.end() - 1);
}

// ---- for people ----

namespace {
std::string mean_bytes(std::int64_t bytes, std::int64_t of) {
  return of == 0 ? "-" : bytes_text(static_cast<double>(bytes) / static_cast<double>(of));
}
}  // namespace

void print_paths(std::FILE* out, const std::vector<MeasuredPath>& paths, std::size_t most) {
  constexpr auto kAlignLeft = TextTable::Align::left;
  TextTable table(
      {{"source"}, {"target"}, {"layers", kAlignLeft}, {"tokens"}, {"pages"}, {"bytes"}, {"runs"}, {"a run"}, {"a piece"}});
  for (std::size_t i = 0; i < std::min(most, paths.size()); ++i) {
    const MeasuredPath& path = paths[i];
    table.add({fmt::format("{}", path.source.value), fmt::format("{}", path.target.value), ids_text(path.layers),
               count_text(path.moved.tokens), count_text(path.moved.pages), bytes_text(Bytes(path.moved.bytes)),
               count_text(path.moved.runs), mean_bytes(path.moved.bytes, path.moved.runs),
               mean_bytes(path.moved.bytes, path.moved.pieces)});
  }
  table.print(out);
  if (paths.size() > most) fmt::print(out, "... and {} more paths\n", count_text(static_cast<std::int64_t>(paths.size() - most)));
}

void print_balance(std::FILE* out, const Plan& plan, const std::vector<MeasuredPath>& paths) {
  std::vector<std::int64_t> sent(static_cast<std::size_t>(plan.source().ranks())),
      received(static_cast<std::size_t>(plan.target().ranks()));
  for (const MeasuredPath& path : paths) {
    sent[static_cast<std::size_t>(path.source.value)] += path.moved.bytes;
    received[static_cast<std::size_t>(path.target.value)] += path.moved.bytes;
  }
  const auto line = [&](const char* side, const char* does, const std::vector<std::int64_t>& bytes) {
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    const double mean =
        static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})) / static_cast<double>(bytes.size());
    fmt::print(out, "{:<8} {:>3} ranks, each {} {} to {}, {} in the mean", side, bytes.size(), does, bytes_text(Bytes(*least)),
               bytes_text(Bytes(*most)), bytes_text(mean));
    if (mean > 0) fmt::print(out, " (the fullest: {:.2f} of the mean)", static_cast<double>(*most) / mean);
    fmt::print(out, "\n");
  };
  line("prefill", "sends", sent);
  line("decode", "gets", received);
}

}  // namespace kvloom
