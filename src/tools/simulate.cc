// simulate.cc: `kvloom simulate`: the session layer under a virtual clock, with faults of every kind; or its tables of edges.  Stage: tools.
#include "kvloom/sim/simulate.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "kvloom/session/receiver.h"
#include "kvloom/session/sender.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/run_control.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kSimulateExamples =
    "Examples:\n"
    "  kvloom simulate --schedules 10000 --seed 7\n"
    "  kvloom simulate --seed 7 --schedule 123        one schedule again, with all that happens if it breaks a law\n"
    "  kvloom simulate --edges                        the tables of the two state machines, as in docs/protocol.md\n"
    "\n"
    "Exit code 1 if an invariant was broken; then it prints how to see that schedule again.";

struct SimulateWords {
  std::int64_t schedules = 1000, seed = 1, schedule = -1, jobs = 1;
  bool edges = false, json = false;
};

struct EdgeRow {
  std::string machine, from, on, to, what;
  std::uint64_t walked = 0;
};

template <class Machine>
void add_edges(const char* machine, const EdgeCounts& counts, std::vector<EdgeRow>& out) {
  std::size_t i = 0;
  for (const auto& edge : Machine::edges()) {
    out.push_back({machine, to_string(edge.from), to_string(edge.on), to_string(edge.to), std::string(edge.what),
                   i < counts.size() ? counts[i] : 0});
    ++i;
  }
}

std::vector<EdgeRow> edge_rows(const SimulateReport& report) {
  std::vector<EdgeRow> rows;
  add_edges<Receiver>("receiver", report.receiver_edges, rows);
  add_edges<Sender>("sender", report.sender_edges, rows);
  return rows;
}

// As docs/protocol.md has them.
void print_edges(std::FILE* out) {
  std::string machine;
  for (const EdgeRow& row : edge_rows({})) {
    if (row.machine != machine)
      fmt::print(out, "{}### {}\n\n| from | on | to | what |\n|---|---|---|---|\n", machine.empty() ? "" : "\n", row.machine);
    machine = row.machine;
    fmt::print(out, "| {} | {} | {} | {} |\n", row.from, row.on, row.to, row.what);
  }
}

// `jobs` threads, each a part of the schedules; the sums are those of one.
SimulateReport simulate_all(const SimulateWords& words) {
  const std::int64_t first = std::max<std::int64_t>(0, words.schedule), count = words.schedule >= 0 ? 1 : words.schedules;
  std::vector<SimulateReport> parts(static_cast<std::size_t>(std::min(words.jobs, count)));
  {
    std::vector<std::jthread> threads;
    const auto jobs = static_cast<std::int64_t>(parts.size());
    for (std::int64_t j = 0; j < jobs; ++j)
      threads.emplace_back([&parts, &words, j, jobs, first, count] {
        const std::int64_t begin = first + count * j / jobs, end = first + count * (j + 1) / jobs;
        parts[static_cast<std::size_t>(j)] =
            simulate({static_cast<std::uint64_t>(words.seed), begin, end - begin, words.schedule >= 0, 10});
      });
  }
  SimulateReport sum = parts.front();
  for (std::size_t j = 1; j < parts.size(); ++j) {
    const SimulateReport& part = parts[j];
    sum.schedules += part.schedules;
    sum.transfers += part.transfers;
    for (const auto& [name, n] : part.outcomes) sum.outcomes[name] += n;
    for (const auto& [name, n] : part.faults) sum.faults[name] += n;
    for (std::size_t i = 0; i < sum.receiver_edges.size(); ++i) sum.receiver_edges[i] += part.receiver_edges[i];
    for (std::size_t i = 0; i < sum.sender_edges.size(); ++i) sum.sender_edges[i] += part.sender_edges[i];
    sum.violations.insert(sum.violations.end(), part.violations.begin(), part.violations.end());
  }
  return sum;
}

std::string replay(const SimulateWords& words, const Violation& violation) {
  return fmt::format("kvloom simulate --seed {} --schedule {}", words.seed, violation.schedule);
}

