// run.cc: `kvloom run`: a real transfer between real processes, every byte checked.  Stage: tools.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "kvloom/tools/html.h"
#include "kvloom/tools/job.h"
#include "kvloom/tools/measure.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/request_trace.h"
#include "kvloom/tools/run_job.h"
#include "kvloom/tools/run_parent.h"
#include "kvloom/tools/stream.h"
#include "kvloom/tools/transport_words.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kRunExamples =
    "Examples:\n"
    "  kvloom run --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --prefix 1000\n"
    "  kvloom run --model samples/llama-3.1-8b.json --prefill tp=4 --decode tp=2,page=16 --tokens 4096 --seed 7 --json\n"
    "  kvloom run --model samples/qwen3-30b-a3b.json --prefill tp=1 --decode tp=1 --stream --tokens 8192 --chunk 2048 --requests "
    "16\n"
    "  kvloom run --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --transport cuda\n"
    "  kvloom run --model samples/qwen3-30b-a3b.json --prefill tp=1 --decode tp=1 --stream --tokens 16384 --transport cuda "
    "--load "
    "gemm\n"
    "\n"
    "Starts a process a rank. Prefill ranks fill their caches with bytes that depend on (layer, token, head, plane, byte) only "
    "and push them layer by\n"
    "layer through shared memory, or between GPUs; decode ranks check every byte of their pools. With --stream computing takes "
    "time, and\n"
    "what of the transfer is left when it ends is measured. Exit code 1: a byte is wrong, or a rank died.";

constexpr std::size_t kMostPaths = 64;  // that are printed; --html and plan show all

struct RunWords {
  JobWords job;
  TransportWords transport;
  std::int64_t seed = -1;  // -1: drawn
  std::string tables;      // empty: random:SEED
  std::string html = "plan.html";
  std::int64_t patience = 120;
  std::optional<bool> naive;  // nothing: where it means something
  bool json = false;
  // With --stream:
  bool stream = false, busy = false;
  LoadWords load;
  CLI::Option* layer_time = nullptr;
  std::int64_t rounds = 0;  // 0: not said
  std::int64_t requests = 1, at_once = 0, chunk = 0, layer_ns = 2'000'000, scale = 1, rate = 0;
  std::string trace, timeline;
  LogLevel log = LogLevel::error;
};

double gb_per_s(std::int64_t bytes, double seconds) { return seconds > 0 ? static_cast<double>(bytes) * 1e-9 / seconds : 0; }

// One line on a terminal, over and over.
ShowProgress progress_bar(const Context& context) {
  if (!context.err_is_terminal) return {};
  return [out = context.err](const char* stage, std::int64_t covered, std::int64_t expected) {
    constexpr int kWidth = 40;
    const double part = expected > 0 ? std::min(1.0, static_cast<double>(covered) / static_cast<double>(expected)) : 0;
    const auto filled = static_cast<std::size_t>(part * kWidth);
    if (expected == 0)
      fmt::print(out, "\r\x1b[K{} ...", stage);
    else
      fmt::print(out, "\r\x1b[K{} [{}{}] {:3.0f}%  {}", stage, std::string(filled, '#'), std::string(kWidth - filled, '.'),
                 part * 100, bytes_text(Bytes(covered)));
    std::fflush(out);
  };
}

nlohmann::json report_json(const RunReport& report, const RunJob& job, const std::string& tables) {
  nlohmann::json out = {{"transport", job.transport.name},
                        {"landed_bytes", report.landed_bytes},
                        {"wanted_bytes", report.wanted_bytes},
                        {"wrong_bytes", report.wrong_bytes},
                        {"sent_bytes", report.sent_bytes},
                        {"naive_sent_bytes", report.naive_sent_bytes},
                        {"seconds", report.seconds},
                        {"naive_seconds", report.naive_seconds},
                        {"gb_per_s", gb_per_s(report.landed_bytes, report.seconds)},
                        {"checksums_equal", report.checksums_equal},
                        {"posts", report.posts},
                        {"runs", report.runs},
                        {"tables", tables},
                        {"prefill_ranks", job.loom.plan.source().ranks()},
                        {"decode_ranks", job.loom.plan.target().ranks()},
                        {"tokens", job.tokens},
                        {"prefix", job.prefix}};
  if (job.transport.on_host()) {
    out["memcpy_gb_per_s"] = report.memcpy_gb_per_s;
    out["page_memcpy_gb_per_s"] = report.page_memcpy_gb_per_s;
  } else {
    out["copies"] = copies_json(job.transport.copies.limits);
  }
  return out;
}

