// run_parent.h: the process that starts all ranks of `run`, tells them what to do, and leaves nothing behind.  Stage: tools.
// A rank that dies, or is silent for too long, ends the run: all others are killed and reaped. If this process dies, the kernel kills the ranks. All
// memory is anonymous (memfd, private pages) and goes with the last process that maps it; no file has a name.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>

#include "kvloom/base/error.h"
#include "kvloom/tools/run_job.h"

namespace kvloom {

struct RunReport {
  std::int64_t landed_bytes = 0;                      // by the targets' own count, when all had landed
  std::int64_t wanted_bytes = 0;                      // by geometry, when checked
  std::int64_t wrong_bytes = 0;                       // of all bytes of all decode pools, the naive way's included
  std::int64_t sent_bytes = 0, naive_sent_bytes = 0;  // delivered, by the transport's word
  std::int64_t posts = 0, runs = 0;
  double seconds = 0, naive_seconds = 0;
  double memcpy_gb_per_s = 0, page_memcpy_gb_per_s = 0;  // of host memory only: all decode ranks at once, as in the transfer
  bool checksums_equal = false;
};

// Told now and then while bytes land: the stage's name, covered and expected bytes.
using ShowProgress = std::function<void(const char* stage, std::int64_t covered, std::int64_t expected)>;

// @error unavailable: which rank died and how, or what it said; deadline: which rank was silent for the job's patience; cancelled: interrupted by a signal
Expected<RunReport> run_processes(const RunJob& job, const ShowProgress& progress);

}  // namespace kvloom
