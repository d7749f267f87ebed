#include "kvloom/transport/cuda/gate_words.h"

#include <cstring>

namespace kvloom::cuda {

Expected<GateWords::Word> GateWords::take(const Driver& driver) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    void* page = nullptr;
    CUdeviceptr device = 0;
    if (auto ok = check(driver, driver.cuMemHostAlloc(&page, kPage, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                        "pinned memory for gates");
        !ok)
      return tl::unexpected(ok.error());
    std::memset(page, 0, kPage);
    pages_.push_back(page);
    if (auto ok = check(driver, driver.cuMemHostGetDevicePointer(&device, page, 0), "gates seen by the GPU"); !ok)
      return tl::unexpected(ok.error());
    for (std::size_t at = 0; at < kPage; at += kLine)
      free_.push_back({reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(page) + at), device + at, 0});
  }
  const Word word = free_.back();
  free_.pop_back();
  return word;
}

void GateWords::put_back(Word word) {
  const std::lock_guard lock(mutex_);
  word.base += kSpan;
  free_.push_back(word);
}

void GateWords::free_all(const Driver& driver) {
  for (void* page : pages_) driver.cuMemFreeHost(page);
}

}  // namespace kvloom::cuda
