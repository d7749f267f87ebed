#include "tests/cuda/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

namespace kvloom::cuda::fake {
namespace {

constexpr std::uint64_t kMagic = 0x6b766c6f6f6d6661;
constexpr std::size_t kHostPage = 4096;

// What stands in a CUipcMemHandle.
struct HandleWords {
  std::uint64_t magic;
  std::int32_t pid;
  std::int32_t fd;
  std::uint64_t inode;
  std::uint64_t bytes;
  std::int32_t device;
};
static_assert(sizeof(HandleWords) <= sizeof(CUipcMemHandle));

void* host_address(CUdeviceptr at) { return reinterpret_cast<void*>(at); }
CUdeviceptr device_address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

std::size_t up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::uint64_t inode_of(int fd) {
  struct stat about = {};
  return fstat(fd, &about) == 0 ? about.st_ino : 0;
}
std::size_t size_of(int fd) {
  struct stat about = {};
  return fstat(fd, &about) == 0 ? static_cast<std::size_t>(about.st_size) : 0;
}

// The name says, in any process, what it is: "kvloom-fake-gpu:DEVICE:HANDLE_TYPES".
std::shared_ptr<Backing> make_backing(std::size_t bytes, int device, unsigned handle_types) {
  const std::string name = "kvloom-fake-gpu:" + std::to_string(device) + ":" + std::to_string(handle_types);
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  auto out = std::make_shared<Backing>(fd, bytes, device, handle_types);
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? out : nullptr;
}

// Of a descriptor that came from outside.
std::shared_ptr<Backing> backing_of(int fd) {
  char name[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), name, sizeof(name) - 1) < 0) return nullptr;
  int device = -1;
  unsigned handle_types = 0;
  if (std::sscanf(name, "/memfd:kvloom-fake-gpu:%d:%u", &device, &handle_types) != 2 || device < 0 || device >= kGpus)
    return nullptr;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  return own < 0 ? nullptr : std::make_shared<Backing>(own, size_of(own), device, handle_types);
}

}  // namespace

Backing::~Backing() { close(fd); }

Memory::~Memory() {
  while (!ranges_.empty()) erase(ranges_.begin());
  for (const auto& [begin, bytes] : reservations_) munmap(host_address(begin), bytes);
}

