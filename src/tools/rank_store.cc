#include "kvloom/tools/rank_store.h"

#include <cstring>
#include <utility>

namespace kvloom {

Expected<RankStore> RankStore::make(Region region, std::shared_ptr<RankDevice> device) {
  RankStore out;
  out.region_ = std::move(region);
  if (device == nullptr) return out;
  const std::size_t bytes = out.region_.memory().size();
  out.view_.reset(static_cast<std::byte*>(std::calloc(bytes, 1)));  // of the kernel's zero pages until it is touched
  if (out.view_ == nullptr) return fail(Code::exhausted, "{} B of host memory, to fill and check as much of a GPU's", bytes);
  out.device_ = std::move(device);
  return out;
}

Expected<void> RankStore::put(std::int64_t offset, std::int64_t length) const {
  if (device_ == nullptr || length == 0) return {};
  return device_->put(region_.base() + offset,
                      memory().subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(length)));
}

Expected<void> RankStore::get(std::int64_t offset, std::int64_t length) const {
  if (device_ == nullptr || length == 0) return {};
  return device_->get(memory().subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(length)),
                      region_.base() + offset);
}

Expected<std::int64_t> RankStore::count_wrong(std::int64_t offset, std::span<const std::byte> expected) const {
  if (expected.empty()) return 0;
  const std::byte* const got = region_.base() + offset;
  if (device_ != nullptr) return device_->count_wrong(got, expected);
  std::int64_t wrong = 0;
  if (std::memcmp(got, expected.data(), expected.size()) != 0)
    for (std::size_t i = 0; i < expected.size(); ++i) wrong += got[i] != expected[i];
  return wrong;
}

}  // namespace kvloom
