#include "kvloom/tools/cuda_measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "kvloom/tools/plan_measure.h"
#include "kvloom/transport/cuda/cuda.h"
#include "kvloom/transport/cuda/device_work.h"

namespace kvloom {
namespace {

using GpuClock = std::chrono::steady_clock;
constexpr std::chrono::seconds kGpuPatience{30};
constexpr Tag kGpuTag{1};
constexpr std::int64_t kGpuPage = 36'864;
constexpr std::int64_t kGpuPost = 32 << 20;  // bytes of a post

double seconds_since(GpuClock::time_point begin) { return std::chrono::duration<double>(GpuClock::now() - begin).count(); }

// A source and a target that know each other, each polled by a thread of its own.
class GpuPair {
 public:
  static Expected<std::unique_ptr<GpuPair>> make(std::shared_ptr<const cuda::Driver> driver, int from, int to,
                                                 const cuda::CopyLimits& limits, std::int64_t bytes) {
    std::unique_ptr<GpuPair> out(new GpuPair);
    CudaOptions source, target;
    source.driver = target.driver = std::move(driver);
    source.device = from;
    target.device = to;
    target.listen = "*";
    target.copies = limits;
    for (auto [options, transport] : {std::pair(&source, &out->source_), std::pair(&target, &out->target_)}) {
      auto made = CudaTransport::make(std::move(*options));
      if (!made) return tl::unexpected(made.error());
      *transport = std::move(*made);
    }
    if (auto ok = out->connect(bytes); !ok) return tl::unexpected(ok.error());
    return out;
  }

  CudaTransport& source() { return *source_; }
  CudaTransport& target() { return *target_; }
  CUdeviceptr from() const { return reinterpret_cast<CUdeviceptr>(from_.base()); }
  CUdeviceptr to() const { return reinterpret_cast<CUdeviceptr>(to_.base()); }

  // The target polls on a thread of its own, as an endpoint does, until rest().
  void go() {
    over_ = false;
    thread_ = std::thread([this] {
      target_->take_over();
      while (!over_) {
        at_target_.clear();
        target_->poll({.copy = target_->abilities().copy_a_poll}, at_target_);
        for (const Event& event : at_target_)
          if (std::holds_alternative<Notice>(event)) heard_at_ = GpuClock::now().time_since_epoch().count();
      }
    });
  }
  void rest() {
    over_ = true;
    thread_.join();
    target_->take_over();
  }

  // Seconds until all of it has landed and the source knows. Posts are of a layer's size, one behind the other, as a session's are.  @pre go()
  Expected<double> push(std::span<const Run> runs) {
    const auto begin = GpuClock::now();
    std::size_t open = 0;
    at_source_.clear();
    while (!runs.empty()) {
      std::size_t count = 0;
      for (std::int64_t bytes = 0; count < runs.size() && bytes < kGpuPost; ++count) bytes += runs[count].total().value;
      source_->write({from_.id(), remote_, kGpuTag, runs.first(count)});
      ++open;
      runs = runs.subspan(count);
      source_->poll({}, at_source_);
    }
    for (std::size_t seen = 0; open > 0; source_->poll({}, at_source_)) {
      for (; seen < at_source_.size(); ++seen) {
        if (const auto* done = std::get_if<Completed>(&at_source_[seen]); done != nullptr) {
          if (!done->delivered) return tl::unexpected(done->delivered.error());
          --open;
        }
      }
      if (GpuClock::now() - begin > kGpuPatience) return fail(Code::deadline, "nothing landed within {} s", kGpuPatience.count());
    }
    return seconds_since(begin);
  }

