#include "kvloom/tools/run_parent.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <optional>
#include <vector>

#include "kvloom/tools/run_control.h"
#include "kvloom/tools/run_rank.h"
#include "kvloom/tools/run_ranks.h"

namespace kvloom {
namespace {

using nlohmann::json;

// The signal that asked us to stop; 0 if none did.  A handler can only set a flag.
volatile std::sig_atomic_t stop_signal = 0;
extern "C" void note_signal(int signal) { stop_signal = signal; }

// Catches SIGINT, SIGTERM and SIGHUP while it lives.
class SignalGuard {
 public:
  SignalGuard() {
    stop_signal = 0;
    struct sigaction action = {};
    action.sa_handler = note_signal;  // no SA_RESTART: poll has to come back
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, 3> before_{};
};

struct Child {
  pid_t pid = -1;
  bool prefill = false;
  Rank rank;
  Channel channel{-1};

  std::string name() const { return fmt::format("{} rank {}", prefill ? "prefill" : "decode", rank.value); }
};

class Family {
 public:
  Family(const RunJob& job, const ShowProgress& progress) : job_(job), patience_(job.patience), progress_(progress) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family() {
    for (const Child& child : children_) ::kill(child.pid, SIGKILL);
    for (const Child& child : children_) ::waitpid(child.pid, nullptr, 0);
  }

  Expected<RunReport> run() {
    if (auto ok = start(); !ok) return tl::unexpected(ok.error());
    for (auto step : {&Family::meet, &Family::transfer, &Family::check, &Family::naive, &Family::copy})
      if (auto ok = (this->*step)(); !ok) return tl::unexpected(ok.error());
    for (Child& child : children_) std::ignore = child.channel.send({{"say", "quit"}});
    for (Child& child : children_) ::waitpid(child.pid, nullptr, 0);
    children_.clear();
    return report_;
  }

 private:
  std::vector<Child*> side(bool prefill) {
    std::vector<Child*> out;
    for (Child& child : children_)
      if (child.prefill == prefill) out.push_back(&child);
    return out;
  }
  std::vector<Child*> all() {
    std::vector<Child*> out;
    for (Child& child : children_) out.push_back(&child);
    return out;
  }

  Expected<void> start() {
    for (std::int32_t rank = 0; rank < job_.loom.plan.source().ranks(); ++rank)
      if (auto ok = fork_rank(true, Rank(rank)); !ok) return ok;
    for (std::int32_t rank = 0; rank < job_.loom.plan.target().ranks(); ++rank)
      if (auto ok = fork_rank(false, Rank(rank)); !ok) return ok;
    return {};
  }

  Expected<void> fork_rank(bool prefill, Rank rank) {
    auto pair = Channel::make();
    if (!pair) return tl::unexpected(pair.error());
    std::fflush(nullptr);  // or the child would write our buffers again
    const pid_t parent = getpid(), pid = ::fork();
    if (pid < 0)
      return fail(Code::exhausted, "can't start process {} of the run: {}", children_.size() + 1, std::strerror(errno));
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      for (Child& other : children_) other.channel.close();
      pair->first.close();
      be_rank(prefill, rank, pair->second);
    }
    children_.push_back({pid, prefill, rank, std::move(pair->first)});
    return {};
  }

