// Carrying pages on one host, by the ways there are: GB/s as Google Benchmark's bytes_per_second. Take ratios inside one run
// only:
//   kvloom_bench --benchmark_filter=copy --benchmark_repetitions=7 --benchmark_enable_random_interleaving=true
//   --benchmark_report_aggregates_only=true
// Ratios ready made: kvloom bench, or measure_copies().
#include <benchmark/benchmark.h>

#include <memory>

#include "kvloom/tools/copy_measure.h"

namespace kvloom {
namespace {

// The memory and the forked source, for all benchmarks of this process.
CopyBed* bed() {
  static const auto made = CopyBed::make({});
  return made ? made->get() : nullptr;
}

void run_copy(benchmark::State& state, CopyWay way, Bytes piece, int threads) {
  if (bed() == nullptr) return state.SkipWithError("no memory for it");
  for (auto _ : state) {
    const auto seconds = bed()->seconds(way, piece, threads);
    if (!seconds) return state.SkipWithError(seconds.error().message.c_str());
    state.SetIterationTime(*seconds);
  }
  state.SetBytesProcessed(state.iterations() * bed()->moved(way, piece).value);
}

const bool kRegistered = [] {
  const CopyOptions options;
  const auto add = [](CopyWay way, Bytes piece, int threads) {
    const std::string name = fmt::format("copy/{}/piece:{}/threads:{}", to_string(way), piece.value, threads);
    benchmark::RegisterBenchmark(name.c_str(), run_copy, way, piece, threads)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(1);
  };
  for (const int threads : options.threads) {
    add(CopyWay::contiguous, options.memory, threads);
    for (const Bytes piece : options.pieces) {
      for (const CopyWay way :
           {CopyWay::memcpy_pieces, CopyWay::own_pieces, CopyWay::reads_peer, CopyWay::writes_peer, CopyWay::shm_push}) {
        add(way, piece, threads);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvloom
