#include "kvloom/transport/check_runs.h"

#include <algorithm>
#include <cstdint>

namespace kvloom {

namespace {

// Empty if every piece is inside [0, length).
Expected<void> check_side(const char* side, std::int64_t offset, std::int64_t step, const Run& run, std::int64_t length) {
  const auto travel = checked_mul(step, run.count - 1);
  const auto last = travel ? checked_add(offset, *travel) : std::nullopt;
  const auto high = last ? checked_add(std::max(offset, *last), run.bytes.value) : std::nullopt;
  if (!high)
    return fail(Code::overflow, "{} offset={} step={} count={} bytes={} does not fit 64 bits", side, offset, step, run.count,
                run.bytes.value);
  const std::int64_t low = std::min(offset, *last);
  if (low < 0 || *high > length) {
    return fail(Code::out_of_range, "{} bytes [{}, {}) are outside of the region's [0, {}): offset={} bytes={} count={} step={}",
                side, low, *high, length, offset, run.bytes.value, run.count, step);
  }
  return {};
}

}  // namespace

Expected<Bytes> check_run(const Run& run, Bytes source_length, Bytes target_length) {
  if (run.bytes.value < 1 || run.count < 1)
    return fail(Code::invalid_argument, "bytes={} count={}: both must be positive", run.bytes.value, run.count);
  if (auto ok = check_side("source", run.source_offset.value, run.source_step.value, run, source_length.value); !ok)
    return tl::unexpected(ok.error());
  if (auto ok = check_side("target", run.target_offset.value, run.target_step.value, run, target_length.value); !ok)
    return tl::unexpected(ok.error());
  const std::int64_t step = run.target_step.value;
  if (run.count > 1 && step < run.bytes.value && step > -run.bytes.value) {
    return fail(Code::invalid_argument, "target step={} bytes={} count={}: pieces overlap on the target", step, run.bytes.value,
                run.count);
  }
  return run.total();  // fits: the pieces are disjoint inside the target
}

Expected<Bytes> check_runs(std::span<const Run> runs, Bytes source_length, Bytes target_length) {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto bytes = check_run(runs[i], source_length, target_length);
    if (!bytes) return fail(bytes.error().code, "run {} of {}: {}", i, runs.size(), bytes.error().message);
    const auto sum = checked_add(total, bytes->value);
    if (!sum) return fail(Code::overflow, "run {} of {}: the sum of all bytes does not fit 64 bits", i, runs.size());
    total = *sum;
  }
  return Bytes(total);
}

}  // namespace kvloom