void print_report(std::FILE* out, const RunReport& report, const RunJob& job) {
  TextTable table({{"", TextTable::Align::left}, {"bytes sent"}, {"seconds"}, {"GB/s of what is wanted"}});
  const auto row = [&](const char* name, std::int64_t bytes, double seconds) {
    table.add(
        {name, count_text(bytes), fmt::format("{:.3f}", seconds), fmt::format("{:.2f}", gb_per_s(report.landed_bytes, seconds))});
  };
  row("kvloom", report.sent_bytes, report.seconds);
  if (report.naive_sent_bytes > 0)
    row("naive: whole sequence to every decode rank, which keeps its part", report.naive_sent_bytes, report.naive_seconds);
  if (job.transport.on_host()) {
    table.add({"memcpy, the same bytes in one piece a rank", "", "", fmt::format("{:.2f}", report.memcpy_gb_per_s)});
    table.add({"memcpy, the same pages one by one", "", "", fmt::format("{:.2f}", report.page_memcpy_gb_per_s)});
  }
  table.print(out);
  if (!job.transport.on_host()) fmt::print(out, "{}\n", copies_text(job.transport.copies.limits));
  if (report.naive_sent_bytes > 0 && report.sent_bytes > 0)
    fmt::print(out, "\nThe naive way sends {:.2f} x the bytes and takes {:.2f} x the time.\n",
               static_cast<double>(report.naive_sent_bytes) / static_cast<double>(report.sent_bytes),
               report.naive_seconds / std::max(report.seconds, 1e-9));
}

void print_verdict(std::FILE* out, const RunReport& report) {
  fmt::print(out,
             "{} of {} bytes landed; {} wrong bytes in all decode pools, prefix pages and canaries included; checksums of both "
             "sides {}.\n",
             count_text(report.landed_bytes), count_text(report.wanted_bytes), count_text(report.wrong_bytes),
             report.checksums_equal ? "equal" : "differ");
}

constexpr std::int64_t kLayerTokens = 2048;  // that take --layer-time where no --chunk is said

// As many tokens as the trace's requests have; without a trace, as --tokens says.
Expected<std::vector<std::int64_t>> lengths(const RunWords& words) {
  if (words.trace.empty()) {
    if (words.job.tokens == 0) return fail(Code::invalid_argument, "--tokens or --trace is required: how long the requests are");
    return std::vector<std::int64_t>(static_cast<std::size_t>(words.requests), words.job.tokens);
  }
  const auto text = read_file(words.trace);
  if (!text) return tl::unexpected(text.error());
  const auto requests = parse_trace(*text, static_cast<std::size_t>(words.requests), words.trace);
  if (!requests) return tl::unexpected(requests.error());
  std::vector<std::int64_t> out;
  for (const TraceRequest& request : *requests) {
    const std::int64_t tokens = std::max<std::int64_t>(1, request.tokens / words.scale);
    out.push_back(words.job.tokens > 0 ? std::min(tokens, words.job.tokens) : tokens);
  }
  return out;
}

constexpr std::int64_t kLoadRounds = 3;  // where a GPU computes: its clock drifts

Expected<void> check_stream_words(const RunWords& words) {
  if (!words.load.prefill_computes()) return {};
  if (words.busy) return fail(Code::invalid_argument, "--busy is for --load sleep: with gemm a GPU computes");
  if (words.layer_time->count() > 0)
    return fail(Code::invalid_argument, "--layer-time is for --load sleep: with gemm a layer takes as long as its GPU does");
  return {};
}

