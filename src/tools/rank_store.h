// rank_store.h: the memory of a rank as its CPU sees it, whatever memory its transport moves: where caches are filled and checked.  Stage: tools.
// A store is a region and a *view* of all of it. In host memory the view is the region, and put and get do nothing; of a GPU's memory it is
// a copy in host memory, and put and get bring it up to date, where they are told to.
// Law: after put of a range, the region has there what the view has; after get, the view what the region has. Other bytes stay.
// Owner: of the region. The view of a GPU's memory takes as much host memory as is touched.
// Thread: one, not the transport's of necessity: put and get never call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>

#include "kvloom/base/error.h"
#include "kvloom/transport/device_work.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

// A device with memory of its own, as the CPU of its rank uses it.  Thread: one
class RankDevice {
 public:
  virtual ~RankDevice() = default;
  virtual std::string name() const = 0;  // "GPU 1, NVIDIA H200"
  // Both are done when they return. The outer address is the device's.  @error io: the device broke down
  virtual Expected<void> put(std::byte* to, std::span<const std::byte> from) = 0;
  virtual Expected<void> get(std::span<std::byte> to, const std::byte* from) = 0;
  // Bytes from there on that are not as expected, counted where they lie.
  virtual Expected<std::int64_t> count_wrong(const std::byte* there, std::span<const std::byte> expected) = 0;
  // All that was computed on it so far.  @error io
  virtual Expected<std::shared_ptr<DeviceWork>> computed() = 0;
};

class RankStore {
 public:
  RankStore() = default;  // of no bytes
  // `device`: whose memory the region is; null: the CPU's.  @error exhausted: no memory for the view
  static Expected<RankStore> make(Region region, std::shared_ptr<RankDevice> device);

  const Region& region() const { return region_; }
  std::span<std::byte> memory() const { return view_ ? std::span(view_.get(), region_.memory().size()) : region_.memory(); }

  // @pre offset + length are inside of the region    @error as RankDevice
  Expected<void> put(std::int64_t offset, std::int64_t length) const;
  Expected<void> get(std::int64_t offset, std::int64_t length) const;
  // Bytes of the region, from offset on, that are not as expected; the view is neither read nor changed.
  Expected<std::int64_t> count_wrong(std::int64_t offset, std::span<const std::byte> expected) const;
  Expected<void> put_all() const { return put(0, region_.length().value); }
  Expected<void> get_all() const { return get(0, region_.length().value); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  Region region_;
  std::shared_ptr<RankDevice> device_;     // shared with the rank's transport and its other stores
  std::unique_ptr<std::byte, Free> view_;  // [region's length], zeroed; null: the region is the view
};

}  // namespace kvloom
