// driver.h: the CUDA driver as a table of its functions.  Stage: carry.  libcuda.so.1 belongs to the GPU's driver, not to the toolkit: it is
// looked up when somebody asks for a GPU, so one binary runs on machines with and without one, and a test can pass in a table of its own
// (tests/cuda/fake_driver.h).
// Law: each member has the very signature, and load() finds the very symbol, that cuda.h maps the name to: cuMemAlloc is a macro for
// cuMemAlloc_v2, and so are the member, the type and the name that is looked up.  `driver->cuMemAlloc(...)` reads as in any CUDA program.
// Owner: whoever calls load; the table never changes.  Thread: any.  Source: cuda.h of CUDA 13.0, "Driver entry point access".
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "kvloom/base/error.h"

// All that kvloom calls: one name, one line.
#define KVLOOM_CUDA_CALLS(X)                \
  X(cuInit)                                 \
  X(cuDriverGetVersion)                     \
  X(cuGetErrorName)                         \
  X(cuGetErrorString)                       \
  X(cuDeviceGetCount)                       \
  X(cuDeviceGet)                            \
  X(cuDeviceGetName)                        \
  X(cuDeviceGetUuid)                        \
  X(cuDeviceGetAttribute)                   \
  X(cuDeviceCanAccessPeer)                  \
  X(cuDeviceGetP2PAttribute)                \
  X(cuDevicePrimaryCtxRetain)               \
  X(cuDevicePrimaryCtxRelease)              \
  X(cuCtxPushCurrent)                       \
  X(cuCtxPopCurrent)                        \
  X(cuCtxEnablePeerAccess)                  \
  X(cuCtxGetStreamPriorityRange)            \
  X(cuMemAlloc)                             \
  X(cuMemFree)                              \
  X(cuMemHostRegister)                      \
  X(cuMemHostUnregister)                    \
  X(cuMemHostAlloc)                         \
  X(cuMemFreeHost)                          \
  X(cuMemHostGetDevicePointer)              \
  X(cuPointerGetAttributes)                 \
  X(cuMemGetAddressRange)                   \
  X(cuIpcGetMemHandle)                      \
  X(cuIpcOpenMemHandle)                     \
  X(cuIpcCloseMemHandle)                    \
  X(cuMemGetAllocationGranularity)          \
  X(cuMemCreate)                            \
  X(cuMemRelease)                           \
  X(cuMemAddressReserve)                    \
  X(cuMemAddressFree)                       \
  X(cuMemMap)                               \
  X(cuMemUnmap)                             \
  X(cuMemSetAccess)                         \
  X(cuMemExportToShareableHandle)           \
  X(cuMemImportFromShareableHandle)         \
  X(cuMemRetainAllocationHandle)            \
  X(cuMemGetAllocationPropertiesFromHandle) \
  X(cuMemcpyAsync)                          \
  X(cuMemcpy2DAsync)                        \
  X(cuMemcpyHtoDAsync)                      \
  X(cuMemcpyDtoHAsync)                      \
  X(cuMemcpyHtoD)                           \
  X(cuMemcpyDtoH)                           \
  X(cuMemsetD8Async)                        \
  X(cuStreamCreateWithPriority)             \
  X(cuStreamDestroy)                        \
  X(cuStreamSynchronize)                    \
  X(cuStreamQuery)                          \
  X(cuStreamWriteValue32)                   \
  X(cuStreamWaitValue32)                    \
  X(cuStreamWaitEvent)                      \
  X(cuEventCreate)                          \
  X(cuEventRecord)                          \
  X(cuEventQuery)                           \
  X(cuEventDestroy)                         \
  X(cuModuleLoadData)                       \
  X(cuModuleUnload)                         \
  X(cuModuleGetFunction)                    \
  X(cuLaunchKernel)

namespace kvloom::cuda {

class Contexts;
std::shared_ptr<Contexts> make_contexts();

struct Driver {
#define KVLOOM_CUDA_MEMBER(call) decltype(&::call) call = nullptr;
  KVLOOM_CUDA_CALLS(KVLOOM_CUDA_MEMBER)
#undef KVLOOM_CUDA_MEMBER

  // Owners: this.  What all users of this driver share (contexts.h).
  std::shared_ptr<Contexts> contexts = make_contexts();

  // The machine's own, after cuInit; one in a process for as long as anybody has it, for so are CUDA's contexts. The library is never unloaded: contexts of others in this process live in it.
  // @error unsupported: no driver, a driver that is too old, no GPU, with what to do
  // Owners: everything that calls CUDA.
  static Expected<std::shared_ptr<const Driver>> load();
};

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
std::string to_string(const Driver& driver, CUresult result);

// A CUresult as our error: "4096 bytes on GPU 1: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
Expected<void> check(const Driver& driver, CUresult result, std::string_view sentence, Code code = Code::io);

// The same, and formats nothing where all is well: for calls per run.
template <class... Args>
Expected<void> check(const Driver& driver, CUresult result, Code code, fmt::format_string<Args...> format, Args&&... args) {
  if (result == CUDA_SUCCESS) [[likely]]
    return {};
  return check(driver, result, fmt::format(format, std::forward<Args>(args)...), code);
}

// Makes a context this thread's current one for as long as it stands, then the former one again: our calls never change what the
// engine's threads see.  Where the context is broken (or null) the push fails and so does every call that needs it: check those.
// @cost well below a microsecond    @pre the driver outlives it
class Current {
 public:
  Current(const Driver& driver, CUcontext context) : driver_(driver), result_(driver.cuCtxPushCurrent(context)) {}
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    CUcontext popped = nullptr;
    if (result_ == CUDA_SUCCESS) driver_.cuCtxPopCurrent(&popped);
  }

  CUresult result() const { return result_; }

 private:
  const Driver& driver_;
  CUresult result_;
};

}  // namespace kvloom::cuda
