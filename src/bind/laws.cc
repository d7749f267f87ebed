#include "kvloom/bind/laws.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "kvloom/plan/laws.h"
#include "kvloom/plan/oracle.h"
#include "kvloom/plan/text.h"

namespace kvloom::laws {
namespace {

std::size_t index_in(const Side& side, const std::string& name) {
  std::size_t i = 0;
  while (side.groups()[i].name != name) ++i;
  return i;
}

// Tables of one side: `pages` gives the pages of a table of so many columns.
template <class Pages>
std::vector<std::vector<PageTable>> make_tables(const Plan& plan, const Side& side, std::int64_t total, PageTable::Use use,
                                                Pages pages) {
  const Oracle oracle(side, total);
  std::vector<std::vector<PageTable>> out;
  for (const GroupPlan& group : plan.groups()) {
    const std::size_t index = index_in(side, group.target->name);
    std::vector<PageTable>& tables = out.emplace_back();
    for (std::int32_t r = 0; r < side.ranks(); ++r) {
      if (r > 0 && oracle.by_value(index)) {  // one table names the pages of all
        tables.push_back(tables.front());
        continue;
      }
      const auto [ids, pool] = pages(oracle.columns(index, Rank(r)));
      tables.push_back(PageTable::make(ids, pool, use).value());
    }
  }
  return out;
}

// One byte of a target page, and what it is.
struct Wanted {
  std::int64_t token = -1;  // -1: nobody wants this byte written
  std::int32_t head = 0, plane = 0;
  std::int64_t byte = 0;
};

// The paths to one target rank of one group, bound, and the pages that they write.
class Landing {
 public:
  Landing(const Plan& plan, const RequestTables& tables, std::int32_t group, Rank target, TokenRange range)
      : plan_(plan),
        tables_(tables),
        group_(group),
        target_(target),
        range_(range),
        from_(plan.source(), length(plan, range)),
        to_(plan.target(), length(plan, range)),
        side_(*plan.groups()[static_cast<std::size_t>(group)].target),
        from_group_(index_in(plan.source(), side_.name)),
        to_group_(index_in(plan.target(), side_.name)) {}

  Expected<void> check() {
    std::map<std::vector<std::size_t>, std::int64_t> seen;  // layers that the same paths bring look the same
    for (std::int32_t s = 0; s < plan_.source().ranks(); ++s)
      if (auto ok = add_path(Rank(s)); !ok) return ok;
    for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(side_.layers.size()); ++layer) {
      std::vector<std::size_t> bringing;
      for (std::size_t i = 0; i < paths_.size(); ++i)
        if (times_in(std::span(&paths_[i].layers, 1), layer) != 0) bringing.push_back(i);
      const bool held = to_.holds_layer(to_group_, target_, side_.layers[static_cast<std::size_t>(layer)]);
      for (const std::size_t i : bringing)
        if (!from_.holds_layer(from_group_, paths_[i].source, side_.layers[static_cast<std::size_t>(layer)]))
          return refuse(paths_[i].source, fmt::format("layer {} is sent by a rank that has it not", layer));
      if (!held && bringing.empty()) continue;
      if (!held)
        return refuse(paths_[bringing.front()].source, fmt::format("layer {} is sent to a rank that wants it not", layer));
      if (!seen.emplace(bringing, layer).second) continue;
      if (auto ok = check_layer(bringing); !ok) return ok;
    }
    return {};
  }

 private:
  // The request's: where a rule cuts it, it is the plan's, and `range` may end before it.
  static std::int64_t length(const Plan& plan, TokenRange range) { return plan.total() == kUnbounded ? range.end : plan.total(); }

  tl::unexpected<Error> refuse(Rank source, const std::string& what) const {
    return fail(Code::invalid_argument, "bind: path {} -> {} of group {}, tokens [{}, {}): {}", source.value, target_.value,
                side_.name, range_.begin, range_.end, what);
  }

  const PageTable& source_table(Rank rank) const {
    return tables_.source[static_cast<std::size_t>(group_)][static_cast<std::size_t>(rank.value)];
  }
  const PageTable& target_table() const {
    return tables_.target[static_cast<std::size_t>(group_)][static_cast<std::size_t>(target_.value)];
  }
  static std::int64_t page_of(const Oracle& oracle, std::size_t group, Rank rank, std::int64_t token, const PageTable& table) {
    const auto column = static_cast<std::size_t>(oracle.spot(group, rank, token).column);
    return column < table.pages().size() ? table.pages()[column].value : -1;
  }

