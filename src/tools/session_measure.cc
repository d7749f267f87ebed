#include "kvloom/tools/session_measure.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "kvloom/session/source_endpoint.h"
#include "kvloom/session/target_endpoint.h"
#include "kvloom/session/wire.h"
#include "kvloom/tools/request_pages.h"
#include "kvloom/tools/run_control.h"

namespace kvloom {
namespace {

constexpr std::chrono::seconds kTime{60};

// 1M tokens at 64 a page, one table: what a decode rank without DCP grants of one group.
double grant_us(int repeats) {
  constexpr std::int64_t kColumns = 15'625;
  Grant grant;
  grant.key.name = "req-1";
  grant.range = {0, 1'000'000};
  grant.time_left = kTime;
  grant.tables.resize(1);
  for (std::int64_t c = 0; c < kColumns; ++c) grant.tables[0].pages.emplace_back(c * 7 % kColumns);
  grant.tables[0].pool_pages = kColumns;
  const Message message = grant;
  constexpr int kCalls = 50;
  MessageEncoder encoder;
  std::vector<double> rounds;
  for (int r = 0; r < repeats; ++r) {
    const std::int64_t begin = now_ns();
    for (int c = 0; c < kCalls; ++c)
      if (!decode_message(encoder.encode(message))) return 0;
    rounds.push_back(static_cast<double>(now_ns() - begin) / kCalls * 1e-3);
  }
  return median(rounds);
}

Expected<std::shared_ptr<const Side>> side_of(std::int32_t layers) {
  std::vector<LayerId> all;
  for (std::int32_t l = 0; l < layers; ++l) all.emplace_back(l);
  auto shape = CacheShape::make("bench", layers, {{"latent", GroupKind::paged, all, 1, {{"latent", 576, 1}}, {}, {}}});
  auto sharding = Sharding::parse("tp=1");
  if (!shape) return tl::unexpected(shape.error());
  if (!sharding) return tl::unexpected(sharding.error());
  auto side = Side::make(*shape, *sharding, 64);
  if (!side) return tl::unexpected(side.error());
  return std::make_shared<const Side>(std::move(*side));
}

// One prefill and one decode rank in one thread, over shm and loopback sockets.
class Pair {
 public:
  static Expected<std::unique_ptr<Pair>> make(std::int32_t layers, std::int64_t pool) {
    auto out = std::unique_ptr<Pair>(new Pair());
    auto side = side_of(layers);
    if (!side) return tl::unexpected(side.error());
    out->layers_ = layers;
    auto from = open_transport({}, true, Rank(0)), to = open_transport({}, false, Rank(0));
    if (!from) return tl::unexpected(from.error());
    if (!to) return tl::unexpected(to.error());
    out->from_ = std::move(*from);
    out->to_ = std::move(*to);
    auto source_pages = RequestPages::make(*side, Rank(0), {pool}, 1, out->from_);
    auto target_pages = RequestPages::make(*side, Rank(0), {pool}, 2, out->to_);
    if (!source_pages) return tl::unexpected(source_pages.error());
    if (!target_pages) return tl::unexpected(target_pages.error());
    out->source_pages_ = std::move(*source_pages);
    out->target_pages_ = std::move(*target_pages);
    auto source = SourceEndpoint::make({}, *out->from_, out->source_pages_->local());
    if (!source) return tl::unexpected(source.error());
    auto target = TargetEndpoint::make({}, *out->to_);
    if (!target) return tl::unexpected(target.error());
    out->source_ = std::move(*source);
    out->target_ = std::move(*target);
    const auto geometry = out->target_->describe(out->target_pages_->local());
    if (!geometry) return tl::unexpected(geometry.error());
    out->geometry_ = *geometry;
    return out;
  }
  ~Pair() {
    source_.reset();
    target_.reset();
    source_pages_.reset();
    target_pages_.reset();
  }

