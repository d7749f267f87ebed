// contexts.h: what all who use GPUs in one process share, since CUDA's primary contexts are the process's: which GPUs are open, at how many
// gates a stream waits, and what is freed once none does.  Stage: carry.
// Why: calls that free memory wait for all that the GPU still has to do (docs/gpu.md has the table), so also for a stream that waits at a
// gate. The transport's thread, which opens the gates, would wait for itself.
// Law: nothing is freed while a gate is shut, and no gate is shut while something is freed. So a call that frees waits for work that ends
// by itself, and never for us. All gates count, of whichever GPU: pinned memory is in the contexts of all of them.
// Owner: a Driver, of which a process has one (Driver::load), as it has one primary context of each GPU; a test's driver has its own.  Thread: any.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "kvloom/base/error.h"
#include "kvloom/transport/cuda/loans.h"
#include "kvloom/transport/cuda/pins.h"

namespace kvloom::cuda {

class Gpu;

class Contexts {
 public:
  // Put off this many: then no more gates are shut, until those that are have opened and all is freed. So what a process keeps for others
  // is bounded by this, and what is put off in the time that the last transfer takes.
  static constexpr std::size_t kMostPutOff = 256;

  Contexts() : pins_(*this) {}
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;

  // The GPU of this ordinal as somebody here has opened it, or else as `open` does: its kernel is loaded once, for to load it waits for
  // all of the GPU's work.
  Expected<std::shared_ptr<const Gpu>> gpu(int ordinal, const std::function<Expected<std::shared_ptr<const Gpu>>()>& open);

  // Held by who puts a wait on a stream, from before it counts the gate as shut: nothing is freed meanwhile.
  std::shared_lock<std::shared_mutex> hold_frees() { return std::shared_lock(freeing_); }
  bool crowded() const { return put_off() >= kMostPutOff; }
  void gate_shut() { ++shut_; }  // @pre hold_frees
  // @pre the caller has a Gpu of this, as with everything below
  void gate_opened();

  // Frees `thing` (its end makes calls that wait for the GPU, and takes nothing of this) now, or when no gate is shut any more.
  // Owner of the thing: this.
  void give_back(std::shared_ptr<void> thing);
  // Frees up to `most` of what was put off, unless a gate is shut.
  void free_some(std::size_t most);
  // Another thread may be freeing: until it is not.
  void wait_for_frees() { const std::unique_lock alone(freeing_); }
  bool can_free() const { return put_off() > 0 && shut_.load() == 0; }
  std::size_t put_off() const { return put_off_.load(); }

  // A transport frees in its polls. Where none is left, who opens the last gate does.
  void add_transport() { ++transports_; }
  void remove_transport();

  Pins& pins() { return pins_; }
  Loans& loans() { return loans_; }

 private:
  std::mutex opening_;
  std::map<int, std::weak_ptr<const Gpu>> gpus_;  // by ordinal; owners: who asked
  std::shared_mutex freeing_;                     // shared: a wait is put on a stream; alone: something is freed
  std::atomic<int> shut_ = 0;                     // rises under freeing_ only
  std::atomic<int> transports_ = 0;
  std::mutex waiting_mutex_;
  std::deque<std::shared_ptr<void>> waiting_;  // owner: this
  std::atomic<std::size_t> put_off_ = 0;       // waiting_.size()
  Pins pins_;
  Loans loans_;
};

}  // namespace kvloom::cuda
