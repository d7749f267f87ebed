// stream_report.cc: what run --stream says of what it has measured (stream.h).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "kvloom/tools/print.h"
#include "kvloom/tools/stream.h"

namespace kvloom {
namespace {

using nlohmann::json;

json quantiles_json(const Quantiles& q) { return {{"p50", q.p50}, {"p99", q.p99}, {"max", q.max}}; }

json spread_json(const Samples& samples) {
  json out = quantiles_json(quantiles(samples.some));
  out["count"] = samples.count;
  out["mean"] = samples.mean();
  return out;
}

json beside_json(const Beside& beside) {
  return {{"alone", spread_json(beside.alone)},
          {"one_shot", spread_json(beside.one_shot)},
          {"with_push", spread_json(beside.stream)},
          {"slowed", beside.slowed()}};
}

void print_beside(std::FILE* out, const char* name, const Beside& beside) {
  if (beside.alone.count == 0) return;
  const auto words = [](const Samples& samples) {
    const Quantiles q = quantiles(samples.some);
    return fmt::format("mean {:.3f} ms, p50 {:.3f} ms, p99 {:.3f} ms", samples.mean(), q.p50, q.p99);
  };
  fmt::print(out, "{}: alone {}; with push {}: {:.4f} x in the mean\n", name, words(beside.alone), words(beside.stream),
             beside.slowed());
  fmt::print(out, "{}, one shot: {}\n", name, words(beside.one_shot));
}

std::vector<std::string> distinct(std::vector<std::string> places) {
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

constexpr const char* kOneGpu =
    "prefill and decode share a GPU: their kernels and copies share its SMs and memory, so these are no figures of overlap "
    "between GPUs";

}  // namespace

void Samples::add(const json& samples) {
  count += samples["count"].get<std::int64_t>();
  sum += samples["sum"].get<double>();
  for (const json& each : samples["some"]) some.push_back(each);
}

void Samples::add(const Samples& more) {
  count += more.count;
  sum += more.sum;
  some.insert(some.end(), more.some.begin(), more.some.end());
}

bool StreamReport::shares_gpu() const {
  return std::any_of(prefill_places.begin(), prefill_places.end(), [&](const std::string& place) {
    return std::find(decode_places.begin(), decode_places.end(), place) != decode_places.end();
  });
}

Quantiles quantiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    const auto index = static_cast<std::size_t>(std::ceil(part * static_cast<double>(values.size())));
    return values[std::clamp<std::size_t>(index, 1, values.size()) - 1];
  };
  return {at(0.5), at(0.99), values.back()};
}

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
  json out = {{"transport", job.worker.transport.name},
              {"requests", requests},
              {"exposed_tail_ms", quantiles_json(report.exposed_tail)},
              {"one_shot_tail_ms", quantiles_json(report.one_shot_tail)},
              {"layer_wire_ms", report.layer_wire_ms},
              {"prefill_slowed", report.prefill_slowed},
              {"prefill_slowed_rounds", report.prefill_slowed_rounds},
              {"against_one_shot", report.against_one_shot},
              {"wrong_bytes", report.wrong_bytes},
              {"posts", report.posts},
              {"layers_times_chunks", report.layers_times_chunks},
              {"chunk", job.chunk},
              {"rounds", job.rounds},
              {"load", job.worker.load.prefill},
              {"decode_load", job.worker.load.decode},
              {"layer_ms", static_cast<double>(job.layer_ns) * 1e-6},
              {"busy", job.busy}};
  if (job.worker.load.prefill_computes()) {
    out.erase("layer_ms");  // nobody said it: it is measured
    out["layer_compute_ms"] = beside_json(report.layers);
  }
  if (job.worker.load.decode_computes()) {
    out["decode_step_ms"] = beside_json(report.steps);
    out["decode_step_bytes"] = report.step_bytes;
  }
  if (job.worker.transport.on_host()) return out;
  out["prefill_gpus"] = report.prefill_places;
  out["decode_gpus"] = report.decode_places;
  out["shares_gpu"] = report.shares_gpu();
  out["copies"] = copies_json(job.worker.transport.copies.limits);
  return out;
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
             job.worker.load.prefill_computes() ? "is matrix products on the GPU"
             : job.busy                         ? "burns a core"
                                                : "waits as for an accelerator");
  if (job.rounds > 1)
    fmt::print(out, "in each of {} rounds: {:.4f}\n", job.rounds, fmt::join(report.prefill_slowed_rounds, ", "));
  print_beside(out, "a layer on the GPU", report.layers);
  print_beside(out, "a decode step", report.steps);
  fmt::print(out, "from begin to landed: {:.3f} x one shot, in the median\n", report.against_one_shot);
  fmt::print(out, "{} posts of the first prefill rank, for {} layers x chunks\n", count_text(report.posts),
             count_text(report.layers_times_chunks));
  if (!report.prefill_places.empty())
    fmt::print(out, "prefill on {}; decode on {}; {}\n", fmt::join(distinct(report.prefill_places), ", "),
               fmt::join(distinct(report.decode_places), ", "), copies_text(job.worker.transport.copies.limits));
  if (report.shares_gpu()) fmt::print(out, "{}\n", kOneGpu);
  fmt::print(out, "{} wrong bytes, of both ways\n", count_text(report.wrong_bytes));
}

}  // namespace kvloom
