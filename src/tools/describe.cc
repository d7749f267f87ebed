// describe.cc: `kvloom describe`: what each rank holds.  Stage: tools.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "kvloom/tools/documents.h"
#include "kvloom/tools/job.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

using Json = nlohmann::ordered_json;

struct DescribeWords {
  JobWords job;
  std::int64_t memory = 0;  // 0: not said
  bool json = false;
};

constexpr const char* kDescribeExamples =
    "Examples:\n"
    "  kvloom describe --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4\n"
    "  kvloom describe --model samples/llama-3.1-70b.json --decode tp=8 --memory 80GiB\n"
    "  kvloom describe --model samples/deepseek-v3.2.json --decode tp=8,dcp=8:stripe=1 --kv-cache-dtype fp8-dsa --json";

// ---- what a rank holds ----

struct Holding {
  std::vector<LayerId> layers;
  StridedSet heads;
  std::string tokens;          // a set's text, or page%N=d
  std::int64_t row_bytes = 0;  // of its layers and heads: per token that it holds, or per request
  double bytes_per_token = 0;  // of the request, in the mean; 0 for states
};

std::string held_tokens(const GroupSide& group, const Place& at, std::int64_t total) {
  if (group.kind == GroupKind::state) return to_string(StridedSet::interval(0, 1));
  if (group.tokens.rule == TokenRule::value) return fmt::format("page%{}={}", group.tokens.parts, at.tokens);
  return to_string(group.tokens.part(at.tokens, total));
}

Holding holding(const GroupSide& group, Rank rank, std::int64_t total) {
  const Place& at = group.places[static_cast<std::size_t>(rank.value)];
  Holding out;
  const StridedSet layers = at.holds ? group.layer_parts[static_cast<std::size_t>(at.layers)] : StridedSet();
  if (layers.empty()) {
    out.tokens = to_string(StridedSet());
    return out;
  }
  for (std::int64_t l = layers.start(); l < layers.end(); ++l) out.layers.push_back(group.layers[static_cast<std::size_t>(l)]);
  out.heads = group.head_parts[static_cast<std::size_t>(at.heads)];
  out.tokens = held_tokens(group, at, total);
  for (const PlaneShape& plane : group.planes) out.row_bytes += plane.bytes;
  out.row_bytes *= out.heads.size() * layers.size();
  if (group.kind == GroupKind::paged) out.bytes_per_token = static_cast<double>(out.row_bytes) / group.tokens.parts;
  return out;
}

std::int64_t bytes_per_request(const Side& side, Rank rank) {
  std::int64_t sum = 0;
  for (const GroupSide& group : side.groups())
    if (group.kind == GroupKind::state) sum += holding(group, rank, 1).row_bytes;
  return sum;
}

// How many tokens, of any requests, fit into `memory` of every rank; and the rank that is full first.
struct Capacity {
  std::int64_t tokens = 0;
  Rank rank;
  double bytes_per_token = 0;
};

Capacity capacity(const Side& side, std::int64_t memory) {
  Capacity out;
  for (std::int32_t r = 0; r < side.ranks(); ++r) {
    const double bytes = side.bytes_per_token(Rank(r));
    if (bytes > out.bytes_per_token) out = {static_cast<std::int64_t>(static_cast<double>(memory) / bytes), Rank(r), bytes};
  }
  return out;
}

Expected<void> check_one_length(const char* option, const Side& side, const Job& job) {
  for (const GroupSide& group : side.groups())
    if (group.tokens.needs_total() && !job.tokens)
      return fail(Code::invalid_argument, "{}: zigzag and blocked cut the request's length: say --tokens T", option);
  return {};
}

Expected<void> check_length(const Job& job) {
  if (auto ok = check_one_length("--prefill", *job.prefill, job); !ok) return ok;
  return check_one_length("--decode", *job.decode, job);
}

// ---- JSON ----

// A whole number where it is one.
Json number(double value) {
  const auto whole = static_cast<std::int64_t>(value);
  return static_cast<double>(whole) == value ? Json(whole) : Json(value);
}

Json layout_json(const GroupSide& group) {
  Json out;
  out["rank_heads"] = group.layout.heads();
  out["page_tokens"] = group.layout.page_tokens();
  out["page_stride"] = group.layout.page_stride();
  Json& planes = out["planes"] = Json::array();
  for (const PlaneLayout& plane : group.layout.planes()) {
    Json one = {{"name", plane.name},
                {"offset", plane.offset},
                {"token_stride", plane.token_stride},
                {"head_stride", plane.head_stride},
                {"bytes", plane.bytes}};
    if (plane.content_stride != 0) {
      one["content_stride"] = plane.content_stride;
      one["element_bytes"] = plane.element_bytes;
    }
    planes.push_back(std::move(one));
  }
  return out;
}

