// fake_work.cc: what is put on streams: copies, events, words, kernels.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kvloom/transport/cuda/copy_items.h"
#include "tests/cuda/fake_machine.h"

namespace kvloom::cuda::fake {

using By = Memory::By;
constexpr std::chrono::seconds kPatience{10};  // for a word that nobody writes

// ---- copies ----

namespace {
// A copy of rows; one row for those of one dimension. Plain host memory (of the ...HtoD and ...DtoH calls) is not looked at.
struct Rows {
  CUdeviceptr target = 0, source = 0;
  std::size_t target_pitch = 0, source_pitch = 0;
  std::size_t width = 0, height = 1;
  bool plain_target = false, plain_source = false;

  bool allowed(int gpu) const {
    if (width == 0 || height == 0) return true;
    const auto all = [&](std::size_t pitch) { return (height - 1) * pitch + width; };
    return (plain_target || memory().may_touch(target, all(target_pitch), gpu, By::engine, true)) &&
           (plain_source || memory().may_touch(source, all(source_pitch), gpu, By::engine, false));
  }
  CUresult run(int gpu) const {
    if (!allowed(gpu)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (std::size_t i = 0; i < height && width > 0; ++i)
      std::memmove(host(target + i * target_pitch), host(source + i * source_pitch), width);
    return CUDA_SUCCESS;
  }
};

CUresult put(std::string_view call, const Rows& rows, CUstream handle) {
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int gpu = stream->device;
  if (!rows.allowed(gpu)) return CUDA_ERROR_INVALID_VALUE;
  m().submit(call, {std::move(stream), {}, [rows, gpu] { return rows.run(gpu); }});
  return CUDA_SUCCESS;
}

}  // namespace

CUresult fake_cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  return put("cuMemcpyAsync", {.target = target, .source = source, .width = bytes}, stream);
}
CUresult fake_cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto plain = [](CUmemorytype type) { return type == CU_MEMORYTYPE_HOST; };
  const auto known = [&](CUmemorytype type) {
    return plain(type) || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED;
  };
  const auto fits = [&](std::size_t pitch, std::size_t x) {
    return pitch <= 0x7fffffff && x <= pitch && copy->WidthInBytes <= pitch - x;
  };
  if (!known(copy->srcMemoryType) || !known(copy->dstMemoryType)) return CUDA_ERROR_INVALID_VALUE;
  if (!fits(copy->srcPitch, copy->srcXInBytes) || !fits(copy->dstPitch, copy->dstXInBytes)) return CUDA_ERROR_INVALID_VALUE;
  const CUdeviceptr source = plain(copy->srcMemoryType) ? reinterpret_cast<CUdeviceptr>(copy->srcHost) : copy->srcDevice;
  const CUdeviceptr target = plain(copy->dstMemoryType) ? reinterpret_cast<CUdeviceptr>(copy->dstHost) : copy->dstDevice;
  return put("cuMemcpy2DAsync",
             {.target = target + copy->dstY * copy->dstPitch + copy->dstXInBytes,
              .source = source + copy->srcY * copy->srcPitch + copy->srcXInBytes,
              .target_pitch = copy->dstPitch,
              .source_pitch = copy->srcPitch,
              .width = copy->WidthInBytes,
              .height = copy->Height,
              .plain_target = plain(copy->dstMemoryType),
              .plain_source = plain(copy->srcMemoryType)},
             stream);
}
// Pageable memory is read during the call, pinned memory when the copy runs.
CUresult fake_cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, std::size_t bytes, CUstream handle) {
  const auto from = reinterpret_cast<CUdeviceptr>(source);
  if (memory().find(from) != nullptr) return put("cuMemcpyHtoDAsync", {.target = target, .source = from, .width = bytes}, handle);
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int gpu = stream->device;
  const auto* first = static_cast<const std::byte*>(source);
  auto copy = std::make_shared<std::vector<std::byte>>(first, first + bytes);  // owned by the operation
  const Rows rows{.target = target, .source = reinterpret_cast<CUdeviceptr>(copy->data()), .width = bytes, .plain_source = true};
  if (!rows.allowed(gpu)) return CUDA_ERROR_INVALID_VALUE;
  m().submit("cuMemcpyHtoDAsync", {std::move(stream), {}, [rows, gpu, copy] { return rows.run(gpu); }});
  return CUDA_SUCCESS;
}
CUresult fake_cuMemcpyDtoHAsync(void* target, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  const auto to = reinterpret_cast<CUdeviceptr>(target);
  return put("cuMemcpyDtoHAsync", {.target = to, .source = source, .width = bytes, .plain_target = memory().find(to) == nullptr},
             stream);
}
CUresult fake_cuMemcpyHtoD(CUdeviceptr target, const void* source, std::size_t bytes) {
  const Rows rows{.target = target, .source = reinterpret_cast<CUdeviceptr>(source), .width = bytes, .plain_source = true};
  return rows.allowed(device()) ? rows.run(device()) : CUDA_ERROR_INVALID_VALUE;
}
CUresult fake_cuMemcpyDtoH(void* target, CUdeviceptr source, std::size_t bytes) {
  const Rows rows{.target = reinterpret_cast<CUdeviceptr>(target), .source = source, .width = bytes, .plain_target = true};
  return rows.allowed(device()) ? rows.run(device()) : CUDA_ERROR_INVALID_VALUE;
}
CUresult fake_cuMemsetD8Async(CUdeviceptr target, unsigned char value, std::size_t bytes, CUstream handle) {
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int gpu = stream->device;
  const auto allowed = [=] { return memory().may_touch(target, bytes, gpu, By::engine, true); };
  if (!allowed()) return CUDA_ERROR_INVALID_VALUE;
  m().submit("cuMemsetD8Async", {std::move(stream), {}, [=] {
                                   if (!allowed()) return CUDA_ERROR_ILLEGAL_ADDRESS;
                                   std::memset(host(target), value, bytes);
                                   return CUDA_SUCCESS;
                                 }});
  return CUDA_SUCCESS;
}

