#include "kvloom/tools/plan_measure.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <span>

#include "kvloom/bind/bind.h"
#include "kvloom/landing/checksum.h"
#include "kvloom/plan/compile.h"
#include "kvloom/plan/wire.h"
#include "kvloom/tools/run_control.h"

namespace kvloom {
namespace {

constexpr std::int64_t kMillion = 1'000'000;

using SharedSide = std::shared_ptr<const Side>;

CacheShape glm() {
  std::vector<LayerId> all, indexed = {LayerId(0), LayerId(1), LayerId(2)};
  for (std::int32_t l = 0; l < 78; ++l) all.emplace_back(l);
  for (std::int32_t l = 6; l < 78; l += 4) indexed.emplace_back(l);
  const std::vector<PlaneShape> latent = {{"latent", 576, 1}}, index = {{"key", 128, 1}, {"scale", 4, 4}};
  return CacheShape::make("glm-5.2", 78,
                          {{"latent", GroupKind::paged, all, 1, latent, {}, ""},
                           {"index_k", GroupKind::paged, indexed, 1, index, {}, ""},
                           {"draft", GroupKind::paged, {LayerId(78)}, 1, latent, {}, ""},
                           {"draft_index_k", GroupKind::paged, {LayerId(78)}, 1, index, {}, ""}})
      .value();
}

Expected<SharedSide> side_of(const std::string& words) {
  auto sharding = Sharding::parse(words);
  if (!sharding) return tl::unexpected(sharding.error());
  auto side = Side::make(glm(), *sharding);
  if (!side) return tl::unexpected(side.error());
  return std::make_shared<const Side>(std::move(*side));
}

// Makes the compiler believe that somebody reads them.
void keep(std::span<Run> runs) { asm volatile("" : : "r"(runs.data()) : "memory"); }

// Nanoseconds of one call of `work`, of each of `repeats` rounds.
template <class Work>
std::vector<double> times_of(int repeats, int calls, Work work) {
  std::vector<double> rounds;
  for (int r = 0; r < repeats; ++r) {
    const std::int64_t begin = now_ns();
    for (int c = 0; c < calls; ++c) work();
    rounds.push_back(static_cast<double>(now_ns() - begin) / calls);
  }
  return rounds;
}

template <class Work>
double time_of(int repeats, int calls, Work work) {
  return median(times_of(repeats, calls, work));
}

class PlanBench {
 public:
  explicit PlanBench(int repeats) : repeats_(repeats) {}

  Expected<std::vector<BenchRow>> run() {
    for (const auto& ok :
         {compile_of("compile 8 x 4", "cp=8:layers", "dcp=4", kUnbounded, 10),
          compile_of("compile 8 x 4, 1k tokens", "cp=8:layers", "dcp=4", 1000, 10),
          compile_of("compile 8 x 4, 1M tokens", "cp=8:layers", "dcp=4", kMillion, 10),
          compile_of("compile 64 x 64", "cp=64:layers", "dcp=64", kUnbounded, 100),
          compile_of("compile 8 x 4, zigzag of 1M tokens", "cp=8:zigzag", "dcp=4", kMillion, 0),
          compile_of("compile 64 x 64, tokens cut on both sides", "cp=64:interleave=64", "dcp=64:stripe=16", kUnbounded, 0),
          wire_of(), bind_of("bind", "dcp=4", 2), bind_of("bind, stripe=1", "dcp=4:stripe=1", 0),
          bind_of("bind, pages of 64 to 16", "dcp=4,page=16", 0), checksum_of()})
      if (!ok) return tl::unexpected(ok.error());
    return rows_;
  }

 private:
  Expected<void> compile_of(const char* name, const char* prefill, const char* decode, std::int64_t total, double goal_us) {
    const auto from = side_of(prefill), to = side_of(decode);
    if (!from) return tl::unexpected(from.error());
    if (!to) return tl::unexpected(to.error());
    if (auto once = compile(*from, *to, total); !once) return tl::unexpected(once.error());
    const double ns = time_of(repeats_, 20, [&] { std::ignore = compile(*from, *to, total); });
    rows_.push_back({name, ns / 1000, "us", goal_us, true,
                     fmt::format("{} -> {}, 4 groups, proof of exact cover included", prefill, decode)});
    return {};
  }

  Expected<void> wire_of() {
    const auto from = side_of("cp=8:layers"), to = side_of("dcp=4");
    if (!from) return tl::unexpected(from.error());
    if (!to) return tl::unexpected(to.error());
    const auto plan = compile(*from, *to);
    if (!plan) return tl::unexpected(plan.error());
    rows_.push_back(
        {"plan 8 x 4 on the wire", static_cast<double>(encode(*plan).size()), "B", 4096, true, "cp=8:layers -> dcp=4, 4 groups"});
    return {};
  }

  static PageTable random_table(std::int64_t pages, PageTable::Use use, std::mt19937_64& random) {
    std::vector<PageId> ids;
    for (std::int64_t i = 0; i < pages; ++i) ids.emplace_back(i);
    std::shuffle(ids.begin(), ids.end(), random);
    return PageTable::make(std::move(ids), pages, use).value();
  }

