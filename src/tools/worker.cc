#include "kvloom/tools/worker.h"

#include <dirent.h>
#include <poll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "kvloom/session/endpoint_thread.h"
#include "kvloom/session/source_endpoint.h"
#include "kvloom/session/target_endpoint.h"
#include "kvloom/tools/rank_transport.h"
#include "kvloom/tools/request_pages.h"

namespace kvloom {
namespace {

using nlohmann::json;

TransferKey key_of(const json& message) { return {message["key"], Epoch(message["epoch"].get<std::uint64_t>())}; }

json about(const char* say, const TransferKey& key) { return {{"say", say}, {"key", key.name}, {"epoch", key.epoch.value}}; }

json ended_json(const TransferKey& key, Outcome outcome, const Error& why, Instant at) {
  json out = about("ended", key);
  out["outcome"] = to_string(outcome);
  out["why"] = why.message;
  out["at"] = at.count();
  return out;
}

std::int64_t open_descriptors() {
  std::int64_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (folder != nullptr && readdir(folder) != nullptr) ++count;
  if (folder != nullptr) closedir(folder);
  return count - 3;  // ".", "..", and the folder's own
}

std::int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  long long all = 0, resident = 0;
  if (file != nullptr && std::fscanf(file, "%lld %lld", &all, &resident) != 2) resident = 0;
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

// Time passes as if layers were computed: on an accelerator (this thread waits), or on a core (this thread burns its own CPU time).
void pass(std::int64_t nanoseconds, bool busy) {
  if (nanoseconds <= 0) return;
  const auto clock = busy ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  timespec now{};
  clock_gettime(clock, &now);
  const std::int64_t end = now.tv_sec * 1'000'000'000 + now.tv_nsec + nanoseconds;
  if (!busy) {
    const timespec until{end / 1'000'000'000, end % 1'000'000'000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {}
    return;
  }
  while (now.tv_sec * 1'000'000'000 + now.tv_nsec < end) clock_gettime(clock, &now);
}

// What both kinds of workers are: a channel, a transport, pages, a session on its thread, and events on their way to the obeying thread.
template <class Endpoint, class Event>
class Worker {
 public:
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

// ---- prefill ----

class PrefillWorker final : public Worker<SourceEndpoint, SourceEvent> {
 public:
  using Worker::Worker;

 private:
  struct Open {
    std::int64_t request = 0;
    bool hold = false;  // the pages stay taken after the transfer is over
  };

  Expected<std::unique_ptr<SourceEndpoint>> make_endpoint(Sinks sinks) override {
    SourceOptions options;
    fill_options(options);
    options.pace = spec_.pace;
    options.control.address = spec_.address;
    auto made = SourceEndpoint::make(std::move(options), *transport_, pages_->local(), std::move(sinks));
    if (made) address_ = (*made)->address();
    return made;
  }

  Expected<json> obey(const json& command) override {
    const std::string word = command["do"];
    if (word == "offer") return offer(command);
    if (word == "prepare") return prepare(command);
    if (word == "compute") return compute(command);
    if (word == "play") return play(command);
    if (word == "cancel") {
      thread_->post([key = key_of(command), why = command["why"].get<std::string>()](SourceEndpoint& endpoint) {
        endpoint.cancel(key, why);
      });
      return json::object();
    }
    return fail(Code::invalid_argument, "no command for a prefill rank: {}", word);
  }

  Expected<json> offer(const json& command) {
    const TransferKey key = key_of(command);
    const Offer offer{key, std::chrono::milliseconds(command["time_ms"].get<std::int64_t>()), command.value("payload", 0) > 0};
    open_[key] = {command["request"], command.value("hold", false)};
    auto ok = thread_->ask([&](SourceEndpoint& endpoint) { return endpoint.offer(offer); });
    if (!ok) {
      open_.erase(key);
      return tl::unexpected(ok.error());
    }
    return json::object();
  }

  // Takes and fills all pages of these requests, for plays that are timed.
  Expected<json> prepare(const json& command) {
    for (const json& request : command["requests"]) {
      const std::int64_t number = request["request"], total = request["total"];
      if (auto tables = pages_->take(number, total, total); !tables) return tl::unexpected(tables.error());
      for (const LayerId layer : pages_->layers())
        if (auto ok = pages_->fill(number, layer, 0, total, total); !ok) return tl::unexpected(ok.error());
    }
    return json::object();
  }

  // A chunk of the forward pass of one request.
  Expected<json> compute(const json& command) {
    const TransferKey key = key_of(command);
    if (!open_.contains(key)) return json{{"over", true}};
    const std::int64_t request = command["request"], begin = command["begin"], end = command["end"], total = command["total"];
    if (auto ok = take(key, request, end, total); !ok) return tl::unexpected(ok.error());
    for (const LayerId layer : layers_of(command)) {
      if (auto ok = pages_->fill(request, layer, begin, end, total); !ok) return tl::unexpected(ok.error());
      pass(command.value("layer_ns", std::int64_t{0}), command.value("busy", false));
      if (auto ok = ready(key, layer, end); !ok) return tl::unexpected(ok.error());
    }
    if (end == total && command.value("payload", 0) > 0)
      thread_->post([key, bytes = std::vector<std::byte>(command["payload"].get<std::size_t>(), std::byte{7})](
                        SourceEndpoint& endpoint) { std::ignore = endpoint.payload(key, bytes); });
    return json::object();
  }

  Expected<void> take(const TransferKey& key, std::int64_t request, std::int64_t tokens, std::int64_t total) {
    auto tables = pages_->take(request, tokens, total);
    if (!tables) return tl::unexpected(tables.error());
    return thread_->ask([&](SourceEndpoint& endpoint) -> Expected<void> {
      for (std::size_t g = 0; g < tables->size(); ++g)
        if (auto ok = endpoint.set_table(key, static_cast<std::int32_t>(g), std::move((*tables)[g])); !ok) return ok;
      return {};
    });
  }

  std::vector<LayerId> layers_of(const json& command) const {
    if (!command.contains("layers")) return pages_->layers();
    std::vector<LayerId> out;
    for (const json& layer : command["layers"]) out.emplace_back(layer.get<std::int32_t>());
    return out;
  }

  // A whole forward pass of many requests, by the clock: `steps` are chunks {key, epoch, request, total, begin, end}, of `layers` layers each that
  // take layer_ns; a rank tells its own. mode "stream": layers are told as they are computed; "one shot": at the end of each request; "alone": never.
  Expected<json> play(const json& command) {
    const std::string mode = command["mode"];
    const std::int64_t layer_ns = command["layer_ns"];
    const std::int32_t layers = command["layers"];
    const bool busy = command["busy"];
    const auto own = pages_->layers();
    const TrackId track = trace_ != nullptr ? trace_->track("layer compute") : TrackId();
    json times = json::array();
    std::set<TransferKey> told;
    for (const json& step : command["steps"])
      if (const TransferKey key = key_of(step); mode != "alone" && told.insert(key).second)
        if (auto ok = take(key, step["request"], step["total"], step["total"]); !ok) return tl::unexpected(ok.error());
    pass(command["begin_at"].get<std::int64_t>() - now_ns(), false);
    for (const json& step : command["steps"]) {
      const TransferKey key = key_of(step);
      const std::int64_t request = step["request"], end = step["end"], total = step["total"];
      const double part = step["part"];  // of a whole chunk: a short one takes less
      const std::int64_t begun = now_ns();
      for (std::int32_t l = 0; l < layers; ++l) {
        const LayerId layer(l);
        const Instant from = monotonic_now();
        pass(static_cast<std::int64_t>(static_cast<double>(layer_ns) * part), busy);
        if (trace_ != nullptr)
          trace_->span(track, "compute", "layer", from, monotonic_now(),
                       {.transfer = key, .layer = layer, .tokens = TokenRange{step["begin"], end}});
        if (mode == "stream" && std::binary_search(own.begin(), own.end(), layer))
          if (auto ok = ready(key, layer, end); !ok) return tl::unexpected(ok.error());
      }
      // Layers that no forward pass counts (a draft model's) come with the last one.
      for (const LayerId layer : own)
        if (mode == "stream" && layer.value >= layers)
          if (auto ok = ready(key, layer, end); !ok) return tl::unexpected(ok.error());
      const std::int64_t ended = now_ns();
      if (mode == "one shot" && end == total)
        for (const LayerId layer : own)
          if (auto ok = ready(key, layer, end); !ok) return tl::unexpected(ok.error());
      times.push_back({{"request", request}, {"begun", begun}, {"ended", ended}, {"last", end == total}});
    }
    return json{{"times", times}};
  }

  // Once the rank's device has done what it was given before.
  Expected<void> ready(const TransferKey& key, LayerId layer, std::int64_t end) {
    auto after = transport_.computed();
    if (!after) return tl::unexpected(after.error());
    thread_->post([=, after = std::move(*after)](SourceEndpoint& endpoint) { endpoint.ready(key, layer, end, after); });
    return {};
  }

  Expected<void> happened(SourceEvent& event) override {
    if (auto* ended = std::get_if<SourceEnded>(&event)) {
      json out = ended_json(ended->key, ended->outcome, ended->why, ended->at);
      out["tail_ns"] = ended->exposed_tail.count();
      say(out);
    } else if (const auto* released = std::get_if<SourceReleased>(&event)) {
      if (const auto at = open_.find(released->key); at != open_.end()) {
        if (!at->second.hold)
          if (auto ok = pages_->give_back(at->second.request); !ok) return ok;
        open_.erase(at);
      }
      say(about("released", released->key));
    }
    return {};
  }

  std::map<TransferKey, Open> open_;
};

// ---- decode ----

class DecodeWorker final : public Worker<TargetEndpoint, TargetEvent> {
 public:
  using Worker::Worker;

 private:
  struct Open {
    std::int64_t request = 0, total = 0;
    TokenRange range;
    bool hold = false;    // check and release only when told
    bool layers = false;  // tell each
    bool landed = false;
  };

  Expected<std::unique_ptr<TargetEndpoint>> make_endpoint(Sinks sinks) override {
    TargetOptions options;
    fill_options(options);
    auto made = TargetEndpoint::make(std::move(options), *transport_, std::move(sinks));
    if (!made) return made;
    auto geometry = (*made)->describe(pages_->local());
    if (!geometry) return tl::unexpected(geometry.error());
    geometry_ = *geometry;
    return made;
  }

  Expected<json> obey(const json& command) override {
    const std::string word = command["do"];
    if (word == "begin") return begin(command);
    if (word == "check") return check(key_of(command));
    if (word == "cancel") {
      thread_->post([key = key_of(command), why = command["why"].get<std::string>()](TargetEndpoint& endpoint) {
        endpoint.cancel(key, why);
      });
      return json::object();
    }
    return fail(Code::invalid_argument, "no command for a decode rank: {}", word);
  }

  Expected<json> begin(const json& command) {
    const TransferKey key = key_of(command);
    Open open{command["request"],
              command["total"],
              {command["prefix"], command["total"]},
              command.value("hold", false),
              command.value("layers", false),
              false};
    auto tables = pages_->take(open.request, open.total, open.total);
    if (!tables) return given_back(open.request, tables.error());
    Want want{key,        geometry_,          {},
              open.range, std::move(*tables), std::chrono::milliseconds(command["time_ms"].get<std::int64_t>())};
    for (const json& source : command["sources"]) want.sources.push_back({source, ""});
    open_[key] = open;
    auto ok = thread_->ask([&](TargetEndpoint& endpoint) { return endpoint.begin(std::move(want)); });
    if (!ok) {
      open_.erase(key);
      return given_back(open.request, ok.error());
    }
    return json::object();
  }

  // `why`, or why the pages can't be given back.
  tl::unexpected<Error> given_back(std::int64_t request, const Error& why) {
    const auto ok = pages_->give_back(request);
    return tl::unexpected(ok ? why : ok.error());
  }

  // @pre held, and over
  Expected<json> check(const TransferKey& key) {
    const auto at = open_.find(key);
    if (at == open_.end()) return fail(Code::invalid_argument, "transfer {} is not held here", to_string(key));
    const Open& open = at->second;
    const auto wrong = open.landed ? pages_->wrong_bytes(open.request, open.range, open.total) : 0;
    if (!wrong) return tl::unexpected(wrong.error());
    json out = {{"wrong", *wrong}, {"landed", open.landed}};
    if (auto ok = pages_->give_back(open.request); !ok) return tl::unexpected(ok.error());
    open_.erase(at);
    return out;
  }

  Expected<void> happened(TargetEvent& event) override {
    if (const auto* layer = std::get_if<LayerLanded>(&event)) {
      if (const auto at = open_.find(layer->key); at == open_.end() || !at->second.layers) return {};
      json out = about("layer", layer->key);
      out["layer"] = layer->layer.value;
      say(out);
      return {};
    }
    if (const auto* ended = std::get_if<TargetEnded>(&event)) {
      json out = ended_json(ended->key, ended->outcome, ended->why, ended->at);
      out["bytes"] = ended->bytes.value;
      std::int64_t payload = 0;
      for (const auto& [rank, bytes] : ended->payloads) payload += static_cast<std::int64_t>(bytes.size());
      out["payload"] = payload;
      Open& open = open_[ended->key];
      open.landed = ended->outcome == Outcome::landed;
      if (open.landed && !open.hold) {
        const auto wrong = pages_->wrong_bytes(open.request, open.range, open.total);
        if (!wrong) return tl::unexpected(wrong.error());
        out["wrong"] = *wrong;
      }
      say(out);
      return {};
    }
    const TransferKey& key = std::get<TargetReleased>(event).key;
    if (const auto at = open_.find(key); at != open_.end() && !at->second.hold) {
      if (auto ok = pages_->give_back(at->second.request); !ok) return ok;
      open_.erase(at);
    }
    say(about("released", key));
    return {};
  }

  GeometryId geometry_;
  std::map<TransferKey, Open> open_;
};

}  // namespace

Expected<void> run_worker(const WorkerSpec& spec, Channel& channel) {
  if (spec.prefill) return PrefillWorker(spec, channel).run();
  return DecodeWorker(spec, channel).run();
}

}  // namespace kvloom
