// run_ranks.h: the processes of `run`: what a prefill rank and a decode rank do.  Stage: tools.
// Each is one process with one thread (and its transport's copy helpers). It does what the starting process says, one message at a time, and answers
// each; between messages it keeps its transport going. See run.cc for the order.
#pragma once

#include "kvloom/base/error.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/run_job.h"

namespace kvloom {

// Both return when told to quit.  @error whatever went wrong: it has been sent to the starting process too
Expected<void> run_prefill_rank(const RunJob& job, Rank rank, Channel& parent);
Expected<void> run_decode_rank(const RunJob& job, Rank rank, Channel& parent);

}  // namespace kvloom
