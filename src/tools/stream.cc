#include "kvloom/tools/stream.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>

#include "kvloom/plan/compile.h"
#include "kvloom/session/trace.h"
#include "kvloom/tools/cluster.h"
#include "kvloom/tools/machine.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

using nlohmann::json;

constexpr std::int64_t kTimeMs = 600'000;
constexpr std::int64_t kLeadNs = 100'000'000;  // from the word to begin until the first layer: all ranks have heard it
constexpr std::chrono::minutes kStreamPatience{10};

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

class Stream {
 public:
  explicit Stream(const StreamJob& job) : job_(job), chunks_(chunks_of(job)) {}

  Expected<StreamReport> run() {
    if (auto ok = open(); !ok) return tl::unexpected(ok.error());
    if (const auto warm = pass("warm", 4); !warm) return tl::unexpected(warm.error());
    const auto alone = pass("alone", 1);
    if (!alone) return tl::unexpected(alone.error());
    const auto one_shot = pass("one shot", 2);
    if (!one_shot) return tl::unexpected(one_shot.error());
    const auto posts_before = posts();
    const auto stream = pass("stream", 3);
    if (!stream) return tl::unexpected(stream.error());
    StreamReport report = summed(*alone, *one_shot, *stream);
    report.posts = posts() - posts_before;
    report.layers_times_chunks = layers_ * static_cast<std::int64_t>(chunks_.size());
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

  // "warm": all is pushed once without taking time, so that connections stand and memory is mapped before anything is timed.
  Expected<std::vector<Timed>> pass(const std::string& mode, std::uint64_t epoch) {
    const bool pushed = mode != "alone", warm = mode == "warm";
    for (std::size_t i = 0; pushed && i < job_.tokens.size(); ++i) {
      if (auto ok = cluster_->offer(request(i, epoch), true); !ok) return tl::unexpected(ok.error());
      if (auto ok = cluster_->begin(request(i, epoch), true); !ok) return tl::unexpected(ok.error());
    }
    const json play = {{"do", "play"},
                       {"mode", warm ? "one shot" : mode},
                       {"layer_ns", warm ? 0 : job_.layer_ns},
                       {"layers", layers_},
                       {"busy", job_.busy && !warm},
                       {"steps", steps(epoch)},
                       {"begin_at", now_ns() + kLeadNs}};
    const auto answers = cluster_->workers.ask_all(cluster_->prefill, play, kStreamPatience);
    if (!answers) return tl::unexpected(answers.error());
    std::vector<Timed> out(job_.tokens.size());
    for (const json& answer : *answers) note(answer["times"], out);
    for (std::size_t i = 0; pushed && i < job_.tokens.size(); ++i)
      if (auto ok = finish(request(i, epoch), out[i]); !ok) return tl::unexpected(ok.error());
    return out;
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

  Expected<void> finish(const ServedRequest& request, Timed& timed) {
    if (!cluster_->listen_until([&] { return cluster_->result(request).over(); }, kStreamPatience))
      return fail(Code::deadline, "{} is not over", request.name);
    const ServedResult& result = cluster_->result(request);
    if (!result.landed())
      for (const auto& [worker, why] : result.whys)
        if (!why.empty()) return fail(Code::unavailable, "{}: {}: {}", request.name, cluster_->workers.spec(worker).name(), why);
    timed.landed = result.landed_at;
    timed.bytes = result.bytes;
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

  StreamReport summed(const std::vector<Timed>& alone, const std::vector<Timed>& one_shot,
                      const std::vector<Timed>& stream) const {
    constexpr double kMs = 1e-6;
    StreamReport out;
    std::vector<double> tails, one_shot_tails, against;
    double rate = 0, with = 0, without = 0;
    for (std::size_t i = 0; i < stream.size(); ++i) {
      const auto took = [&](const Timed& t) { return static_cast<double>(t.ended - t.begun) * kMs; };
      const auto tail = [&](const Timed& t) { return std::max(0.0, static_cast<double>(t.landed - t.ended) * kMs); };
      StreamRequest request;
      request.id = static_cast<std::int64_t>(i);
      request.tokens = job_.tokens[i];
      request.bytes = stream[i].bytes;
      request.prefill_alone_ms = took(alone[i]);
      request.prefill_ms = took(stream[i]);
      request.landed_ms = static_cast<double>(stream[i].landed - stream[i].begun) * kMs;
      request.exposed_tail_ms = tail(stream[i]);
      request.one_shot_prefill_ms = took(one_shot[i]);
      request.one_shot_tail_ms = tail(one_shot[i]);
      request.wrong_bytes = stream[i].wrong_bytes + one_shot[i].wrong_bytes;
      out.wrong_bytes += request.wrong_bytes;
      tails.push_back(request.exposed_tail_ms);
      one_shot_tails.push_back(request.one_shot_tail_ms);
      if (request.one_shot_tail_ms > 0) rate = std::max(rate, static_cast<double>(request.bytes) / request.one_shot_tail_ms);
      against.push_back(request.landed_ms / std::max(1e-6, request.one_shot_prefill_ms + request.one_shot_tail_ms));
      with += request.prefill_ms;
      without += request.prefill_alone_ms;
      out.requests.push_back(request);
    }
    out.exposed_tail = quantiles(tails);
    out.one_shot_tail = quantiles(one_shot_tails);
    out.against_one_shot = quantiles(against).p50;
    out.prefill_slowed = without > 0 ? with / without : 1;
    double most = 0;
    for (const StreamRequest& request : out.requests) most = std::max(most, static_cast<double>(request.bytes));
    if (rate > 0 && layers_ > 0) out.layer_wire_ms = most / static_cast<double>(layers_) / rate;
    return out;
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
};

json quantiles_json(const Quantiles& q) { return {{"p50", q.p50}, {"p99", q.p99}, {"max", q.max}}; }

}  // namespace

Quantiles quantiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    const auto index = static_cast<std::size_t>(std::ceil(part * static_cast<double>(values.size())));
    return values[std::clamp<std::size_t>(index, 1, values.size()) - 1];
  };
  return {at(0.5), at(0.99), values.back()};
}

Expected<StreamReport> run_stream(const StreamJob& job) { return Stream(job).run(); }

json stream_json(const StreamReport& report, const StreamJob& job) {
  json requests = json::array();
  for (const StreamRequest& r : report.requests)
    requests.push_back({{"id", r.id},
                        {"tokens", r.tokens},
                        {"bytes", r.bytes},
                        {"prefill_alone_ms", r.prefill_alone_ms},
                        {"prefill_ms", r.prefill_ms},
                        {"landed_ms", r.landed_ms},
                        {"exposed_tail_ms", r.exposed_tail_ms},
                        {"one_shot_prefill_ms", r.one_shot_prefill_ms},
                        {"one_shot_tail_ms", r.one_shot_tail_ms},
                        {"wrong_bytes", r.wrong_bytes}});
  return {{"transport", job.worker.transport.name},
          {"requests", requests},
          {"exposed_tail_ms", quantiles_json(report.exposed_tail)},
          {"one_shot_tail_ms", quantiles_json(report.one_shot_tail)},
          {"layer_wire_ms", report.layer_wire_ms},
          {"prefill_slowed", report.prefill_slowed},
          {"against_one_shot", report.against_one_shot},
          {"wrong_bytes", report.wrong_bytes},
          {"posts", report.posts},
          {"layers_times_chunks", report.layers_times_chunks},
          {"chunk", job.chunk},
          {"layer_ms", static_cast<double>(job.layer_ns) * 1e-6},
          {"busy", job.busy}};
}

void print_stream(std::FILE* out, const StreamReport& report, const StreamJob& job) {
  constexpr std::size_t kMost = 32;  // that are printed
  TextTable table({{"request"},
                   {"tokens"},
                   {"prefill alone, ms"},
                   {"with push, ms"},
                   {"landed after, ms"},
                   {"exposed tail, ms"},
                   {"one shot: tail, ms"}});
  for (std::size_t i = 0; i < std::min(kMost, report.requests.size()); ++i) {
    const StreamRequest& r = report.requests[i];
    table.add({fmt::format("{}", r.id), count_text(r.tokens), fmt::format("{:.1f}", r.prefill_alone_ms),
               fmt::format("{:.1f}", r.prefill_ms), fmt::format("{:.1f}", r.landed_ms), fmt::format("{:.2f}", r.exposed_tail_ms),
               fmt::format("{:.2f}", r.one_shot_tail_ms)});
  }
  table.print(out);
  if (report.requests.size() > kMost) fmt::print(out, "... and {} more\n", report.requests.size() - kMost);
  const auto line = [&](const char* name, const Quantiles& q) {
    fmt::print(out, "{}: p50 {:.2f} ms, p99 {:.2f} ms, max {:.2f} ms\n", name, q.p50, q.p99, q.max);
  };
  fmt::print(out, "\n");
  line("exposed tail, streamed", report.exposed_tail);
  line("exposed tail, one shot", report.one_shot_tail);
  fmt::print(out, "one layer of the longest request is {:.2f} ms on the wire\n", report.layer_wire_ms);
  fmt::print(out, "prefill with push takes {:.4f} x its time alone; computing {}\n", report.prefill_slowed,
             job.busy ? "burns a core" : "waits as for an accelerator");
  fmt::print(out, "from begin to landed: {:.3f} x one shot, in the median\n", report.against_one_shot);
  fmt::print(out, "{} posts of the first prefill rank, for {} layers x chunks\n", count_text(report.posts),
             count_text(report.layers_times_chunks));
  fmt::print(out, "{} wrong bytes, of both ways\n", count_text(report.wrong_bytes));
}

}  // namespace kvloom