Json ids_json(const std::vector<LayerId>& layers) {
  Json out = Json::array();
  for (const LayerId layer : layers) out.push_back(layer.value);
  return out;
}

Json group_json(const CacheGroup& group, const GroupSide* prefill, const GroupSide* decode) {
  Json out;
  out["name"] = group.name;
  out["kind"] = group.kind == GroupKind::paged ? "paged" : "state";
  out["layers"] = ids_json(group.layers);
  out["heads"] = group.heads;
  const GroupSide* shown = prefill != nullptr ? prefill : decode;
  if (shown != nullptr) out.update(layout_json(*shown));
  if (group.window)
    out["window"] = {{"kind", group.window->kind == Window::Kind::sliding ? "sliding" : "chunked"},
                     {"tokens", group.window->tokens}};
  const bool same = prefill != nullptr && decode != nullptr && prefill->layout == decode->layout;
  if (!same) {
    out["prefill"] = prefill != nullptr ? layout_json(*prefill) : Json();
    out["decode"] = decode != nullptr ? layout_json(*decode) : Json();
  }
  return out;
}

Json rank_json(const Side& side, Rank rank, std::int64_t total) {
  Json out;
  out["rank"] = rank.value;
  Json& groups = out["groups"] = Json::array();
  for (const GroupSide& group : side.groups()) {
    const Holding held = holding(group, rank, total);
    Json heads = Json::array();
    for (std::int64_t h = held.heads.start(); h < held.heads.end(); ++h) heads.push_back(h);
    groups.push_back(
        {{"name", group.name}, {"layers", ids_json(held.layers)}, {"heads", std::move(heads)}, {"tokens", held.tokens}});
  }
  out["bytes_per_token"] = number(side.bytes_per_token(rank));
  out["bytes_per_request"] = bytes_per_request(side, rank);
  return out;
}

Json side_json(const Side& side, std::int64_t total) {
  Json out = Json::array();
  for (std::int32_t r = 0; r < side.ranks(); ++r) out.push_back(rank_json(side, Rank(r), total));
  return out;
}

Json capacity_json(const Side& side, std::int64_t memory) {
  const Capacity fits = capacity(side, memory);
  return {{"tokens", fits.tokens}, {"rank", fits.rank.value}, {"bytes_per_token", number(fits.bytes_per_token)}};
}

Json describe_json(const Job& job, std::int64_t memory) {
  Json out;
  out["model"] = job.shape.model();
  out["model_layers"] = job.shape.layers();
  out["bytes_per_token"] = job.shape.bytes_per_token().value;
  out["bytes_per_request"] = job.shape.bytes_per_request().value;
  out["prefill_words"] = to_string(job.prefill->sharding());
  out["decode_words"] = to_string(job.decode->sharding());
  Json& groups = out["groups"] = Json::array();
  for (const CacheGroup& group : job.shape.groups())
    groups.push_back(group_json(group, job.prefill->find(group.name), job.decode->find(group.name)));
  out["prefill"] = side_json(*job.prefill, job.total());
  out["decode"] = side_json(*job.decode, job.total());
  if (memory != 0)
    out["capacity"] = {
        {"memory", memory}, {"prefill", capacity_json(*job.prefill, memory)}, {"decode", capacity_json(*job.decode, memory)}};
  return out;
}

// ---- for people ----

constexpr auto kLeft = TextTable::Align::left;

std::string planes_text(const CacheGroup& group) {
  std::string text;
  for (const PlaneShape& plane : group.planes)
    text += fmt::format("{}{} {} B", text.empty() ? "" : " + ", plane.name, plane.bytes);
  return text;
}

std::string window_text(const CacheGroup& group) {
  if (!group.window) return "";
  const char* words = group.window->kind == Window::Kind::sliding ? "the last" : "chunks of";
  return fmt::format("{} {} tokens", words, group.window->tokens);
}

void print_groups(std::FILE* out, const CacheShape& shape) {
  fmt::print(out, "{}: {} layers, {} B a token", shape.model(), shape.layers(), count_text(shape.bytes_per_token().value));
  if (shape.bytes_per_request() > Bytes(0)) fmt::print(out, ", {} a request", bytes_text(shape.bytes_per_request()));
  fmt::print(out, "\n\n");
  TextTable table({{"group", kLeft},
                   {"kind", kLeft},
                   {"layers", kLeft},
                   {"heads"},
                   {"a head's row", kLeft},
                   {"all layers"},
                   {"", kLeft},
                   {"", kLeft}});
  for (const CacheGroup& group : shape.groups()) {
    const bool paged = group.kind == GroupKind::paged;
    const std::string bytes = count_text((group.row_bytes() * static_cast<std::int64_t>(group.layers.size())).value);
    table.add({group.name, paged ? "paged" : "state", ids_text(group.layers), fmt::format("{}", group.heads), planes_text(group),
               fmt::format("{} B a {}", bytes, paged ? "token" : "request"), window_text(group), group.note});
  }
  table.print(out, 2);
}