  Expected<void> add_path(Rank source) {
    const auto path = plan_.path(group_, source, target_);
    if (!path) return {};
    auto bound = bind(plan_, *path, source_table(source), target_table(), range_);
    if (!bound) return refuse(source, bound.error().message);
    const std::vector<Run> runs = drain(*bound, 64);
    bound->rewind();
    if (drain(*bound, 2) != runs) return refuse(source, "streaming: a buffer of 2 gives other runs than one of 64");
    bound->rewind();
    std::vector<Run> some(2);
    bound->next(some);
    bound->rewind();  // in the middle
    if (drain(*bound, 3) != runs) return refuse(source, "streaming: a buffer of 3 gives other runs than one of 64");
    Bytes sum;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      sum += run.total();
      if (run.count < 1 || run.bytes <= Bytes(0) ||
          (run.count == 1 && (run.source_step != Bytes(0) || run.target_step != Bytes(0))))
        return refuse(source, fmt::format("run {} has {} pieces of {} B", i, run.count, run.bytes.value));
      if (i > 0 && joinable(runs[i - 1], run))
        return refuse(source, fmt::format("fewest: runs {} and {} of {} could be one", i - 1, i, runs.size()));
    }
    if (sum != bound->bytes())
      return refuse(source, fmt::format("streaming: bytes() is {}, its runs have {}", bound->bytes().value, sum.value));
    paths_.push_back(*path);
    runs_.push_back(runs);
    return {};
  }

  // All bytes of the target's pages: which of them is wanted, and as what.
  std::vector<Wanted> wanted_bytes(std::int64_t& count) const {
    std::vector<Wanted> out(static_cast<std::size_t>(extent(side_, target_table())));
    const std::int64_t end = to_.end_wanted(to_group_, range_.end);
    for (std::int64_t token = to_.first_wanted(to_group_, range_.begin, range_.end); token < end; ++token) {
      const std::int64_t page = page_of(to_, to_group_, target_, token, target_table());
      if (!to_.holds_token(to_group_, target_, token, page)) continue;
      for (std::int32_t head = 0; head < side_.heads; ++head)
        for (std::int32_t plane = 0;
             to_.holds_head(to_group_, target_, head) && plane < static_cast<std::int32_t>(side_.planes.size()); ++plane)
          for (std::int64_t byte = 0; byte < side_.planes[static_cast<std::size_t>(plane)].bytes; ++byte) {
            const std::int64_t at = to_.address(to_group_, target_, token, head, static_cast<std::size_t>(plane), byte, page);
            out[static_cast<std::size_t>(at)] = {token, head, plane, byte};
            ++count;
          }
    }
    return out;
  }

  static std::int64_t extent(const GroupSide& side, const PageTable& table) {
    std::int64_t bytes = table.pool_pages() * side.layout.page_stride();
    for (const PlaneLayout& plane : side.layout.planes())
      bytes = std::max(bytes, plane.offset + table.pool_pages() * side.layout.page_stride());
    return bytes;
  }

  Expected<void> check_layer(const std::vector<std::size_t>& bringing) const {
    std::int64_t left = 0;
    std::vector<Wanted> bytes = wanted_bytes(left);
    for (const std::size_t i : bringing)
      for (const Run& run : runs_[i])
        for (std::int64_t piece = 0; piece < run.count; ++piece)
          for (std::int64_t b = 0; b < run.bytes.value; ++b) {
            const std::int64_t from = run.source_offset.value + piece * run.source_step.value + b;
            const std::int64_t to = run.target_offset.value + piece * run.target_step.value + b;
            if (auto ok = check_byte(paths_[i].source, bytes, from, to); !ok) return ok;
            --left;
          }
    if (left != 0)
      return refuse(bringing.empty() ? Rank(-1) : paths_[bringing.front()].source,
                    fmt::format("{} wanted bytes are not written", left));
    return {};
  }

  Expected<void> check_byte(Rank source, std::vector<Wanted>& bytes, std::int64_t from, std::int64_t to) const {
    if (to < 0 || to >= static_cast<std::int64_t>(bytes.size()))
      return refuse(source, fmt::format("writes byte {} of {}", to, bytes.size()));
    Wanted& wanted = bytes[static_cast<std::size_t>(to)];
    if (wanted.token < 0) return refuse(source, fmt::format("byte {} is written twice, or not wanted", to));
    const std::int64_t page = page_of(from_, from_group_, source, wanted.token, source_table(source));
    const auto what = [&] {
      return fmt::format("token {} head {} plane {} byte {}", wanted.token, wanted.head, wanted.plane, wanted.byte);
    };
    if (!from_.holds_token(from_group_, source, wanted.token, page) || !from_.holds_head(from_group_, source, wanted.head))
      return refuse(source, what() + " is sent by a rank that has it not");
    const std::int64_t right =
        from_.address(from_group_, source, wanted.token, wanted.head, static_cast<std::size_t>(wanted.plane), wanted.byte, page);
    if (from != right) return refuse(source, fmt::format("{} is read at byte {}, but stands at {}", what(), from, right));
    wanted.token = -1;
    return {};
  }

