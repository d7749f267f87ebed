#include "kvloom/transport/cuda/copy_queue.h"

#include <algorithm>
#include <cstring>

#include "kvloom/transport/cuda/contexts.h"

namespace kvloom::cuda {
namespace {

constexpr std::size_t kLine = 64;      // between two words that different streams write
constexpr int kQuietPolls = 4096;      // without progress: then the driver is asked whether something broke
constexpr std::ptrdiff_t kAlike = 16;  // runs: fewer are worded as items
constexpr unsigned kThreads = 1024;    // of a block of the copy kernel
constexpr unsigned kFewWarps = 8;      // of a block of few items: spread over the SMs, not over one

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

RunAddress address_of(const shm::Stretch& stretch, const shm::RunPlace& place) {
  return {reinterpret_cast<std::uintptr_t>(stretch.like.source) + static_cast<std::uint64_t>(place.source),
          reinterpret_cast<std::uintptr_t>(stretch.like.target) + static_cast<std::uint64_t>(place.target)};
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
  const std::size_t bytes = lanes().size() * kLine;
  if (auto ok = gpu_->check(driver.cuMemHostAlloc(&words_, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                            "{} B of pinned memory", bytes);
      !ok)
    return ok;
  std::memset(words_, 0, bytes);
  auto* at = static_cast<std::byte*>(words_);
  for (Lane* lane : lanes()) {
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
  if (auto ok = gpu_->check(driver.cuMemHostAlloc(&pinned_, kLists * kListBytes, CU_MEMHOSTALLOC_PORTABLE),
                            "{} B of pinned memory", kLists * kListBytes);
      !ok)
    return ok;
  if (auto ok = gpu_->check(driver.cuMemAlloc(&device_, kLists * kListBytes + kLine), "{} B for the copy kernel's lists",
                            kLists * kListBytes);
      !ok)
    return ok;
  done_.counter = device_ + kLists * kListBytes;
  done_.word = kernel_.word_address;
  if (auto ok = gpu_->check(driver.cuMemsetD8Async(done_.counter, 0, kLine, kernel_.stream), "zeroing a counter"); !ok) return ok;
  for (std::size_t i = 0; i < kLists; ++i) {
    lists_[i].pinned = static_cast<std::byte*>(pinned_) + i * kListBytes;
    lists_[i].device = device_ + i * kListBytes;
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
  for (const Lane* lane : lanes())
    if (lane->stream != nullptr) driver.cuStreamDestroy(lane->stream);
  if (upload_ != nullptr) driver.cuStreamDestroy(upload_);
  if (words_ != nullptr) driver.cuMemFreeHost(words_);
}

Expected<void> GpuCopyQueue::start(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) {
  if (broken_) return tl::unexpected(*broken_);
  const Current here = gpu_->current();
  auto ok = try_start(work, begin, end);
  if (ok) return ok;
  give_up(ok.error());  // what it has begun has no mark: wait for it here
  for (const CUstream stream : {engines_[0].stream, engines_[1].stream, upload_, kernel_.stream})
    gpu_->driver().cuStreamSynchronize(stream);
  return ok;
}

// The open list will not go: what shares it is never finished.
void GpuCopyQueue::give_up(const Error& why) {
  broken_ = why;
  used_ = 0;
  batches_.clear();
  items_.clear();
}

Expected<void> GpuCopyQueue::try_start(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) {
  const Bytes all(end - begin), engine_before = counts_.by_engine;
  const auto few = try_few(work, begin, end);
  if (!few) return tl::unexpected(few.error());
  if (!*few)
    if (auto ok = copy_all(work, begin, end); !ok) return ok;
  counts_.by_kernel += all - (counts_.by_engine - engine_before);
  if (is_open() && kernel_.put - kernel_.done() < kEnough)
    if (auto ok = close_list(); !ok) return ok;
  in_flight_ += all;
  started_.push_back({engine_, engines_[engine_].put, kernel_.put + (is_open() ? 1 : 0), all});
  return {};
}

// What a single page waits for: one call, nothing to be brought first, and no mark of the stream behind it. False: there is too much.
Expected<bool> GpuCopyQueue::try_few(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) {
  if (end - begin > kFewBytes.value || work.runs() > kFewItems || is_open()) return false;
  cut_.clear();
  work.append_jobs(cut_);
  const auto bytes = static_cast<std::uint32_t>(ceil_div(end - begin, std::int64_t{kFewItems} * kFewItemBytes)) * kFewItemBytes;
  append_items(cut_, begin, end, items_, std::min(bytes, kItemBytes));
  FewItems few;
  few.count = static_cast<std::uint32_t>(items_.size());
  const bool fit = few.count <= kFewItems;
  if (fit) std::copy(items_.begin(), items_.end(), few.items);
  items_.clear();
  if (!fit) return false;
  few.done = done_;
  few.done.mark = static_cast<std::uint32_t>(++kernel_.put);
  void* arguments[] = {&few};
  const auto blocks = std::min(static_cast<unsigned>(limits_.blocks), (few.count + kFewWarps - 1) / kFewWarps);
  if (auto ok = gpu_->check(gpu_->driver().cuLaunchKernel(gpu_->copy_few(), blocks, 1, 1, kFewWarps * 32, 1, 1, 0, kernel_.stream,
                                                          arguments, nullptr),
                            "the copy kernel, {} items", few.count);
      !ok) {
    --kernel_.put;
    return tl::unexpected(ok.error());
  }
  ++counts_.kernel_launches;
  counts_.items += few.count;
  return true;
}

Expected<void> GpuCopyQueue::copy_all(const shm::CopyWork& work, std::int64_t begin, std::int64_t end) {
  engine_ = (engine_ + 1) % kEngines;
  engine_used_ = false;
  std::int64_t at = 0;
  for (const shm::Stretch& stretch : work.stretches()) {
    const std::int64_t total = stretch.like.run.total().value * static_cast<std::int64_t>(stretch.count);
    const std::int64_t from = std::max(begin - at, std::int64_t{0}), to = std::min(end - at, total);
    at += total;
    if (from < to)
      if (auto ok = copy_stretch(work, stretch, from, to); !ok) return ok;
  }
  return engine_used_ ? mark(engines_[engine_]) : Expected<void>();
}

// Bytes [begin, end) of the stretch: the rest of a run, whole runs, the start of a run.
Expected<void> GpuCopyQueue::copy_stretch(const shm::CopyWork& work, const shm::Stretch& stretch, std::int64_t begin,
                                          std::int64_t end) {
  const auto places = work.places(stretch);
  const std::int64_t each = stretch.like.run.total().value;
  const std::int64_t first = ceil_div(begin, each), last = end / each;  // whole runs
  const auto job = [&](std::int64_t run) { return job_at(stretch, places[static_cast<std::size_t>(run)]); };
  if (first > last) return copy_cut(job(last), begin - last * each, end - last * each);
  if (begin < first * each)
    if (auto ok = copy_cut(job(first - 1), begin - (first - 1) * each, each); !ok) return ok;
  if (first < last) {
    const auto whole = places.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
    if (auto ok = copy_runs(stretch, whole); !ok) return ok;
  }
  return last * each < end ? copy_cut(job(last), 0, end - last * each) : Expected<void>();
}

Expected<void> GpuCopyQueue::copy_cut(const CopyJob& job, std::int64_t begin, std::int64_t end) {
  cut_.clear();
  cut_jobs({&job, 1}, begin, end, cut_);
  for (const CopyJob& part : cut_)
    if (auto ok = copy(part); !ok) return ok;
  return {};
}

Expected<void> GpuCopyQueue::copy(const CopyJob& job) { return choose(job.run).way == Way::engine ? copy_2d(job) : word(job); }

Expected<void> GpuCopyQueue::copy_runs(const shm::Stretch& stretch, std::span<const shm::RunPlace> places) {
  const Way way = choose(stretch.like.run).way;
  const bool few = std::ssize(places) < kAlike || batches_.size() >= kMostBatches;
  if (way == Way::kernel && !few && list_of(stretch.like.run, 1)) return word(stretch, places);
  for (const shm::RunPlace& place : places) {
    const CopyJob job = job_at(stretch, place);
    if (auto ok = way == Way::engine ? copy_2d(job) : word(job); !ok) return ok;
  }
  return {};
}

Expected<void> GpuCopyQueue::copy_2d(const CopyJob& job) {
  const Driver& driver = gpu_->driver();
  const CUstream stream = engines_[engine_].stream;
  const Run run = rising(job.run);
  const auto source = reinterpret_cast<CUdeviceptr>(job.source) + static_cast<CUdeviceptr>(run.source_offset.value);
  const auto target = reinterpret_cast<CUdeviceptr>(job.target) + static_cast<CUdeviceptr>(run.target_offset.value);
  ++counts_.engine_calls;
  counts_.by_engine += run.total();
  engine_used_ = true;
  if (run.count == 1)
    return gpu_->check(driver.cuMemcpyAsync(target, source, static_cast<std::size_t>(run.bytes.value), stream), "copying {} B",
                       run.bytes.value);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = source;
  copy.dstDevice = target;
  copy.srcPitch = static_cast<std::size_t>(run.source_step.value);
  copy.dstPitch = static_cast<std::size_t>(run.target_step.value);
  copy.WidthInBytes = static_cast<std::size_t>(run.bytes.value);
  copy.Height = static_cast<std::size_t>(run.count);
  return gpu_->check(driver.cuMemcpy2DAsync(&copy, stream), "a 2-D copy of {} x {} B", run.count, run.bytes.value);
}

// ---- the open list ----

// So many bytes more may be worded.
Expected<void> GpuCopyQueue::make_room(std::size_t bytes) {
  if (space() < bytes)
    if (auto ok = close_list(); !ok) return ok;
  if (can_word()) return {};
  return gpu_->check(gpu_->driver().cuStreamSynchronize(kernel_.stream), "waiting for a copy");
}

Expected<void> GpuCopyQueue::word(const CopyJob& job) {
  constexpr std::int64_t kAtOnce = 1 << 20;  // bytes
  constexpr std::size_t kMostItems = 512;    // of them: an item has at least half of kItemBytes, if there are several
  const std::int64_t total = job.run.total().value;
  for (std::int64_t from = 0; from < total; from += kAtOnce) {
    if (auto ok = make_room(kMostItems * sizeof(CopyItem)); !ok) return ok;
    append_items({&job, 1}, from, std::min(from + kAtOnce, total), items_);
  }
  return {};
}

// Runs by where they are.
Expected<void> GpuCopyQueue::word(const shm::Stretch& stretch, std::span<const shm::RunPlace> places) {
  while (!places.empty()) {
    if (auto ok = make_room(sizeof(RunAddress)); !ok) return ok;
    Batch& batch = batch_for(stretch.like.run, address_of(stretch, places[0]));
    const std::size_t worded = word_some(stretch, places, batch.mask);
    batch.list.run_count += static_cast<std::uint32_t>(worded);
    places = places.subspan(worded);
  }
  return {};
}

// The batch that such a run goes into: the last one, if its runs are of that kind and no better aligned.
GpuCopyQueue::Batch& GpuCopyQueue::batch_for(const Run& like, const RunAddress& first) {
  const std::uint64_t bits = first.source | first.target | 16;
  if (!batches_.empty() && is_same_kind(batches_.back().like, like) && (bits & batches_.back().mask) == 0) return batches_.back();
  const std::uint64_t alignment = bits & -bits;
  return batches_.emplace_back(Batch{*list_of(like, alignment), like, used_, alignment - 1});
}

// As many of the runs as there is room for, until one is not aligned.  @cost two additions and 16 bytes each
std::size_t GpuCopyQueue::word_some(const shm::Stretch& stretch, std::span<const shm::RunPlace> places, std::uint64_t mask) {
  auto* const out = reinterpret_cast<RunAddress*>(lists_[next_list_].pinned + used_);
  const std::size_t most = std::min(places.size(), space() / sizeof(RunAddress));
  std::size_t i = 0;
  for (; i < most; ++i) {
    const RunAddress run = address_of(stretch, places[i]);
    if (((run.source | run.target) & mask) != 0) break;
    out[i] = run;
  }
  used_ += i * sizeof(RunAddress);
  return i;
}

// Brings the open list to the GPU, and a kernel for each of its batches; the last one has the items too, and says that all is in place.
Expected<void> GpuCopyQueue::close_list() {
  List& list = lists_[next_list_];
  if (auto ok = upload(); !ok) return ok;
  if (batches_.empty()) batches_.emplace_back();
  CopyList& last = batches_.back().list;
  last.items = list.device + used_;
  last.item_count = static_cast<std::uint32_t>(items_.size());
  last.done = done_;
  last.done.mark = static_cast<std::uint32_t>(kernel_.put + 1);
  for (Batch& batch : batches_) {
    batch.list.runs = list.device + batch.begin;
    if (auto ok = launch(batch.list); !ok) return ok;
  }
  list.mark = ++kernel_.put;
  used_ = 0;
  batches_.clear();
  items_.clear();
  next_list_ = (next_list_ + 1) % kLists;
  return {};
}

// What the kernel stream gets from now on finds the list in the GPU's memory.
Expected<void> GpuCopyQueue::upload() {
  const Driver& driver = gpu_->driver();
  const List& list = lists_[next_list_];
  std::copy(items_.begin(), items_.end(), reinterpret_cast<CopyItem*>(list.pinned + used_));
  if (auto ok =
          gpu_->check(driver.cuMemcpyHtoDAsync(list.device, list.pinned, kListBytes - space(), upload_), "the kernel's list");
      !ok)
    return ok;
  if (auto ok = gpu_->check(driver.cuEventRecord(list.uploaded, upload_), "an event"); !ok) return ok;
  return gpu_->check(driver.cuStreamWaitEvent(kernel_.stream, list.uploaded, 0), "an event");
}

Expected<void> GpuCopyQueue::launch(const CopyList& list) {
  void* arguments[] = {const_cast<CopyList*>(&list)};
  constexpr unsigned kWarps = kThreads / 32;
  const auto blocks = std::min(static_cast<unsigned>(limits_.blocks), (list.count() + kWarps - 1) / kWarps);
  if (auto ok = gpu_->check(
          gpu_->driver().cuLaunchKernel(gpu_->copy_list(), blocks, 1, 1, kThreads, 1, 1, 0, kernel_.stream, arguments, nullptr),
          "the copy kernel, {} items", list.count());
      !ok)
    return ok;
  ++counts_.kernel_launches;
  counts_.items += list.count();
  return {};
}

Expected<void> GpuCopyQueue::mark(Lane& lane) {
  return gpu_->check(gpu_->driver().cuStreamWriteValue32(lane.stream, lane.word_address, static_cast<std::uint32_t>(++lane.put),
                                                         CU_STREAM_WRITE_VALUE_DEFAULT),
                     "a stream's mark");
}

Expected<std::uint64_t> GpuCopyQueue::finished() {
  if (broken_) return tl::unexpected(*broken_);
  if (is_open() && kernel_.put - kernel_.done() < kEnough) {
    const Current here = gpu_->current();
    if (auto ok = close_list(); !ok) {
      give_up(ok.error());
      return tl::unexpected(ok.error());
    }
  }
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
  bool idle = true, said = true;
  for (const Lane* lane : lanes()) {
    const CUresult result = gpu_->driver().cuStreamQuery(lane->stream);
    idle &= result == CUDA_SUCCESS;
    said &= lane->has(lane->put);
    if (result != CUDA_ERROR_NOT_READY)
      if (auto ok = gpu_->check(result, "copying from a peer"); !ok) return ok;
  }
  if (idle && !said) return fail(Code::io, "the GPU has nothing to do, and has not said that copy {} is done", finished_ + 1);
  return {};
}

void GpuCopyQueue::drain() {
  const auto idle = [](const Lane* lane) { return lane->stream == nullptr || lane->has(lane->put); };
  if (!is_open() && std::ranges::all_of(lanes(), idle)) return;
  const Current here = gpu_->current();
  if (is_open())
    if (const auto ok = close_list(); !ok) give_up(ok.error());
  for (const Lane* lane : lanes())  // an error: the context is broken, and its streams have stopped
    gpu_->driver().cuStreamSynchronize(lane->stream);
}

bool GpuCopyQueue::renew() {
  if (broken_ || is_open() || !std::ranges::all_of(lanes(), [](const Lane* lane) { return lane->has(lane->put); })) return false;
  started_.clear();
  finished_ = 0;
  in_flight_ = Bytes(0);
  quiet_polls_ = 0;
  return true;
}

}  // namespace kvloom::cuda
