// run_rank.h: what prefill and decode ranks of `run` have in common: an endpoint that goes on while they wait to be told something.  Stage: tools.
// One thread: the rank polls its endpoint itself.
#pragma once

#include <poll.h>

#include <memory>
#include <vector>

#include "kvloom/session/source_endpoint.h"
#include "kvloom/session/target_endpoint.h"
#include "kvloom/tools/rank_memory.h"
#include "kvloom/tools/rank_transport.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/run_job.h"

namespace kvloom {

// Stages of a run are transfers: the loom's, the naive way's; and one of no tokens before them, in which everybody connects.
inline constexpr int kLoomStage = 0, kNaiveStage = 1, kMeetStage = 2;
TransferKey stage_key(int stage);
// A transfer of a run ends when it ends, or with the run.
inline constexpr std::chrono::nanoseconds kStageTime = kMaxTimeLeft;

// The tables of a rank by the groups of its side; of groups that the plan has not: none.
std::vector<CacheTable> side_tables(const Plan& plan, bool prefill, Rank rank, const std::vector<GroupTables>& tables);

template <class Endpoint, class Event>
class RankProcess {
 public:
  RankProcess(const RunJob& job, Rank rank, Channel& parent) : job_(job), rank_(rank), parent_(parent) {}

 protected:
  // @error as kvloom::open_transport
  Expected<void> open_transport(bool prefill) {
    auto opened = kvloom::open_transport(job_.transport, prefill, rank_);
    if (!opened) return tl::unexpected(opened.error());
    transport_ = std::move(*opened);
    return {};
  }

  void fill_options(EndpointOptions& options) const {
    options.name = fmt::format("{}", rank_.value);
    options.silence = job_.patience;
  }

  // The next message; meanwhile the endpoint goes on and its events are kept.
  Expected<nlohmann::json> next_message() {
    for (;;) {
      endpoint_->poll(std::chrono::seconds(60), kept_, parent_.fd());
      pollfd told = {parent_.fd(), POLLIN, 0};
      if (::poll(&told, 1, 0) > 0) return parent_.receive();
    }
  }

  // What happened, after waiting a little if nothing did.
  std::vector<Event> poll() {
    std::vector<Event> events = std::exchange(kept_, {});
    endpoint_->poll(events.empty() ? std::chrono::milliseconds(50) : std::chrono::milliseconds(0), events);
    return events;
  }

  const RunJob& job_;
  Rank rank_;
  Channel& parent_;
  RankTransport transport_;
  std::unique_ptr<Endpoint> endpoint_;  // before the transport

 private:
  std::vector<Event> kept_;
};

}  // namespace kvloom