// ---- streams and events ----

CUresult fake_cuStreamCreateWithPriority(CUstream* out, unsigned, int priority) {
  auto stream = std::make_shared<Stream>(Stream{.device = device(), .priority = std::clamp(priority, -5, 0)});
  *out = reinterpret_cast<CUstream>(stream.get());
  m().streams[stream.get()] = std::move(stream);
  return CUDA_SUCCESS;
}
// What is on it still runs.
CUresult fake_cuStreamDestroy(CUstream handle) {
  return m().streams.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Everything on the stream runs, and of other streams what it waits for.
CUresult fake_cuStreamSynchronize(CUstream handle) {
  const auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (stream->open > 0) {
    if (m().pump(1, stream.get()) == 1 || m().pump(1) == 1) continue;
    if (std::chrono::steady_clock::now() > until) return CUDA_ERROR_LAUNCH_TIMEOUT;
    m().mutex.unlock();  // a word that another thread or process writes
    std::this_thread::yield();
    m().mutex.lock();
  }
  return context(stream->device).broken;
}
CUresult fake_cuStreamQuery(CUstream handle) {
  const auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  m().settle();
  if (context(stream->device).broken != CUDA_SUCCESS) return context(stream->device).broken;
  return stream->open > 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static std::atomic_ref<std::uint32_t> word(CUdeviceptr at) {
  return std::atomic_ref<std::uint32_t>(*static_cast<std::uint32_t*>(host(at)));
}

CUresult fake_cuStreamWriteValue32(CUstream handle, CUdeviceptr at, cuuint32_t value, unsigned) {
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int gpu = stream->device;
  const auto allowed = [=] { return at % 4 == 0 && memory().may_touch(at, 4, gpu, By::kernel, true); };
  if (!allowed()) return CUDA_ERROR_INVALID_VALUE;
  m().submit("cuStreamWriteValue32", {std::move(stream), {}, [=] {
                                        if (!allowed()) return CUDA_ERROR_ILLEGAL_ADDRESS;
                                        word(at).store(value, std::memory_order_release);
                                        return CUDA_SUCCESS;
                                      }});
  return CUDA_SUCCESS;
}
CUresult fake_cuStreamWaitValue32(CUstream handle, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int gpu = stream->device;
  const auto allowed = [=] { return at % 4 == 0 && memory().may_touch(at, 4, gpu, By::kernel, false); };
  if (!allowed()) return CUDA_ERROR_INVALID_VALUE;
  const auto ready = [=] {
    if (!allowed()) return true;  // and fails
    const std::uint32_t is = word(at).load(std::memory_order_acquire);
    switch (flags & 3) {
      case CU_STREAM_WAIT_VALUE_EQ: return is == value;
      case CU_STREAM_WAIT_VALUE_AND: return (is & value) != 0;
      case CU_STREAM_WAIT_VALUE_NOR: return ~(is | value) != 0;
      default: return static_cast<std::int32_t>(is - value) >= 0;
    }
  };
  m().submit("cuStreamWaitValue32",
             {std::move(stream), ready, [=] { return allowed() ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS; }, true});
  return CUDA_SUCCESS;
}
CUresult fake_cuEventCreate(CUevent* out, unsigned) {
  auto event = std::make_shared<Event>(Event{.device = device()});
  *out = reinterpret_cast<CUevent>(event.get());
  m().events[event.get()] = std::move(event);
  return CUDA_SUCCESS;
}
CUresult fake_cuEventDestroy(CUevent handle) { return m().events.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult fake_cuEventRecord(CUevent handle, CUstream stream_handle) {
  auto event = m().event_of(handle);
  auto stream = m().stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
  const std::uint64_t number = ++event->recorded;
  m().submit("cuEventRecord", {std::move(stream), {}, [event, number] {
                                 event->done = std::max(event->done, number);
                                 return CUDA_SUCCESS;
                               }});
  return CUDA_SUCCESS;
}
CUresult fake_cuEventQuery(CUevent handle) {
  const auto event = m().event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  m().settle();
  if (context(event->device).broken != CUDA_SUCCESS) return context(event->device).broken;
  return event->done < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult fake_cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
  auto event = m().event_of(handle);
  auto stream = m().stream_of(stream_handle);
  if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
  const auto ready = [event, number = event->recorded] {
    return event->done >= number || context(event->device).broken != CUDA_SUCCESS;
  };
  m().submit("cuStreamWaitEvent", {std::move(stream), ready, [] { return CUDA_SUCCESS; }});
  return CUDA_SUCCESS;
}

// ---- kernels ----

CUresult fake_cuModuleLoadData(CUmodule* out, const void* image) {
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto module = std::make_unique<Module>(Module{device(), {}});
  *out = reinterpret_cast<CUmodule>(module.get());
  m().modules[module.get()] = std::move(module);
  return CUDA_SUCCESS;
}
CUresult fake_cuModuleUnload(CUmodule handle) {
  return m().modules.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult fake_cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  const auto module = m().modules.find(handle);
  if (module == m().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (std::string_view(name) != "kvloom_copy_list" && std::string_view(name) != "kvloom_copy_few") return CUDA_ERROR_NOT_FOUND;
  auto& kernels = module->second->kernels;
  kernels.push_back(std::make_unique<Kernel>(Kernel{module->second->device, name}));
  *out = reinterpret_cast<CUfunction>(kernels.back().get());
  return CUDA_SUCCESS;
}
static const Kernel* find_kernel(const void* handle, int gpu) {
  for (const auto& [key, module] : m().modules)
    for (const auto& kernel : module->kernels)
      if (kernel.get() == handle) return kernel->device == gpu ? kernel.get() : nullptr;
  return nullptr;
}
// As a GPU has it, the last block to be done writes the word.
static CUresult run_items(const Done& done, std::span<const CopyItem> items, int gpu) {
  if (done.word != 0)
    for (const std::uint64_t at : {done.counter, done.word})
      if (!memory().may_touch(at, 4, gpu, By::kernel, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (const CUresult result = run_copy_items(memory(), gpu, items); result != CUDA_SUCCESS) return result;
  if (done.word != 0) word(done.word).store(done.mark, std::memory_order_release);
  return CUDA_SUCCESS;
}
static CUresult run_copy_list(const CopyList& list, int gpu) {
  const auto may_read = [&](CUdeviceptr at, std::size_t bytes) {
    return bytes == 0 || memory().may_touch(at, bytes, gpu, By::kernel, false);
  };
  if (!may_read(list.runs, list.run_count * sizeof(RunAddress)) || !may_read(list.items, list.item_count * sizeof(CopyItem)))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::vector<CopyItem> items(list.count());
  for (std::uint32_t i = 0; i < list.count(); ++i)
    items[i] = item_of(list, static_cast<const RunAddress*>(host(list.runs)), static_cast<const CopyItem*>(host(list.items)), i);
  return run_items(list.done, items, gpu);
}
CUresult fake_cuLaunchKernel(CUfunction kernel, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                             unsigned threads_y, unsigned threads_z, unsigned, CUstream handle, void** parameters, void** extra) {
  auto stream = m().stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const Kernel* const found = find_kernel(kernel, stream->device);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (blocks == 0 || blocks_y != 1 || blocks_z != 1 || threads == 0 || threads > 1024 || threads % 32 != 0 || threads_y != 1 ||
      threads_z != 1 || parameters == nullptr || extra != nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  const int gpu = stream->device;
  if (found->name == "kvloom_copy_few") {
    const FewItems few = *static_cast<const FewItems*>(parameters[0]);
    if (few.count > kFewItems) return CUDA_ERROR_INVALID_VALUE;
    m().submit("cuLaunchKernel", {std::move(stream), {}, [=] { return run_items(few.done, {few.items, few.count}, gpu); }});
    return CUDA_SUCCESS;
  }
  const CopyList list = *static_cast<const CopyList*>(parameters[0]);
  m().submit("cuLaunchKernel", {std::move(stream), {}, [=] { return run_copy_list(list, gpu); }});
  return CUDA_SUCCESS;
}

}  // namespace kvloom::cuda::fake
