#include "kvloom/tools/workers.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

namespace kvloom {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

std::chrono::milliseconds left(Clock::time_point until) {
  const auto out = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
  return std::max(out, std::chrono::milliseconds(0));
}

}  // namespace

Workers::~Workers() {
  for (const auto& one : workers_)
    if (one->pid > 0) ::kill(one->pid, SIGKILL);
  for (const auto& one : workers_)
    if (one->pid > 0) ::waitpid(one->pid, nullptr, 0);
}

Expected<WorkerId> Workers::start(const WorkerSpec& spec) {
  workers_.push_back(std::make_unique<One>());
  workers_.back()->spec = spec;
  if (auto ok = fork_one(*workers_.back()); !ok) return tl::unexpected(ok.error());
  return workers_.size() - 1;
}

Expected<void> Workers::restart(WorkerId worker) {
  One& one = *workers_[worker];
  if (one.spec.prefill) one.spec.address = one.address;
  return fork_one(one);
}

Expected<void> Workers::fork_one(One& one) {
  auto pair = Channel::make();
  if (!pair) return tl::unexpected(pair.error());
  std::fflush(nullptr);  // or the child would write our buffers again
  const pid_t parent = getpid(), pid = ::fork();
  if (pid < 0) return fail(Code::exhausted, "can't start {}: {}", one.spec.name(), std::strerror(errno));
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    std::signal(SIGINT, SIG_IGN);  // Ctrl-C reaches every process of the terminal; only the first one answers it
    for (const int number : {SIGTERM, SIGHUP}) std::signal(number, SIG_DFL);
    for (const auto& other : workers_) other->channel.close();
    pair->first.close();
    const auto ended = run_worker(one.spec, pair->second);
    if (!ended) std::ignore = pair->second.send({{"say", "refused"}, {"do", "start"}, {"why", ended.error().message}});
    _exit(ended ? 0 : 1);
  }
  one.pid = pid;
  one.channel = std::move(pair->first);
  one.answers.clear();
  for (WorkerId id = 0; id < workers_.size(); ++id) {
    if (workers_[id].get() != &one) continue;
    const auto ready = answer_of(id, Clock::now() + std::chrono::seconds(60));
    if (!ready) return tl::unexpected(ready.error());
    one.address = (*ready)["address"];
  }
  return {};
}

void Workers::signal(WorkerId worker, int number) {
  if (workers_[worker]->pid > 0) ::kill(workers_[worker]->pid, number);
}

void Workers::kill(WorkerId worker) {
  signal(worker, SIGKILL);
  const auto until = Clock::now() + std::chrono::seconds(10);
  while (lives(worker) && Clock::now() < until) listen(left(until));
}

Expected<json> Workers::ask(WorkerId worker, const json& command, std::chrono::milliseconds at_most) {
  auto answers = ask_all({worker}, command, at_most);
  if (!answers) return tl::unexpected(answers.error());
  return std::move(answers->front());
}

Expected<std::vector<json>> Workers::ask_all(const std::vector<WorkerId>& workers, const json& command,
                                             std::chrono::milliseconds at_most) {
  for (const WorkerId worker : workers) {
    if (!lives(worker)) return fail(Code::unavailable, "{} is dead", spec(worker).name());
    if (auto ok = workers_[worker]->channel.send(command); !ok) return fail(Code::unavailable, "{} is gone", spec(worker).name());
  }
  std::vector<json> out;
  const auto until = Clock::now() + at_most;
  for (const WorkerId worker : workers) {
    auto answer = answer_of(worker, until);
    if (!answer) return tl::unexpected(answer.error());
    out.push_back(std::move(*answer));
  }
  return out;
}

Expected<json> Workers::answer_of(WorkerId worker, Clock::time_point until) {
  One& one = *workers_[worker];
  while (one.answers.empty()) {
    if (!lives(worker)) return fail(Code::unavailable, "{} died before it answered", one.spec.name());
    if (Clock::now() >= until) return fail(Code::deadline, "{} does not answer", one.spec.name());
    listen(left(until));
  }
  json answer = std::move(one.answers.front());
  one.answers.pop_front();
  if (answer["say"] == "refused")
    return fail(Code::invalid_argument, "{}: {}", one.spec.name(), answer["why"].get<std::string>());
  return answer;
}

std::optional<WorkerEvent> Workers::next(std::chrono::milliseconds at_most) {
  const auto until = Clock::now() + at_most;
  while (events_.empty()) {
    if (Clock::now() >= until) return std::nullopt;
    listen(left(until));
  }
  WorkerEvent out = std::move(events_.front());
  events_.pop_front();
  return out;
}

void Workers::listen(std::chrono::milliseconds at_most) {
  std::vector<pollfd> fds;
  std::vector<WorkerId> ids;
  for (WorkerId id = 0; id < workers_.size(); ++id)
    if (lives(id)) {
      fds.push_back({workers_[id]->channel.fd(), POLLIN, 0});
      ids.push_back(id);
    }
  if (::poll(fds.data(), fds.size(), static_cast<int>(at_most.count()) + 1) <= 0) return;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents == 0) continue;
    auto message = workers_[ids[i]]->channel.receive();
    if (!message) {
      bury(ids[i]);
      continue;
    }
    const std::string say = (*message)["say"];
    if (say == "done" || say == "refused" || say == "ready")
      workers_[ids[i]]->answers.push_back(std::move(*message));
    else
      events_.push_back({ids[i], std::move(*message)});
  }
}

void Workers::bury(WorkerId worker) {
  One& one = *workers_[worker];
  int status = 0;
  ::kill(one.pid, SIGKILL);
  ::waitpid(one.pid, &status, 0);
  one.pid = -1;
  one.channel.close();
  events_.push_back({worker, {{"say", "died"}, {"how", how_it_ended(status)}}});
}

}  // namespace kvloom
