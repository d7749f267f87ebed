#include "tests/cuda/fake_machine.h"

#include <algorithm>
#include <cstring>

#include "kvloom/transport/cuda/copy_items.h"

namespace kvloom::cuda::fake {

Machine& machine() {
  static auto* one = new Machine;  // outlives everything: a transport may be destroyed late
  return *one;
}

Machine::Machine() {
  for (int device = 0; device < kGpus; ++device) {
    contexts[static_cast<std::size_t>(device)].device = device;
    default_streams[static_cast<std::size_t>(device)] = std::make_shared<Stream>(Stream{.device = device});
  }
}

std::vector<Context*>& Machine::stack() {
  thread_local std::vector<Context*> stack;
  return stack;
}

Context* Machine::current() { return stack().empty() ? nullptr : stack().back(); }

Context* Machine::context_of(CUcontext handle) {
  for (Context& context : contexts)
    if (handle_of(context) == handle && context.retained > 0) return &context;
  return nullptr;
}

std::shared_ptr<Stream> Machine::stream_of(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    const Context* context = current();
    return context == nullptr ? nullptr : default_streams[static_cast<std::size_t>(context->device)];
  }
  const auto at = streams.find(handle);
  return at == streams.end() ? nullptr : at->second;
}

std::shared_ptr<Event> Machine::event_of(CUevent handle) {
  const auto at = events.find(handle);
  return at == events.end() ? nullptr : at->second;
}

void Machine::submit(std::string_view call, Operation operation) {
  if (const auto wish = fail_when_run.find(call); wish != fail_when_run.end()) {
    operation.run = [result = wish->second] { return result; };
    fail_when_run.erase(wish);
  }
  ++operation.stream->open;
  operations.push_back(std::move(operation));
  settle();
}

bool Machine::waits_at_word() {
  settle();
  return std::any_of(operations.begin(), operations.end(),
                     [](const Operation& operation) { return operation.at_word && !operation.ready(); });
}

bool Machine::run_next(const Stream* only) {
  std::vector<const Stream*> seen;  // only the first operation of a stream may run
  for (auto at = operations.begin(); at != operations.end(); ++at) {
    const Stream* stream = at->stream.get();
    if (std::find(seen.begin(), seen.end(), stream) != seen.end() || (only != nullptr && only != stream)) continue;
    seen.push_back(stream);
    if (at->ready && !at->ready()) continue;
    const Operation operation = std::move(*at);
    operations.erase(at);
    --operation.stream->open;
    Context& context = contexts[static_cast<std::size_t>(stream->device)];
    if (context.broken == CUDA_SUCCESS) context.broken = operation.run();  // on a broken GPU nothing runs any more
    return true;
  }
  return false;
}

std::size_t Machine::pump(std::size_t most, const Stream* only) {
  std::size_t done = 0;
  while (done < most && run_next(only)) ++done;
  return done;
}

CUresult run_copy_items(const Memory& memory, int device, std::span<const CopyItem> items) {
  using By = Memory::By;
  for (const CopyItem& item : items) {
    if (item.log2_width > 4 || item.bytes == 0 || item.count == 0 || std::uint64_t{item.bytes} * item.count > kItemBytes)
      return CUDA_ERROR_LAUNCH_FAILED;
    const std::size_t width = std::size_t{1} << item.log2_width;
    for (std::uint32_t v = 0; v < vector_count(item, item.log2_width); ++v) {
      const VectorPlace place = vector_place(item, v, item.log2_width);
      if (place.source % width != 0 || place.target % width != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
      if (v % (item.bytes >> item.log2_width) == 0 && (!memory.may_touch(place.source, item.bytes, device, By::kernel, false) ||
                                                       !memory.may_touch(place.target, item.bytes, device, By::kernel, true)))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      std::memcpy(reinterpret_cast<void*>(place.target), reinterpret_cast<const void*>(place.source), width);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace kvloom::cuda::fake
