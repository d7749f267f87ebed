// copy_crew.h: several threads that copy as one.  Stage: carry.
// Nothing is copied outside of run(): when it has returned, no thread of the crew touches memory. That is what makes fence a
// matter of not calling run again.
// Thread: run is called by one thread, which copies too; threads - 1 others help, take shares as they come, and sleep between
// calls. They block all signals.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "kvloom/transport/copy.h"

namespace kvloom {

class CopyCrew {
 public:
  // @pre threads >= 1
  CopyCrew(CopyKernel kernel, int threads);
  CopyCrew(const CopyCrew&) = delete;
  CopyCrew& operator=(const CopyCrew&) = delete;
  ~CopyCrew();

  // Copies bytes [begin, end) of the stream of jobs, as copy_range.  @post all is in place and visible to the caller
  void run(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end);

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

 private:
  void help();
  void take_shares();

  // gate_: how many helpers are inside, and whether more may come in. A helper that wakes late finds it closed, so nobody waits
  // for one that sleeps.
  static constexpr std::uint32_t kOpen = 1u << 31;

  CopyKernel kernel_;
  std::span<const CopyJob> jobs_;
  std::int64_t end_ = 0;
  std::int64_t share_ = 1;
  std::atomic<std::int64_t> next_{0};  // where the next share begins
  std::atomic<std::uint32_t> gate_{0};
  std::atomic<std::uint32_t> round_{0};  // changes with each run: what helpers sleep on
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace kvloom