// Ranks that hold the same of a group share a line.
void add_rows(TextTable& table, const Side& side, const GroupSide& group, std::int64_t total) {
  std::vector<std::pair<std::vector<std::string>, std::vector<std::int64_t>>> rows;
  for (std::int32_t r = 0; r < side.ranks(); ++r) {
    const Holding held = holding(group, Rank(r), total);
    const bool paged = group.kind == GroupKind::paged;
    std::vector<std::string> cells = {"-", "-", "-"};
    if (!held.layers.empty()) {
      const std::int64_t heads = held.heads.size();
      cells = {
          ids_text(held.layers),
          heads == 1 ? fmt::format("{}", held.heads.start()) : fmt::format("{}-{}", held.heads.start(), held.heads.end() - 1),
          held.tokens};
    }
    cells.push_back(paged ? bytes_text(held.bytes_per_token) : bytes_text(Bytes(held.row_bytes)) + " a request");
    const auto same = std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return row.first == cells; });
    if (same != rows.end())
      same->second.push_back(r);
    else
      rows.push_back({cells, {r}});
  }
  for (const auto& [cells, ranks] : rows) table.add({group.name, ids_text(ranks), cells[0], cells[1], cells[2], cells[3]});
}

void print_pages(std::FILE* out, const Side& side) {
  for (const GroupSide& group : side.groups())
    if (group.kind == GroupKind::paged)
      fmt::print(out, "  {}: pages of {} tokens, {} B{}\n", group.name, group.layout.page_tokens(),
                 count_text(group.layout.page_stride()),
                 group.layout.payload() < group.layout.page_stride()
                     ? fmt::format(", {} of them padding", count_text(group.layout.page_stride() - group.layout.payload()))
                     : "");
}

void print_side(std::FILE* out, const char* name, const Side& side, std::int64_t total, std::int64_t memory) {
  fmt::print(out, "\n{} {}: {} {}\n\n", name, to_string(side.sharding()), side.ranks(), side.ranks() == 1 ? "rank" : "ranks");
  TextTable table(
      {{"group", kLeft}, {"ranks", kLeft}, {"layers", kLeft}, {"heads", kLeft}, {"tokens", kLeft}, {"each, a token"}});
  for (const GroupSide& group : side.groups()) add_rows(table, side, group, total);
  table.print(out, 2);
  fmt::print(out, "\n");
  print_pages(out, side);
  std::int64_t states = 0;
  for (std::int32_t r = 0; r < side.ranks(); ++r) states = std::max(states, bytes_per_request(side, Rank(r)));
  const Capacity fits = capacity(side, memory);
  fmt::print(out, "  the fullest rank keeps {} a token{}\n", bytes_text(fits.bytes_per_token),
             states > 0 ? fmt::format(", {} a request", bytes_text(Bytes(states))) : "");
  if (memory != 0)
    fmt::print(out, "  capacity: {} tokens with {} in each rank (rank {} is full first){}\n", count_text(fits.tokens),
               bytes_text(Bytes(memory)), fits.rank.value, states > 0 ? ", less what the requests' states take" : "");
}

Expected<ExitCode> describe(const Context& context, const DescribeWords& words) {
  const auto job = make_job(words.job);
  if (!job) return tl::unexpected(job.error());
  if (auto ok = check_length(*job); !ok) return tl::unexpected(ok.error());
  if (words.json) {
    fmt::print(context.out, "{}\n", describe_json(*job, words.memory).dump(2));
    return kFine;
  }
  print_groups(context.out, job->shape);
  print_side(context.out, "prefill", *job->prefill, job->total(), words.memory);
  print_side(context.out, "decode", *job->decode, job->total(), words.memory);
  return kFine;
}

}  // namespace

Expected<std::string> describe_document(const Job& job, std::int64_t memory) {
  if (auto ok = check_length(job); !ok) return tl::unexpected(ok.error());
  return describe_json(job, memory).dump();
}

void add_describe(CLI::App& app, Context& context) {
  auto words = std::make_shared<DescribeWords>();  // shared by the options and the body
  CLI::App* verb = add_verb(app, context, "describe", "Say what each rank holds: layers, heads, tokens, bytes a token, capacity",
                            kDescribeExamples, [&context, words] { return describe(context, *words); });
  add_job_options(*verb, words->job, false);
  add_bytes(*verb, "--memory", words->memory, "Memory of each rank's cache, as in 80GiB: adds the capacity in tokens");
  verb->add_flag("--json", words->json, "Print JSON, numbers in bytes");
}

}  // namespace kvloom
