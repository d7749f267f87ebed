#include "kvloom/transport/cuda/copy_queue.h"

#include <algorithm>
#include <cstring>

#include "kvloom/transport/cuda/contexts.h"

namespace kvloom::cuda {
namespace {

constexpr std::size_t kLine = 64;    // between two words that different streams write
constexpr int kQuietPolls = 4096;    // without progress: then the driver is asked whether something broke
constexpr Bytes kMany{32 << 20};     // of a start: from here on the kernel's items are large ones
constexpr unsigned kThreads = 1024;  // of a block of the copy kernel
constexpr unsigned kFewWarps = 8;    // of a block of few items: spread over the SMs, not over one

// The piece's bytes [from, to).
void add_rest(const CopyJob& job, std::int64_t piece, std::int64_t from, std::int64_t to, std::vector<CopyJob>& out) {
  if (from >= to) return;
  Run rest = job.run;
  rest.source_offset += job.run.source_step * piece + Bytes(from);
  rest.target_offset += job.run.target_step * piece + Bytes(from);
  rest.bytes = Bytes(to - from);
  rest.count = 1;
  rest.source_step = rest.target_step = Bytes(0);
  out.push_back({job.target, job.source, rest});
}

void cut(const CopyJob& job, std::int64_t begin, std::int64_t end, std::vector<CopyJob>& out) {
  const std::int64_t piece = job.run.bytes.value;
  const std::int64_t first = (begin + piece - 1) / piece, last = end / piece;  // whole pieces [first, last)
  if (first > last) return add_rest(job, last, begin - last * piece, end - last * piece, out);
  if (begin < first * piece) add_rest(job, first - 1, begin - (first - 1) * piece, piece, out);
  if (first < last) {
    CopyJob whole = job;
    whole.run.source_offset += job.run.source_step * first;
    whole.run.target_offset += job.run.target_step * first;
    whole.run.count = last - first;
    if (whole.run.count == 1) whole.run.source_step = whole.run.target_step = Bytes(0);
    out.push_back(whole);
  }
  add_rest(job, last, 0, end - last * piece, out);
}

// With steps that rise: a 2-D copy has no others.
Run rising(Run run) {
  if (run.count == 1 || run.source_step.value > 0) return run;
  const std::int64_t last = run.count - 1;
  run.source_offset += run.source_step * last;
  run.target_offset += run.target_step * last;
  run.source_step = Bytes(-run.source_step.value);
  run.target_step = Bytes(-run.target_step.value);
  return run;
}

}  // namespace

void cut_jobs(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end, std::vector<CopyJob>& out) {
  std::int64_t at = 0;
  for (const CopyJob& job : jobs) {
    const std::int64_t total = job.run.total().value;
    const std::int64_t from = std::max(begin - at, std::int64_t{0}), to = std::min(end - at, total);
    if (from < to) cut(job, from, to, out);
    at += total;
    if (at >= end) return;
  }
}

Expected<std::unique_ptr<GpuCopyQueue>> GpuCopyQueue::make(const GpuPtr& gpu, CopyLimits limits, CopyCounts& counts) {
  std::unique_ptr<GpuCopyQueue> queue(new GpuCopyQueue(gpu, limits, counts));
  if (auto ok = queue->set_up(); !ok) {
    gpu->contexts().give_back(std::shared_ptr<GpuCopyQueue>(std::move(queue)));
    return tl::unexpected(ok.error());
  }
  return queue;
}

Expected<void> GpuCopyQueue::set_up() {
  const Current here = gpu_->current();
  const Driver& driver = gpu_->driver();
  if (auto ok = gpu_->check(driver.cuMemHostAlloc(&words_, 2 * kLine, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                            "{} B of pinned memory", 2 * kLine);
      !ok)
    return ok;
  std::memset(words_, 0, 2 * kLine);
  auto* at = static_cast<std::byte*>(words_);
  for (Lane* lane : {&engine_, &kernel_}) {
    lane->word = reinterpret_cast<volatile std::uint32_t*>(at);
    if (auto ok = gpu_->check(driver.cuMemHostGetDevicePointer(&lane->word_address, at, 0), "pinned memory seen by the GPU"); !ok)
      return ok;
    at += kLine;
    if (auto ok =
            gpu_->check(driver.cuStreamCreateWithPriority(&lane->stream, CU_STREAM_NON_BLOCKING, limits_.priority), "a stream");
        !ok)
      return ok;
  }
  if (auto ok = gpu_->check(driver.cuStreamCreateWithPriority(&upload_, CU_STREAM_NON_BLOCKING, limits_.priority), "a stream");
      !ok)
    return ok;
  return set_up_lists();
}

Expected<void> GpuCopyQueue::set_up_lists() {
  const Driver& driver = gpu_->driver();
  constexpr std::size_t kBytes = kMostItems * sizeof(CopyItem);
  if (auto ok = gpu_->check(driver.cuMemHostAlloc(&pinned_, kLists * kBytes, CU_MEMHOSTALLOC_PORTABLE), "{} B of pinned memory",
                            kLists * kBytes);
      !ok)
    return ok;
  if (auto ok =
          gpu_->check(driver.cuMemAlloc(&device_, kLists * kBytes + kLine), "{} B for the copy kernel's lists", kLists * kBytes);
      !ok)
    return ok;
  few_.counter = device_ + kLists * kBytes;
  few_.word = kernel_.word_address;
  if (auto ok = gpu_->check(driver.cuMemsetD8Async(few_.counter, 0, kLine, kernel_.stream), "zeroing a counter"); !ok) return ok;
  for (std::size_t i = 0; i < kLists; ++i) {
    lists_[i].pinned = static_cast<CopyItem*>(pinned_) + i * kMostItems;
    lists_[i].device = device_ + i * kBytes;
    if (auto ok = gpu_->check(driver.cuEventCreate(&lists_[i].uploaded, CU_EVENT_DISABLE_TIMING), "an event"); !ok) return ok;
  }
  return {};
}

GpuCopyQueue::~GpuCopyQueue() {
  drain();
  const Current here = gpu_->current();
  const Driver& driver = gpu_->driver();
  for (const List& list : lists_)
    if (list.uploaded != nullptr) driver.cuEventDestroy(list.uploaded);
  if (device_ != 0) driver.cuMemFree(device_);
  if (pinned_ != nullptr) driver.cuMemFreeHost(pinned_);
  for (const CUstream stream : {engine_.stream, kernel_.stream, upload_})
    if (stream != nullptr) driver.cuStreamDestroy(stream);
  if (words_ != nullptr) driver.cuMemFreeHost(words_);
}

Expected<void> GpuCopyQueue::start(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  const Current here = gpu_->current();
  auto ok = try_start(jobs, begin, end);
  if (!ok)  // what it has begun has no mark: wait for it here
    for (const CUstream stream : {engine_.stream, upload_, kernel_.stream}) gpu_->driver().cuStreamSynchronize(stream);
  return ok;
}

Expected<void> GpuCopyQueue::try_start(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  const Bytes all(end - begin), engine_before = counts_.by_engine;
  const auto few = try_few(jobs, begin, end);
  if (!few) return tl::unexpected(few.error());
  if (!*few)
    if (auto ok = copy_all(jobs, begin, end); !ok) return ok;
  counts_.by_kernel += all - (counts_.by_engine - engine_before);
  in_flight_ += all;
  started_.push_back({engine_.put, kernel_.put, all});
  return {};
}

// What a single page waits for: one call, nothing to be brought first, and no mark of the stream behind it. False: there is too much.
Expected<bool> GpuCopyQueue::try_few(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  if (end - begin > kFewBytes.value || jobs.size() > kFewItems) return false;
  items_.clear();
  const auto bytes = static_cast<std::uint32_t>(ceil_div(end - begin, std::int64_t{kFewItems} * kFewItemBytes)) * kFewItemBytes;
  append_items(jobs, begin, end, items_, std::min(bytes, kSmallItemBytes));
  if (items_.size() > kFewItems) return false;
  std::copy(items_.begin(), items_.end(), few_.items);
  few_.count = static_cast<std::uint32_t>(items_.size());
  few_.mark = static_cast<std::uint32_t>(++kernel_.put);
  void* arguments[] = {&few_};
  const auto blocks = std::min(static_cast<unsigned>(limits_.blocks), (few_.count + kFewWarps - 1) / kFewWarps);
  if (auto ok = gpu_->check(gpu_->driver().cuLaunchKernel(gpu_->copy_few(), blocks, 1, 1, kFewWarps * 32, 1, 1, 0, kernel_.stream,
                                                          arguments, nullptr),
                            "the copy kernel, {} items", few_.count);
      !ok) {
    --kernel_.put;
    return tl::unexpected(ok.error());
  }
  ++counts_.kernel_launches;
  counts_.items += few_.count;
  return true;
}

Expected<void> GpuCopyQueue::copy_all(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  items_.clear();
  engine_used_ = false;
  last_item_ = {};
  item_bytes_ = end - begin >= kMany.value ? kItemBytes : kSmallItemBytes;
  std::int64_t at = 0;
  for (const CopyJob& job : jobs) {
    const std::int64_t total = job.run.total().value;
    const std::int64_t from = std::max(begin - at, std::int64_t{0}), to = std::min(end - at, total);
    at += total;
    if (from >= to) continue;
    if (from == 0 && to == total) {
      if (auto ok = copy(job); !ok) return ok;
      continue;
    }
    cut_.clear();
    cut_jobs({&job, 1}, from, to, cut_);
    for (const CopyJob& part : cut_)
      if (auto ok = copy(part); !ok) return ok;
  }
  if (engine_used_)
    if (auto ok = mark(engine_); !ok) return ok;
  for (std::span<const CopyItem> rest = items_; !rest.empty();) {
    const std::size_t count = std::min(rest.size(), kMostItems);
    if (auto ok = launch(rest.first(count)); !ok) return ok;
    rest = rest.subspan(count);
  }
  return {};
}

Expected<void> GpuCopyQueue::copy(const CopyJob& job) {
  if (!is_same_kind(job.run, last_run_)) {
    last_run_ = job.run;
    last_way_ = choose(job.run).way;
    last_item_ = {};
  }
  if (last_way_ == Way::engine) return copy_2d(job);
  append(job);
  return {};
}

void GpuCopyQueue::append(const CopyJob& job) {
  const auto source = reinterpret_cast<CUdeviceptr>(job.source) + static_cast<CUdeviceptr>(job.run.source_offset.value);
  const auto target = reinterpret_cast<CUdeviceptr>(job.target) + static_cast<CUdeviceptr>(job.run.target_offset.value);
  if (last_item_.count != 0 && (source | target) % 16 == 0) {
    last_item_.source = source;
    last_item_.target = target;
    items_.push_back(last_item_);
    return;
  }
  const std::size_t before = items_.size();
  append_items({&job, 1}, 0, job.run.total().value, items_, item_bytes_);
  last_item_ = {};
  if (items_.size() == before + 1 && items_.back().log2_width == 4) last_item_ = items_.back();
}

Expected<void> GpuCopyQueue::copy_2d(const CopyJob& job) {
  const Driver& driver = gpu_->driver();
  const Run run = rising(job.run);
  const auto source = reinterpret_cast<CUdeviceptr>(job.source) + static_cast<CUdeviceptr>(run.source_offset.value);
  const auto target = reinterpret_cast<CUdeviceptr>(job.target) + static_cast<CUdeviceptr>(run.target_offset.value);
  ++counts_.engine_calls;
  counts_.by_engine += run.total();
  engine_used_ = true;
  if (run.count == 1)
    return gpu_->check(driver.cuMemcpyAsync(target, source, static_cast<std::size_t>(run.bytes.value), engine_.stream),
                       "copying {} B", run.bytes.value);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = source;
  copy.dstDevice = target;
  copy.srcPitch = static_cast<std::size_t>(run.source_step.value);
  copy.dstPitch = static_cast<std::size_t>(run.target_step.value);
  copy.WidthInBytes = static_cast<std::size_t>(run.bytes.value);
  copy.Height = static_cast<std::size_t>(run.count);
  return gpu_->check(driver.cuMemcpy2DAsync(&copy, engine_.stream), "a 2-D copy of {} x {} B", run.count, run.bytes.value);
}

Expected<void> GpuCopyQueue::launch(std::span<const CopyItem> items) {
  const Driver& driver = gpu_->driver();
  List& list = lists_[next_list_];
  next_list_ = (next_list_ + 1) % kLists;
  if (!kernel_.has(list.mark))
    if (auto ok = gpu_->check(driver.cuStreamSynchronize(kernel_.stream), "waiting for a copy"); !ok) return ok;
  std::copy(items.begin(), items.end(), list.pinned);
  if (auto ok = gpu_->check(driver.cuMemcpyHtoDAsync(list.device, list.pinned, items.size_bytes(), upload_), "the kernel's list");
      !ok)
    return ok;
  if (auto ok = gpu_->check(driver.cuEventRecord(list.uploaded, upload_), "an event"); !ok) return ok;
  if (auto ok = gpu_->check(driver.cuStreamWaitEvent(kernel_.stream, list.uploaded, 0), "an event"); !ok) return ok;
  CUdeviceptr address = list.device;
  auto count = static_cast<unsigned>(items.size());
  void* arguments[] = {&address, &count};
  constexpr unsigned kWarps = kThreads / 32;
  const auto blocks = std::min(static_cast<unsigned>(limits_.blocks), (count + kWarps - 1) / kWarps);
  if (auto ok = gpu_->check(
          driver.cuLaunchKernel(gpu_->copy_items(), blocks, 1, 1, kThreads, 1, 1, 0, kernel_.stream, arguments, nullptr),
          "the copy kernel, {} items", count);
      !ok)
    return ok;
  ++counts_.kernel_launches;
  counts_.items += count;
  if (auto ok = mark(kernel_); !ok) return ok;
  list.mark = kernel_.put;
  return {};
}

Expected<void> GpuCopyQueue::mark(Lane& lane) {
  return gpu_->check(gpu_->driver().cuStreamWriteValue32(lane.stream, lane.word_address, static_cast<std::uint32_t>(++lane.put),
                                                         CU_STREAM_WRITE_VALUE_DEFAULT),
                     "a stream's mark");
}

Expected<std::uint64_t> GpuCopyQueue::finished() {
  const std::uint64_t before = finished_;
  for (; !started_.empty() && has(started_.front()); started_.pop_front()) {
    in_flight_ -= started_.front().bytes;
    ++finished_;
  }
  if (started_.empty() || finished_ != before || ++quiet_polls_ == kQuietPolls) {
    if (!started_.empty() && finished_ == before)
      if (auto ok = look_for_errors(); !ok) return tl::unexpected(ok.error());
    quiet_polls_ = 0;
  }
  return finished_;
}

Expected<void> GpuCopyQueue::look_for_errors() {
  const Current here = gpu_->current();
  bool idle = true;
  for (const Lane* lane : {&engine_, &kernel_}) {
    const CUresult result = gpu_->driver().cuStreamQuery(lane->stream);
    idle &= result == CUDA_SUCCESS;
    if (result != CUDA_ERROR_NOT_READY)
      if (auto ok = gpu_->check(result, "copying from a peer"); !ok) return ok;
  }
  if (idle && !has(started_.front()))
    return fail(Code::io, "the GPU has nothing to do, and has not said that copy {} is done", finished_ + 1);
  return {};
}

void GpuCopyQueue::drain() {
  if (engine_.stream == nullptr || (engine_.has(engine_.put) && kernel_.has(kernel_.put))) return;
  const Current here = gpu_->current();
  for (const Lane* lane : {&engine_, &kernel_})  // an error: the context is broken, and its streams have stopped
    gpu_->driver().cuStreamSynchronize(lane->stream);
}

bool GpuCopyQueue::renew() {
  if (!engine_.has(engine_.put) || !kernel_.has(kernel_.put)) return false;
  started_.clear();
  finished_ = 0;
  in_flight_ = Bytes(0);
  quiet_polls_ = 0;
  return true;
}

}  // namespace kvloom::cuda
