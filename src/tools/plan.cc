// plan.cc: `kvloom plan`: which rank sends what to which, as a table, text, JSON, runs, reasons or a picture.  Stage: tools.
#include "kvloom/plan/plan.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "kvloom/bind/bind.h"
#include "kvloom/plan/compile.h"
#include "kvloom/plan/explain.h"
#include "kvloom/plan/text.h"
#include "kvloom/tools/documents.h"
#include "kvloom/tools/html.h"
#include "kvloom/tools/job.h"
#include "kvloom/tools/measure.h"
#include "kvloom/tools/plan_copies.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/tables.h"
#include "kvloom/tools/transport_words.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

using Json = nlohmann::ordered_json;

struct PlanWords {
  JobWords job;
  std::string tables = "identity";
  std::string html;     // a file
  std::string explain;  // "S:T", or empty for all paths
  CLI::Option* explain_option = nullptr;
  std::string transport;  // whose ways of copying are explained; empty: none's
  bool text = false, json = false, runs = false, all = false;
};

constexpr std::size_t kShownPaths = 64;  // of a table without --all

constexpr const char* kPlanExamples =
    "Examples:\n"
    "  kvloom plan --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4\n"
    "  kvloom plan --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --html plan.html\n"
    "  kvloom plan --model samples/llama-3.1-70b.json --prefill tp=8 --decode tp=2,page=16 --tokens 4096 --explain 3:0\n"
    "  kvloom plan --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --explain --transport cuda\n"
    "  kvloom plan --model samples/glm-5.2.json --prefill tp=8 --decode dcp=4 --tokens 4096 --runs --tables random:7 > runs.tsv";

// One plan and what was found out beside it.
struct Planned {
  Job job;
  Plan plan;
  std::int64_t compile_ns = 0;
  std::optional<RequestTables> tables;  // where the length is known
  std::vector<MeasuredPath> paths;

  TokenRange range() const { return job.tokens ? job.range() : TokenRange{}; }
};

// The median of several compiles, for at most a quarter of a second; the sides are made before.
Expected<std::pair<Plan, std::int64_t>> timed_compile(const Job& job) {
  using Clock = std::chrono::steady_clock;
  std::optional<Plan> plan;
  std::vector<std::int64_t> times;
  const auto end = Clock::now() + std::chrono::milliseconds(250);
  do {
    const auto before = Clock::now();
    auto compiled = compile(job.prefill, job.decode, job.total());
    times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - before).count());
    if (!compiled) return tl::unexpected(compiled.error());
    plan = std::move(*compiled);
  } while (times.size() < 101 && Clock::now() < end);
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return std::pair{std::move(*plan), times[times.size() / 2]};
}

Expected<Planned> make_plan(const PlanWords& words) {
  auto job = make_job(words.job);
  if (!job) return tl::unexpected(job.error());
  if (!job->tokens && words.tables != "identity")
    return fail(Code::invalid_argument, "--tables wants --tokens: a table belongs to a request");
  auto timed = timed_compile(*job);
  if (!timed) return tl::unexpected(timed.error());
  return Planned{std::move(*job), std::move(timed->first), timed->second, std::nullopt, {}};
}

Expected<void> count_paths(Planned& planned, const std::string& words) {
  if (planned.job.tokens) {
    auto tables = make_tables(planned.plan, *planned.job.tokens, words);
    if (!tables) return tl::unexpected(tables.error());
    planned.tables = std::move(*tables);
  }
  auto paths = measure(planned.plan, planned.tables ? &*planned.tables : nullptr, planned.range());
  if (!paths) return tl::unexpected(paths.error());
  planned.paths = std::move(*paths);
  return {};
}

// ---- JSON ----

Json ids_json(const std::vector<LayerId>& layers) {
  Json out = Json::array();
  for (const LayerId layer : layers) out.push_back(layer.value);
  return out;
}

void add_moved(Json& out, const Moved& moved, bool counted) {
  if (!counted) return;
  out["pages"] = moved.pages;
  out["bytes"] = moved.bytes;
  out["runs"] = moved.runs;
  out["pieces"] = moved.pieces;
}

