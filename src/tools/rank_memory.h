// rank_memory.h: the memory of one rank in `run`: a tensor a (group, layer), one after another in one region.  Stage: tools.
// Filling and checking go by geometry (the side's own rules) and the content function; neither knows a plan's paths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/cache_memory.h"
#include "kvloom/plan/plan.h"
#include "kvloom/tools/rank_store.h"
#include "kvloom/tools/tables.h"

namespace kvloom {

struct Tensor {
  std::int32_t group = 0;  // index in the plan
  LayerId layer;
  std::int64_t offset = 0, length = 0;  // bytes, in the rank's region
};

// Which tensors a rank has and where.
class TensorMap {
 public:
  // @error overflow: more bytes than 63 bits hold
  static Expected<TensorMap> make(const Plan& plan, bool prefill, Rank rank, const std::vector<GroupTables>& tables);

  std::int64_t length() const { return length_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  // For an endpoint: the same, by the groups of the plan's side, in the one region.
  std::vector<PlacedTensor> placed(const Plan& plan, bool prefill) const;
  // @pre the rank holds that layer
  const Tensor& find(std::int32_t group, LayerId layer) const;

 private:
  std::vector<Tensor> tensors_;  // by group, then layer
  std::int64_t length_ = 0;
};

// One rank of one side, and the tables by which its pages are found.
struct RankCache {
  const Plan* plan = nullptr;
  bool prefill = false;
  Rank rank;
  const std::vector<GroupTables>* tables = nullptr;
  std::int64_t total = 0;  // tokens of the request

  const GroupSide& side(std::int32_t group) const {
    const GroupPlan& g = plan->groups()[static_cast<std::size_t>(group)];
    return prefill ? *g.source : *g.target;
  }
  std::span<const PageId> table(std::int32_t group) const { return (*tables)[static_cast<std::size_t>(group)].of(rank).pages(); }
};

// What is written: one request's tensor, on one rank.
struct RowsOf {
  const GroupSide* side = nullptr;
  Rank rank;
  std::int32_t group = 0;
  LayerId layer;
  std::int64_t total = 0;  // tokens of the request
  std::int64_t request = 0;
};
// Writes the rows of tokens [begin, end) that the rank holds, of a state: token 0.  Returns the bytes written.
std::int64_t write_rows(const RowsOf& rows, std::span<const PageId> table, std::int64_t begin, std::int64_t end,
                        std::span<std::byte> memory);
std::int64_t write_rows(const RankCache& cache, const Tensor& tensor, std::int64_t begin, std::int64_t end,
                        std::span<std::byte> memory);

struct CheckResult {
  std::int64_t wanted = 0;  // bytes that the rank should have got
  std::int64_t wrong = 0;   // of all its bytes: wanted ones that are not as they should be, others that are not as they were
};
// All bytes of the rank's region: rows of `range` by the content function, everything else still the canary.
// @error as RankStore::count_wrong
Expected<CheckResult> check_memory(const RankCache& cache, const TensorMap& map, TokenRange range, const RankStore& store);
void fill_canary(const RankCache& cache, const TensorMap& map, std::span<std::byte> region);

}  // namespace kvloom
