#include "kvloom/transport/cuda/queue_pool.h"

#include <utility>

#include "kvloom/transport/cuda/contexts.h"

namespace kvloom::cuda {
namespace {

// A queue of the pool, and a reader of what this process lends itself.
class PooledQueue final : public shm::CopyQueue, private Loans::Reader {
 public:
  PooledQueue(QueuePool& pool, Loans& loans, std::unique_ptr<GpuCopyQueue> queue)
      : pool_(pool), loans_(loans), queue_(std::move(queue)) {
    loans_.add(*this);
  }
  PooledQueue(const PooledQueue&) = delete;
  PooledQueue& operator=(const PooledQueue&) = delete;
  ~PooledQueue() override {
    loans_.remove(*this);
    queue_->drain();
    pool_.put_back(std::move(queue_));
  }

  Expected<void> start(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) override {
    const auto reading = loans_.reading();
    if (!loans_.may_read(work))
      return fail(Code::unavailable, "the peer, of this process, took back memory that writes of it still read");
    return queue_->start(work, begin, end);
  }
  Expected<std::uint64_t> finished() override {
    const auto reading = loans_.reading();
    return queue_->finished();
  }
  Bytes room() const override {
    const auto reading = loans_.reading();
    return queue_->room();
  }
  Bytes batch() const override { return queue_->batch(); }
  void drain() override {
    const auto reading = loans_.reading();
    queue_->drain();
  }

 private:
  void drain_for_lender() override { queue_->drain(); }

  QueuePool& pool_;
  Loans& loans_;
  std::unique_ptr<GpuCopyQueue> queue_;
};

}  // namespace

QueuePool::~QueuePool() {
  for (auto& queue : std::exchange(idle_, {})) gpu_->contexts().give_back(std::shared_ptr<GpuCopyQueue>(std::move(queue)));
}

Expected<std::unique_ptr<shm::CopyQueue>> QueuePool::take() {
  std::unique_ptr<GpuCopyQueue> queue;
  if (!idle_.empty()) {
    queue = std::move(idle_.back());
    idle_.pop_back();
  } else {
    auto made = GpuCopyQueue::make(gpu_, limits_, counts_);
    if (!made) return tl::unexpected(made.error());
    queue = std::move(*made);
  }
  return std::make_unique<PooledQueue>(*this, gpu_->contexts().loans(), std::move(queue));
}

void QueuePool::put_back(std::unique_ptr<GpuCopyQueue> queue) {
  if (queue->renew() && idle_.size() < kMostIdle) return idle_.push_back(std::move(queue));
  gpu_->contexts().give_back(std::shared_ptr<GpuCopyQueue>(std::move(queue)));
}

}  // namespace kvloom::cuda
