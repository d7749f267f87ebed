// shm.h: the transport between processes of one host, over shared memory.  Stage: carry.  ring_transport.h over cpu_device.h.
// Sources must be allocate()d (memfds, which the target maps read-only), targets may be any memory (huge pages help).
// Thread: as ring_transport.h, and copy_threads - 1 helpers that run only inside poll.
#pragma once

#include "kvloom/transport/copy.h"
#include "kvloom/transport/shm/ring_transport.h"

namespace kvloom {

struct ShmOptions : shm::RingOptions {
  int copy_threads = 1;  // that copy what arrives, the polling thread among them
  CopyKernel kernel = best_copy_kernel();
};

class ShmTransport final : public shm::RingTransport {
 public:
  // @error invalid_argument (an option that can't be right), unavailable (the name is taken), exhausted (descriptors)
  static Expected<std::unique_ptr<ShmTransport>> make(ShmOptions options);

 private:
  using RingTransport::RingTransport;
};

}  // namespace kvloom
