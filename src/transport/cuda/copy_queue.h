// copy_queue.h: copies out of one peer's memory by a GPU: runs that a copy engine takes go there, all others are the copy kernel's list
// (choice.h).  Stage: carry.
//
//   start --runs--> engine stream: 2-D copies ---------------------> write `done` of the engine
//         --items-> upload stream: the list --event--> kernel stream: the kernel --> write `done` of the kernel
//         --few---> kernel stream: a kernel that has its list with it and writes `done` itself
//
// The streams write how far they are into pinned words, which `finished` reads: no system call, no lock, and nothing spins on the GPU.
// Nothing of it waits for the peer: what was posted was computed before. So to drain takes as long as the bytes in flight do, and as a kernel
// waits for SMs that others have, whatever the peer does.  Owner: a connection.  Thread: the transport's.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "kvloom/transport/cuda/choice.h"
#include "kvloom/transport/cuda/copy_items.h"
#include "kvloom/transport/cuda/copy_limits.h"
#include "kvloom/transport/cuda/memory.h"

namespace kvloom::cuda {

// Copies of one kind, so far.  For metrics, tests and `bench`.
struct CopyCounts {
  std::int64_t engine_calls = 0, kernel_launches = 0, items = 0;
  Bytes by_engine, by_kernel;
};

// A stream counts its marks in 32 bits, we in 64: how many of the `put` ones have come, by the word that it wrote last.
// @pre less than 2^32 of them are under way
constexpr std::uint64_t marks_done(std::uint64_t put, std::uint32_t word) {
  return put - static_cast<std::uint32_t>(static_cast<std::uint32_t>(put) - word);
}

class GpuCopyQueue final : public shm::CopyQueue {
 public:
  // @error exhausted: no streams or pinned memory
  static Expected<std::unique_ptr<GpuCopyQueue>> make(const GpuPtr& gpu, CopyLimits limits, CopyCounts& counts);
  ~GpuCopyQueue() override;

  Expected<void> start(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) override;
  Expected<std::uint64_t> finished() override;
  // None while the next list is still read: so a start waits only if it needs more lists than are free.
  Bytes room() const override {
    return kernel_.has(lists_[next_list_].mark) ? std::max(limits_.in_flight - in_flight_, Bytes(0)) : Bytes(0);
  }
  Bytes batch() const override { return std::min(Bytes(limits_.in_flight.value / 2), kMostBatch); }
  void drain() override;
  // As new, for another peer; false: something of it broke.  @pre drained
  bool renew();

 private:
  static constexpr Bytes kMostBatch{128 << 20};
  static constexpr std::size_t kMostItems = 8192;  // of a launch
  static constexpr std::size_t kLists = 16;
  static constexpr Bytes kFewBytes{256 << 10};  // of a start that goes with its kernel, if it has no more than kFewItems

  // A stream, and how much of what was put into it is done.
  struct Lane {
    CUstream stream = nullptr;
    volatile std::uint32_t* word = nullptr;  // pinned; the stream writes it
    CUdeviceptr word_address = 0;
    std::uint64_t put = 0;
    bool has(std::uint64_t mark) const { return marks_done(put, *word) >= mark; }
  };
  // A kernel's list: worded in pinned memory, read in the GPU's. All of them are made with the queue: to pin memory takes a millisecond.
  struct List {
    CopyItem* pinned = nullptr;  // [kMostItems]
    CUdeviceptr device = 0;      // [kMostItems]
    CUevent uploaded = nullptr;
    std::uint64_t mark = 0;  // of the kernel lane: then it is free again
  };
  struct Started {
    std::uint64_t engine = 0, kernel = 0;  // marks
    Bytes bytes;
  };

  GpuCopyQueue(GpuPtr gpu, CopyLimits limits, CopyCounts& counts) : gpu_(std::move(gpu)), limits_(limits), counts_(counts) {}
  Expected<void> set_up();
  Expected<void> try_start(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end);
  Expected<void> set_up_lists();
  Expected<void> copy_2d(const CopyJob& job);
  Expected<bool> try_few(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end);
  Expected<void> copy_all(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end);
  Expected<void> copy(const CopyJob& job);
  void append(const CopyJob& job);
  Expected<void> launch(std::span<const CopyItem> items);
  Expected<void> mark(Lane& lane);
  bool has(const Started& start) const { return engine_.has(start.engine) && kernel_.has(start.kernel); }
  Expected<void> look_for_errors();

  GpuPtr gpu_;
  CopyLimits limits_;
  CopyCounts& counts_;
  Lane engine_, kernel_;
  CUstream upload_ = nullptr;
  void* words_ = nullptr;   // pinned: of both lanes, a line apart
  void* pinned_ = nullptr;  // of all lists
  CUdeviceptr device_ = 0;  // of all lists, and behind them the counter of FewItems
  std::array<List, kLists> lists_;
  std::size_t next_list_ = 0;
  std::deque<Started> started_;
  std::uint64_t finished_ = 0;
  Bytes in_flight_;
  int quiet_polls_ = 0;       // without progress, since the driver was asked for errors
  std::vector<CopyJob> cut_;  // of the start that is being made
  std::vector<CopyItem> items_;
  bool engine_used_ = false;
  std::uint32_t item_bytes_ = kSmallItemBytes;
  FewItems few_;
  // The runs of a start are of few kinds: what was worked out for the last one holds for the next.
  Run last_run_;
  Way last_way_ = Way::kernel;
  CopyItem last_item_;  // all of last_run_; count 0: it took several, or narrow ones
};

// Appends bytes [begin, end) of the stream of jobs as jobs of whole runs: what is cut becomes a run of its whole pieces and the rests.
void cut_jobs(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end, std::vector<CopyJob>& out);

}  // namespace kvloom::cuda
