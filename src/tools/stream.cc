#include "kvloom/tools/stream.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>
#include <tuple>

#include "kvloom/plan/compile.h"
#include "kvloom/session/trace.h"
#include "kvloom/tools/cluster.h"
#include "kvloom/tools/machine.h"
#include "kvloom/tools/plan_measure.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

using nlohmann::json;

constexpr std::int64_t kTimeMs = 600'000;
constexpr std::int64_t kLeadNs = 100'000'000;  // from the word to begin until the first layer: all ranks have heard it
constexpr std::chrono::minutes kStreamPatience{10};
constexpr double kMs = 1e-6;  // of a nanosecond

struct Chunk {
  std::size_t request;
  std::int64_t begin, end;
};

// In turns: a chunk of each of the open requests; the next request opens when one is done.
std::vector<Chunk> chunks_of(const StreamJob& job) {
  std::vector<Chunk> out;
  std::deque<Chunk> open;
  std::size_t next = 0;
  const auto at_once = static_cast<std::size_t>(job.at_once > 0 ? job.at_once : static_cast<std::int64_t>(job.tokens.size()));
  for (;;) {
    while (open.size() < at_once && next < job.tokens.size()) {
      open.push_back({next, 0, 0});
      ++next;
    }
    if (open.empty()) return out;
    Chunk chunk = open.front();
    open.pop_front();
    const std::int64_t total = job.tokens[chunk.request];
    chunk.begin = chunk.end;
    chunk.end = job.chunk > 0 ? std::min(total, chunk.begin + job.chunk) : total;
    out.push_back(chunk);
    if (chunk.end < total) open.push_back(chunk);
  }
}

struct Timed {
  std::int64_t begun = 0, ended = 0, landed = 0;  // ns
  std::int64_t wrong_bytes = 0, bytes = 0;
};

struct Pass {
  std::vector<Timed> requests;  // [requests]
  Samples layers, steps;        // of loads
};

class Stream {
 public:
  explicit Stream(const StreamJob& job) : job_(job), chunks_(chunks_of(job)) {}

  Expected<StreamReport> run() {
    if (auto ok = open(); !ok) return tl::unexpected(ok.error());
    if (const auto warm = pass("warm", 4); !warm) return tl::unexpected(warm.error());
    for (std::int64_t round = 0; round < job_.rounds; ++round)
      if (auto ok = one_round(round); !ok) return tl::unexpected(ok.error());
    StreamReport report = summed();
    report.posts = posts_;
    report.layers_times_chunks = layers_ * static_cast<std::int64_t>(chunks_.size());
    report.step_bytes = step_bytes_;
    if (auto ok = add_places(report); !ok) return tl::unexpected(ok.error());
    if (auto ok = write_timeline(); !ok) return tl::unexpected(ok.error());
    return report;
  }

 private:
  ServedRequest request(std::size_t i, std::uint64_t epoch) const {
    ServedRequest out;
    out.name = fmt::format("req-{}", i);
    out.epoch = epoch;
    out.number = static_cast<std::int64_t>(i) + 1;
    out.total = job_.tokens[i];
    out.prefix = std::min(job_.job.prefix, out.total);
    out.time_ms = kTimeMs;
    return out;
  }

  Expected<void> open() {
    ClusterSpec spec;
    spec.prefill = job_.job.prefill;
    spec.decode = job_.job.decode;
    for (const std::int64_t tokens : job_.tokens) spec.tokens_at_once += tokens;
    spec.requests_at_once = static_cast<std::int64_t>(job_.tokens.size());
    spec.worker = job_.worker;
    spec.worker.trace = !job_.timeline.empty();
    if (auto ok = check_memory(spec); !ok) return ok;
    auto made = WorkerCluster::make(spec);
    if (!made) return tl::unexpected(made.error());
    cluster_ = std::move(*made);
    layers_ = job_.job.shape.layers();
    if (auto ok = open_loads(); !ok) return ok;
    json prepare = {{"do", "prepare"}, {"requests", json::array()}};
    for (std::size_t i = 0; i < job_.tokens.size(); ++i)
      prepare["requests"].push_back({{"request", request(i, 0).number}, {"total", job_.tokens[i]}});
    return cluster_->workers.ask_all(cluster_->prefill, prepare, kStreamPatience).map([](const auto&) {});
  }

