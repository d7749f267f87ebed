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

RunBounds::RunBounds(const Run& run, Bytes source_length, Bytes target_length) : like_(run) {
  if (run.bytes.value < 1 || run.count < 1) return;
  if (run.count > 1 && run.target_step < run.bytes && run.target_step.value > -run.bytes.value) return;
  source_ = offsets(run.source_step, run, source_length);
  target_ = offsets(run.target_step, run, target_length);
  if (source_.count > 0 && target_.count > 0) total_ = run.total();  // fits: the pieces are disjoint inside the target
}

RunBounds::Offsets RunBounds::offsets(Bytes step, const Run& run, Bytes length) {
  const auto travel = checked_mul(step.value, run.count - 1);
  if (!travel || *travel < -length.value || *travel > length.value) return {};
  const std::int64_t first = std::max<std::int64_t>(-*travel, 0);
  const auto above = checked_add(std::max<std::int64_t>(*travel, 0), run.bytes.value);
  if (!above || *above > length.value || length.value - *above < first) return {};
  return {first, static_cast<std::uint64_t>(length.value - *above - first) + 1};
}

Expected<Bytes> check_runs(std::span<const Run> runs, Bytes source_length, Bytes target_length) {
  std::int64_t total = 0;
  RunBounds bounds;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (!bounds.are_of(run)) bounds = RunBounds(run, source_length, target_length);
    if (!bounds.hold(run.source_offset, run.target_offset)) {
      const auto why = check_run(run, source_length, target_length);
      return fail(why.error().code, "run {} of {}: {}", i, runs.size(), why.error().message);
    }
    const auto sum = checked_add(total, bounds.total().value);
    if (!sum) return fail(Code::overflow, "run {} of {}: the sum of all bytes does not fit 64 bits", i, runs.size());
    total = *sum;
  }
  return Bytes(total);
}

}  // namespace kvloom
