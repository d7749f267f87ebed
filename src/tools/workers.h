// workers.h: the processes of a small cluster (worker.h), seen from the one that started them: forked, asked, killed, frozen, started anew.
// Stage: tools.  Thread: one, and no other may live when a worker is started: it is a fork.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/worker.h"

namespace kvloom {

using WorkerId = std::size_t;

// What a worker said by itself; {"say": "died", "how": ...} once when it is gone.
struct WorkerEvent {
  WorkerId worker = 0;
  nlohmann::json said;
};

class Workers {
 public:
  Workers() = default;
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers();  // kills those that are left

  // Until it is ready.  @error what it said instead; deadline
  Expected<WorkerId> start(const WorkerSpec& spec);
  // A prefill rank listens where it did before.  @pre it is dead
  Expected<void> restart(WorkerId worker);
  void signal(WorkerId worker, int signal);
  // Kills it and waits until it is gone.
  void kill(WorkerId worker);

  // Sends a command and waits for its answer; what comes meanwhile is kept for `next`.
  // @error what the worker refuses; unavailable: it is gone; deadline
  Expected<nlohmann::json> ask(WorkerId worker, const nlohmann::json& command,
                               std::chrono::milliseconds at_most = std::chrono::seconds(60));
  // Sends commands to several, then gathers their answers.
  Expected<std::vector<nlohmann::json>> ask_all(const std::vector<WorkerId>& workers, const nlohmann::json& command,
                                                std::chrono::milliseconds at_most = std::chrono::seconds(60));
  // The next event, within this time.
  std::optional<WorkerEvent> next(std::chrono::milliseconds at_most);

  const WorkerSpec& spec(WorkerId worker) const { return workers_[worker]->spec; }
  const std::string& address(WorkerId worker) const { return workers_[worker]->address; }
  bool lives(WorkerId worker) const { return workers_[worker]->pid > 0; }
  std::size_t size() const { return workers_.size(); }

 private:
  struct One {
    WorkerSpec spec;
    pid_t pid = -1;
    Channel channel{-1};
    std::string address;
    std::deque<nlohmann::json> answers;
  };
  Expected<void> fork_one(One& one);
  Expected<nlohmann::json> answer_of(WorkerId worker, std::chrono::steady_clock::time_point until);
  // Reads what there is, waiting up to `at_most` for something.
  void listen(std::chrono::milliseconds at_most);
  void bury(WorkerId worker);

  std::vector<std::unique_ptr<One>> workers_;
  std::deque<WorkerEvent> events_;
};

}  // namespace kvloom
