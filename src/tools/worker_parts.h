// worker_parts.h: what prefill and decode workers (worker.h) have in common: a channel, a transport, pages, a session on its thread, and events on
// their way to the obeying thread.  Stage: tools.  For prefill_worker.cc and decode_worker.cc.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "kvloom/session/endpoint.h"
#include "kvloom/session/endpoint_thread.h"
#include "kvloom/session/telemetry.h"
#include "kvloom/tools/rank_transport.h"
#include "kvloom/tools/request_pages.h"
#include "kvloom/tools/worker.h"

namespace kvloom {

inline TransferKey key_of(const nlohmann::json& message) {
  return {message["key"], Epoch(message["epoch"].get<std::uint64_t>())};
}

inline nlohmann::json about(const char* say, const TransferKey& key) {
  return {{"say", say}, {"key", key.name}, {"epoch", key.epoch.value}};
}

inline nlohmann::json ended_json(const TransferKey& key, Outcome outcome, const Error& why, Instant at) {
  nlohmann::json out = about("ended", key);
  out["outcome"] = to_string(outcome);
  out["why"] = why.message;
  out["at"] = at.count();
  return out;
}

inline std::int64_t open_descriptors() {
  std::int64_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (folder != nullptr && readdir(folder) != nullptr) ++count;
  if (folder != nullptr) closedir(folder);
  return count - 3;  // ".", "..", and the folder's own
}

inline std::int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  long long all = 0, resident = 0;
  if (file != nullptr && std::fscanf(file, "%lld %lld", &all, &resident) != 2) resident = 0;
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

// Milliseconds as they go in one message: how many, their sum, and at most 2,000 of them in order of size, the least and the most among them.
inline nlohmann::json samples_json(std::vector<double> milliseconds) {
  constexpr std::size_t kMost = 2000;
  std::sort(milliseconds.begin(), milliseconds.end());
  const std::size_t all = milliseconds.size(), sent = std::min(all, kMost);
  nlohmann::json some = nlohmann::json::array();
  for (std::size_t i = 0; i < sent; ++i) some.push_back(milliseconds[sent > 1 ? i * (all - 1) / (sent - 1) : 0]);
  return {{"count", all}, {"sum", std::accumulate(milliseconds.begin(), milliseconds.end(), 0.0)}, {"some", std::move(some)}};
}

// What both kinds of workers are: a channel, a transport, pages, a session on its thread, and events on their way to the obeying thread.
template <class Endpoint, class Event>
class Worker {
 public:
  using json = nlohmann::json;
  Worker(const WorkerSpec& spec, Channel& channel) : spec_(spec), channel_(channel) {}
  virtual ~Worker() {
    if (thread_ != nullptr) thread_->stop();
    thread_.reset();
    pages_.reset();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  Expected<void> run() {
    prctl(PR_SET_TIMERSLACK, 1000UL);
    if (auto ok = open(); !ok) return ok;
    for (;;) {
      pollfd fds[2] = {{channel_.fd(), POLLIN, 0}, {rung_.fd(), POLLIN, 0}};
      ::poll(fds, 2, -1);
      if (fds[1].revents != 0)
        if (auto ok = tell_events(); !ok) return ok;
      if (fds[0].revents == 0) continue;
      const auto command = channel_.receive();
      if (!command || (*command)["do"] == "quit") return {};
      if (auto ok = channel_.send(answer(*command)); !ok) return ok;
    }
  }

 protected:
  virtual Expected<std::unique_ptr<Endpoint>> make_endpoint(Sinks sinks) = 0;
  virtual Expected<json> obey(const json& command) = 0;
  virtual Expected<void> happened(Event& event) = 0;  // an error ends the process: its memory is out of reach
  virtual void started() {}

  void say(const json& message) { std::ignore = channel_.send(message); }  // the other end is gone: the loop sees it
  void fill_options(EndpointOptions& options) const {
    options.name = fmt::format("{}-{}", spec_.name(), getpid());
    options.limits = spec_.limits;
    options.heartbeat = spec_.heartbeat;
    options.silence = spec_.silence;
  }

  const WorkerSpec& spec_;
  Channel& channel_;
  RankTransport transport_;
  std::unique_ptr<RequestPages> pages_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<EndpointThread<Endpoint, Event>> thread_;
  std::string address_;

 private:
  Expected<void> open() {
    auto transport = open_transport(spec_.transport, spec_.prefill, spec_.rank);
    if (!transport) return tl::unexpected(transport.error());
    transport_ = std::move(*transport);
    auto pages = RequestPages::make(spec_.side, spec_.rank, spec_.pool_pages, spec_.seed, transport_);
    if (!pages) return tl::unexpected(pages.error());
    pages_ = std::move(*pages);
    metrics_ = std::make_unique<Metrics>(spec_.prefill ? "prefill" : "decode", spec_.rank);
    if (spec_.trace) trace_ = std::make_unique<Trace>(spec_.name(), getpid());
    auto endpoint = make_endpoint({metrics_.get(), trace_.get(), stderr_log(spec_.name(), spec_.log), spec_.log});
    if (!endpoint) return tl::unexpected(endpoint.error());
    thread_ = std::make_unique<EndpointThread<Endpoint, Event>>(std::move(*endpoint), *transport_,
                                                                [this](std::vector<Event>& events) { note(events); });
    started();
    return channel_.send({{"say", "ready"}, {"address", address_}});
  }

  // On the session's thread.
  void note(std::vector<Event>& events) {
    const std::lock_guard lock(mutex_);
    events_.insert(events_.end(), std::make_move_iterator(events.begin()), std::make_move_iterator(events.end()));
    rung_.ring();
  }

  Expected<void> tell_events() {
    rung_.quiet();
    std::vector<Event> events;
    {
      const std::lock_guard lock(mutex_);
      events.swap(events_);
    }
    for (Event& event : events)
      if (auto ok = happened(event); !ok) return ok;
    return {};
  }

  json answer(const json& command) {
    const std::string word = command["do"];
    auto done = word == "state"     ? state()
                : word == "where"   ? Expected<json>(json{{"where", transport_.where()}})
                : word == "metrics" ? Expected<json>(json{{"text", metrics_->text()}})
                : word == "trace"   ? Expected<json>(json{{"file", write_trace(command["file"])}})
                                    : obey(command);
    if (!done) return {{"say", "refused"}, {"do", word}, {"why", done.error().message}};
    json out = std::move(*done);
    out["say"] = "done";
    out["do"] = word;
    return out;
  }

  Expected<json> state() {
    const auto wrong = pages_->wrong_free_bytes();
    if (!wrong) return tl::unexpected(wrong.error());
    return json{{"taken", pages_->taken()},
                {"wrong_free_bytes", *wrong},
                {"descriptors", open_descriptors()},
                {"resident_bytes", resident_bytes()},
                {"open", thread_->ask([](Endpoint& endpoint) { return endpoint.open(); })}};
  }

  // A trace is larger than a message may be.
  std::string write_trace(const std::string& file) {
    std::FILE* to = std::fopen(file.c_str(), "w");
    if (to == nullptr) return "";
    const std::string text = trace_ != nullptr ? trace_->json() : "{}";
    std::fwrite(text.data(), 1, text.size(), to);
    std::fclose(to);
    return file;
  }

  WakeUp rung_;
  std::mutex mutex_;  // guards events_
  std::vector<Event> events_;
};

Expected<void> run_prefill_worker(const WorkerSpec& spec, Channel& channel);
Expected<void> run_decode_worker(const WorkerSpec& spec, Channel& channel);

}  // namespace kvloom
