// fake_memory.h: the memory of GPUs that are not there: which addresses are whose, of which allocation, and who may touch them.
// GPU memory is a memfd, mapped here: another process maps the same pages through an exported descriptor (VMM) or /proc/PID/fd/N (legacy IPC
// handles), so real processes share it as they share a GPU's. Device addresses are host addresses.
// Law: what cuda.h of CUDA 13.0 says of these calls, and an error wherever it says that something is not allowed.
// Thread: none of its own: fake_driver.cc locks.  Each function is the call of its name, without its tests of the context.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

namespace kvloom::cuda::fake {

inline constexpr int kGpus = 2;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;  // of VMM, as on real ones

// A memfd; closed with its last owner: allocations, handles and mappings of it.
struct Backing {
  Backing(int fd_of, std::size_t bytes_of, int device_of, unsigned types)
      : fd(fd_of), bytes(bytes_of), device(device_of), handle_types(types) {}
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  ~Backing();

  int fd;
  std::size_t bytes;
  int device;
  unsigned handle_types;  // CUmemAllocationHandleType bits
};

struct Range {
  enum class Kind : std::uint8_t { allocated, opened, mapped, registered, pinned };
  Kind kind = Kind::allocated;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  int device = 0;
  std::uint64_t id = 0;                     // never used again
  std::shared_ptr<Backing> backing;         // not of host memory
  std::uint64_t inode = 0;                  // opened: of the exporter's memfd
  int times_opened = 0;                     // opened
  CUmemGenericAllocationHandle handle = 0;  // mapped
  bool readable[kGpus] = {};                // mapped: what cuMemSetAccess gave
  bool writable[kGpus] = {};

  bool is_host() const { return kind == Kind::registered || kind == Kind::pinned; }
  bool contains(CUdeviceptr at) const { return at >= begin && at - begin < bytes; }
};

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  CUresult allocate(int device, std::size_t bytes, CUdeviceptr* out);
  CUresult free(CUdeviceptr begin);
  CUresult host_allocate(int device, std::size_t bytes, void** out);
  CUresult host_free(void* begin);
  CUresult host_register(int device, void* begin, std::size_t bytes);
  CUresult host_unregister(void* begin);

  CUresult ipc_handle(CUdeviceptr begin, CUipcMemHandle* out) const;
  CUresult ipc_open(int device, const CUipcMemHandle& handle, CUdeviceptr* out);
  CUresult ipc_close(CUdeviceptr begin);

  CUresult create(std::size_t bytes, const CUmemAllocationProp& wish, CUmemGenericAllocationHandle* out);
  CUresult release(CUmemGenericAllocationHandle handle);
  CUresult retain(CUdeviceptr at, CUmemGenericAllocationHandle* out);
  CUresult export_fd(CUmemGenericAllocationHandle handle, int* out) const;
  CUresult import_fd(int fd, CUmemGenericAllocationHandle* out);
  CUresult properties(CUmemGenericAllocationHandle handle, CUmemAllocationProp* out) const;
  CUresult reserve(std::size_t bytes, std::size_t alignment, CUdeviceptr* out);
  CUresult address_free(CUdeviceptr begin, std::size_t bytes);
  CUresult map(CUdeviceptr begin, std::size_t bytes, CUmemGenericAllocationHandle handle);
  CUresult unmap(CUdeviceptr begin, std::size_t bytes);
  CUresult set_access(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc& wish);

  // Asked of an address: null where nothing is.
  const Range* find(CUdeviceptr at) const;
  // As cuPointerGetAttributes: zero for what is unknown.
  CUresult attribute(CUpointer_attribute name, CUdeviceptr at, CUcontext context_of_device[kGpus], void* out) const;

  enum class By : std::uint8_t { engine, kernel };  // kernels need peer access, copy engines only what VMM memory allows
  bool may_touch(CUdeviceptr at, std::size_t bytes, int device, By by, bool write) const;
  void enable_peer(int device, int peer) { peers_[device][peer] = true; }
  bool peer_enabled(int device, int peer) const { return peers_[device][peer]; }

  std::int64_t count(Range::Kind kind) const;
  std::int64_t handles() const;  // references to VMM handles
  std::int64_t reservations() const { return static_cast<std::int64_t>(reservations_.size()); }
  void free_all_of(int device);

 private:
  struct Handle {
    std::shared_ptr<Backing> backing;
    int references = 0;
  };
  using Ranges = std::map<CUdeviceptr, Range>;

  Range* find_begin(CUdeviceptr begin, Range::Kind kind);
  bool overlaps(CUdeviceptr begin, std::size_t bytes) const;
  CUresult map_backing(Range range, CUdeviceptr* out);
  bool whole_mappings(CUdeviceptr begin, std::size_t bytes) const;
  void erase(Ranges::iterator at);

  Ranges ranges_;  // by begin; do not overlap
  std::map<CUdeviceptr, std::size_t> reservations_;
  std::map<CUmemGenericAllocationHandle, Handle> handles_;
  bool peers_[kGpus][kGpus] = {};
  std::uint64_t next_id_ = 1;
  CUmemGenericAllocationHandle next_handle_ = 0x1000;
};

}  // namespace kvloom::cuda::fake
