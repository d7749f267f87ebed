#include "kvloom/transport/cuda/contexts.h"

#include <limits>

#include "kvloom/transport/cuda/gpu.h"

namespace kvloom::cuda {
namespace {

constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

}  // namespace

Expected<std::shared_ptr<const Gpu>> Contexts::gpu(int ordinal,
                                                   const std::function<Expected<std::shared_ptr<const Gpu>>()>& open) {
  const std::lock_guard lock(opening_);
  if (auto there = gpus_[ordinal].lock()) return there;
  auto opened = open();
  if (opened) gpus_[ordinal] = *opened;
  return opened;
}

void Contexts::give_back(std::shared_ptr<void> thing) {
  if (shut_.load() == 0) {
    const std::unique_lock alone(freeing_);
    if (shut_.load() == 0) return thing.reset();
  }
  {
    const std::lock_guard lock(waiting_mutex_);
    waiting_.push_back(std::move(thing));
    ++put_off_;
  }
  if (transports_.load() == 0) free_some(kAll);  // the gate may have opened meanwhile, and nobody polls
}

void Contexts::free_some(std::size_t most) {
  if (!can_free()) return;
  const std::unique_lock alone(freeing_);
  for (; most > 0 && can_free(); --most) {
    std::shared_ptr<void> next;
    {
      const std::lock_guard lock(waiting_mutex_);
      if (waiting_.empty()) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
      --put_off_;
    }
    next.reset();
  }
}

void Contexts::gate_opened() {
  if (--shut_ == 0 && transports_.load() == 0) free_some(kAll);
}

void Contexts::remove_transport() {
  if (--transports_ == 0) free_some(kAll);
}

}  // namespace kvloom::cuda
