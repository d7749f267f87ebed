// rank_transport.h: the transport of a process that plays a rank, by its words, with the stores that it gives.  Stage: tools.
// Only a rank's own process opens one: CUDA does not survive a fork (transport_words.h). cuda_ranks.h has what is CUDA's.
// Thread: as Transport; `computed` and stores may be used by another.
#pragma once

#include <memory>

#include "kvloom/tools/rank_store.h"
#include "kvloom/tools/transport_words.h"

namespace kvloom {

class RankTransport {
 public:
  RankTransport() = default;
  // `device`: whose memory it moves; null: the host's
  RankTransport(std::unique_ptr<Transport> transport, std::shared_ptr<RankDevice> device)
      : device_(std::move(device)), transport_(std::move(transport)) {}

  Transport& operator*() const { return *transport_; }
  // Of the device; empty: the host's memory.
  std::string where() const { return device_ != nullptr ? device_->name() : ""; }

  // Its region is zeroed.  @pre length > 0; the store goes before this    @error as Transport::allocate, RankStore::make
  Expected<RankStore> allocate(Bytes length) const;
  // What a layer that was computed until now is ready after; null: it is ready.  @error io
  Expected<std::shared_ptr<DeviceWork>> computed() const;

 private:
  std::shared_ptr<RankDevice> device_;  // shared with the stores
  std::unique_ptr<Transport> transport_;
};

// Decode ranks can be connected to.  @error as ShmTransport::make, open_cuda
Expected<RankTransport> open_transport(const TransportWords& words, bool prefill, Rank rank);

}  // namespace kvloom