Json path_json(const Planned& planned, const MeasuredPath& path) {
  const bool counted = planned.job.tokens.has_value();
  Json out;
  out["source"] = path.source.value;
  out["target"] = path.target.value;
  out["layers"] = ids_json(path.layers);
  if (counted) out["tokens"] = path.moved.tokens;
  add_moved(out, path.moved, counted);
  Json& groups = out["groups"] = Json::array();
  for (const MeasuredGroup& group : path.groups) {
    const GroupSide& side = *planned.plan.groups()[static_cast<std::size_t>(group.path.group)].target;
    Json heads = Json::array();
    for (std::int64_t h = group.path.heads.start(); h < group.path.heads.end(); ++h) heads.push_back(h);
    Json one = {{"name", side.name},
                {"layers", ids_json(group.layers)},
                {"heads", std::move(heads)},
                {"tokens", tokens_text(planned.plan, group.path, planned.range())}};
    if (counted) one["token_count"] = group.moved.tokens;
    one["row_bytes"] = group.path.row_bytes;
    add_moved(one, group.moved, counted);
    groups.push_back(std::move(one));
  }
  return out;
}

Json plan_json(const Planned& planned) {
  Json out;
  out["model"] = planned.job.shape.model();
  out["prefill_words"] = to_string(planned.job.prefill->sharding());
  out["decode_words"] = to_string(planned.job.decode->sharding());
  out["tokens"] = planned.job.tokens ? Json(*planned.job.tokens) : Json();
  out["prefix"] = planned.job.prefix;
  out["compile_ns"] = planned.compile_ns;
  out["digest"] = digest(planned.plan);
  Json& paths = out["paths"] = Json::array();
  std::int64_t total = 0, runs = 0;
  for (const MeasuredPath& path : planned.paths) {
    paths.push_back(path_json(planned, path));
    total += path.moved.bytes;
    runs += path.moved.runs;
  }
  if (!planned.job.tokens) return out;
  out["total_bytes"] = total;
  out["total_runs"] = runs;
  out["naive_bytes"] = naive_bytes(planned.plan, planned.range()).value;
  return out;
}

// ---- runs ----

// One line a run and layer, as they are found: nothing is kept.
Expected<void> print_runs(std::FILE* out, const Planned& planned, const RequestTables& tables) {
  fmt::print(out, "source\ttarget\tgroup\tlayer\tsource_offset\ttarget_offset\tbytes\tcount\tsource_step\ttarget_step\n");
  std::array<Run, 256> runs;
  fmt::memory_buffer lines;
  for (const Path& path : planned.plan.paths()) {
    const auto group = static_cast<std::size_t>(path.group);
    auto bound =
        bind(planned.plan, path, tables.prefill[group].of(path.source), tables.decode[group].of(path.target), planned.range());
    if (!bound) return tl::unexpected(bound.error());
    const std::string& name = planned.plan.groups()[group].target->name;
    for (const LayerId layer : planned.plan.layer_ids(path)) {
      bound->rewind();
      while (const std::size_t n = bound->next(runs)) {
        lines.clear();
        for (const Run& run : std::span(runs).first(n))
          fmt::format_to(std::back_inserter(lines), "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n", path.source.value,
                         path.target.value, name, layer.value, run.source_offset.value, run.target_offset.value, run.bytes.value,
                         run.count, run.source_step.value, run.target_step.value);
        if (std::fwrite(lines.data(), 1, lines.size(), out) != lines.size()) return fail(Code::io, "can't write the runs");
      }
    }
  }
  return {};
}

// ---- for people ----

// Families instead of counts: a plan for any length.
void print_families(std::FILE* out, const Planned& planned, std::size_t most) {
  constexpr auto kLeft = TextTable::Align::left;
  TextTable table(
      {{"source"}, {"target"}, {"group", kLeft}, {"layers", kLeft}, {"heads", kLeft}, {"tokens", kLeft}, {"a token"}});
  std::size_t paths = 0;
  for (const MeasuredPath& path : planned.paths) {
    if (++paths > most) break;
    for (const MeasuredGroup& group : path.groups) {
      const GroupSide& side = *planned.plan.groups()[static_cast<std::size_t>(group.path.group)].target;
      table.add({fmt::format("{}", path.source.value), fmt::format("{}", path.target.value), side.name, ids_text(group.layers),
                 heads_text(side, group.path.heads), tokens_text(planned.plan, group.path, {}),
                 bytes_text(Bytes(group.path.row_bytes * static_cast<std::int64_t>(group.layers.size())))});
    }
  }
  table.print(out);
  if (planned.paths.size() > most) fmt::print(out, "... and {} more paths: --all prints them\n", planned.paths.size() - most);
}

