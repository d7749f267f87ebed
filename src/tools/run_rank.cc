#include "kvloom/tools/run_rank.h"

namespace kvloom {

TransferKey stage_key(int stage) {
  constexpr const char* kNames[] = {"loom", "naive", "meet"};
  return {kNames[stage], Epoch(1)};
}

std::vector<CacheTable> side_tables(const Plan& plan, bool prefill, Rank rank, const std::vector<GroupTables>& tables) {
  const Side& side = prefill ? plan.source() : plan.target();
  std::vector<CacheTable> out(side.groups().size());
  for (std::size_t g = 0; g < plan.groups().size(); ++g) {
    const GroupPlan& group = plan.groups()[g];
    const auto index = static_cast<std::size_t>((prefill ? group.source : group.target) - side.groups().data());
    const PageTable& table = tables[g].of(rank);
    out[index] = {{table.pages().begin(), table.pages().end()}, table.pool_pages()};
  }
  return out;
}

}  // namespace kvloom
