#include "kvloom/tools/cuda_ranks.h"

namespace kvloom {

Expected<void> cuda_is_built() {
  return fail(Code::unsupported, "this kvloom was built without CUDA: configure with -DKVLOOM_CUDA=ON");
}

Expected<RankTransport> open_cuda(const TransportWords&, bool, Rank) { return tl::unexpected(cuda_is_built().error()); }

}  // namespace kvloom
