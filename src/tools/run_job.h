// run_job.h: everything that the processes of `run` agree on before they begin.  Stage: tools.  Made once, then forked into every rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"
#include "kvloom/tools/job.h"
#include "kvloom/tools/tables.h"
#include "kvloom/tools/transport_words.h"

namespace kvloom {

// A plan with the tables of one request.
struct Scheme {
  Plan plan;
  RequestTables tables;
};

// The naive way, for comparison: every decode rank gets the whole sequence (`send`), then keeps its part of it (`keep`: from its own
// staging memory, laid out as a side of one rank, to its pages).
struct NaiveScheme {
  Scheme send, keep;
};

struct RunJob {
  Scheme loom;
  std::optional<NaiveScheme> naive;
  std::int64_t tokens = 0, prefix = 0;
  TransportWords transport;
  std::chrono::seconds patience{120};

  TokenRange range() const { return {prefix, tokens}; }
};

// `tables`: the words of --tables.  @pre the naive way: caches in host memory
// @error as compile and make_tables; exhausted: more memory than this machine has free, said beforehand
Expected<RunJob> make_run_job(const Job& job, const std::string& tables, const TransportWords& transport, bool naive);

// Bytes of host memory that all ranks together will take: with GPUs, for the views of their caches.
Expected<std::int64_t> memory_needed(const RunJob& job);

}  // namespace kvloom
