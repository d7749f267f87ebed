// copy_queue.h: copies out of one peer's memory by a GPU: runs that a copy engine takes go there, all others are the copy kernel's list
// (choice.h).  Stage: carry.
//
//   start --runs--> one of two engine streams: 2-D copies ------------> write `done` of the engine
//         --pages-> upload stream: the list --event--> kernel stream: a kernel that writes `done` itself
//         --few---> kernel stream: a kernel that has its list with it, and writes `done` itself
//
// The streams and kernels write how far they are into pinned words, which `finished` reads: no system call, no lock, and nothing spins on
// the GPU. Two engine streams: while one says that it is done, the other copies. What is to be listed while kEnough kernels are under way
// is added to an open list, which goes when one of them has ended or when the list is full: so kernels are few and large where the host is
// faster than the link, and nothing waits where it is not.
// Law: a list goes to the GPU whole, and one mark says that all of it is in place; starts that share it have that mark.
// Nothing of it waits for the peer: what was posted was computed before. So to drain takes as long as the bytes in flight do (an open list
// among them), and as a kernel waits for SMs that others have, whatever the peer does.
// Owner: a connection.  Thread: the transport's; a lender of this process drains from its own, while ours is kept out (loans.h).
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <vector>

#include "kvloom/transport/cuda/choice.h"
#include "kvloom/transport/cuda/copy_items.h"
#include "kvloom/transport/cuda/copy_limits.h"
#include "kvloom/transport/cuda/memory.h"

namespace kvloom::cuda {

// Copies so far.  For tests and `bench`.
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

  Expected<void> start(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) override;
  Expected<std::uint64_t> finished() override;
  // None while the next list is still read: so a start waits only if it needs more lists than are free.
  Bytes room() const override { return can_word() ? std::max(limits_.in_flight - in_flight_, Bytes(0)) : Bytes(0); }
  Bytes batch() const override { return std::min(Bytes(limits_.in_flight.value / 2), kMostBatch); }
  void drain() override;
  // As new, for another peer; false: something of it broke.  @pre drained
  bool renew();

 private:
  static constexpr Bytes kMostBatch{128 << 20};
  static constexpr std::size_t kListBytes = 384 << 10;  // of a list: 24,576 runs, or 8,192 items
  static constexpr std::size_t kLists = 16;
  static constexpr Bytes kFewBytes{256 << 10};  // of a start that goes with its kernel, if it has no more than kFewItems
  static constexpr std::uint64_t kEnough = 2;   // kernels under way: one copies, one waits for it
  static constexpr std::size_t kEngines = 2;
  static constexpr std::size_t kMostBatches = 32;  // of a list: a kernel each. Further kinds are items

  // A stream, and how much of what was put into it is done.
  struct Lane {
    CUstream stream = nullptr;
    volatile std::uint32_t* word = nullptr;  // pinned; the stream writes it
    CUdeviceptr word_address = 0;
    std::uint64_t put = 0;
    std::uint64_t done() const { return marks_done(put, *word); }
    bool has(std::uint64_t mark) const { return done() >= mark; }
  };
  // A kernel's list: worded in pinned memory, read in the GPU's. All of them are made with the queue: to pin memory takes a millisecond.
  struct List {
    std::byte* pinned = nullptr;  // [kListBytes]
    CUdeviceptr device = 0;       // [kListBytes]
    CUevent uploaded = nullptr;
    std::uint64_t mark = 0;  // of the kernel lane: then it is free again
  };
  // Runs of the open list that one kernel copies, from byte `begin` of the list on.
  struct Batch {
    CopyList list;
    Run like;
    std::size_t begin = 0;
    std::uint64_t mask = 0;  // of bits that no address has
  };
  struct Started {
    std::size_t lane = 0;                  // of the engine
    std::uint64_t engine = 0, kernel = 0;  // marks
    Bytes bytes;
  };

  GpuCopyQueue(GpuPtr gpu, CopyLimits limits, CopyCounts& counts) : gpu_(std::move(gpu)), limits_(limits), counts_(counts) {}
  Expected<void> set_up();
  Expected<void> set_up_lists();
  std::array<Lane*, kEngines + 1> lanes() { return {&engines_[0], &engines_[1], &kernel_}; }
  bool is_open() const { return used_ > 0 || !items_.empty(); }
  bool can_word() const { return is_open() || kernel_.has(lists_[next_list_].mark); }
  std::size_t space() const { return kListBytes - used_ - items_.size() * sizeof(CopyItem); }
  void give_up(const Error& why);

  Expected<void> try_start(const shm::CopyWork& work, std::int64_t begin, std::int64_t end);
  Expected<bool> try_few(const shm::CopyWork& work, std::int64_t begin, std::int64_t end);
  Expected<void> copy_all(const shm::CopyWork& work, std::int64_t begin, std::int64_t end);
  Expected<void> copy_stretch(const shm::CopyWork& work, const shm::Stretch& stretch, std::int64_t begin, std::int64_t end);
  Expected<void> copy_cut(const CopyJob& job, std::int64_t begin, std::int64_t end);
  Expected<void> copy_runs(const shm::Stretch& stretch, std::span<const shm::RunPlace> places);
  Expected<void> copy(const CopyJob& job);
  Expected<void> copy_2d(const CopyJob& job);
  Expected<void> make_room(std::size_t bytes);
  Expected<void> word(const CopyJob& job);
  Expected<void> word(const shm::Stretch& stretch, std::span<const shm::RunPlace> places);
  std::size_t word_some(const shm::Stretch& stretch, std::span<const shm::RunPlace> places, std::uint64_t mask);
  Batch& batch_for(const Run& like, const RunAddress& first);
  Expected<void> close_list();
  Expected<void> upload();
  Expected<void> launch(const CopyList& list);
  Expected<void> mark(Lane& lane);
  bool has(const Started& start) const { return engines_[start.lane].has(start.engine) && kernel_.has(start.kernel); }
  Expected<void> look_for_errors();

  GpuPtr gpu_;
  CopyLimits limits_;
  CopyCounts& counts_;
  std::array<Lane, kEngines> engines_;
  Lane kernel_;
  std::size_t engine_ = 0;  // the lane of the start that is being made
  CUstream upload_ = nullptr;
  void* words_ = nullptr;   // pinned: of all lanes, a line apart
  void* pinned_ = nullptr;  // of all lists
  CUdeviceptr device_ = 0;  // of all lists, and behind them the counter of Done
  std::array<List, kLists> lists_;
  std::size_t next_list_ = 0;    // the open one
  std::size_t used_ = 0;         // bytes of the open list, of runs
  std::vector<Batch> batches_;   // of the open list
  std::vector<CopyItem> items_;  // of the open list: go behind its runs
  std::deque<Started> started_;
  std::uint64_t finished_ = 0;
  Bytes in_flight_;
  int quiet_polls_ = 0;       // without progress, since the driver was asked for errors
  std::vector<CopyJob> cut_;  // of the start that is being made
  bool engine_used_ = false;
  Done done_;                    // without its mark
  std::optional<Error> broken_;  // something that was begun, or listed, will never be done
};

// Appends bytes [begin, end) of the stream of jobs as jobs of whole runs: what is cut becomes a run of its whole pieces and the rests.
void cut_jobs(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end, std::vector<CopyJob>& out);

}  // namespace kvloom::cuda