nlohmann::json report_json(const SimulateWords& words, const SimulateReport& report, double seconds) {
  const auto rows = edge_rows(report);
  nlohmann::json edges = nlohmann::json::array(), violations = nlohmann::json::array();
  for (const EdgeRow& row : rows)
    edges.push_back({{"machine", row.machine}, {"from", row.from}, {"on", row.on}, {"to", row.to}, {"walked", row.walked}});
  for (const Violation& violation : report.violations)
    violations.push_back({{"schedule", violation.schedule},
                          {"what", violation.what},
                          {"replay", replay(words, violation)},
                          {"events", violation.events}});
  return {{"schedules", report.schedules},
          {"transfers", report.transfers},
          {"violations", report.violations.size()},
          {"broken", violations},
          {"schedules_per_second", static_cast<double>(report.schedules) / seconds},
          {"edges", rows.size()},
          {"edges_walked", std::count_if(rows.begin(), rows.end(), [](const EdgeRow& row) { return row.walked > 0; })},
          {"edge_counts", edges},
          {"outcomes", report.outcomes},
          {"faults", report.faults}};
}

void print_report(std::FILE* out, const SimulateReport& report, double seconds) {
  fmt::print(out, "{} schedules, {} transfers, {:.0f} schedules a second\n\n", report.schedules, report.transfers,
             static_cast<double>(report.schedules) / seconds);
  TextTable faults({{"injected", TextTable::Align::left}, {"times"}});
  for (const auto& [name, count] : report.faults) faults.add({name, fmt::format("{}", count)});
  faults.print(out);
  fmt::print(out, "\n");
  TextTable edges({{"machine", TextTable::Align::left},
                   {"from", TextTable::Align::left},
                   {"on", TextTable::Align::left},
                   {"to", TextTable::Align::left},
                   {"walked"}});
  for (const EdgeRow& row : edge_rows(report)) edges.add({row.machine, row.from, row.on, row.to, fmt::format("{}", row.walked)});
  edges.print(out);
  fmt::print(out, "\nreceivers:");
  for (const auto& [name, count] : report.outcomes) fmt::print(out, " {} {}", count, name);
  fmt::print(out, "\n{} violations\n", report.violations.size());
}

Expected<ExitCode> run(const SimulateWords& words, const Context& context) {
  if (words.edges) {
    print_edges(context.out);
    return kFine;
  }
  const std::int64_t begin = now_ns();
  const SimulateReport report = simulate_all(words);
  const double seconds = static_cast<double>(now_ns() - begin) * 1e-9;
  if (words.json)
    fmt::print(context.out, "{}\n", report_json(words, report, seconds).dump(2));
  else
    print_report(context.out, report, seconds);
  for (const Violation& violation : report.violations) {
    fmt::print(context.err, "schedule {}: {}\nreplay: {}\n", violation.schedule, violation.what, replay(words, violation));
    if (!words.json)
      for (const std::string& event : violation.events) fmt::print(context.err, "  {}\n", event);
  }
  return report.violations.empty() ? kFine : kJobFailed;
}

}  // namespace

void add_simulate(CLI::App& app, Context& context) {
  const auto words = std::make_shared<SimulateWords>();
  CLI::App* verb = add_verb(app, context, "simulate", "Try the session layer under faults of every kind, on a virtual clock",
                            kSimulateExamples, [words, &context] { return run(*words, context); });
  add_count(*verb, "--schedules", words->schedules, "how many, drawn from the seed");
  add_count(*verb, "--seed", words->seed, "of all that is drawn", 0);
  add_count(*verb, "--schedule", words->schedule, "only this one, told event by event if it breaks", 0);
  add_count(*verb, "--jobs", words->jobs, "threads", 1, 256);
  verb->add_flag("--edges", words->edges, "Print the tables of edges and stop");
  verb->add_flag("--json", words->json, "Print JSON");
}

}  // namespace kvloom
