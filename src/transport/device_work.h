// device_work.h: what an engine does on a device's streams, as others see it who must not wait there.  Stage: carry.  Interfaces only.
// A prefill rank's layer is computed when its stream says so, long after the host has said `ready`; a decode rank's stream can wait for a layer
// without its host. cuda/device_work.h has both for CUDA.
#pragma once

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom {

// Work that was put on a device, and is done at some time.  Thread: whoever asks, one at a time
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;
  // Never waits.  @error io: it will never be done, the device broke down
  virtual Expected<bool> is_done() = 0;
};

// Where a device's stream waits for layers.  Thread: the session's
class LayerGate {
 public:
  virtual ~LayerGate() = default;
  virtual void landed(LayerId layer) = 0;  // with all layers of ours before it
  // Nothing more will land: whoever still waits goes on, and has to ask how the transfer ended before it believes what it reads.
  virtual void over() = 0;
};

}  // namespace kvloom
