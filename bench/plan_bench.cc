// Planning: compile and bind, by Google Benchmark.  The table with goals: kvloom bench.
#include <benchmark/benchmark.h>

#include <memory>
#include <random>

#include "kvloom/bind/bind.h"
#include "kvloom/plan/compile.h"

namespace kvloom {
namespace {

std::shared_ptr<const Side> side_of(const std::string& words) {
  std::vector<LayerId> layers;
  for (std::int32_t l = 0; l < 78; ++l) layers.emplace_back(l);
  const auto shape = CacheShape::make("mla", 78, {{"latent", GroupKind::paged, layers, 1, {{"latent", 576, 1}}, {}, ""}}).value();
  return std::make_shared<const Side>(Side::make(shape, Sharding::parse(words).value()).value());
}

void compile_layers_to_dcp(benchmark::State& state) {
  const auto ranks = state.range(0);
  const auto prefill = side_of("cp=" + std::to_string(ranks) + ":layers"),
             decode = side_of("dcp=" + std::to_string(state.range(1)));
  for (auto _ : state) benchmark::DoNotOptimize(compile(prefill, decode));
}
BENCHMARK(compile_layers_to_dcp)->Args({8, 4})->Args({64, 64})->Unit(benchmark::kMicrosecond);

void compile_stripes_to_stripes(benchmark::State& state) {
  const auto prefill = side_of("cp=64:interleave=64"), decode = side_of("dcp=64:stripe=16");
  for (auto _ : state) benchmark::DoNotOptimize(compile(prefill, decode));
}
BENCHMARK(compile_stripes_to_stripes)->Unit(benchmark::kMicrosecond);

PageTable random_table(std::int64_t pages, PageTable::Use use) {
  std::mt19937_64 random(1);
  std::vector<PageId> ids;
  for (std::int64_t i = 0; i < pages; ++i) ids.emplace_back(i);
  std::shuffle(ids.begin(), ids.end(), random);
  return PageTable::make(std::move(ids), pages, use).value();
}

// One path of 8 x 4 at 1M tokens: a quarter of the pages.
void bind_one_path(benchmark::State& state, const std::string& decode) {
  constexpr std::int64_t kTokens = 1'000'000;
  const Plan plan = compile(side_of("cp=8:layers"), side_of(decode)).value();
  const auto source = random_table(kTokens / 64 + 1, PageTable::Use::source);
  const auto target = random_table(kTokens / 4 / 16 + 64, PageTable::Use::target);
  const Path path = *plan.path(0, Rank(3), Rank(1));
  std::vector<Run> runs(512);
  std::int64_t given = 0;
  for (auto _ : state) {
    auto bound = bind(plan, path, source, target, {0, kTokens}).value();
    while (const std::size_t n = bound.next(runs)) given += static_cast<std::int64_t>(n);
  }
  state.counters["runs"] = static_cast<double>(given) / static_cast<double>(state.iterations());
  state.SetItemsProcessed(state.iterations() * (kTokens / 64 / 4));  // pages of the source
}
BENCHMARK_CAPTURE(bind_one_path, pages, std::string("dcp=4"));
BENCHMARK_CAPTURE(bind_one_path, stripe_1, std::string("dcp=4:stripe=1"));
BENCHMARK_CAPTURE(bind_one_path, page_16, std::string("dcp=4,page=16"));

}  // namespace
}  // namespace kvloom
