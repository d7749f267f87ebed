// bench.cc: `kvloom bench`: the table of ratios, each measured against its own yardstick in the same run.  Stage: tools.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvloom/tools/copy_measure.h"
#include "kvloom/tools/cuda_measure.h"
#include "kvloom/tools/plan_measure.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/session_measure.h"
#include "kvloom/tools/transport_words.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kBenchExamples =
    "Examples:\n"
    "  kvloom bench                 planning, sessions and copying, about a minute\n"
    "  kvloom bench --only plan     compile, bind, wire, checksum\n"
    "  kvloom bench --only session  grants, posts, transfers a second\n"
    "  kvloom bench --transport cuda --json\n"
    "  kvloom bench --json\n"
    "\n"
    "Figures are medians. Compare ratios of one run only, with nothing else running.";

struct BenchWords {
  std::string only;  // empty: all
  std::string transport = "shm";
  CopyWords copies;
  std::int64_t repeats = 9;
  std::int64_t memory = std::int64_t{1} << 30;
  bool json = false;
};

std::string number_text(double value) { return fmt::format("{:.{}f}", value, value < 10 ? 2 : value < 100 ? 1 : 0); }

std::string goal_text(const BenchRow& row) {
  if (row.goal == 0) return "";
  return fmt::format("{} {}", row.at_most ? "<=" : ">=", number_text(row.goal));
}

void print_rows(std::FILE* out, const std::vector<BenchRow>& rows) {
  TextTable table({{"what", TextTable::Align::left},
                   {"value"},
                   {"unit", TextTable::Align::left},
                   {"goal"},
                   {"", TextTable::Align::left},
                   {"shape", TextTable::Align::left}});
  for (const BenchRow& row : rows)
    table.add({row.name, number_text(row.value), row.unit, goal_text(row),
               row.goal == 0 ? ""
               : holds(row)  ? "holds"
                             : "short",
               row.shape});
  table.print(out);
}

nlohmann::json rows_json(const std::vector<BenchRow>& rows) {
  nlohmann::json out = nlohmann::json::array();
  for (const BenchRow& row : rows) {
    nlohmann::json line = {{"name", row.name}, {"value", row.value}, {"unit", row.unit}, {"shape", row.shape}};
    if (row.goal != 0)
      line.update({{"goal", row.goal}, {"goal_is", row.at_most ? "at_most" : "at_least"}, {"holds", holds(row)}});
    out.push_back(std::move(line));
  }
  return out;
}

// The goal for pages of an MLA cache; the other pieces stand beside it: stripe=1 (576 B), GQA heads cut from tp=8 to tp=2 (256 B and 1 KiB).
double goal_of(const CopyRow& row) {
  if (row.way != CopyWay::shm_push || row.piece != Bytes(36'864)) return 0;
  return row.threads == 1 ? 0.85 : 1.6;
}

Expected<std::vector<BenchRow>> copy_rows(int repeats, Bytes memory) {
  CopyOptions options;
  options.memory = memory;
  options.repetitions = repeats;
  const auto measured = measure_copies(options);
  if (!measured) return tl::unexpected(measured.error());
  std::vector<BenchRow> rows;
  for (const CopyRow& row : *measured) {
    const bool anchor = row.way == CopyWay::contiguous;
    rows.push_back({fmt::format("{}{}", to_string(row.way), anchor ? "" : fmt::format(", {} B", row.piece.value)), row.ratio,
                    "of memcpy", goal_of(row), false,
                    fmt::format("{} thread{}, {:.2f} GB/s, {} each side", row.threads, row.threads == 1 ? "" : "s", row.gb_per_s,
                                bytes_text(memory))});
  }
  return rows;
}

Expected<ExitCode> bench_gpus(const BenchWords& words, const Context& context) {
  const auto measured = measure_gpu_copies(words.memory, static_cast<int>(words.repeats), words.copies.limits);
  if (!measured) return tl::unexpected(measured.error());
  if (words.json) {
    nlohmann::json out = nlohmann::json::array();
    for (const GpuCopyRow& row : measured->rows)
      out.push_back({{"name", row.name},
                     {"bytes", row.bytes},
                     {"pieces", row.pieces},
                     {"gb_per_s", row.gb_per_s},
                     {"contiguous_gb_per_s", row.contiguous_gb_per_s},
                     {"ratio", row.ratio},
                     {"sms", row.sms}});
    out.push_back({{"name", "event to landed notice, one page"},
                   {"copies", copies_json(words.copies.limits)},
                   {"p50_us", measured->latency_us_p50},
                   {"p99_us", measured->latency_us_p99}});
    fmt::print(context.out, "{}\n", out.dump(2));
    return kFine;
  }
  fmt::print(context.out, "{}; {}\n", measured->hardware, copies_text(words.copies.limits));
  TextTable table({{"what", TextTable::Align::left}, {"pieces"}, {"GB/s"}, {"contiguous"}, {"ratio"}, {"SMs"}});
  for (const GpuCopyRow& row : measured->rows)
    table.add({row.name, fmt::format("{}", row.pieces), number_text(row.gb_per_s), number_text(row.contiguous_gb_per_s),
               fmt::format("{:.3f}", row.ratio), fmt::format("{}", row.sms)});
  table.print(context.out);
  fmt::print(context.out, "event to landed notice, one page: p50 {:.1f} us, p99 {:.1f} us\n", measured->latency_us_p50,
             measured->latency_us_p99);
  return kFine;
}

Expected<ExitCode> bench(const BenchWords& words, const Context& context) {
  if (auto ok = check_copies(words.copies, words.transport); !ok) return tl::unexpected(ok.error());
  if (words.transport == "cuda") return bench_gpus(words, context);
  std::vector<BenchRow> rows;
  if (words.only.empty() || words.only == "plan") {
    auto planning = measure_planning(static_cast<int>(words.repeats));
    if (!planning) return tl::unexpected(planning.error());
    rows = std::move(*planning);
  }
  if (words.only.empty() || words.only == "session") {
    auto sessions = measure_sessions(static_cast<int>(words.repeats));
    if (!sessions) return tl::unexpected(sessions.error());
    rows.insert(rows.end(), sessions->begin(), sessions->end());
  }
  if (words.only.empty() || words.only == "copy") {
    auto copying = copy_rows(static_cast<int>(words.repeats), Bytes(words.memory));
    if (!copying) return tl::unexpected(copying.error());
    rows.insert(rows.end(), copying->begin(), copying->end());
  }
  if (words.json)
    fmt::print(context.out, "{}\n", rows_json(rows).dump(2));
  else
    print_rows(context.out, rows);
  return kFine;
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  auto words = std::make_shared<BenchWords>();
  CLI::App* verb = add_verb(app, context, "bench", "Measure planning, sessions and copying on this machine", kBenchExamples,
                            [words, &context] { return bench(*words, context); });
  verb->add_option("--only", words->only, "plan, session or copy (default: all)")
      ->check(CLI::IsMember({"plan", "session", "copy"}));
  verb->add_option("--transport", words->transport, "shm: the CPU's tables; cuda: copies between GPUs (default: shm)")
      ->check(CLI::IsMember({"shm", "cuda"}));
  add_copy_options(*verb, words->copies);
  add_count(*verb, "--repeats", words->repeats, "rounds of each measurement, of which the median counts", 1, 1000);
  add_bytes(*verb, "--memory", words->memory, "of each of the two buffers that copying goes between; more than the last cache");
  verb->add_flag("--json", words->json, "Print JSON");
}

}  // namespace kvloom
