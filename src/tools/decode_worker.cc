// decode_worker.cc: a rank of a decode group (worker.h).
#include "kvloom/session/target_endpoint.h"
#include "kvloom/tools/cuda_load.h"
#include "kvloom/tools/worker_parts.h"

namespace kvloom {
namespace {

using nlohmann::json;

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
    if (word == "load") return load(command["what"]);
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

  // "open" once; then "start" and "stop" around each play: the steps between.
  Expected<json> load(const std::string& what) {
    if (what == "open") {
      auto made = open_decode_load(spec_.load, spec_.transport, spec_.rank);
      if (!made) return tl::unexpected(made.error());
      load_ = std::move(*made);
      return json{{"step_bytes", load_->step_bytes()}};
    }
    if (load_ == nullptr) return fail(Code::invalid_argument, "there is no load to {}", what);
    if (what == "start") {
      load_->start();
      return json::object();
    }
    const auto steps = load_->stop();
    if (!steps) return tl::unexpected(steps.error());
    return json{{"step_ms", samples_json(*steps)}};
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
  std::unique_ptr<DecodeLoad> load_;
};

}  // namespace

Expected<void> run_decode_worker(const WorkerSpec& spec, Channel& channel) { return DecodeWorker(spec, channel).run(); }

}  // namespace kvloom
