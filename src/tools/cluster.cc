#include "kvloom/tools/cluster.h"

#include <algorithm>
#include <random>

#include "kvloom/tools/tables.h"

namespace kvloom {
namespace {

using nlohmann::json;

// Pages of each pool of one rank: for all tokens, and a part of a page for each request.
std::vector<std::int64_t> pool_pages(const Side& side, const ClusterSpec& spec) {
  std::vector<std::int64_t> out;
  for (const GroupSide& group : side.groups()) {
    if (group.kind == GroupKind::state) {
      out.push_back(2 * spec.requests_at_once);
      continue;
    }
    const std::int64_t parts = group.tokens.rule == TokenRule::all ? 1 : group.tokens.parts;
    const std::int64_t slack = 2 + std::max<std::int64_t>(1, group.tokens.stripe / group.layout.page_tokens());
    out.push_back(ceil_div(ceil_div(spec.tokens_at_once, parts), group.layout.page_tokens()) + spec.requests_at_once * slack);
  }
  return out;
}

}  // namespace

json ServedRequest::command(const char* word) const {
  return {{"do", word},     {"key", name},      {"epoch", epoch},     {"request", number},
          {"total", total}, {"prefix", prefix}, {"time_ms", time_ms}, {"payload", payload}};
}

bool ServedResult::landed() const {
  return !outcomes.empty() &&
         std::all_of(outcomes.begin(), outcomes.end(), [](const auto& outcome) { return outcome.second == "landed"; });
}

Expected<std::unique_ptr<WorkerCluster>> WorkerCluster::make(const ClusterSpec& spec) {
  auto out = std::make_unique<WorkerCluster>();
  for (const bool is_prefill : {true, false}) {
    const auto& side = is_prefill ? spec.prefill : spec.decode;
    for (std::int32_t rank = 0; rank < side->ranks(); ++rank) {
      WorkerSpec worker = spec.worker;
      worker.side = side;
      worker.rank = Rank(rank);
      worker.prefill = is_prefill;
      worker.pool_pages = pool_pages(*side, spec);
      const auto id = out->workers.start(worker);
      if (!id) return tl::unexpected(id.error());
      (is_prefill ? out->prefill : out->decode).push_back(*id);
    }
  }
  return out;
}

std::vector<std::string> WorkerCluster::addresses() const {
  std::vector<std::string> out;
  for (const WorkerId worker : prefill) out.push_back(workers.address(worker));
  return out;
}

std::vector<WorkerId> WorkerCluster::all() const {
  std::vector<WorkerId> out = prefill;
  out.insert(out.end(), decode.begin(), decode.end());
  return out;
}

Expected<void> WorkerCluster::tell(const std::vector<WorkerId>& to, const json& command) {
  std::vector<WorkerId> living;
  for (const WorkerId worker : to)
    if (workers.lives(worker)) living.push_back(worker);
  return workers.ask_all(living, command).map([](const auto&) {});
}

Expected<void> WorkerCluster::offer(const ServedRequest& request, bool hold) {
  for (const WorkerId worker : prefill)
    if (workers.lives(worker)) result(request).told.insert(worker);
  json command = request.command("offer");
  command["hold"] = hold;
  return tell(prefill, command);
}

Expected<void> WorkerCluster::begin(const ServedRequest& request, bool hold, bool layers) {
  for (const WorkerId worker : decode)
    if (workers.lives(worker)) result(request).told.insert(worker);
  json command = request.command("begin");
  command["sources"] = addresses();
  command["hold"] = hold;
  command["layers"] = layers;
  return tell(decode, command);
}

Expected<void> WorkerCluster::compute(const ServedRequest& request, std::int64_t begin, std::int64_t end,
                                      const std::vector<std::int32_t>& layers) {
  json command = request.command("compute");
  command["begin"] = begin;
  command["end"] = end;
  if (!layers.empty()) command["layers"] = layers;
  return tell(prefill, command);
}

Expected<void> WorkerCluster::cancel(const ServedRequest& request, bool by_decode, const std::string& why) {
  json command = request.command("cancel");
  command["why"] = why;
  return tell(by_decode ? decode : prefill, command);
}

bool WorkerCluster::listen(std::chrono::milliseconds at_most) {
  const auto event = workers.next(at_most);
  if (!event) return false;
  const std::string say = event->said["say"];
  if (say == "died") {
    bury(event->worker);
    return true;
  }
  const auto at = results_.find({event->said["key"], event->said["epoch"]});
  if (at == results_.end()) return true;
  ServedResult& result = at->second;
  if (say == "released") result.released.insert(event->worker);
  if (say == "layer") result.layers.emplace(event->worker, event->said["layer"]);
  if (say != "ended") return true;
  result.outcomes[event->worker] = event->said["outcome"];
  result.whys[event->worker] = event->said["why"];
  result.wrong_bytes += event->said.value("wrong", std::int64_t{0});
  if (workers.spec(event->worker).prefill) return true;
  result.payload += event->said.value("payload", std::int64_t{0});
  result.bytes += event->said.value("bytes", std::int64_t{0});
  result.landed_at = std::max(result.landed_at, event->said["at"].get<std::int64_t>());
  return true;
}

Expected<void> WorkerCluster::restart(WorkerId worker) {
  while (listen(std::chrono::milliseconds(0))) {}
  return workers.restart(worker);
}

void WorkerCluster::bury(WorkerId worker) {
  for (auto& [key, result] : results_) {
    if (!result.told.contains(worker) || result.released.contains(worker)) continue;
    result.released.insert(worker);
    result.outcomes[worker] = "died";
  }
}

}  // namespace kvloom