  // Offered, granted, connected: all but the bytes.
  Expected<void> begin(std::int64_t number, std::int64_t tokens, bool payload) {
    const TransferKey key = key_of(number);
    auto ours = source_pages_->take(number, tokens, tokens), theirs = target_pages_->take(number, tokens, tokens);
    if (!ours) return tl::unexpected(ours.error());
    if (!theirs) return tl::unexpected(theirs.error());
    if (auto ok = source_->offer({key, kTime, payload}); !ok) return ok;
    if (auto ok = source_->set_table(key, 0, std::move((*ours)[0])); !ok) return ok;
    return target_->begin({key, geometry_, {{source_->address(), ""}}, {0, tokens}, std::move(*theirs), kTime});
  }
  void give_back(std::int64_t number) {
    std::ignore = source_pages_->give_back(number);  // host memory: nothing can fail
    std::ignore = target_pages_->give_back(number);
  }
  void poll() {
    source_->poll(std::chrono::nanoseconds(0), source_events_);
    target_->poll(std::chrono::nanoseconds(0), target_events_);
  }
  // Until as many transfers are over on both sides as were begun.
  void poll_until_over(std::size_t transfers) {
    const auto over = [&] {
      std::size_t count = 0;
      for (const SourceEvent& event : source_events_) count += std::holds_alternative<SourceReleased>(event) ? 1U : 0U;
      for (const TargetEvent& event : target_events_) count += std::holds_alternative<TargetReleased>(event) ? 1U : 0U;
      return count >= 2 * transfers;
    };
    while (!over()) poll();
    source_events_.clear();
    target_events_.clear();
  }
  SourceEndpoint& source() { return *source_; }
  std::int32_t layers() const { return layers_; }
  static TransferKey key_of(std::int64_t number) { return {fmt::format("req-{}", number), Epoch(1)}; }

 private:
  Pair() = default;
  RankTransport from_, to_;
  std::unique_ptr<RequestPages> source_pages_, target_pages_;
  std::unique_ptr<SourceEndpoint> source_;
  std::unique_ptr<TargetEndpoint> target_;
  GeometryId geometry_;
  std::int32_t layers_ = 0;
  std::vector<SourceEvent> source_events_;
  std::vector<TargetEvent> target_events_;
};

// From the call that says that a layer is ready until its write is posted.
Expected<double> ready_to_post_us(int repeats) {
  constexpr std::int64_t kTokens = 512;
  auto pair = Pair::make(78, 64);
  if (!pair) return tl::unexpected(pair.error());
  Pair& p = **pair;
  std::vector<double> times;
  for (std::int64_t number = 0; number <= repeats; ++number) {
    if (auto ok = p.begin(number, kTokens, false); !ok) return tl::unexpected(ok.error());
    for (int turn = 0; turn < 2000; ++turn) p.poll();  // granted
    for (std::int32_t layer = 0; layer < p.layers(); ++layer) {
      const std::int64_t before = p.source().counts().posts, begin = now_ns();
      p.source().ready(Pair::key_of(number), LayerId(layer), kTokens);
      const std::int64_t end = now_ns();
      if (number > 0 && p.source().counts().posts > before) times.push_back(static_cast<double>(end - begin) * 1e-3);
      for (int turn = 0; turn < 4; ++turn) p.poll();
    }
    p.poll_until_over(1);
    p.give_back(number);
  }
  return median(times);
}

// Transfers of one page and a payload of 1 KiB, sixteen at once, both ends on one core.
Expected<double> transfers_per_second(int repeats) {
  constexpr std::int64_t kAtOnce = 16, kTokens = 64;
  constexpr int kRounds = 20;
  auto pair = Pair::make(1, 64);
  if (!pair) return tl::unexpected(pair.error());
  Pair& p = **pair;
  std::int64_t number = 0;
  std::vector<double> rates;
  for (int r = 0; r <= repeats; ++r) {
    std::int64_t spent = 0;
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t begin = now_ns();
      for (std::int64_t i = 0; i < kAtOnce; ++i) {
        if (auto ok = p.begin(number + i, kTokens, true); !ok) return tl::unexpected(ok.error());
        p.source().ready(Pair::key_of(number + i), LayerId(0), kTokens);
        std::ignore = p.source().payload(Pair::key_of(number + i), std::vector<std::byte>(1024));
      }
      p.poll_until_over(kAtOnce);
      spent += now_ns() - begin;
      for (std::int64_t i = 0; i < kAtOnce; ++i) p.give_back(number + i);
      number += kAtOnce;
    }
    if (r > 0) rates.push_back(static_cast<double>(kAtOnce * kRounds) / (static_cast<double>(spent) * 1e-9));
  }
  return median(rates);
}

}  // namespace

Expected<std::vector<BenchRow>> measure_sessions(int repeats) {
  std::vector<BenchRow> rows;
  rows.push_back({"grant encoded and decoded", grant_us(repeats), "us", 50, true, "1M tokens, 15,625 pages in one table"});
  const auto ready = ready_to_post_us(repeats);
  if (!ready) return tl::unexpected(ready.error());
  rows.push_back({"ready to post", *ready, "us", 5, true, "a layer of 78, 8 pages of 36,864 B, to one decode rank, shm"});
  const auto rate = transfers_per_second(repeats);
  if (!rate) return tl::unexpected(rate.error());
  rows.push_back({"transfers a second", *rate, "", 0, false,
                  "one page of 36,864 B and a payload of 1 KiB, 16 at once, both ends on one core, shm"});
  return rows;
}

}  // namespace kvloom
