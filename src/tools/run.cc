// run.cc: `kvloom run`: a real transfer between real processes, every byte checked.  Stage: tools.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "kvloom/tools/html.h"
#include "kvloom/tools/job.h"
#include "kvloom/tools/measure.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/run_job.h"
#include "kvloom/tools/run_parent.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  kvloom run --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --prefix 1000\n"
    "  kvloom run --model samples/llama-3.1-8b.json --prefill tp=4 --decode tp=2,page=16 --tokens 4096 --seed 7 --json\n"
    "\n"
    "Starts a process a rank. Prefill ranks fill their caches with bytes that depend on (layer, token, head, plane, byte) only "
    "and push them layer by\n"
    "layer through shared memory; decode ranks check every byte of their pools. Exit code 1: a byte is wrong, or a rank died.";

constexpr std::size_t kMostPaths = 64;  // that are printed; --html and plan show all

struct RunWords {
  JobWords job;
  std::int64_t seed = -1;  // -1: drawn
  std::string tables;      // empty: random:SEED
  std::string html = "plan.html";
  std::int64_t patience = 120;
  bool naive = true;
  bool json = false;
};

double gb_per_s(std::int64_t bytes, double seconds) { return seconds > 0 ? static_cast<double>(bytes) * 1e-9 / seconds : 0; }

// One line on a terminal, over and over.
Progress progress_bar(const Context& context) {
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
  return {{"landed_bytes", report.landed_bytes},
          {"wanted_bytes", report.wanted_bytes},
          {"wrong_bytes", report.wrong_bytes},
          {"sent_bytes", report.sent_bytes},
          {"naive_sent_bytes", report.naive_sent_bytes},
          {"seconds", report.seconds},
          {"naive_seconds", report.naive_seconds},
          {"gb_per_s", gb_per_s(report.landed_bytes, report.seconds)},
          {"memcpy_gb_per_s", report.memcpy_gb_per_s},
          {"page_memcpy_gb_per_s", report.page_memcpy_gb_per_s},
          {"checksums_equal", report.checksums_equal},
          {"posts", report.posts},
          {"runs", report.runs},
          {"tables", tables},
          {"prefill_ranks", job.loom.plan.source().ranks()},
          {"decode_ranks", job.loom.plan.target().ranks()},
          {"tokens", job.tokens},
          {"prefix", job.prefix}};
}

void print_report(std::FILE* out, const RunReport& report) {
  TextTable table({{"", TextTable::Align::left}, {"bytes sent"}, {"seconds"}, {"GB/s of what is wanted"}});
  const auto row = [&](const char* name, std::int64_t bytes, double seconds) {
    table.add(
        {name, count_text(bytes), fmt::format("{:.3f}", seconds), fmt::format("{:.2f}", gb_per_s(report.landed_bytes, seconds))});
  };
  row("kvloom", report.sent_bytes, report.seconds);
  if (report.naive_sent_bytes > 0)
    row("naive: whole sequence to every decode rank, which keeps its part", report.naive_sent_bytes, report.naive_seconds);
  table.add({"memcpy, the same bytes in one piece a rank", "", "", fmt::format("{:.2f}", report.memcpy_gb_per_s)});
  table.add({"memcpy, the same pages one by one", "", "", fmt::format("{:.2f}", report.page_memcpy_gb_per_s)});
  table.print(out);
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

Expected<ExitCode> run(const RunWords& words, const Context& context) {
  if (words.job.tokens == 0) return fail(Code::invalid_argument, "--tokens is required: how many tokens the request has");
  auto job = make_job(words.job);
  if (!job) return tl::unexpected(job.error());
  const std::int64_t seed = words.seed >= 0 ? words.seed : static_cast<std::int64_t>(std::random_device{}());
  const std::string tables = words.tables.empty() ? fmt::format("random:{}", seed) : words.tables;
  auto made = make_run_job(*job, tables, words.naive);
  if (!made) return tl::unexpected(made.error());
  auto paths = measure(made->loom.plan, &made->loom.tables, made->range());
  if (!paths) return tl::unexpected(paths.error());
  if (!words.json) {
    fmt::print(context.out, "{} prefill and {} decode processes, {} tokens, prefix {}, page tables {}\n\n",
               made->loom.plan.source().ranks(), made->loom.plan.target().ranks(), count_text(made->tokens),
               count_text(made->prefix), tables);
    print_paths(context.out, *paths, kMostPaths);
    fmt::print(context.out, "\n");
    print_balance(context.out, made->loom.plan, *paths);
    fmt::print(context.out, "\n");
  }
  if (!words.html.empty())
    if (auto ok = write_file(words.html, plan_html(made->loom.plan, *paths, made->range())); !ok)
      return tl::unexpected(ok.error());
  const auto report = run_processes(*made, std::chrono::seconds(words.patience), progress_bar(context));
  if (context.err_is_terminal) fmt::print(context.err, "\r\x1b[K");
  if (!report) return tl::unexpected(report.error());
  const bool good = report->wrong_bytes == 0 && report->landed_bytes == report->wanted_bytes && report->checksums_equal;
  if (words.json) {
    fmt::print(context.out, "{}\n", report_json(*report, *made, tables).dump(2));
  } else {
    print_report(context.out, *report);
    fmt::print(context.out, "\n");
    print_verdict(context.out, *report);
    if (!words.html.empty()) fmt::print(context.out, "The picture: {}\n", words.html);
  }
  return good ? kFine : kJobFailed;
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto words = std::make_shared<RunWords>();
  CLI::App* verb = add_verb(app, context, "run", "Move a KV cache between real processes and check every byte", kExamples,
                            [words, &context] { return run(*words, context); });
  add_job_options(*verb, words->job, true);
  add_count(*verb, "--seed", words->seed, "of the random page tables; drawn and printed where not said", 0);
  verb->add_option("--tables", words->tables, "Page tables: identity, random:SEED or a JSON file (default: random with --seed)");
  verb->add_option("--html", words->html, "Write the picture of the plan to this file; '' for none")->capture_default_str();
  add_count(*verb, "--patience", words->patience, "seconds without a word from any rank after which the run fails", 1, 86400);
  verb->add_flag("--naive,!--no-naive", words->naive,
                 "Also run the naive way: the whole sequence to every decode rank (on by default)");
  verb->add_flag("--json", words->json, "Print JSON");
}

}  // namespace kvloom
