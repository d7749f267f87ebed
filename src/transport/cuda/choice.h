// choice.h: which way a run is copied on a GPU: by a copy engine, as one 2-D strided copy (no SM), or by the copy kernel, as a part of its
// list.  Stage: carry.  Values only.
// Both are lines: a call's price and a price per byte and piece. The kernel's bytes count more than their time, because it takes SMs from
// the computation beside it: kSmPrice says how much.
// Source: measured on 2 x H200 (NV18): DESIGN.md "Carry"; docs/gpu.md.
#pragma once

#include <cstdint>
#include <string>

#include "kvloom/base/run.h"

namespace kvloom::cuda {

enum class Way : std::uint8_t { engine, kernel };
const char* to_string(Way way);

// Nanoseconds.
struct Line {
  double per_call = 0;  // of a run that goes alone; the kernel's launch is shared by all runs of a list
  double per_piece = 0;
  double per_byte = 0;
  constexpr double of(const Run& run) const {
    return per_call + per_piece * static_cast<double>(run.count) + per_byte * static_cast<double>(run.total().value);
  }
};

inline constexpr Line kEngine{3000, 0.26, 1 / 397.0};  // 397 GB/s of pages, 337 GB/s of 576 B rows; a call takes 3 us and more
inline constexpr Line kKernel{10, 1, 1 / 350.0};       // 8 blocks; 10 ns to word a run and bring it to the GPU
inline constexpr double kSmPrice = 1.5;                // of a kernel's time, beside a computation that would use its SMs

struct Choice {
  Way way = Way::kernel;
  double engine_ns = 0;  // infinite: no 2-D copy can do it
  double kernel_ns = 0;
};

// Whether one 2-D copy can do it: steps of the same sign, not narrower than a piece, and within what the hardware takes.
bool fits_engine(const Run& run);

Choice choose(const Run& run);

// "copy engine (2-D): 92.9 us beside 158.0 us by the kernel", for explain, doctor and bench.
std::string explain(const Run& run);

}  // namespace kvloom::cuda
