// prefill_worker.cc: a rank of a prefill group (worker.h).
#include <time.h>

#include <cerrno>
#include <set>
#include <span>

#include "kvloom/session/source_endpoint.h"
#include "kvloom/tools/cuda_load.h"
#include "kvloom/tools/worker_parts.h"

namespace kvloom {
namespace {

using nlohmann::json;

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
    if (word == "load") return load(command);
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

  // Opens the load of the plays to come.
  Expected<json> load(const json& command) {
    auto made = open_prefill_load(spec_.load, spec_.transport, spec_.rank, command["context"].get<std::int64_t>());
    if (!made) return tl::unexpected(made.error());
    load_ = std::move(*made);
    return json::object();
  }

  // A whole forward pass of many requests: `steps` are chunks {key, epoch, request, total, begin, end}, of `layers` layers each; a rank tells
  // its own. Layers take layer_ns by the clock or, with a load, as long as its GPU takes. mode "stream": layers are told as they are computed;
  // "one shot": at the end of each request; "alone": never.
  Expected<json> play(const json& command) {
    Play play{command["mode"], command["layers"], command["layer_ns"], command["busy"], pages_->layers()};
    std::set<TransferKey> taken;
    for (const json& step : command["steps"])
      if (const TransferKey key = key_of(step); play.mode != "alone" && taken.insert(key).second)
        if (auto ok = take(key, step["request"], step["total"], step["total"]); !ok) return tl::unexpected(ok.error());
    pass(command["begin_at"].get<std::int64_t>() - now_ns(), false);
    return load_ != nullptr ? play_load(play, command["steps"]) : play_clock(play, command["steps"]);
  }

  struct Play {
    std::string mode;
    std::int32_t layers = 0;
    std::int64_t layer_ns = 0;
    bool busy = false;
    std::vector<LayerId> own;
  };

  Expected<json> play_clock(const Play& play, const json& steps) {
    json times = json::array();
    for (const json& step : steps) {
      const double part = step["part"];  // of a whole chunk: a short one takes less
      const std::int64_t begun = now_ns();
      for (std::int32_t l = 0; l < play.layers; ++l) {
        const Instant from = monotonic_now();
        pass(static_cast<std::int64_t>(static_cast<double>(play.layer_ns) * part), play.busy);
        trace_layer(step, LayerId(l), from, monotonic_now());
        if (auto ok = told(play, step, LayerId(l)); !ok) return tl::unexpected(ok.error());
      }
      if (auto ok = told_the_rest(play, step); !ok) return tl::unexpected(ok.error());
      const std::int64_t ended = now_ns();
      if (auto ok = told_at_end(play, step); !ok) return tl::unexpected(ok.error());
      times.push_back(time_of(step, begun, ended));
    }
    return json{{"times", times}};
  }

  // As engines do it: the next chunk is put on the stream while the GPU computes this one, and never more.
  Expected<json> play_load(const Play& play, const json& steps) {
    std::vector<std::uint32_t> marks;
    std::vector<std::int64_t> begun, ended;
    const auto wait_for_one = [&]() -> Expected<void> {
      const auto at = load_->wait(marks[ended.size()]);
      if (!at) return tl::unexpected(at.error());
      ended.push_back(*at);
      return {};
    };
    for (const json& step : steps) {
      begun.push_back(now_ns());
      if (auto ok = put_chunk(play, step); !ok) return tl::unexpected(ok.error());
      const auto mark = load_->mark();
      if (!mark) return tl::unexpected(mark.error());
      marks.push_back(*mark);
      if (auto ok = told_at_end(play, step); !ok) return tl::unexpected(ok.error());
      if (marks.size() < 2) continue;
      if (auto ok = wait_for_one(); !ok) return tl::unexpected(ok.error());
    }
    while (ended.size() < marks.size())
      if (auto ok = wait_for_one(); !ok) return tl::unexpected(ok.error());
    const auto layer_times = load_->layer_times();
    if (!layer_times) return tl::unexpected(layer_times.error());
    json times = json::array();
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (i > 0) begun[i] = std::max(begun[i], ended[i - 1]);
      trace_chunk(play, steps[i], std::span(*layer_times).subspan(i * static_cast<std::size_t>(play.layers)), ended[i]);
      times.push_back(time_of(steps[i], begun[i], ended[i]));
    }
    return json{{"times", times}, {"layer_ms", samples_json(*layer_times)}};
  }

  Expected<void> put_chunk(const Play& play, const json& step) {
    if (auto ok = load_->begin_chunk(); !ok) return ok;
    for (std::int32_t l = 0; l < play.layers; ++l) {
      if (auto ok = load_->layer(step["begin"], step["end"]); !ok) return ok;
      if (auto ok = told(play, step, LayerId(l)); !ok) return ok;
    }
    return told_the_rest(play, step);
  }

  static json time_of(const json& step, std::int64_t begun, std::int64_t ended) {
    return {{"request", step["request"]}, {"begun", begun}, {"ended", ended}};
  }

  Expected<void> told(const Play& play, const json& step, LayerId layer) {
    if (play.mode != "stream" || !std::binary_search(play.own.begin(), play.own.end(), layer)) return {};
    return ready(key_of(step), layer, step["end"]);
  }

  // Layers that no forward pass counts (a draft model's) come with the last one.
  Expected<void> told_the_rest(const Play& play, const json& step) {
    for (const LayerId layer : play.own)
      if (layer.value >= play.layers)
        if (auto ok = told(play, step, layer); !ok) return ok;
    return {};
  }

  Expected<void> told_at_end(const Play& play, const json& step) {
    if (play.mode != "one shot" || step["end"] != step["total"]) return {};
    for (const LayerId layer : play.own)
      if (auto ok = ready(key_of(step), layer, step["end"]); !ok) return ok;
    return {};
  }

  void trace_layer(const json& step, LayerId layer, Instant from, Instant to) {
    if (trace_ == nullptr) return;
    trace_->span(trace_->track("layer compute"), "compute", "layer", from, to,
                 {.transfer = key_of(step), .layer = layer, .tokens = TokenRange{step["begin"], step["end"]}});
  }

  // Backwards from the end of a chunk: a GPU says how long, not when.
  void trace_chunk(const Play& play, const json& step, std::span<const double> layer_ms, std::int64_t ended) {
    Instant to(ended);
    for (std::int32_t l = play.layers - 1; l >= 0; --l) {
      const Instant from = to - Instant(static_cast<std::int64_t>(layer_ms[static_cast<std::size_t>(l)] * 1e6));
      trace_layer(step, LayerId(l), from, to);
      to = from;
    }
  }

  // Once the rank's device has done what it was given before.
  Expected<void> ready(const TransferKey& key, LayerId layer, std::int64_t end) {
    auto after = load_ != nullptr ? load_->computed() : transport_.computed();
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
  std::unique_ptr<PrefillLoad> load_;  // null: layers take time by the clock
};

}  // namespace

Expected<void> run_prefill_worker(const WorkerSpec& spec, Channel& channel) { return PrefillWorker(spec, channel).run(); }

}  // namespace kvloom