  const Plan& plan_;
  const RequestTables& tables_;
  std::int32_t group_;
  Rank target_;
  TokenRange range_;
  Oracle from_, to_;
  const GroupSide& side_;
  std::size_t from_group_, to_group_;
  std::vector<Path> paths_;
  std::vector<std::vector<Run>> runs_;  // [paths]
};

}  // namespace

RequestTables random_tables(const Plan& plan, std::int64_t total, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pages = [&](std::int64_t columns) {
    std::vector<PageId> ids;
    const std::int64_t pool = columns + 1 + static_cast<std::int64_t>(random() % 5);
    for (std::int64_t page = 0; page < pool; ++page) ids.emplace_back(page);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(static_cast<std::size_t>(columns));
    return std::pair(ids, pool);
  };
  return {make_tables(plan, plan.source(), total, PageTable::Use::source, pages),
          make_tables(plan, plan.target(), total, PageTable::Use::target, pages)};
}

RequestTables identity_tables(const Plan& plan, std::int64_t total) {
  const auto pages = [](std::int64_t columns) {
    std::vector<PageId> ids;
    for (std::int64_t page = 0; page < columns; ++page) ids.emplace_back(page);
    return std::pair(ids, columns);
  };
  return {make_tables(plan, plan.source(), total, PageTable::Use::source, pages),
          make_tables(plan, plan.target(), total, PageTable::Use::target, pages)};
}

std::vector<Run> drain(BoundPath& path, std::size_t room) {
  std::vector<Run> buffer(room), out;
  while (const std::size_t n = path.next(buffer))
    out.insert(out.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(n));
  return out;
}

bool joinable(const Run& a, const Run& b) {
  if (a.count == 1 && b.count == 1 && b.source_offset == a.source_offset + a.bytes &&
      b.target_offset == a.target_offset + a.bytes)
    return true;
  if (a.bytes != b.bytes) return false;
  const Bytes source_gap = b.source_offset - (a.source_offset + a.source_step * (a.count - 1));
  const Bytes target_gap = b.target_offset - (a.target_offset + a.target_step * (a.count - 1));
  const auto steps_by_gap = [&](const Run& run) {
    return run.count == 1 || (run.source_step == source_gap && run.target_step == target_gap);
  };
  return steps_by_gap(a) && steps_by_gap(b);
}

Expected<void> check_bind(const Plan& plan, const RequestTables& tables, TokenRange range) {
  const std::string before = to_string(plan);
  for (std::int32_t group = 0; group < static_cast<std::int32_t>(plan.groups().size()); ++group)
    for (std::int32_t t = 0; t < plan.target().ranks(); ++t)
      if (auto ok = Landing(plan, tables, group, Rank(t), range).check(); !ok) return ok;
  if (to_string(plan) != before) return fail(Code::invalid_argument, "address-free: binding changed the plan");
  return {};
}

Expected<void> check_template(const PageLayout& source, const PageLayout& target, const HeadSlice& heads,
                              const TokenPiece& piece) {
  using Pair = std::pair<std::int64_t, std::int64_t>;  // source byte, target byte
  std::vector<Pair> wanted, moved;
  for (std::int64_t i = 0; i < piece.count; ++i)
    for (std::int64_t token = 0; token < piece.length; ++token)
      for (std::int64_t head = 0; head < heads.count; ++head)
        for (std::size_t plane = 0; plane < source.planes().size(); ++plane)
          for (std::int64_t byte = 0; byte < source.planes()[plane].bytes; ++byte)
            wanted.emplace_back(
                source.planes()[plane].at(piece.source_slot + i * piece.source_step + token, heads.source_first + head, byte),
                target.planes()[plane].at(piece.target_slot + i * piece.target_step + token, heads.target_first + head, byte));
  std::vector<Run> runs;
  expand(source, target, heads, piece, runs);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (i > 0 && run.source_offset <= runs[i - 1].source_offset)
      return fail(Code::invalid_argument, "template: run {} begins at source byte {}, not after the one before", i,
                  run.source_offset.value);
    for (std::int64_t n = 0; n < run.count; ++n)
      for (std::int64_t b = 0; b < run.bytes.value; ++b)
        moved.emplace_back(run.source_offset.value + n * run.source_step.value + b,
                           run.target_offset.value + n * run.target_step.value + b);
  }
  std::sort(wanted.begin(), wanted.end());
  std::sort(moved.begin(), moved.end());
  if (moved != wanted)
    return fail(Code::invalid_argument, "template: {} bytes moved by {} runs, {} wanted, or not the same ones", moved.size(),
                runs.size(), wanted.size());
  return {};
}

}  // namespace kvloom::laws