// "2 ms a layer of 2,048 tokens", "layers are matrix products on the GPU".
std::string layer_words(const StreamJob& stream) {
  if (stream.worker.load.prefill_computes()) return "layers are matrix products on the GPU";
  return fmt::format("{} ms a layer of {} tokens", static_cast<double>(stream.layer_ns) * 1e-6, count_text(stream.layer_tokens));
}

Expected<ExitCode> run_streamed(const RunWords& words, const Context& context) {
  if (auto ok = check_stream_words(words); !ok) return tl::unexpected(ok.error());
  auto tokens = lengths(words);
  if (!tokens) return tl::unexpected(tokens.error());
  JobWords job_words = words.job;
  job_words.tokens = *std::max_element(tokens->begin(), tokens->end());
  auto job = make_job(job_words);
  if (!job) return tl::unexpected(job.error());
  StreamJob stream;
  stream.job = std::move(*job);
  stream.tokens = std::move(*tokens);
  stream.at_once = words.at_once;
  stream.chunk = words.chunk;
  stream.layer_ns = words.layer_ns;
  stream.layer_tokens = words.chunk > 0 ? words.chunk : kLayerTokens;
  stream.busy = words.busy;
  stream.rounds = words.rounds > 0 ? words.rounds : words.load.any() ? kLoadRounds : 1;
  stream.worker.transport = words.transport;
  stream.worker.load = words.load;
  stream.worker.seed = words.seed >= 0 ? static_cast<std::uint64_t>(words.seed) : std::random_device{}();
  stream.worker.pace.bytes_per_second = words.rate;
  stream.worker.log = words.log;
  stream.timeline = words.timeline;
  if (!words.json)
    fmt::print(context.out, "{} requests of {} to {} tokens; {} prefill and {} decode processes, over {}; {}{}\n\n",
               stream.tokens.size(), count_text(*std::min_element(stream.tokens.begin(), stream.tokens.end())),
               count_text(job_words.tokens), stream.job.prefill->ranks(), stream.job.decode->ranks(), words.transport.name,
               layer_words(stream), stream.chunk > 0 ? fmt::format("; chunks of {}", count_text(stream.chunk)) : "");
  const auto report = run_stream(stream);
  if (!report) return tl::unexpected(report.error());
  if (words.json)
    fmt::print(context.out, "{}\n", stream_json(*report, stream).dump(2));
  else
    print_stream(context.out, *report, stream);
  if (!words.json && !words.timeline.empty())
    fmt::print(context.out, "The timeline, for https://ui.perfetto.dev: {}\n", words.timeline);
  return report->wrong_bytes == 0 ? kFine : kJobFailed;
}