  // Ctrl-C reaches every process of the terminal; only the first one answers it.
  [[noreturn]] void be_rank(bool prefill, Rank rank, Channel& channel) const {
    std::signal(SIGINT, SIG_IGN);
    for (const int signal : {SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
    const auto ended = prefill ? run_prefill_rank(job_, rank, channel) : run_decode_rank(job_, rank, channel);
    if (!ended) std::ignore = channel.send({{"say", "error"}, {"why", ended.error().message}});
    _exit(ended ? 0 : 1);
  }

  // How a child that is gone went.
  static std::string epitaph(const Child& child) {
    int status = 0;
    if (::waitpid(child.pid, &status, WNOHANG) == 0) {
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, &status, 0);
    }
    return how_it_ended(status);
  }

  Expected<json> read(Child& child) {
    auto message = child.channel.receive();
    if (!message) return tl::unexpected(gone(child));
    if ((*message)["say"] == "error") {
      const Error said{Code::unavailable, Scope::process,
                       fmt::format("{}: {}", child.name(), (*message)["why"].get<std::string>())};
      return tl::unexpected(cause_of(said, child.pid));
    }
    return message;
  }

  // What a rank complains of may be that another one is gone, and we may hear the complaint first. So all are listened to a moment longer:
  // one that goes without a word is the cause.
  Error cause_of(const Error& said, pid_t by) {
    constexpr std::chrono::milliseconds kMoment(500);
    std::vector<pid_t> spoken = {by};
    const std::int64_t end = now_ns() + std::chrono::nanoseconds(kMoment).count();
    for (std::int64_t left = end - now_ns(); left > 0 && spoken.size() < children_.size(); left = end - now_ns()) {
      std::vector<pollfd> fds;
      std::vector<Child*> open;
      for (Child& child : children_)
        if (std::find(spoken.begin(), spoken.end(), child.pid) == spoken.end()) {
          fds.push_back({child.channel.fd(), POLLIN, 0});
          open.push_back(&child);
        }
      if (::poll(fds.data(), fds.size(), static_cast<int>(left / 1'000'000) + 1) <= 0) break;
      for (std::size_t i = 0; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        const auto message = open[i]->channel.receive();
        if (!message) return gone(*open[i]);
        if ((*message)["say"] == "error") spoken.push_back(open[i]->pid);
      }
    }
    return said;
  }

  // Buries a child whose channel is closed.
  Error gone(const Child& child) {
    const Error out{Code::unavailable, Scope::process, fmt::format("{} {}", child.name(), epitaph(child))};
    std::erase_if(children_, [pid = child.pid](const Child& c) { return c.pid == pid; });  // reaped: its pid is not ours any more
    return out;
  }

  // Sends `message` to each of `to` and gathers one answer from each, in their order.
  Expected<std::vector<json>> ask(const std::vector<Child*>& to, const json& message) {
    for (Child* child : to)
      if (auto ok = child->channel.send(message); !ok) {
        auto last = read(*child);  // it may have said why
        if (!last) return tl::unexpected(last.error());
        return tl::unexpected(ok.error());
      }
    return gather(to);
  }

  // What a rank answers is anything but "progress". All ranks are listened to, since any may die.
  Expected<std::vector<json>> gather(const std::vector<Child*>& from) {
    std::vector<json> answers(from.size());
    std::size_t open = from.size();
    std::int64_t heard = now_ns();
    while (open > 0) {
      std::vector<pollfd> fds;
      for (const Child& child : children_) fds.push_back({child.channel.fd(), POLLIN, 0});
      const int ready = ::poll(fds.data(), fds.size(), 200);
      if (stop_signal != 0)
        return fail(Code::cancelled, "stopped by signal {}; all ranks are ended", static_cast<int>(stop_signal));
      if (ready > 0) heard = now_ns();
      if (now_ns() - heard > std::chrono::nanoseconds(patience_).count()) return silent(from, answers);
      for (std::size_t i = 0; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        Child& child = children_[i];
        const pid_t pid = child.pid;
        auto message = read(child);
        if (!message) return tl::unexpected(message.error());
        if ((*message)["say"] == "progress") {
          show_progress(child.rank, (*message)["bytes"]);
          continue;
        }
        const auto at = std::find_if(from.begin(), from.end(), [&](const Child* c) { return c->pid == pid; });
        if (at == from.end()) return fail(Scope::process, Code::io, "{} spoke out of turn", child.name());
        answers[static_cast<std::size_t>(at - from.begin())] = std::move(*message);
        --open;
      }
    }
    return answers;
  }

  Expected<std::vector<json>> silent(const std::vector<Child*>& from, const std::vector<json>& answers) const {
    std::string names;
    for (std::size_t i = 0; i < from.size(); ++i)
      if (answers[i].is_null()) names += (names.empty() ? "" : ", ") + from[i]->name();
    return fail(Scope::process, Code::deadline, "nothing was heard for {} s; still waited for: {}", patience_.count(), names);
  }

  void show_progress(Rank rank, std::int64_t bytes) {
    covered_[rank] = bytes;
    std::int64_t sum = 0;
    for (const auto& [r, covered] : covered_) sum += covered;
    if (progress_) progress_(stage_name_, sum, stage_bytes_);
  }

  void begin_stage(const char* name, const Plan& plan) {
    stage_name_ = name;
    covered_.clear();
    stage_bytes_ = 0;
    for (const Path& path : plan.paths()) stage_bytes_ += plan.bytes(path, job_.range()).value;
    if (progress_) progress_(stage_name_, 0, stage_bytes_);
  }

  // All memory is there; every decode rank is told where prefill listens, and connects.
  Expected<void> meet() {
    if (progress_) progress_("filling the caches", 0, 0);
    auto ready = gather(all());
    if (!ready) return tl::unexpected(ready.error());
    json sources = json::array();
    for (std::int32_t s = 0; s < job_.loom.plan.source().ranks(); ++s)
      sources.push_back((*ready)[static_cast<std::size_t>(s)]["address"]);
    return ask(all(), {{"say", "meet"}, {"sources", sources}}).map([](const auto&) {});
  }

  struct Landed {
    std::int64_t sent = 0, landed = 0, posts = 0, runs = 0;
    double seconds = 0;  // from the word to begin until the last byte is where it should be
  };

  Expected<Landed> stage(int number) {
    const std::int64_t begin = now_ns();
    const auto answers = ask(all(), {{"say", "go"}, {"stage", number}});
    if (!answers) return tl::unexpected(answers.error());
    Landed out;
    std::int64_t end = begin;
    for (const json& answer : *answers) {
      if (answer["say"] == "sent") {
        out.sent += answer["bytes"].get<std::int64_t>();
        out.posts += answer["posts"].get<std::int64_t>();
        out.runs += answer["runs"].get<std::int64_t>();
      } else {
        out.landed += answer["bytes"].get<std::int64_t>();
        end = std::max(end, answer["done_at"].get<std::int64_t>());
      }
    }
    out.seconds = static_cast<double>(end - begin) * 1e-9;
    return out;
  }

  Expected<void> transfer() {
    begin_stage("kvloom", job_.loom.plan);
    const auto done = stage(kLoomStage);
    if (!done) return tl::unexpected(done.error());
    report_.sent_bytes = done->sent;
    report_.landed_bytes = done->landed;
    report_.posts = done->posts;
    report_.runs = done->runs;
    report_.seconds = done->seconds;
    return {};
  }

  Expected<void> check() {
    if (progress_) progress_("checking every byte", 0, 0);
    const auto checked = ask(side(false), {{"say", "check"}});
    if (!checked) return tl::unexpected(checked.error());
    const auto sums = ask(side(true), {{"say", "sum"}});
    if (!sums) return tl::unexpected(sums.error());
    std::uint64_t ours = 0, theirs = 0;
    std::int64_t rows = 0;
    report_.wanted_bytes = 0;
    for (const json& answer : *checked) {
      report_.wanted_bytes += answer["wanted"].get<std::int64_t>();
      report_.wrong_bytes += answer["wrong"].get<std::int64_t>();
      ours += answer["sum"].get<std::uint64_t>();
      rows += answer["rows"].get<std::int64_t>();
    }
    for (const json& answer : *sums) {
      theirs += answer["sum"].get<std::uint64_t>();
      rows -= answer["rows"].get<std::int64_t>();
    }
    report_.checksums_equal = ours == theirs && rows == 0;
    return {};
  }

  Expected<void> naive() {
    if (!job_.naive) return {};
    if (auto ok = ask(side(false), {{"say", "refill"}}); !ok) return tl::unexpected(ok.error());
    begin_stage("naive", job_.naive->send.plan);
    const auto done = stage(kNaiveStage);
    if (!done) return tl::unexpected(done.error());
    report_.naive_sent_bytes = done->sent;
    report_.naive_seconds = done->seconds;
    return check();
  }

  // The best of three rounds, as GB/s of all decode ranks together.
  Expected<void> copy() {
    if (!job_.transport.on_host()) return {};
    for (const bool pages : {false, true})
      for (int round = 0; round < 3; ++round) {
        const auto copied = ask(side(false), {{"say", "copy"}, {"pages", pages}});
        if (!copied) return tl::unexpected(copied.error());
        std::int64_t bytes = 0, from = INT64_MAX, to = 0;
        for (const json& answer : *copied) {
          bytes += answer["bytes"].get<std::int64_t>();
          from = std::min(from, answer["from"].get<std::int64_t>());
          to = std::max(to, answer["to"].get<std::int64_t>());
        }
        double& best = pages ? report_.page_memcpy_gb_per_s : report_.memcpy_gb_per_s;
        if (to > from) best = std::max(best, static_cast<double>(bytes) / static_cast<double>(to - from));
      }
    return {};
  }

  const RunJob& job_;
  std::chrono::seconds patience_;
  const ShowProgress& progress_;
  std::vector<Child> children_;
  RunReport report_;
  const char* stage_name_ = "";
  std::int64_t stage_bytes_ = 0;
  std::map<Rank, std::int64_t> covered_;
};

}  // namespace

Expected<RunReport> run_processes(const RunJob& job, const ShowProgress& progress) {
  const SignalGuard guard;
  return Family(job, progress).run();
}

}  // namespace kvloom