  // Seconds from the moment in which the engine's stream has come to its event until the target hears that a page has landed. The stream says
  // so by a word that it writes just before: a gate keeps it until all is in place, and the gate's own time is not ours.  @pre go()
  Expected<double> latency(CUstream engine) {
    auto gate = cuda::StreamGate::make(source_->gpu_owner());
    if (!gate) return tl::unexpected(gate.error());
    if (auto ok = (*gate)->wait(engine, LayerId(0)); !ok) return tl::unexpected(ok.error());
    const auto reached = mark(engine);
    if (!reached) return tl::unexpected(reached.error());
    const auto work = cuda::StreamWork::record(source_->gpu_owner(), engine);
    if (!work) return tl::unexpected(work.error());
    std::this_thread::yield();
    const std::vector<Run> runs = {{Bytes(0), Bytes(0), Bytes(kGpuPage)}};
    heard_at_ = 0;
    const auto started = GpuClock::now();
    (*gate)->landed(LayerId(0));
    while (*word_ != *reached && GpuClock::now() - started < kGpuPatience) {}
    const auto begin = GpuClock::now();
    while (!(*work)->is_done().value_or(true)) {}
    source_->write({from_.id(), remote_, kGpuTag, runs});
    source_->notify(remote_.peer, kGpuTag, {});
    at_source_.clear();
    while ((heard_at_ == 0 || at_source_.size() < 2) && GpuClock::now() - started < kGpuPatience) source_->poll({}, at_source_);
    if (heard_at_ == 0) return fail(Code::deadline, "no notice within {} s", kGpuPatience.count());
    return std::chrono::duration<double>(GpuClock::duration(heard_at_) - begin.time_since_epoch()).count();
  }

 private:
  GpuPair() = default;

  static const PeerUp* is_up(const std::vector<Event>& events) {
    for (const Event& event : events)
      if (const auto* up = std::get_if<PeerUp>(&event); up != nullptr) return up;
    return nullptr;
  }

  // The number that the stream is going to write to *word_.
  Expected<std::uint32_t> mark(CUstream engine) {
    const cuda::Gpu& gpu = source_->gpu();
    const cuda::Current here = gpu.current();
    void* memory = nullptr;
    if (word_ == nullptr) {
      if (auto ok = gpu.check(gpu.driver().cuMemHostAlloc(&memory, sizeof(std::uint32_t), CU_MEMHOSTALLOC_DEVICEMAP), "a word");
          !ok)
        return tl::unexpected(ok.error());
      word_ = static_cast<volatile std::uint32_t*>(memory);
      *word_ = 0;
      if (auto ok = gpu.check(gpu.driver().cuMemHostGetDevicePointer(&word_address_, memory, 0), "a word"); !ok)
        return tl::unexpected(ok.error());
    }
    if (auto ok = gpu.check(gpu.driver().cuStreamWriteValue32(engine, word_address_, ++marks_, 0), "a mark"); !ok)
      return tl::unexpected(ok.error());
    return marks_;
  }

  Expected<void> connect(std::int64_t bytes) {
    const auto peer = source_->connect(target_->address());
    if (!peer) return tl::unexpected(peer.error());
    const auto begin = GpuClock::now();
    while (!is_up(at_source_) || !is_up(at_target_)) {
      source_->poll({}, at_source_);
      target_->poll({}, at_target_);
      if (GpuClock::now() - begin > kGpuPatience) return fail(Code::deadline, "not connected within {} s", kGpuPatience.count());
    }
    auto from = source_->allocate(Bytes(bytes)), to = target_->allocate(Bytes(bytes));
    if (!from) return tl::unexpected(from.error());
    if (!to) return tl::unexpected(to.error());
    from_ = std::move(*from);
    to_ = std::move(*to);
    const auto key = target_->export_region(to_.id());
    if (!key) return tl::unexpected(key.error());
    const auto remote = source_->import_region(*peer, *key);
    if (!remote) return tl::unexpected(remote.error());
    remote_ = *remote;
    return target_->admit(is_up(at_target_)->peer, kGpuTag);
  }

  std::unique_ptr<CudaTransport> source_, target_;
  Region from_, to_;
  RemoteRegion remote_;
  std::vector<Event> at_source_, at_target_;
  std::thread thread_;  // of the target, from go() to rest()
  std::atomic<bool> over_ = false;
  std::atomic<GpuClock::rep> heard_at_ = 0;  // of the last notice
  volatile std::uint32_t* word_ = nullptr;   // pinned; to the end of the process, as this is
  CUdeviceptr word_address_ = 0;
  std::uint32_t marks_ = 0;
};

class Polling {
 public:
  explicit Polling(GpuPair& pair) : pair_(pair) { pair_.go(); }
  Polling(const Polling&) = delete;
  Polling& operator=(const Polling&) = delete;
  ~Polling() { pair_.rest(); }

