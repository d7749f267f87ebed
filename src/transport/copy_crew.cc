#include "kvloom/transport/copy_crew.h"

#include <algorithm>
#include <csignal>

#include "kvloom/transport/copy_kernels.h"

namespace kvloom {

namespace {

// Bytes of a share: enough that their count costs nothing, and several for each thread, so that all end together.
constexpr std::int64_t kLeastShare = 64 << 10;
constexpr std::int64_t kMostShare = 256 << 10;
constexpr std::int64_t kWorthHelp = 256 << 10;  // below this, waking a helper costs more than it brings
constexpr int kSpins = 4000;                    // about 50 us awake between runs, for the next one

}  // namespace

CopyCrew::CopyCrew(CopyKernel kernel, int threads) : kernel_(kernel) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

CopyCrew::~CopyCrew() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void CopyCrew::take_shares() {
  for (;;) {
    const std::int64_t begin = next_.fetch_add(share_, std::memory_order_relaxed);
    if (begin >= end_) return;
    copy_range(kernel_, jobs_, begin, std::min(begin + share_, end_));
  }
}

void CopyCrew::run(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  if (helpers_.empty() || end - begin < kWorthHelp) return copy_range(kernel_, jobs, begin, end);
  jobs_ = jobs;
  end_ = end;
  share_ = std::clamp((end - begin) / (8 * threads()), kLeastShare, kMostShare);
  next_.store(begin, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  round_.fetch_add(1);
  round_.notify_all();
  take_shares();
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spin = 0; gate_.load(std::memory_order_acquire) != 0; ++spin) spin < kSpins ? relax_cpu() : std::this_thread::yield();
}

void CopyCrew::help() {
  std::uint32_t seen = 0;
  while (!stop_.load()) {
    for (int spin = 0; spin < kSpins && round_.load(std::memory_order_relaxed) == seen; ++spin) relax_cpu();
    round_.wait(seen);
    seen = round_.load();
    std::uint32_t gate = gate_.load(std::memory_order_relaxed);
    while ((gate & kOpen) != 0 && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
    if ((gate & kOpen) == 0) continue;
    take_shares();
    gate_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace kvloom
