#include "kvloom/tools/cuda_load.h"
#include "kvloom/tools/cuda_ranks.h"

namespace kvloom {

Expected<std::unique_ptr<PrefillLoad>> open_prefill_load(const LoadWords&, const TransportWords&, Rank, std::int64_t) {
  return tl::unexpected(cuda_is_built().error());
}

Expected<std::unique_ptr<DecodeLoad>> open_decode_load(const LoadWords&, const TransportWords&, Rank) {
  return tl::unexpected(cuda_is_built().error());
}

}  // namespace kvloom
