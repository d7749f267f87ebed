#include "kvloom/transport/cuda/choice.h"

#include <fmt/format.h>

#include <cstdlib>
#include <limits>

namespace kvloom::cuda {
namespace {

constexpr Bytes kNarrowest{64};                             // rows: an engine takes a nanosecond and more for each, however short
constexpr std::int64_t kMostPitch = std::int64_t{1} << 31;  // CU_DEVICE_ATTRIBUTE_MAX_PITCH: 2^31 - 1 on all GPUs since 2010

}  // namespace

const char* to_string(Way way) { return way == Way::engine ? "copy engine (2-D)" : "copy kernel"; }

bool fits_engine(const Run& run) {
  if (run.count == 1) return true;
  if (run.bytes < kNarrowest) return false;
  const std::int64_t source = run.source_step.value, target = run.target_step.value;
  if (source == 0 || target == 0 || (source < 0) != (target < 0)) return false;
  return std::abs(source) >= run.bytes.value && std::abs(target) >= run.bytes.value && std::abs(source) < kMostPitch &&
         std::abs(target) < kMostPitch;
}

Choice choose(const Run& run) {
  Choice out;
  out.engine_ns = fits_engine(run) ? kEngine.of(run) : std::numeric_limits<double>::infinity();
  out.kernel_ns = kSmPrice * kKernel.of(run);
  out.way = out.engine_ns <= out.kernel_ns ? Way::engine : Way::kernel;
  return out;
}

std::string explain(const Run& run) {
  const Choice choice = choose(run);
  const bool engine = choice.way == Way::engine;
  if (!fits_engine(run)) return "copy kernel: no 2-D copy has these steps";
  return fmt::format("{}: {:.1f} us beside {:.1f} us by the {}", to_string(choice.way),
                     (engine ? choice.engine_ns : choice.kernel_ns) / 1000, (engine ? choice.kernel_ns : choice.engine_ns) / 1000,
                     engine ? "kernel (its SMs counted)" : "copy engine");
}

}  // namespace kvloom::cuda