void print_totals(std::FILE* out, const Planned& planned) {
  std::int64_t bytes = 0, runs = 0;
  for (const MeasuredPath& path : planned.paths) {
    bytes += path.moved.bytes;
    runs += path.moved.runs;
  }
  fmt::print(out, "{} paths, {} in {} runs", planned.paths.size(), bytes_text(Bytes(bytes)), count_text(runs));
  const std::int64_t naive = naive_bytes(planned.plan, planned.range()).value;
  if (bytes > 0)
    fmt::print(out, "; all tokens to every decode rank would be {} ({:.2f} x)", bytes_text(Bytes(naive)),
               static_cast<double>(naive) / static_cast<double>(bytes));
  fmt::print(out, "\n");
}

void print_table(const Context& context, const Planned& planned, const PlanWords& words) {
  std::FILE* out = context.out;
  const Job& job = planned.job;
  const std::size_t most = words.all ? planned.paths.size() : kShownPaths;
  fmt::print(out, "{}: prefill {} ({} ranks) to decode {} ({} ranks)", job.shape.model(), to_string(job.prefill->sharding()),
             job.prefill->ranks(), to_string(job.decode->sharding()), job.decode->ranks());
  if (job.tokens)
    fmt::print(out, ", tokens [{}, {}), page tables: {}\n\n", job.prefix, *job.tokens, words.tables);
  else
    fmt::print(out, ", any number of tokens\n\n");
  if (job.tokens) {
    print_paths(out, planned.paths, most);
    if (most < planned.paths.size()) fmt::print(out, "(--all prints them)\n");
    fmt::print(out, "\n");
    print_totals(out, planned);
    print_balance(out, planned.plan, planned.paths);
  } else {
    print_families(out, planned, most);
    fmt::print(out, "\n{} paths; --tokens T adds bytes and runs\n", planned.paths.size());
  }
  fmt::print(out, "compiled in {}; digest {}\n", time_text(static_cast<double>(planned.compile_ns)), digest(planned.plan));
}

// ---- reasons ----

Expected<std::pair<Rank, Rank>> parse_pair(const std::string& text, const Job& job) {
  std::int32_t source = -1, target = -1;
  const char *begin = text.data(), *end = begin + text.size();
  const auto [colon, first] = std::from_chars(begin, end, source);
  const bool more = first == std::errc() && colon != end && *colon == ':';
  const auto [last, second] =
      more ? std::from_chars(colon + 1, end, target) : std::from_chars_result{end, std::errc::invalid_argument};
  if (second != std::errc() || last != end)
    return fail(Code::parse, "--explain: '{}' is not SOURCE:TARGET, two ranks as in 3:1", text);
  if (source < 0 || source >= job.prefill->ranks())
    return fail(Code::out_of_range, "--explain: there is no prefill rank {}: 0 to {}", source, job.prefill->ranks() - 1);
  if (target < 0 || target >= job.decode->ranks())
    return fail(Code::out_of_range, "--explain: there is no decode rank {}: 0 to {}", target, job.decode->ranks() - 1);
  return std::pair{Rank(source), Rank(target)};
}

constexpr std::int64_t kExplainedTokens = 16384;  // where no --tokens are said and the plan is for any length

Expected<void> print_copies(std::FILE* out, const Planned& planned, const std::optional<std::pair<Rank, Rank>>& ranks) {
  const std::int64_t tokens = planned.job.tokens.value_or(kExplainedTokens);
  const auto text = explain_copies(planned.plan, tokens, planned.job.tokens ? planned.range() : TokenRange{0, tokens}, ranks);
  if (!text) return tl::unexpected(text.error());
  fmt::print(out, "{}", *text);
  return {};
}

Expected<void> print_reasons(std::FILE* out, const Planned& planned, const PlanWords& words) {
  std::optional<std::pair<Rank, Rank>> ranks;
  if (!words.explain.empty()) {
    const auto parsed = parse_pair(words.explain, planned.job);
    if (!parsed) return tl::unexpected(parsed.error());
    ranks = *parsed;
  }
  fmt::print(
      out, "{}\n",
      ranks ? explain(planned.plan, ranks->first, ranks->second, planned.range()) : explain(planned.plan, planned.range()));
  return words.transport == "cuda" ? print_copies(out, planned, ranks) : Expected<void>();
}

