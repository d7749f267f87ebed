// run_rank.h: what prefill and decode ranks of `run` have in common: a transport that goes on while they wait to be told something.  Stage: tools.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kvloom/tools/rank_memory.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/run_job.h"
#include "kvloom/transport/shm/shm.h"

namespace kvloom {

// What travels with a notice: a layer's bytes are all visible.
struct LayerNotice {
  std::int32_t source = 0, group = 0, layer = 0, stage = 0;
  std::int64_t bytes = 0;
};

// Stages of a run: their writes and notices carry the stage as their tag.
inline constexpr int kLoomStage = 0, kNaiveStage = 1;
inline Tag tag_of(int stage) { return Tag(static_cast<std::uint64_t>(stage) + 1); }

class RankProcess {
 public:
  RankProcess(const RunJob& job, Rank rank, Channel& parent) : job_(job), rank_(rank), parent_(parent) {}

 protected:
  // @error as ShmTransport::make
  Expected<void> open_transport(bool listen);
  // The next message; meanwhile the transport goes on and its events are kept.
  Expected<nlohmann::json> next_message();
  // Polls, waiting a little if nothing is to do, and gives what happened.
  std::vector<Event> poll();

  const RunJob& job_;
  Rank rank_;
  Channel& parent_;
  std::unique_ptr<ShmTransport> transport_;

 private:
  std::vector<Event> kept_;
};

}  // namespace kvloom