 private:
  GpuPair& pair_;
};

// ---- what is copied ----

struct GpuShape {
  std::string name;
  std::vector<Run> runs;
  bool all_sms = false;
};

std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(count));
  std::iota(out.begin(), out.end(), 0);
  std::shuffle(out.begin(), out.end(), std::mt19937_64(seed));
  return out;
}

// Pages whose rows of `bytes` are `source_step` and `target_step` apart, in random order on both sides.
std::vector<Run> random_pages(std::int64_t memory, std::int64_t bytes, std::int64_t rows, std::int64_t source_step,
                              std::int64_t target_step) {
  const std::int64_t stride = std::max(source_step, target_step) * rows;
  const std::int64_t pages = memory / stride;
  const auto from = shuffled(pages, 1), to = shuffled(pages, 2);
  std::vector<Run> out;
  for (std::size_t i = 0; i < from.size(); ++i)
    out.push_back({Bytes(from[i] * stride), Bytes(to[i] * stride), Bytes(bytes), rows, Bytes(rows == 1 ? 0 : source_step),
                   Bytes(rows == 1 ? 0 : target_step)});
  return out;
}

// Every fourth page to pages in a row, as DCP of 4 has it.
std::vector<Run> constant_step(std::int64_t memory) {
  const std::int64_t pages = memory / (4 * kGpuPage);
  std::vector<Run> out;
  for (std::int64_t first = 0; first < 4; ++first)
    out.push_back(
        {Bytes(first * kGpuPage), Bytes(first * pages * kGpuPage), Bytes(kGpuPage), pages, Bytes(4 * kGpuPage), Bytes(kGpuPage)});
  return out;
}

// What an allocator gives after an hour of use: half in runs of 256 pages in a row, half one by one.
std::vector<Run> half_and_half(std::int64_t memory) {
  constexpr std::int64_t kInARow = 256;
  const std::int64_t pages = memory / kGpuPage, half = pages / 2 / kInARow * kInARow;
  std::vector<Run> out;
  for (std::int64_t first = 0; first < half; first += kInARow)
    out.push_back({Bytes(first * kGpuPage), Bytes((half - kInARow - first) * kGpuPage), Bytes(kInARow * kGpuPage)});
  const auto from = shuffled(pages - half, 3), to = shuffled(pages - half, 4);
  for (std::size_t i = 0; i < from.size(); ++i)
    out.push_back({Bytes((half + from[i]) * kGpuPage), Bytes((half + to[i]) * kGpuPage), Bytes(kGpuPage)});
  return out;
}

std::vector<GpuShape> gpu_shapes(std::int64_t memory, int few) {
  return {{"36864 B pages at a constant step", constant_step(memory)},
          {fmt::format("36864 B pages in random order, {} blocks", few), random_pages(memory, kGpuPage, 1, kGpuPage, kGpuPage)},
          {"36864 B pages in random order, all SMs", random_pages(memory, kGpuPage, 1, kGpuPage, kGpuPage), true},
          {"656 B pieces (stripe 1)", random_pages(memory, 656, 16, 4 * 656, 656), true},
          {"576 B pieces (stripe 1)", random_pages(memory, 576, 16, 4 * 576, 576), true},
          {"half random pages, half in rows", half_and_half(memory), true},
          {"GQA heads, NHD pages, tp=2 to tp=1: 1024 B pieces", random_pages(memory, 1024, 64, 1024, 2048), true},
          {"GQA heads, NHD pages, tp=8 to tp=1: 256 B pieces", random_pages(memory, 256, 64, 256, 2048), true}};
}

Expected<double> contiguous(GpuPair& pair, std::int64_t bytes, CUstream stream) {
  const cuda::Gpu& gpu = pair.target().gpu();
  const cuda::Current here = gpu.current();
  const auto begin = GpuClock::now();
  if (auto ok = gpu.check(gpu.driver().cuMemcpyAsync(pair.to(), pair.from(), static_cast<std::size_t>(bytes), stream), "a copy");
      !ok)
    return tl::unexpected(ok.error());
  if (auto ok = gpu.check(gpu.driver().cuStreamSynchronize(stream), "a copy"); !ok) return tl::unexpected(ok.error());
  return seconds_since(begin);
}