  // What bind is beside: a loop over the same tables that writes one run for each page, and looks at nothing.
  BenchRow plain_loop(const std::vector<PageTable>& sources, const std::vector<PageTable>& targets, std::span<Run> runs) const {
    constexpr std::int64_t kPage = 64 * 576;
    std::int64_t pages = 0;
    const double ns = time_of(10 * repeats_, 1, [&] {
      pages = 0;
      for (const PageTable& source : sources)
        for (std::size_t t = 0; t < targets.size(); ++t) {
          const PageId* from = source.pages().data() + t;
          for (std::int64_t column = 0; column < kMillion / 64 / 4; ++column, from += 4) {
            const std::int64_t to = targets[t].pages()[static_cast<std::size_t>(column)].value;
            runs[static_cast<std::size_t>(column) % 64] = {
                Bytes(from->value * kPage), Bytes(to * kPage), Bytes(kPage), 1, {}, {}};
            ++pages;
          }
          keep(runs);
        }
    });
    return {"a run a page, plain loop",
            ns / static_cast<double>(pages),
            "ns a page of a path",
            0,
            true,
            fmt::format("the tables of bind: {} pages, {} runs", pages, pages)};
  }

  // All paths of the latent group, each from its own table to its rank's.
  Expected<void> bind_of(const char* name, const char* decode, double goal_ns) {
    const auto from = side_of("cp=8:layers"), to = side_of(decode);
    if (!from) return tl::unexpected(from.error());
    if (!to) return tl::unexpected(to.error());
    const auto plan = compile(*from, *to);
    if (!plan) return tl::unexpected(plan.error());
    const std::int64_t page = plan->groups()[0].target->layout.page_tokens();
    std::mt19937_64 random(1);
    std::vector<PageTable> sources, targets;
    for (std::int32_t s = 0; s < 8; ++s) sources.push_back(random_table(kMillion / 64 + 1, PageTable::Use::source, random));
    for (std::int32_t t = 0; t < 4; ++t)
      targets.push_back(random_table(kMillion / 4 / page + 64, PageTable::Use::target, random));
    std::vector<Run> runs(64);  // 3 KiB: stays in the first cache
    std::int64_t moved = 0, given = 0;
    const std::vector<double> rounds = times_of(10 * repeats_, 1, [&] {
      moved = given = 0;
      for (std::int32_t s = 0; s < 8; ++s)
        for (std::int32_t t = 0; t < 4; ++t) {
          const auto path = *plan->path(0, Rank(s), Rank(t));
          auto bound =
              bind(*plan, path, sources[static_cast<std::size_t>(s)], targets[static_cast<std::size_t>(t)], {0, kMillion});
          moved += ceil_div(bound->bytes().value, page * 576);
          while (const std::size_t n = bound->next(runs)) given += static_cast<std::int64_t>(n);
        }
    });
    const double pages = static_cast<double>(moved), ns = median(rounds);
    if (goal_ns > 0) rows_.push_back(plain_loop(sources, targets, runs));
    rows_.push_back({name, ns / pages, "ns a page of a path", goal_ns, true,
                     fmt::format("1M tokens, random tables, 32 paths cp=8:layers -> {}: {} pages, {} runs, {:.0f} us (fastest "
                                 "round {:.2f} ns a page); each serves its path's 9 or 10 layers",
                                 decode, moved, given, ns / 1000, *std::min_element(rounds.begin(), rounds.end()) / pages)});
    return {};
  }

  // The checksum of 256 MiB of MLA pages, beside memcpy of the same bytes.
  Expected<void> checksum_of() {
    const auto side = side_of("tp=1,latent:page=64");
    if (!side) return tl::unexpected(side.error());
    const GroupSide& group = *(*side)->find("latent");
    constexpr std::int64_t kPages = 7282;  // x 36,864 B
    std::mt19937_64 random(2);
    const PageTable table = random_table(kPages, PageTable::Use::source, random);
    std::vector<std::byte> tensor(static_cast<std::size_t>(kPages * group.layout.page_stride()), std::byte{3}),
        copy(tensor.size());
    std::uint64_t sink = 0;
    const double hash = time_of(repeats_, 1, [&] {
      sink += checksum(group, Rank(0), LayerId(0), tensor, table.pages(), 0, kPages * 64, kUnbounded).sum;
    });
    const double move = time_of(repeats_, 1, [&] { std::memcpy(copy.data(), tensor.data(), tensor.size()); });
    rows_.push_back(
        {"checksum", static_cast<double>(tensor.size()) / hash, "GB/s", 0, false,
         fmt::format("576 B rows in pages in random order, 268 MB, 1 thread; memcpy of the same {:.2f} GB/s, sum {:x}",
                     static_cast<double>(tensor.size()) / move, sink & 0xff)});
    return {};
  }

  int repeats_;
  std::vector<BenchRow> rows_;
};

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

Expected<std::vector<BenchRow>> measure_planning(int repeats) { return PlanBench(repeats).run(); }

}  // namespace kvloom
