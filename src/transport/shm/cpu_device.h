// cpu_device.h: host memory, copied by threads.  Stage: carry.  Sources are memfds, which peers map read-only; targets are any memory.
// A copy is done when its start returns.
#pragma once

#include "kvloom/transport/copy_crew.h"
#include "kvloom/transport/shm/device.h"

namespace kvloom::shm {

class CpuDevice final : public Device {
 public:
  CpuDevice(CopyKernel kernel, int threads) : crew_(kernel, threads) {}

  Abilities abilities() const override;
  Cost cost() const override;
  std::uint64_t protocol() const override { return kProtocol; }
  std::size_t most_descriptors() const override { return 1; }
  Expected<std::shared_ptr<LocalMemory>> allocate(Bytes length) override;
  Expected<std::shared_ptr<LocalMemory>> lend(std::span<std::byte> memory) override;
  Expected<std::unique_ptr<PeerMemory>> map(Offer offer) override;
  Expected<std::unique_ptr<CopyQueue>> queue() override;

  static constexpr std::uint64_t kProtocol = 0x6b766c6f6f6d0002;  // "kvloom", version 2

 private:
  CopyCrew crew_;  // of all queues: one runs at a time
};

}  // namespace kvloom::shm
