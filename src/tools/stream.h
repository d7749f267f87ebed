// stream.h: `kvloom run --stream`: a prefill that takes time, its cache pushed while it computes, beside the same pushed at its end.  Stage: tools.
// Passes over the same requests and pages: alone (nothing is pushed), one shot (each request's cache leaves when its prefill ends), and
// stream (each layer of each chunk leaves when it is computed). Of several rounds each has alone and stream, in turns which comes first; the
// first has one shot too. All times are of CLOCK_MONOTONIC, one clock for all processes of the host, but those of layers and decode steps on a
// GPU (cuda_load.h).
//   exposed tail = landed at the last decode rank - end of prefill at the last prefill rank: what streaming cannot hide.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "kvloom/tools/job.h"
#include "kvloom/tools/workers.h"

namespace kvloom {

struct StreamJob {
  Job job;                            // its tokens are those of each request, where there is no trace
  std::vector<std::int64_t> tokens;   // [requests]
  std::int64_t at_once = 0;           // requests that are computed in turns, chunk by chunk; 0: all
  std::int64_t chunk = 0;             // tokens; 0: each request is one
  std::int64_t layer_ns = 2'000'000;  // of a layer of `layer_tokens` tokens; others in proportion
  std::int64_t layer_tokens = 2048;
  std::int64_t rounds = 1;
  bool busy = false;     // computing burns a core, as its own CPU time; else it waits, as for an accelerator
  WorkerSpec worker;     // what all ranks have in common
  std::string timeline;  // a file for Perfetto; empty: none
};

struct StreamRequest {
  std::int64_t id = 0, tokens = 0, bytes = 0;
  double prefill_alone_ms = 0, prefill_ms = 0;  // from the first chunk's begin to the last one's end: the median of the rounds
  double landed_ms = 0, exposed_tail_ms = 0;    // streamed: the median, and the longest
  double one_shot_prefill_ms = 0, one_shot_tail_ms = 0;  // pushed at the end
  std::int64_t wrong_bytes = 0;                          // of both ways
};

struct Quantiles {
  double p50 = 0, p99 = 0, max = 0;
};
Quantiles quantiles(std::vector<double> values);  // of none: zeros

// Milliseconds that something took, over and over: all are counted, of many some are kept (samples_json).
struct Samples {
  std::int64_t count = 0;
  double sum = 0;
  std::vector<double> some;
  double mean() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
  void add(const nlohmann::json& samples);
  void add(const Samples& more);
};

// The same alone, pushed at its end, and pushed meanwhile.
struct Beside {
  Samples alone, one_shot, stream;
  double slowed() const { return alone.sum > 0 && stream.count > 0 ? stream.mean() / alone.mean() : 1; }  // by the push
};

struct StreamReport {
  std::vector<StreamRequest> requests;
  Quantiles exposed_tail, one_shot_tail;  // of all requests of all rounds
  double layer_wire_ms = 0;               // of one layer of the longest request, at the rate of the fastest one shot
  double prefill_slowed = 0;              // prefill with push / alone, over all requests: the median of the rounds
  std::vector<double> prefill_slowed_rounds;
  double against_one_shot = 0;  // from begin to landed, streamed / one shot: the median over the requests
  std::int64_t wrong_bytes = 0;
  std::int64_t posts = 0, layers_times_chunks = 0;         // of one prefill rank, streamed; what one post for each would be
  Beside layers, steps;                                    // of loads; of none: no samples
  std::int64_t step_bytes = 0;                             // that a decode step reads
  std::vector<std::string> prefill_places, decode_places;  // "GPU 0, NVIDIA H200", of each rank; empty: host memory
  bool shares_gpu() const;                                 // a GPU both prefills and decodes
};

// @error as WorkerCluster::make; unavailable: a transfer that did not land, with its reason
Expected<StreamReport> run_stream(const StreamJob& job);

nlohmann::json stream_json(const StreamReport& report, const StreamJob& job);
void print_stream(std::FILE* out, const StreamReport& report, const StreamJob& job);

}  // namespace kvloom
