#include "kvloom/tools/cuda_load.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "kvloom/tools/cuda_gemm_stream.h"
#include "kvloom/tools/cuda_rank_gpu.h"
#include "kvloom/transport/cuda/device_work.h"

namespace kvloom {
namespace {

class GemmPrefill final : public PrefillLoad {
 public:
  GemmPrefill(std::unique_ptr<GemmStream> stream, const LoadLimits& limits) : stream_(std::move(stream)), limits_(limits) {}

  // Between two chunks the stream may be idle: that time is no layer's.
  Expected<void> begin_chunk() override {
    starts_.push_back(events_++);
    return stream_->event();
  }

  Expected<void> layer(std::int64_t begin, std::int64_t end) override {
    if (auto ok = stream_->put(prefill_layer(sizes_, limits_, begin, end), layers_++); !ok) return ok;
    ++events_;
    return stream_->event();
  }

  Expected<std::shared_ptr<DeviceWork>> computed() override {
    auto work = cuda::StreamWork::record(stream_->gpu(), stream_->stream());
    if (!work) return tl::unexpected(work.error());
    return std::move(*work);
  }
  Expected<std::uint32_t> mark() override { return stream_->mark(); }
  Expected<std::int64_t> wait(std::uint32_t mark) override { return stream_->wait(mark); }

  Expected<std::vector<double>> layer_times() override {
    auto times = stream_->times();
    if (!times) return times;
    std::vector<double> out;
    for (std::size_t i = 0; i < times->size(); ++i)  // the time i ends with the event i + 1
      if (!std::binary_search(starts_.begin(), starts_.end(), i + 1)) out.push_back((*times)[i]);
    starts_.clear();
    events_ = 0;
    return out;
  }

 private:
  std::unique_ptr<GemmStream> stream_;
  ModelSizes sizes_;
  LoadLimits limits_;
  std::vector<std::size_t> starts_;  // which events begin a chunk
  std::size_t events_ = 0, layers_ = 0;
};

class GemmDecode final : public DecodeLoad {
 public:
  explicit GemmDecode(std::unique_ptr<GemmStream> stream) : stream_(std::move(stream)) {}
  GemmDecode(const GemmDecode&) = delete;
  GemmDecode& operator=(const GemmDecode&) = delete;
  ~GemmDecode() override { std::ignore = stop(); }

  std::int64_t step_bytes() const override {
    return static_cast<std::int64_t>(stream_->layers()) * ModelSizes().layer_weights() * 2;
  }

  void start() override {
    stopping_ = false;
    thread_ = std::thread([this] { ended_ = run(); });
  }

  Expected<std::vector<double>> stop() override {
    if (!thread_.joinable()) return std::vector<double>();
    stopping_ = true;
    thread_.join();
    if (!ended_) return tl::unexpected(ended_.error());
    auto times = stream_->times();
    if (times && !times->empty()) times->erase(times->begin());
    return times;
  }

 private:
  // Two steps ahead of the GPU, so that it never waits for this thread.
  Expected<void> run() {
    const std::vector<Product> layer = decode_layer({}, {});
    std::vector<std::uint32_t> marks;
    if (auto ok = stream_->event(); !ok) return ok;
    while (!stopping_) {
      for (std::size_t i = 0; i < stream_->layers(); ++i)
        if (auto ok = stream_->put(layer, i); !ok) return ok;
      if (auto ok = stream_->event(); !ok) return ok;
      const auto mark = stream_->mark();
      if (!mark) return tl::unexpected(mark.error());
      marks.push_back(*mark);
      if (marks.size() < kAhead) continue;
      if (const auto at = stream_->wait(marks[marks.size() - kAhead]); !at) return tl::unexpected(at.error());
    }
    if (marks.empty()) return {};
    return stream_->wait(marks.back()).map([](std::int64_t) {});
  }

  static constexpr std::size_t kAhead = 2;

  std::unique_ptr<GemmStream> stream_;  // the thread's while it runs
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
  Expected<void> ended_;  // of the thread; read after it was joined
};

Expected<std::unique_ptr<GemmStream>> open_stream(const LoadWords& words, const TransportWords& transport, bool prefill,
                                                  Rank rank, const LoadLimits& limits, std::vector<LoadBuffer> buffers,
                                                  std::int64_t most_layers) {
  auto gpu = open_rank_gpu(transport, prefill, rank);
  if (!gpu) return tl::unexpected(gpu.error());
  auto blas = Blas::load(words.cublas);
  if (!blas) return tl::unexpected(blas.error());
  return GemmStream::make(std::move(*gpu), std::move(*blas), {}, limits, std::move(buffers), most_layers);
}

}  // namespace

Expected<std::unique_ptr<PrefillLoad>> open_prefill_load(const LoadWords& words, const TransportWords& transport, Rank rank,
                                                         std::int64_t context) {
  constexpr std::int64_t kLayers = 2;  // whose weights there are, in turn: 550 MB each, far above what caches keep
  LoadLimits limits;
  limits.context = context;
  using enum LoadBuffer;
  auto stream = open_stream(words, transport, true, rank, limits, {input, output, keys, values, scores}, kLayers);
  if (!stream) return tl::unexpected(stream.error());
  return std::make_unique<GemmPrefill>(std::move(*stream), limits);
}

Expected<std::unique_ptr<DecodeLoad>> open_decode_load(const LoadWords& words, const TransportWords& transport, Rank rank) {
  LoadLimits limits;
  limits.rows = limits.decode_rows;
  auto stream = open_stream(words, transport, false, rank, limits, {LoadBuffer::input, LoadBuffer::output}, ModelSizes().layers);
  if (!stream) return tl::unexpected(stream.error());
  return std::make_unique<GemmDecode>(std::move(*stream));
}

}  // namespace kvloom
