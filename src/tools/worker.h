// worker.h: a process that plays one rank of an engine with a real session: it takes pages, computes layers, lets them be pushed or receives
// them, and checks every byte.  Stage: tools.  `run --stream`, `soak` and tests/faults drive it over a Channel, one JSON object a message:
//   command {"do": WORD, ...}  is answered by {"say": "done", "do": WORD, ...} or {"say": "refused", "do": WORD, "why": ...}
//   what happens by itself comes as {"say": "ended" | "layer" | "released" | "checked", "key", "epoch", ...}
// Prefill: offer {key, epoch, request, total, time_ms, hold}, compute {key, epoch, request, total, begin, end [, layers, layer_ns, busy]},
//   play {steps, layers, layer_ns, busy, mode, begin_at}, cancel {key, epoch, why}, prepare {requests}, load {context}.
// Decode: begin {key, epoch, request, total, prefix, time_ms, sources, hold, layers}, check {key, epoch}, cancel, load {what}.
// Both: state, where, metrics, trace, quit.
// Threads: one that obeys and computes, one of the session, one of a decode rank's load, and the transport's copy helpers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvloom/geometry/side.h"
#include "kvloom/session/log.h"
#include "kvloom/session/pacer.h"
#include "kvloom/session/session.h"
#include "kvloom/tools/load_words.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/transport_words.h"

namespace kvloom {

struct WorkerSpec {
  std::shared_ptr<const Side> side;  // shared with all workers that were forked with it
  Rank rank;
  bool prefill = false;
  std::vector<std::int64_t> pool_pages;  // [groups]
  std::uint64_t seed = 1;
  std::string address = "tcp://127.0.0.1:*";  // of a prefill rank's control socket; a restarted one has the same
  SessionLimits limits;
  std::chrono::nanoseconds heartbeat = std::chrono::milliseconds(250), silence = std::chrono::seconds(1);
  PaceLimits pace;
  TransportWords transport;
  LoadWords load;
  bool trace = false;
  LogLevel log = LogLevel::error;

  std::string name() const { return fmt::format("{} rank {}", prefill ? "prefill" : "decode", rank.value); }
};

// Says {"say": "ready", "address": ...}, then obeys until told to quit or the other end is gone.
Expected<void> run_worker(const WorkerSpec& spec, Channel& channel);

}  // namespace kvloom