  Expected<void> check_memory(const ClusterSpec& spec) const {
    double bytes = 0;
    for (const auto& side : {spec.prefill, spec.decode})
      for (std::int32_t rank = 0; rank < side->ranks(); ++rank)
        bytes += side->bytes_per_token(Rank(rank)) * static_cast<double>(spec.tokens_at_once);
    const auto usable = read_memory().usable();
    if (usable && bytes * 1.1 > static_cast<double>(*usable))
      return fail(Code::exhausted, "the requests need {} of memory together, of which {} are free: fewer --requests or --tokens",
                  bytes_text(Bytes(static_cast<std::int64_t>(bytes * 1.1))), bytes_text(Bytes(*usable)));
    return {};
  }

  json steps(std::uint64_t epoch) const {
    json out = json::array();
    for (const Chunk& chunk : chunks_) {
      json step = request(chunk.request, epoch).command("step");
      step["begin"] = chunk.begin;
      step["end"] = chunk.end;
      step["part"] = static_cast<double>(chunk.end - chunk.begin) / static_cast<double>(job_.layer_tokens);
      out.push_back(std::move(step));
    }
    return out;
  }

  Expected<void> open_loads() {
    const std::int64_t context = *std::max_element(job_.tokens.begin(), job_.tokens.end());
    if (job_.worker.load.prefill_computes())
      if (auto ok = cluster_->workers.ask_all(cluster_->prefill, {{"do", "load"}, {"context", context}}, kStreamPatience); !ok)
        return tl::unexpected(ok.error());
    if (!job_.worker.load.decode_computes()) return {};
    const auto opened = cluster_->workers.ask_all(cluster_->decode, {{"do", "load"}, {"what", "open"}}, kStreamPatience);
    if (!opened) return tl::unexpected(opened.error());
    step_bytes_ = opened->front()["step_bytes"];
    return {};
  }

  // Alone and streamed, in turns which comes first: what drifts (a GPU's clock, its heat) meets both.
  Expected<void> one_round(std::int64_t round) {
    const auto epoch = static_cast<std::uint64_t>(round) * 10;
    const auto play = [&](const std::string& mode, std::uint64_t number, std::vector<Pass>& to) -> Expected<void> {
      auto played = pass(mode, epoch + number);
      if (!played) return tl::unexpected(played.error());
      to.push_back(std::move(*played));
      return {};
    };
    const bool stream_first = round % 2 == 1;
    if (!stream_first)
      if (auto ok = play("alone", 1, alone_); !ok) return ok;
    if (round == 0)
      if (auto ok = play("one shot", 2, one_shot_); !ok) return ok;
    const auto posts_before = posts();
    if (auto ok = play("stream", 3, stream_); !ok) return ok;
    if (round == 0) posts_ = posts() - posts_before;
    return stream_first ? play("alone", 1, alone_) : Expected<void>();
  }

  // "warm": all is pushed once without taking time but a load's, so that connections stand, memory is mapped and kernels are loaded before
  // anything is timed.
  Expected<Pass> pass(const std::string& mode, std::uint64_t epoch) {
    const bool pushed = mode != "alone", warm = mode == "warm";
    for (std::size_t i = 0; pushed && i < job_.tokens.size(); ++i) {
      if (auto ok = cluster_->offer(request(i, epoch), true); !ok) return tl::unexpected(ok.error());
      if (auto ok = cluster_->begin(request(i, epoch), true); !ok) return tl::unexpected(ok.error());
    }
    if (auto ok = tell_decode_loads("start"); !ok) return tl::unexpected(ok.error());
    const json play = {{"do", "play"},
                       {"mode", warm ? "one shot" : mode},
                       {"layer_ns", warm ? 0 : job_.layer_ns},
                       {"layers", layers_},
                       {"busy", job_.busy && !warm},
                       {"steps", steps(epoch)},
                       {"begin_at", now_ns() + kLeadNs}};
    const auto answers = cluster_->workers.ask_all(cluster_->prefill, play, kStreamPatience);
    if (!answers) return tl::unexpected(answers.error());
    Pass out;
    out.requests.resize(job_.tokens.size());
    for (const json& answer : *answers) {
      note(answer["times"], out.requests);
      if (answer.contains("layer_ms")) out.layers.add(answer["layer_ms"]);
    }
    for (std::size_t i = 0; pushed && i < job_.tokens.size(); ++i)
      if (auto ok = landed(request(i, epoch), out.requests[i]); !ok) return tl::unexpected(ok.error());
    const auto stopped = tell_decode_loads("stop");
    if (!stopped) return tl::unexpected(stopped.error());
    for (const json& answer : *stopped) out.steps.add(answer["step_ms"]);
    for (std::size_t i = 0; pushed && i < job_.tokens.size(); ++i)
      if (auto ok = check(request(i, epoch), out.requests[i]); !ok) return tl::unexpected(ok.error());
    return out;
  }

