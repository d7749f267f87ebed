#include "kvloom/tools/rank_transport.h"

#include "kvloom/tools/cuda_ranks.h"
#include "kvloom/transport/shm/shm.h"

namespace kvloom {

Expected<RankStore> RankTransport::allocate(Bytes length) const {
  auto region = transport_->allocate(length);
  if (!region) return tl::unexpected(region.error());
  return RankStore::make(std::move(*region), device_);
}

Expected<std::shared_ptr<DeviceWork>> RankTransport::computed() const {
  if (device_ == nullptr) return nullptr;
  return device_->computed();
}

Expected<RankTransport> open_transport(const TransportWords& words, bool prefill, Rank rank) {
  if (auto ok = check_transport(words); !ok) return tl::unexpected(ok.error());
  if (words.name == "cuda") return open_cuda(words, prefill, rank);
  ShmOptions options;
  if (!prefill) options.listen = "*";
  options.copy_threads = words.copy_threads;
  auto made = ShmTransport::make(std::move(options));
  if (!made) return tl::unexpected(made.error());
  return RankTransport(std::move(*made), nullptr);
}

}  // namespace kvloom
