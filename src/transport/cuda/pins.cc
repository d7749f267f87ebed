#include "kvloom/transport/cuda/pins.h"

#include <array>
#include <limits>
#include <utility>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/gpu.h"

namespace kvloom::cuda {
namespace {

// Unpins when it ends.
class Unpin {
 public:
  Unpin(std::shared_ptr<const Gpu> gpu, const std::byte* begin, std::shared_ptr<std::atomic<bool>> gone)
      : gpu_(std::move(gpu)), begin_(begin), gone_(std::move(gone)) {}
  Unpin(const Unpin&) = delete;
  Unpin& operator=(const Unpin&) = delete;
  ~Unpin() {
    const Current here = gpu_->current();
    gpu_->driver().cuMemHostUnregister(const_cast<std::byte*>(begin_));
    gone_->store(true);
  }

 private:
  std::shared_ptr<const Gpu> gpu_;
  const std::byte* begin_;
  std::shared_ptr<std::atomic<bool>> gone_;
};

struct Host {
  bool pinned = false;
  CUdeviceptr begin = 0;  // of the range that is pinned, where the driver tells it
};

Expected<Host> ask_host(const Gpu& gpu, const std::byte* at) {
  unsigned type = 0;
  Host out;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
  void* values[] = {&type, &out.begin};
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  if (auto ok =
          gpu.check(gpu.driver().cuPointerGetAttributes(std::size(names), names, values, address), "asking about {:#x}", address);
      !ok)
    return tl::unexpected(ok.error());
  out.pinned = type == CU_MEMORYTYPE_HOST;
  return out;
}

}  // namespace

Pins::Entries::iterator Pins::overlapping(const std::byte* begin, const std::byte* end) {
  auto at = entries_.upper_bound(begin);
  if (at != entries_.begin() && std::prev(at)->second.end > begin) return std::prev(at);
  return at != entries_.end() && at->first < end ? at : entries_.end();
}

void Pins::forget_gone() {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.gone->load(); });
}

Expected<std::unique_ptr<Pins::Pin>> Pins::pin(const std::shared_ptr<const Gpu>& gpu, std::span<std::byte> memory) {
  const std::lock_guard lock(mutex_);
  const std::byte* const begin = memory.data();
  const std::byte* const end = begin + memory.size();
  forget_gone();
  if (const auto at = overlapping(begin, end); at != entries_.end() && at->second.users == 0) {
    contexts_.free_some(std::numeric_limits<std::size_t>::max());
    contexts_.wait_for_frees();
    forget_gone();
  }
  if (const auto at = overlapping(begin, end); at != entries_.end()) {
    if (at->second.users == 0)
      return fail(Code::unavailable,
                  "{} B of host memory that was lent before: it can't be unpinned while a stream waits at a gate; lend it when "
                  "the transfer is over",
                  memory.size());
    if (begin < at->first || end > at->second.end)
      return fail(Code::invalid_argument,
                  "{} B of host memory that overlap {} B that are lent, and go beyond them: first lend all of it as one region",
                  memory.size(), at->second.end - at->first);
    ++at->second.users;
    return std::make_unique<Pin>(*this, gpu, at->first);
  }
  const auto first = ask_host(*gpu, begin), last = ask_host(*gpu, end - 1);
  if (!first) return tl::unexpected(first.error());
  if (!last) return tl::unexpected(last.error());
  if (first->pinned && last->pinned && first->begin == last->begin) return nullptr;
  const CUresult result = gpu->driver().cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE);
  if (result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    return fail(Code::invalid_argument,
                "{} B of host memory, of which a part is pinned by its owner: pin all "
                "of it, or "
                "nothing",
                memory.size());
  if (auto ok =
          check(gpu->driver(), result, fmt::format("pinning {} B of host memory (ulimit -l?)", memory.size()), Code::exhausted);
      !ok)
    return tl::unexpected(ok.error());
  entries_.emplace(begin, Entry{end, 1, std::make_shared<std::atomic<bool>>(false)});
  return std::make_unique<Pin>(*this, gpu, begin);
}

void Pins::leave(const std::shared_ptr<const Gpu>& gpu, const std::byte* begin) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_.at(begin);
  if (--entry.users > 0) return;
  contexts_.give_back(std::make_shared<Unpin>(gpu, begin, entry.gone));
  forget_gone();
}

}  // namespace kvloom::cuda