  Expected<std::vector<json>> tell_decode_loads(const char* what) {
    if (!job_.worker.load.decode_computes()) return std::vector<json>();
    return cluster_->workers.ask_all(cluster_->decode, {{"do", "load"}, {"what", what}}, kStreamPatience);
  }

  // The last rank to begin and to end counts: they work together.
  static void note(const json& times, std::vector<Timed>& out) {
    std::vector<bool> seen(out.size());
    for (const json& time : times) {
      const auto i = static_cast<std::size_t>(time["request"].get<std::int64_t>() - 1);
      if (!seen[i]) out[i].begun = std::max(out[i].begun, time["begun"].get<std::int64_t>());
      seen[i] = true;
      out[i].ended = std::max(out[i].ended, time["ended"].get<std::int64_t>());
    }
  }

  Expected<void> landed(const ServedRequest& request, Timed& timed) {
    if (!cluster_->listen_until([&] { return cluster_->result(request).over(); }, kStreamPatience))
      return fail(Code::deadline, "{} is not over", request.name);
    const ServedResult& result = cluster_->result(request);
    if (!result.landed()) {
      for (const auto& [worker, why] : result.whys)
        if (!why.empty()) return fail(Code::unavailable, "{}: {}: {}", request.name, cluster_->workers.spec(worker).name(), why);
      return fail(Code::unavailable, "{} ended before it had landed, and nobody says why", request.name);
    }
    timed.landed = result.landed_at;
    timed.bytes = result.bytes;
    return {};
  }

  Expected<void> check(const ServedRequest& request, Timed& timed) {
    for (const WorkerId worker : cluster_->decode) {
      const auto checked = cluster_->workers.ask(worker, request.command("check"), kStreamPatience);
      if (!checked) return tl::unexpected(checked.error());
      timed.wrong_bytes += (*checked)["wrong"].get<std::int64_t>();
    }
    cluster_->forget(request);
    return {};
  }

  // That the first prefill rank has made so far.
  std::int64_t posts() {
    const auto metrics = cluster_->workers.ask(cluster_->prefill.front(), {{"do", "metrics"}});
    if (!metrics) return 0;
    const std::string text = (*metrics)["text"];
    const auto at = text.find("\nkvloom_posts_total{");
    return at == std::string::npos ? 0 : std::stoll(text.substr(text.find("} ", at) + 2));
  }

  static double took(const Timed& t) { return static_cast<double>(t.ended - t.begun) * kMs; }
  static double tail(const Timed& t) { return std::max(0.0, static_cast<double>(t.landed - t.ended) * kMs); }
  static double until_landed(const Timed& t) { return static_cast<double>(t.landed - t.begun) * kMs; }

  // Of one request in all rounds.
  static std::vector<double> of(const std::vector<Pass>& passes, std::size_t request, double (*what)(const Timed&)) {
    std::vector<double> out;
    for (const Pass& pass : passes) out.push_back(what(pass.requests[request]));
    return out;
  }

  StreamRequest summed_request(std::size_t i) const {
    StreamRequest out;
    out.id = static_cast<std::int64_t>(i);
    out.tokens = job_.tokens[i];
    out.bytes = stream_.front().requests[i].bytes;
    out.prefill_alone_ms = median(of(alone_, i, took));
    out.prefill_ms = median(of(stream_, i, took));
    out.landed_ms = median(of(stream_, i, until_landed));
    const std::vector<double> tails = of(stream_, i, tail);
    out.exposed_tail_ms = *std::max_element(tails.begin(), tails.end());
    out.one_shot_prefill_ms = took(one_shot_.front().requests[i]);
    out.one_shot_tail_ms = tail(one_shot_.front().requests[i]);
    out.wrong_bytes = one_shot_.front().requests[i].wrong_bytes;
    for (const Pass& pass : stream_) out.wrong_bytes += pass.requests[i].wrong_bytes;
    return out;
  }