void Memory::erase(Ranges::iterator at) {
  const Range& range = at->second;
  if (range.kind == Range::Kind::mapped)  // its addresses stay reserved
    mmap(host_address(range.begin), range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  else if (range.kind != Range::Kind::registered)
    munmap(host_address(range.begin), up(range.bytes, kHostPage));
  ranges_.erase(at);
}

const Range* Memory::find(CUdeviceptr at) const {
  auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return nullptr;
  const Range& range = std::prev(after)->second;
  return range.contains(at) ? &range : nullptr;
}

Range* Memory::find_begin(CUdeviceptr begin, Range::Kind kind) {
  const auto at = ranges_.find(begin);
  return at != ranges_.end() && at->second.kind == kind ? &at->second : nullptr;
}

bool Memory::overlaps(CUdeviceptr begin, std::size_t bytes) const {
  const auto after = ranges_.lower_bound(begin);
  return find(begin) != nullptr || (after != ranges_.end() && after->first - begin < bytes);
}

CUresult Memory::map_backing(Range range, CUdeviceptr* out) {
  void* at = mmap(nullptr, up(range.bytes, kHostPage), PROT_READ | PROT_WRITE, MAP_SHARED, range.backing->fd, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  range.begin = *out = device_address(at);
  range.id = next_id_++;
  ranges_[range.begin] = std::move(range);
  return CUDA_SUCCESS;
}

// ---- cuMemAlloc and host memory ----

CUresult Memory::allocate(int device, std::size_t bytes, CUdeviceptr* out) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  auto backing = make_backing(bytes, device, 0);
  if (!backing) return CUDA_ERROR_OUT_OF_MEMORY;
  return map_backing({.kind = Range::Kind::allocated, .bytes = bytes, .device = device, .backing = std::move(backing)}, out);
}

CUresult Memory::free(CUdeviceptr begin) {
  if (begin == 0) return CUDA_SUCCESS;
  if (find_begin(begin, Range::Kind::allocated) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  erase(ranges_.find(begin));
  return CUDA_SUCCESS;
}

CUresult Memory::host_allocate(int device, std::size_t bytes, void** out) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* at = mmap(nullptr, up(bytes, kHostPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = at;
  ranges_[device_address(at)] = {
      .kind = Range::Kind::pinned, .begin = device_address(at), .bytes = bytes, .device = device, .id = next_id_++};
  return CUDA_SUCCESS;
}

CUresult Memory::host_free(void* begin) {
  if (find_begin(device_address(begin), Range::Kind::pinned) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  erase(ranges_.find(device_address(begin)));
  return CUDA_SUCCESS;
}

CUresult Memory::host_register(int device, void* begin, std::size_t bytes) {
  const CUdeviceptr at = device_address(begin);
  if (begin == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (overlaps(at, bytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  const CUdeviceptr page = at / kHostPage * kHostPage;
  if (msync(host_address(page), at + bytes - page, MS_ASYNC) != 0) return CUDA_ERROR_INVALID_VALUE;  // nothing is mapped there
  ranges_[at] = {.kind = Range::Kind::registered, .begin = at, .bytes = bytes, .device = device, .id = next_id_++};
  return CUDA_SUCCESS;
}

CUresult Memory::host_unregister(void* begin) {
  if (find_begin(device_address(begin), Range::Kind::registered) == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  erase(ranges_.find(device_address(begin)));
  return CUDA_SUCCESS;
}

// ---- legacy IPC ----

CUresult Memory::ipc_handle(CUdeviceptr begin, CUipcMemHandle* out) const {
  const Range* range = find(begin);
  if (range == nullptr || range->begin != begin || range->kind != Range::Kind::allocated) return CUDA_ERROR_INVALID_VALUE;
  HandleWords words = {};
  words.magic = kMagic;
  words.pid = getpid();
  words.fd = range->backing->fd;
  words.inode = inode_of(range->backing->fd);
  words.bytes = range->bytes;
  words.device = range->device;
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &words, sizeof(words));
  return CUDA_SUCCESS;
}

// As the real one: not in the process that exported it, and again the same address when it is open already.
CUresult Memory::ipc_open(int device, const CUipcMemHandle& handle, CUdeviceptr* out) {
  HandleWords words = {};
  std::memcpy(&words, &handle, sizeof(words));
  if (words.magic != kMagic || words.device < 0 || words.device >= kGpus) return CUDA_ERROR_INVALID_HANDLE;
  if (words.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const std::string path = "/proc/" + std::to_string(words.pid) + "/fd/" + std::to_string(words.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  auto backing = std::make_shared<Backing>(fd, words.bytes, words.device, 0U);
  if (inode_of(fd) != words.inode || size_of(fd) != words.bytes)
    return CUDA_ERROR_INVALID_HANDLE;  // freed, and its number used again
  enable_peer(device, words.device);
  for (auto& [begin, range] : ranges_) {
    if (range.kind != Range::Kind::opened || range.inode != words.inode) continue;
    ++range.times_opened;
    *out = begin;
    return CUDA_SUCCESS;
  }
  Range range{.kind = Range::Kind::opened, .bytes = words.bytes, .device = words.device, .backing = std::move(backing)};
  range.inode = words.inode;
  range.times_opened = 1;
  return map_backing(std::move(range), out);
}

CUresult Memory::ipc_close(CUdeviceptr begin) {
  Range* range = find_begin(begin, Range::Kind::opened);
  if (range == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (--range->times_opened == 0) erase(ranges_.find(begin));
  return CUDA_SUCCESS;
}

// ---- VMM ----

CUresult Memory::create(std::size_t bytes, const CUmemAllocationProp& wish, CUmemGenericAllocationHandle* out) {
  const auto types = static_cast<unsigned>(wish.requestedHandleTypes);
  if (bytes == 0 || bytes % kGranularity != 0 || wish.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (wish.location.type != CU_MEM_LOCATION_TYPE_DEVICE || wish.location.id < 0 || wish.location.id >= kGpus)
    return CUDA_ERROR_INVALID_DEVICE;
  if ((types & ~static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  auto backing = make_backing(bytes, wish.location.id, types);
  if (!backing) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = next_handle_++;
  handles_[*out] = {std::move(backing), 1};
  return CUDA_SUCCESS;
}

CUresult Memory::release(CUmemGenericAllocationHandle handle) {
  const auto at = handles_.find(handle);
  if (at == handles_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--at->second.references == 0) handles_.erase(at);
  return CUDA_SUCCESS;
}

// The value that it was mapped by, also where that was released since.
CUresult Memory::retain(CUdeviceptr at, CUmemGenericAllocationHandle* out) {
  const Range* range = find(at);
  if (range == nullptr || range->kind != Range::Kind::mapped) return CUDA_ERROR_INVALID_VALUE;
  Handle& handle = handles_[range->handle];
  handle.backing = range->backing;
  ++handle.references;
  *out = range->handle;
  return CUDA_SUCCESS;
}

CUresult Memory::export_fd(CUmemGenericAllocationHandle handle, int* out) const {
  const auto at = handles_.find(handle);
  if (at == handles_.end() || (at->second.backing->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0)
    return CUDA_ERROR_INVALID_VALUE;
  *out = fcntl(at->second.backing->fd, F_DUPFD_CLOEXEC, 0);
  return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult Memory::import_fd(int fd, CUmemGenericAllocationHandle* out) {
  auto backing = backing_of(fd);
  if (!backing || backing->handle_types == 0) return CUDA_ERROR_INVALID_VALUE;
  *out = next_handle_++;
  handles_[*out] = {std::move(backing), 1};
  return CUDA_SUCCESS;
}

CUresult Memory::properties(CUmemGenericAllocationHandle handle, CUmemAllocationProp* out) const {
  const auto at = handles_.find(handle);
  if (at == handles_.end()) return CUDA_ERROR_INVALID_VALUE;
  *out = {};
  out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(at->second.backing->handle_types);
  out->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  out->location.id = at->second.backing->device;
  return CUDA_SUCCESS;
}

CUresult Memory::reserve(std::size_t bytes, std::size_t alignment, CUdeviceptr* out) {
  if (bytes == 0 || bytes % kGranularity != 0 || (alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t unit = std::max(alignment, kGranularity), all = bytes + unit;
  void* at = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUdeviceptr got = device_address(at), begin = up(got, unit), rest = got + all - (begin + bytes);
  if (begin > got) munmap(at, begin - got);
  if (rest > 0) munmap(host_address(begin + bytes), rest);
  reservations_[begin] = bytes;
  *out = begin;
  return CUDA_SUCCESS;
}

CUresult Memory::address_free(CUdeviceptr begin, std::size_t bytes) {
  const auto at = reservations_.find(begin);
  if (at == reservations_.end() || at->second != bytes || overlaps(begin, bytes)) return CUDA_ERROR_INVALID_VALUE;
  munmap(host_address(begin), bytes);
  reservations_.erase(at);
  return CUDA_SUCCESS;
}

CUresult Memory::map(CUdeviceptr begin, std::size_t bytes, CUmemGenericAllocationHandle handle) {
  const auto from = handles_.find(handle);
  auto around = reservations_.upper_bound(begin);
  if (from == handles_.end() || around == reservations_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --around;
  const std::size_t skip = begin - around->first;
  if (bytes == 0 || bytes % kGranularity != 0 || skip % kGranularity != 0 || bytes > from->second.backing->bytes ||
      skip >= around->second || bytes > around->second - skip || overlaps(begin, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  if (mmap(host_address(begin), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, from->second.backing->fd, 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  Range range{.kind = Range::Kind::mapped,
              .begin = begin,
              .bytes = bytes,
              .device = from->second.backing->device,
              .id = next_id_++,
              .backing = from->second.backing};
  range.handle = handle;
  ranges_[begin] = std::move(range);
  return CUDA_SUCCESS;
}

// [begin, begin + bytes) is mappings, whole ones, without a gap.
bool Memory::whole_mappings(CUdeviceptr begin, std::size_t bytes) const {
  const CUdeviceptr end = begin + bytes;
  while (begin < end) {
    const auto at = ranges_.find(begin);
    if (at == ranges_.end() || at->second.kind != Range::Kind::mapped || at->second.bytes > end - begin) return false;
    begin += at->second.bytes;
  }
  return bytes > 0;
}

CUresult Memory::unmap(CUdeviceptr begin, std::size_t bytes) {
  if (!whole_mappings(begin, bytes)) return CUDA_ERROR_INVALID_VALUE;
  for (auto at = ranges_.find(begin); at != ranges_.end() && at->first < begin + bytes; at = ranges_.lower_bound(begin))
    erase(at);
  return CUDA_SUCCESS;
}

CUresult Memory::set_access(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc& wish) {
  if (!whole_mappings(begin, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (wish.location.type != CU_MEM_LOCATION_TYPE_DEVICE || wish.location.id < 0 || wish.location.id >= kGpus)
    return CUDA_ERROR_INVALID_DEVICE;
  for (auto at = ranges_.find(begin); at != ranges_.end() && at->first < begin + bytes; ++at) {
    Range& range = at->second;
    range.readable[wish.location.id] = wish.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    range.writable[wish.location.id] = wish.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const bool anyone = std::find(std::begin(range.readable), std::end(range.readable), true) != std::end(range.readable);
    mprotect(host_address(range.begin), range.bytes, anyone ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  return CUDA_SUCCESS;
}

// ---- questions ----

bool Memory::may_touch(CUdeviceptr at, std::size_t bytes, int device, By by, bool write) const {
  while (bytes > 0) {
    const Range* range = find(at);
    if (range == nullptr) return false;
    const std::size_t here = std::min(bytes, range->bytes - static_cast<std::size_t>(at - range->begin));
    if (range->kind == Range::Kind::mapped) {
      if (!(write ? range->writable : range->readable)[device]) return false;
    } else if (here < bytes) {
      return false;  // two allocations are never one, wherever they lie
    } else if (by == By::kernel && !range->is_host() && range->device != device && !peers_[device][range->device]) {
      return false;
    }
    at += here;
    bytes -= here;
  }
  return true;
}

CUresult Memory::attribute(CUpointer_attribute name, CUdeviceptr at, CUcontext context_of_device[kGpus], void* out) const {
  const Range* found = find(at);
  const Range range = found != nullptr ? *found : Range{.device = -2};  // CU_DEVICE_INVALID
  const bool known = found != nullptr, mapped = known && range.kind == Range::Kind::mapped;
  CUdeviceptr begin = range.begin;
  std::size_t bytes = range.bytes;
  if (mapped) {  // the range of a mapping is its reservation
    const auto around = std::prev(reservations_.upper_bound(at));
    begin = around->first;
    bytes = around->second;
  }
  const auto give = [&](const auto value) {
    std::memcpy(out, &value, sizeof(value));
    return CUDA_SUCCESS;
  };
  switch (name) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return give(known && !mapped ? context_of_device[range.device] : CUcontext{nullptr});
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give(!known ? 0U : static_cast<unsigned>(range.is_host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return give(known ? at : CUdeviceptr{0});
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return give(known && range.is_host() ? host_address(at) : static_cast<void*>(nullptr));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE: return give(0U);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: return give(range.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return give(range.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: return give(known && range.kind == Range::Kind::allocated ? 1U : 0U);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return give(begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return give(bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED: return give(known ? 1U : 0U);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: return give(mapped ? range.backing->handle_types : 0U);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: return give(static_cast<void*>(nullptr));
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: return give(range.bytes);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: return give(range.begin);
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

std::int64_t Memory::count(Range::Kind kind) const {
  return std::count_if(ranges_.begin(), ranges_.end(), [&](const auto& entry) { return entry.second.kind == kind; });
}

std::int64_t Memory::handles() const {
  std::int64_t out = 0;
  for (const auto& [value, handle] : handles_) out += handle.references;
  return out;
}

void Memory::free_all_of(int device) {
  for (auto at = ranges_.begin(); at != ranges_.end();) {
    const auto next = std::next(at);
    if (at->second.device == device && at->second.kind != Range::Kind::mapped) erase(at);
    at = next;
  }
}

}  // namespace kvloom::cuda::fake