Expected<ExitCode> run(const RunWords& words, const Context& context) {
  if (auto ok = check_transport(words.transport); !ok) return tl::unexpected(ok.error());
  if (auto ok = check_load(words.load, words.transport, words.stream); !ok) return tl::unexpected(ok.error());
  if (words.stream) return run_streamed(words, context);
  if (words.naive.value_or(false) && !words.transport.on_host())
    return fail(Code::invalid_argument, "--naive moves host memory only: leave it out, or say --transport shm");
  if (words.job.tokens == 0) return fail(Code::invalid_argument, "--tokens is required: how many tokens the request has");
  auto job = make_job(words.job);
  if (!job) return tl::unexpected(job.error());
  const std::int64_t seed = words.seed >= 0 ? words.seed : static_cast<std::int64_t>(std::random_device{}());
  const std::string tables = words.tables.empty() ? fmt::format("random:{}", seed) : words.tables;
  auto made = make_run_job(*job, tables, words.transport, words.naive.value_or(words.transport.on_host()));
  if (!made) return tl::unexpected(made.error());
  auto paths = measure(made->loom.plan, &made->loom.tables, made->range());
  if (!paths) return tl::unexpected(paths.error());
  if (!words.json) {
    fmt::print(context.out, "{} prefill and {} decode processes, over {}, {} tokens, prefix {}, page tables {}\n\n",
               made->loom.plan.source().ranks(), made->loom.plan.target().ranks(), words.transport.name, count_text(made->tokens),
               count_text(made->prefix), tables);
    print_paths(context.out, *paths, kMostPaths);
    fmt::print(context.out, "\n");
    print_balance(context.out, made->loom.plan, *paths);
    fmt::print(context.out, "\n");
  }
  if (!words.html.empty())
    if (auto ok = write_file(words.html, plan_html(made->loom.plan, *paths, made->range())); !ok)
      return tl::unexpected(ok.error());
  made->patience = std::chrono::seconds(words.patience);
  const auto report = run_processes(*made, progress_bar(context));
  if (context.err_is_terminal) fmt::print(context.err, "\r\x1b[K");
  if (!report) return tl::unexpected(report.error());
  const bool good = report->wrong_bytes == 0 && report->landed_bytes == report->wanted_bytes && report->checksums_equal;
  if (words.json) {
    fmt::print(context.out, "{}\n", report_json(*report, *made, tables).dump(2));
  } else {
    print_report(context.out, *report, *made);
    fmt::print(context.out, "\n");
    print_verdict(context.out, *report);
    if (!words.html.empty()) fmt::print(context.out, "The picture: {}\n", words.html);
  }
  return good ? kFine : kJobFailed;
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto words = std::make_shared<RunWords>();
  CLI::App* verb = add_verb(app, context, "run", "Move a KV cache between real processes and check every byte", kRunExamples,
                            [words, &context] { return run(*words, context); });
  add_job_options(*verb, words->job, true);
  add_count(*verb, "--seed", words->seed, "of the random page tables; drawn and printed where not said", 0);
  verb->add_option("--tables", words->tables, "Page tables: identity, random:SEED or a JSON file (default: random with --seed)");
  verb->add_option("--html", words->html, "Write the picture of the plan to this file; '' for none")->capture_default_str();
  add_count(*verb, "--patience", words->patience, "seconds without a word from any rank after which the run fails", 1, 86400);
  add_transport_options(*verb, words->transport);
  verb->add_flag_function(
      "--naive,!--no-naive", [words](std::int64_t said) { words->naive = said > 0; },
      "Also run the naive way: the whole sequence to every decode rank (on by default, with shm)");
  verb->add_flag("--json", words->json, "Print JSON");
  verb->add_flag(
      "--stream", words->stream,
      "Play a prefill that takes time, push while it computes, and print what of the transfer is left when it ends, beside "
      "the same pushed at its end. The options below are for it");
  add_count(*verb, "--requests", words->requests, "that are served", 1, 100000);
  add_count(*verb, "--at-once", words->at_once, "requests that are computed in turns, chunk by chunk (default: all)", 1, 100000);
  verb->add_option(
      "--trace", words->trace,
      "Take lengths from this trace, a JSON object with \"input_length\" a line (see samples/requests.jsonl); --tokens is "
      "then the longest");
  add_count(*verb, "--scale", words->scale, "by which lengths of the trace are divided", 1, 1 << 20);
  add_count(*verb, "--chunk", words->chunk, "tokens of a chunk of prefill (default: a request is one)", 1, kMaxTokens);
  words->layer_time = add_duration(*verb, "--layer-time", words->layer_ns,
                                   "of a layer of --chunk tokens, or of 2,048 where no chunk is said (default: 2ms)");
  add_load_options(*verb, words->load);
  add_count(*verb, "--rounds", words->rounds, "of prefill alone and with push, in turns (default: 1; 3 with gemm)", 1, 1000);
  verb->add_flag("--busy", words->busy, "Computing burns a core, instead of waiting as for an accelerator");
  add_bytes(*verb, "--rate", words->rate, "a second that each prefill rank may push (default: no limit)");
  add_log(*verb, words->log);
  verb->add_option("--timeline", words->timeline, "Write what happened when to this file, for https://ui.perfetto.dev");
}

}  // namespace kvloom