Expected<GpuCopyRow> measure_shape(GpuPair& pair, const GpuShape& shape, int blocks, int repeats, CUstream stream) {
  GpuCopyRow row{.name = shape.name};
  for (const Run& run : shape.runs) {
    row.bytes += run.total().value;
    row.pieces += run.count;
  }
  const cuda::CopyCounts before = pair.target().counts();
  std::vector<double> ours, theirs;
  {
    const Polling polling(pair);
    for (int i = 0; i < repeats + 1; ++i) {
      const auto copied = contiguous(pair, row.bytes, stream);
      if (!copied) return tl::unexpected(copied.error());
      const auto pushed = pair.push(shape.runs);
      if (!pushed) return tl::unexpected(pushed.error());
      if (i == 0) continue;  // warm
      theirs.push_back(*copied);
      ours.push_back(*pushed);
    }
  }
  row.gb_per_s = static_cast<double>(row.bytes) * 1e-9 / median(ours);
  row.contiguous_gb_per_s = static_cast<double>(row.bytes) * 1e-9 / median(theirs);
  row.ratio = row.gb_per_s / row.contiguous_gb_per_s;
  row.sms = pair.target().counts().kernel_launches > before.kernel_launches ? blocks : 0;
  return row;
}

}  // namespace

Expected<GpuMeasurement> measure_gpu_copies(std::int64_t bytes, int repeats, const cuda::CopyLimits& limits) {
  auto driver = cuda::Driver::load();
  if (!driver) return tl::unexpected(driver.error());
  int gpus = 0;
  if (auto ok = cuda::check(**driver, (*driver)->cuDeviceGetCount(&gpus), "counting GPUs"); !ok)
    return tl::unexpected(ok.error());
  if (gpus == 0) return fail(Code::unsupported, "no GPU is visible to this process (nvidia-smi; CUDA_VISIBLE_DEVICES)");
  const int to = gpus > 1 ? 1 : 0;
  auto few = GpuPair::make(*driver, 0, to, limits, bytes);
  if (!few) return tl::unexpected(few.error());
  const cuda::Gpu& gpu = (*few)->target().gpu();
  const int sms = gpu.multiprocessors();
  GpuMeasurement out;
  out.hardware = fmt::format("{}, GPU 0 to GPU {}{}", gpu.name(), to, to == 0 ? " (one GPU: nothing crosses NVLink)" : "");
  cuda::CopyLimits wide = limits;
  wide.blocks = sms;
  auto all = GpuPair::make(*driver, 0, to, wide, bytes);
  if (!all) return tl::unexpected(all.error());
  CUstream stream = nullptr, engine = nullptr;
  {
    const cuda::Current here = gpu.current();
    if (auto ok = gpu.check(gpu.driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "a stream"); !ok)
      return tl::unexpected(ok.error());
    const cuda::Current there = (*few)->source().gpu().current();
    if (auto ok = gpu.check(gpu.driver().cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), "a stream"); !ok)
      return tl::unexpected(ok.error());
  }
  for (const GpuShape& shape : gpu_shapes(bytes, limits.blocks)) {
    auto row = measure_shape(shape.all_sms ? **all : **few, shape, shape.all_sms ? sms : limits.blocks, repeats, stream);
    if (!row) return tl::unexpected(row.error());
    out.rows.push_back(std::move(*row));
  }
  std::vector<double> latencies;
  const Polling polling(**few);
  constexpr int kLatencies = 200;
  for (int i = 0; i < kLatencies; ++i) {
    const auto latency = (*few)->latency(engine);
    if (!latency) return tl::unexpected(latency.error());
    if (i >= 10) latencies.push_back(*latency * 1e6);
  }
  std::sort(latencies.begin(), latencies.end());
  out.latency_us_p50 = latencies[latencies.size() / 2];
  out.latency_us_p99 = latencies[latencies.size() * 99 / 100];
  return out;
}

}  // namespace kvloom