// ---- the verb ----

Expected<void> print_result(const Context& context, Planned& planned, const PlanWords& words) {
  if (words.text) {
    fmt::print(context.out, "{}", to_string(planned.plan));
    return {};
  }
  if (words.explain_option->count() > 0) return print_reasons(context.out, planned, words);
  if (words.runs) {
    if (!planned.job.tokens) return fail(Code::invalid_argument, "--runs wants --tokens: runs belong to a request");
    const auto tables = make_tables(planned.plan, *planned.job.tokens, words.tables);
    if (!tables) return tl::unexpected(tables.error());
    return print_runs(context.out, planned, *tables);
  }
  if (auto ok = count_paths(planned, words.tables); !ok) return ok;
  if (words.json)
    fmt::print(context.out, "{}\n", plan_json(planned).dump(2));
  else
    print_table(context, planned, words);
  return {};
}

Expected<void> write_picture(const Context& context, Planned& planned, const PlanWords& words) {
  if (planned.paths.empty())
    if (auto ok = count_paths(planned, words.tables); !ok) return ok;
  if (auto ok = write_file(words.html, plan_html(planned.plan, planned.paths,
                                                 planned.job.tokens ? std::optional(planned.job.range()) : std::nullopt));
      !ok)
    return ok;
  fmt::print(context.err, "the picture is in {}\n", words.html);
  return {};
}

// Before anything is printed.
Expected<void> check_explained(const PlanWords& words) {
  if (words.transport.empty()) return {};
  if (words.explain_option->count() == 0)
    return fail(Code::invalid_argument,
                "--transport wants --explain: a plan is the same for all transports, but not how it is copied");
  TransportWords transport;
  transport.name = words.transport;
  return check_transport(transport);
}

Expected<ExitCode> plan(const Context& context, const PlanWords& words) {
  if (auto ok = check_explained(words); !ok) return tl::unexpected(ok.error());
  auto planned = make_plan(words);
  if (!planned) return tl::unexpected(planned.error());
  if (auto ok = print_result(context, *planned, words); !ok) return tl::unexpected(ok.error());
  if (words.html.empty()) return kFine;
  if (auto ok = write_picture(context, *planned, words); !ok) return tl::unexpected(ok.error());
  return kFine;
}

}  // namespace

Expected<std::string> plan_document(const Job& job, const Plan& plan, const std::string& tables) {
  Planned planned{job, plan, 0, std::nullopt, {}};
  if (auto ok = count_paths(planned, tables); !ok) return tl::unexpected(ok.error());
  Json out = plan_json(planned);
  out.erase("compile_ns");
  return out.dump();
}

void add_plan(CLI::App& app, Context& context) {
  auto words = std::make_shared<PlanWords>();  // shared by the options and the body
  CLI::App* verb =
      add_verb(app, context, "plan", "Say which rank sends what to which: table, text, JSON, runs, reasons or a picture",
               kPlanExamples, [&context, words] { return plan(context, *words); });
  add_job_options(*verb, words->job, true);
  verb->add_option("--tables", words->tables, "Page tables: identity, random:SEED, or a JSON FILE [identity]")
      ->type_name("TABLES");
  CLI::Option* json = verb->add_flag("--json", words->json, "Print JSON: paths with bytes and runs, compile_ns, digest");
  CLI::Option* text = verb->add_flag("--text", words->text, "Print the plan's canonical text");
  CLI::Option* runs = verb->add_flag("--runs", words->runs, "Print every run, tab-separated, one line a run and layer");
  words->explain_option =
      verb->add_option("--explain", words->explain, "Say why: of the whole plan, or of one path S:T (source and target rank)")
          ->expected(0, 1)
          ->type_name("[S:T]");
  verb->add_option("--transport", words->transport,
                   "With --explain: also say how this transport would copy, pages in order and in no order (cuda)")
      ->type_name("TRANSPORT");
  verb->add_flag("--all", words->all, "Print the whole table, however many paths there are");
  verb->add_option("--html", words->html, "Write a picture of the plan, one self-contained page")->type_name("FILE");
  for (CLI::Option* one : {json, text, runs})
    for (CLI::Option* other : {json, text, runs, words->explain_option})
      if (one != other) one->excludes(other);
}

}  // namespace kvloom
