#include "tests/cuda/fake_driver.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "tests/cuda/fake_machine.h"

namespace kvloom::cuda {
namespace fake {
namespace {

bool is_gpu(CUdevice gpu) { return gpu >= 0 && gpu < kGpus; }

struct Named {
  CUresult result;
  const char* name;
  const char* words;
};
constexpr Named kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
const Named* named(CUresult result) {
  const auto* at = std::find_if(std::begin(kErrors), std::end(kErrors), [&](const Named& n) { return n.result == result; });
  return at == std::end(kErrors) ? nullptr : at;
}

// Those after which a process has to start anew (cuda.h: "The context cannot be used").
bool is_sticky(CUresult result) {
  return result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED || result == CUDA_ERROR_LAUNCH_TIMEOUT ||
         result == CUDA_ERROR_MISALIGNED_ADDRESS || result == CUDA_ERROR_ECC_UNCORRECTABLE ||
         result == CUDA_ERROR_HARDWARE_STACK_ERROR || result == CUDA_ERROR_ILLEGAL_INSTRUCTION || result == CUDA_ERROR_ASSERT;
}

}  // namespace

// ---- the driver and its devices ----

CUresult fake_cuInit(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult fake_cuDriverGetVersion(int* out) {
  *out = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult fake_cuGetErrorName(CUresult result, const char** out) {
  const Named* found = named(result);
  *out = found != nullptr ? found->name : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult fake_cuGetErrorString(CUresult result, const char** out) {
  const Named* found = named(result);
  *out = found != nullptr ? found->words : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult fake_cuDeviceGetCount(int* out) {
  *out = kGpus;
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceGet(CUdevice* out, int ordinal) {
  if (!is_gpu(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *out = ordinal;
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceGetName(char* out, int bytes, CUdevice gpu) {
  if (!is_gpu(gpu)) return CUDA_ERROR_INVALID_DEVICE;
  if (out == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::strncpy(out, "Fake GPU", static_cast<std::size_t>(bytes));
  out[bytes - 1] = 0;
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceGetUuid(CUuuid* out, CUdevice gpu) {
  if (!is_gpu(gpu)) return CUDA_ERROR_INVALID_DEVICE;
  std::memcpy(out->bytes, "kvloom fake GPU", 15);
  out->bytes[15] = static_cast<char>('0' + gpu);
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceGetAttribute(int* out, CUdevice_attribute name, CUdevice gpu) {
  if (!is_gpu(gpu)) return CUDA_ERROR_INVALID_DEVICE;
  switch (name) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = 132; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out = 3; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = 9; break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *out = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *out = 1 + gpu; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: *out = 1; break;
    default: *out = 0;
  }
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceCanAccessPeer(int* out, CUdevice gpu, CUdevice peer) {
  if (!is_gpu(gpu) || !is_gpu(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *out = gpu != peer && m().peer_access ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult fake_cuDeviceGetP2PAttribute(int* out, CUdevice_P2PAttribute name, CUdevice gpu, CUdevice peer) {
  if (!is_gpu(gpu) || !is_gpu(peer) || gpu == peer) return CUDA_ERROR_INVALID_DEVICE;
  *out = name != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && m().peer_access ? 1 : 0;
  return CUDA_SUCCESS;
}

// ---- contexts ----

CUresult fake_cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice gpu) {
  if (!is_gpu(gpu)) return CUDA_ERROR_INVALID_DEVICE;
  ++context(gpu).retained;
  *out = m().handle_of(context(gpu));
  return CUDA_SUCCESS;
}
// With its last reference a broken context goes, and all that stood in it.
CUresult fake_cuDevicePrimaryCtxRelease(CUdevice gpu) {
  if (!is_gpu(gpu)) return CUDA_ERROR_INVALID_DEVICE;
  if (context(gpu).retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context(gpu).retained > 0 || context(gpu).broken == CUDA_SUCCESS) return CUDA_SUCCESS;
  context(gpu).broken = CUDA_SUCCESS;
  const auto of_gpu = [&](const auto& entry) { return entry.second->device == gpu; };
  std::erase_if(m().streams, of_gpu);
  std::erase_if(m().events, of_gpu);
  std::erase_if(m().modules, of_gpu);
  std::erase_if(m().operations, [&](const Operation& operation) { return operation.stream->device == gpu; });
  memory().free_all_of(gpu);
  return CUDA_SUCCESS;
}
CUresult fake_cuCtxPushCurrent(CUcontext handle) {
  Context* pushed = m().context_of(handle);
  if (pushed == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Machine::stack().push_back(pushed);
  return CUDA_SUCCESS;
}
CUresult fake_cuCtxPopCurrent(CUcontext* out) {
  if (m().current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (out != nullptr) *out = m().handle_of(*m().current());
  Machine::stack().pop_back();
  return CUDA_SUCCESS;
}
CUresult fake_cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
  const Context* peer = m().context_of(handle);
  if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (peer->device == device()) return CUDA_ERROR_INVALID_DEVICE;
  if (!m().peer_access) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (memory().peer_enabled(device(), peer->device)) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  memory().enable_peer(device(), peer->device);
  return CUDA_SUCCESS;
}
CUresult fake_cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}

// ---- memory ----

CUresult fake_cuMemAlloc(CUdeviceptr* out, std::size_t bytes) { return memory().allocate(device(), bytes, out); }
CUresult fake_cuMemFree(CUdeviceptr begin) { return memory().free(begin); }
CUresult fake_cuMemHostAlloc(void** out, std::size_t bytes, unsigned) { return memory().host_allocate(device(), bytes, out); }
CUresult fake_cuMemFreeHost(void* begin) { return memory().host_free(begin); }
CUresult fake_cuMemHostRegister(void* begin, std::size_t bytes, unsigned) {
  return memory().host_register(device(), begin, bytes);
}
CUresult fake_cuMemHostUnregister(void* begin) { return memory().host_unregister(begin); }
CUresult fake_cuMemHostGetDevicePointer(CUdeviceptr* out, void* at, unsigned flags) {
  const Range* range = memory().find(reinterpret_cast<CUdeviceptr>(at));
  if (range == nullptr || !range->is_host() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
CUresult fake_cuPointerGetAttributes(unsigned count, CUpointer_attribute* names, void** out, CUdeviceptr at) {
  CUcontext contexts[kGpus];
  for (int gpu = 0; gpu < kGpus; ++gpu) contexts[gpu] = m().handle_of(context(gpu));
  for (unsigned i = 0; i < count; ++i)
    if (const CUresult result = memory().attribute(names[i], at, contexts, out[i]); result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}
CUresult fake_cuMemGetAddressRange(CUdeviceptr* begin, std::size_t* bytes, CUdeviceptr at) {
  const Range* range = memory().find(at);
  const bool of_another = range != nullptr && range->kind == Range::Kind::allocated && range->device != device();
  if (range == nullptr || of_another) return CUDA_ERROR_NOT_FOUND;  // seen on two H200: the owner's context has to be current
  if (begin != nullptr) *begin = range->begin;
  if (bytes != nullptr) *bytes = range->bytes;
  return CUDA_SUCCESS;
}
CUresult fake_cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr begin) { return memory().ipc_handle(begin, out); }
CUresult fake_cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) {
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  return memory().ipc_open(device(), handle, out);
}
CUresult fake_cuIpcCloseMemHandle(CUdeviceptr begin) { return memory().ipc_close(begin); }
CUresult fake_cuMemGetAllocationGranularity(std::size_t* out, const CUmemAllocationProp* wish, CUmemAllocationGranularity_flags) {
  if (wish == nullptr || !is_gpu(wish->location.id)) return CUDA_ERROR_INVALID_VALUE;
  *out = kGranularity;
  return CUDA_SUCCESS;
}
CUresult fake_cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* wish,
                          unsigned long long flags) {
  return wish == nullptr || flags != 0 ? CUDA_ERROR_INVALID_VALUE : memory().create(bytes, *wish, out);
}
CUresult fake_cuMemRelease(CUmemGenericAllocationHandle handle) { return memory().release(handle); }
CUresult fake_cuMemAddressReserve(CUdeviceptr* out, std::size_t bytes, std::size_t alignment, CUdeviceptr,
                                  unsigned long long flags) {
  return flags != 0 ? CUDA_ERROR_INVALID_VALUE : memory().reserve(bytes, alignment, out);
}
CUresult fake_cuMemAddressFree(CUdeviceptr begin, std::size_t bytes) { return memory().address_free(begin, bytes); }
CUresult fake_cuMemMap(CUdeviceptr begin, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags) {
  return offset != 0 || flags != 0 ? CUDA_ERROR_INVALID_VALUE : memory().map(begin, bytes, handle);
}
CUresult fake_cuMemUnmap(CUdeviceptr begin, std::size_t bytes) { return memory().unmap(begin, bytes); }
CUresult fake_cuMemSetAccess(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc* wishes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (const CUresult result = memory().set_access(begin, bytes, wishes[i]); result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}
CUresult fake_cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                           unsigned long long flags) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().export_fd(handle, static_cast<int*>(out));
}
CUresult fake_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* shared, CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  return memory().import_fd(static_cast<int>(reinterpret_cast<std::intptr_t>(shared)), out);
}
CUresult fake_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* at) {
  return memory().retain(reinterpret_cast<CUdeviceptr>(at), out);
}
CUresult fake_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* out, CUmemGenericAllocationHandle handle) {
  return memory().properties(handle, out);
}

// ---- the table ----

namespace {

bool begins_with_any(std::string_view call, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view beginning) { return call.starts_with(beginning); });
}
// These work on a GPU that is broken.
bool always_works(std::string_view call) {
  return begins_with_any(call, {"cuInit", "cuDriverGetVersion", "cuGetError", "cuDevice", "cuCtxPushCurrent", "cuCtxPopCurrent"});
}
// These name their device, or an address or handle that knows it.
bool needs_context(std::string_view call) {
  return !begins_with_any(call, {"cuPointerGetAttributes", "cuMemGetA", "cuMemCreate", "cuMemRelease", "cuMemAddress", "cuMemMap",
                                 "cuMemUnmap", "cuMemSetAccess", "cuMemExport", "cuMemImport", "cuMemRetain"});
}

// These wait for all that the GPU still has to do: docs/gpu.md, as measured; cuMemUnmap does not, and CUDA does not promise it.
bool waits_for_gpu(std::string_view call) {
  return call == "cuMemFree" || begins_with_any(call, {"cuMemFreeHost", "cuMemHostUnregister", "cuIpcCloseMemHandle",
                                                       "cuMemUnmap", "cuModuleLoadData", "cuModuleUnload"});
}

// Counts the call, lets it fail if somebody wished so, and gives it the machine.
template <class Name, auto kBody, class Type>
struct Entry;
template <class Name, auto kBody, class... A>
struct Entry<Name, kBody, CUresult (*)(A...)> {
  static CUresult CUDAAPI call(A... arguments) {
    const std::lock_guard lock(m().mutex);
    const char* name = Name::text();
    ++m().calls[name];
    Context* current = m().current();
    if (waits_for_gpu(name) && m().waits_at_word()) m().stuck.emplace_back(name);
    if (!always_works(name)) {
      if (current == nullptr && needs_context(name)) return CUDA_ERROR_INVALID_CONTEXT;
      if (current != nullptr && current->broken != CUDA_SUCCESS) return current->broken;
    }
    if (const auto wish = m().fail_next.find(std::string_view(name)); wish != m().fail_next.end()) {
      const CUresult result = wish->second;
      m().fail_next.erase(wish);
      if (current != nullptr && is_sticky(result)) current->broken = result;
      return result;
    }
    return kBody(arguments...);
  }
};

std::shared_ptr<const Driver> make_table() {
  auto driver = std::make_shared<Driver>();
#define KVLOOM_FAKE_CALL(name)                                               \
  {                                                                          \
    struct Name {                                                            \
      static constexpr const char* text() { return #name; }                  \
    };                                                                       \
    driver->name = &Entry<Name, &fake_##name, decltype(driver->name)>::call; \
  }
  KVLOOM_CUDA_CALLS(KVLOOM_FAKE_CALL)
#undef KVLOOM_FAKE_CALL
  return driver;
}

}  // namespace

void reset() {
  const std::lock_guard lock(m().mutex);
  m().operations.clear();
  m().streams.clear();
  m().events.clear();
  m().modules.clear();
  m().calls.clear();
  m().stuck.clear();
  m().fail_next.clear();
  m().fail_when_run.clear();
  m().held = false;
  m().peer_access = true;
  m().memory = std::make_unique<Memory>();
  Machine::stack().clear();
  for (Context& context : m().contexts) {
    context.retained = 0;
    context.broken = CUDA_SUCCESS;
  }
  for (const auto& stream : m().default_streams) stream->open = 0;
}

void hold() {
  const std::lock_guard lock(m().mutex);
  m().held = true;
}
std::size_t release(std::size_t n) {
  const std::lock_guard lock(m().mutex);
  return m().pump(n);
}
void release_all() {
  const std::lock_guard lock(m().mutex);
  m().held = false;
  m().settle();
}
std::size_t held() {
  const std::lock_guard lock(m().mutex);
  return m().operations.size();
}
void fail_next(std::string_view call, CUresult result) {
  const std::lock_guard lock(m().mutex);
  m().fail_next[std::string(call)] = result;
}
void fail_when_run(std::string_view call, CUresult result) {
  const std::lock_guard lock(m().mutex);
  m().fail_when_run[std::string(call)] = result;
}
std::int64_t calls(std::string_view name) {
  const std::lock_guard lock(m().mutex);
  const auto at = m().calls.find(name);
  return at == m().calls.end() ? 0 : at->second;
}
std::vector<std::string> stuck() {
  const std::lock_guard lock(m().mutex);
  return m().stuck;
}
void set_peer_access(bool there) {
  const std::lock_guard lock(m().mutex);
  m().peer_access = there;
}

Live live() {
  const std::lock_guard lock(m().mutex);
  using Kind = Range::Kind;
  Live out;
  out.allocations = memory().count(Kind::allocated);
  out.pinned = memory().count(Kind::pinned);
  out.registered = memory().count(Kind::registered);
  out.opened = memory().count(Kind::opened);
  out.handles = memory().handles();
  out.mappings = memory().count(Kind::mapped);
  out.reservations = memory().reservations();
  out.streams = static_cast<std::int64_t>(m().streams.size());
  out.events = static_cast<std::int64_t>(m().events.size());
  out.modules = static_cast<std::int64_t>(m().modules.size());
  for (const Context& context : m().contexts) out.contexts += context.retained;
  return out;
}

std::string to_string(const Live& live) {
  return fmt::format(
      "allocations={} pinned={} registered={} opened={} handles={} mappings={} reservations={} streams={} events={} modules={} "
      "contexts={}",
      live.allocations, live.pinned, live.registered, live.opened, live.handles, live.mappings, live.reservations, live.streams,
      live.events, live.modules, live.contexts);
}

}  // namespace fake

std::shared_ptr<const Driver> fake_driver() {
  static const std::shared_ptr<const Driver> table = fake::make_table();  // owners: this and everything that calls it
  return table;
}

}  // namespace kvloom::cuda