  StreamReport summed() const {
    StreamReport out;
    std::vector<double> tails, one_shot_tails, against;
    double rate = 0, most = 0;
    for (std::size_t i = 0; i < job_.tokens.size(); ++i) {
      const StreamRequest& request = out.requests.emplace_back(summed_request(i));
      out.wrong_bytes += request.wrong_bytes;
      for (const double each : of(stream_, i, tail)) tails.push_back(each);
      one_shot_tails.push_back(request.one_shot_tail_ms);
      if (request.one_shot_tail_ms > 0) rate = std::max(rate, static_cast<double>(request.bytes) / request.one_shot_tail_ms);
      against.push_back(request.landed_ms / std::max(1e-6, request.one_shot_prefill_ms + request.one_shot_tail_ms));
      most = std::max(most, static_cast<double>(request.bytes));
    }
    out.exposed_tail = quantiles(tails);
    out.one_shot_tail = quantiles(one_shot_tails);
    out.against_one_shot = quantiles(against).p50;
    if (rate > 0 && layers_ > 0) out.layer_wire_ms = most / static_cast<double>(layers_) / rate;
    add_slowed(out);
    return out;
  }

  void add_slowed(StreamReport& out) const {
    for (std::size_t round = 0; round < stream_.size(); ++round) {
      double with = 0, without = 0;
      for (std::size_t i = 0; i < job_.tokens.size(); ++i) {
        with += took(stream_[round].requests[i]);
        without += took(alone_[round].requests[i]);
      }
      out.prefill_slowed_rounds.push_back(without > 0 ? with / without : 1);
    }
    out.prefill_slowed = median(out.prefill_slowed_rounds);
    for (const auto& [passes, layers, steps] : {std::tuple(&alone_, &out.layers.alone, &out.steps.alone),
                                                std::tuple(&one_shot_, &out.layers.one_shot, &out.steps.one_shot),
                                                std::tuple(&stream_, &out.layers.stream, &out.steps.stream)})
      for (const Pass& pass : *passes) {
        layers->add(pass.layers);
        steps->add(pass.steps);
      }
  }

  Expected<void> add_places(StreamReport& out) {
    for (const auto& [workers, places] :
         {std::pair(&cluster_->prefill, &out.prefill_places), std::pair(&cluster_->decode, &out.decode_places)}) {
      const auto answers = cluster_->workers.ask_all(*workers, {{"do", "where"}});
      if (!answers) return tl::unexpected(answers.error());
      for (const json& answer : *answers)
        if (const std::string where = answer["where"]; !where.empty()) places->push_back(where);
    }
    return {};
  }

  Expected<void> write_timeline() {
    if (job_.timeline.empty()) return {};
    std::vector<std::string> parts;
    for (const WorkerId worker : cluster_->all()) {
      const std::string file = fmt::format("{}.{}.{}", job_.timeline, getpid(), worker);
      const auto written = cluster_->workers.ask(worker, {{"do", "trace"}, {"file", file}}, kStreamPatience);
      if (!written) return tl::unexpected(written.error());
      auto text = read_file(file);
      std::remove(file.c_str());
      if (!text) return tl::unexpected(text.error());
      parts.push_back(std::move(*text));
    }
    const auto merged = merge_traces(parts);
    if (!merged) return tl::unexpected(merged.error());
    return write_file(job_.timeline, *merged);
  }

  const StreamJob& job_;
  std::vector<Chunk> chunks_;
  std::unique_ptr<WorkerCluster> cluster_;
  std::int32_t layers_ = 0;
  std::int64_t posts_ = 0, step_bytes_ = 0;
  std::vector<Pass> alone_, one_shot_, stream_;  // [rounds], [1], [rounds]
};

}  // namespace

Expected<StreamReport> run_stream(const StreamJob& job) { return Stream(job).run(); }

}  // namespace kvloom
