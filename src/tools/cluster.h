// cluster.h: the workers of one prefill and one decode group, and the requests that they serve: who has been told what, who is done.  Stage: tools.
// Thread: one.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "kvloom/tools/workers.h"

namespace kvloom {

struct ClusterSpec {
  std::shared_ptr<const Side> prefill, decode;  // shared with every worker
  std::int64_t tokens_at_once = 0;              // that all open requests together may have: pools hold these and a little more
  std::int64_t requests_at_once = 1;
  WorkerSpec worker;  // what all have in common
};

// One attempt at one request, everywhere.
struct ServedRequest {
  std::string name;
  std::uint64_t epoch = 1;
  std::int64_t number = 0;  // of its content
  std::int64_t total = 0, prefix = 0;
  std::int64_t time_ms = 30'000;
  std::int64_t payload = 0;  // bytes

  nlohmann::json command(const char* word) const;
};

// What became of it: of each worker that was told of it.
struct ServedResult {
  std::map<WorkerId, std::string> outcomes, whys;
  std::set<WorkerId> told, released;
  std::int64_t wrong_bytes = 0, payload = 0;
  std::int64_t bytes = 0;      // that landed, on all decode ranks
  std::int64_t landed_at = 0;  // CLOCK_MONOTONIC, ns; of the last decode rank
  std::set<std::pair<WorkerId, std::int32_t>> layers;
  bool over() const { return released.size() == told.size(); }
  bool landed() const;
};

class WorkerCluster {
 public:
  static Expected<std::unique_ptr<WorkerCluster>> make(const ClusterSpec& spec);

  Workers workers;
  std::vector<WorkerId> prefill, decode;

  std::vector<std::string> addresses() const;
  std::vector<WorkerId> all() const;

  // Each tells every worker of its side that lives.  @error what a worker refuses
  Expected<void> offer(const ServedRequest& request, bool hold = false);
  Expected<void> begin(const ServedRequest& request, bool hold = false, bool layers = false);
  Expected<void> compute(const ServedRequest& request, std::int64_t begin, std::int64_t end,
                         const std::vector<std::int32_t>& layers = {});
  Expected<void> cancel(const ServedRequest& request, bool by_decode, const std::string& why);

  // Takes in what workers say, for up to this long.  True if anything was said.
  bool listen(std::chrono::milliseconds at_most);
  // Until `done`.  False: not within that time.
  template <class Done>
  bool listen_until(Done done, std::chrono::milliseconds at_most = std::chrono::seconds(30)) {
    const auto until = std::chrono::steady_clock::now() + at_most;
    while (!done()) {
      if (std::chrono::steady_clock::now() > until) return false;
      listen(std::chrono::milliseconds(50));
    }
    return true;
  }
  ServedResult& result(const ServedRequest& request) { return results_[{request.name, request.epoch}]; }
  void forget(const ServedRequest& request) { results_.erase({request.name, request.epoch}); }
  // Starts a dead one anew, after all that was said before is taken in.
  Expected<void> restart(WorkerId worker);

 private:
  // A worker that is dead has let go of everything.
  void bury(WorkerId worker);
  Expected<void> tell(const std::vector<WorkerId>& to, const nlohmann::json& command);
  std::map<std::pair<std::string, std::uint64_t>, ServedResult> results_;
};

}  // namespace kvloom
