#include "kvloom/session/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <span>
#include <sstream>

namespace kvloom {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;
using prometheus::Registry;

constexpr std::array kOutcomes = {Outcome::landed, Outcome::failed, Outcome::cancelled};
constexpr std::array kCodes = {Code::invalid_argument, Code::parse,       Code::unsupported, Code::out_of_range, Code::overflow,
                               Code::exhausted,        Code::unavailable, Code::deadline,    Code::cancelled,    Code::io};

// Counters of one family, one for each value of an enum whose values are 0, 1, 2, ...
template <class Enum, std::size_t kValues>
struct Each {
  std::array<Counter*, kValues> counters;
  void count(Enum value) { counters[static_cast<std::size_t>(value)]->Increment(); }
};

// Makes series of one registry, all with the labels of the rank.
class Maker {
 public:
  Maker(Registry& registry, Labels labels) : registry_(registry), labels_(std::move(labels)) {}

  Counter& counter(const char* name, const char* help) { return counters(name, help).Add({}); }
  Gauge& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Labels(labels_).Register(registry_).Add({});
  }
  Histogram& histogram(const char* name, const char* help, std::span<const double> bounds) {
    auto& family = prometheus::BuildHistogram().Name(name).Help(help).Labels(labels_).Register(registry_);
    return family.Add({}, Histogram::BucketBoundaries(bounds.begin(), bounds.end()));
  }
  template <class Enum, std::size_t kValues>
  Each<Enum, kValues> each(const char* name, const char* help, const char* label, const std::array<Enum, kValues>& values) {
    auto& family = counters(name, help);
    Each<Enum, kValues> out{};
    for (const Enum value : values) out.counters[static_cast<std::size_t>(value)] = &family.Add({{label, to_string(value)}});
    return out;
  }

 private:
  prometheus::Family<Counter>& counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Labels(labels_).Register(registry_);
  }

  Registry& registry_;
  Labels labels_;
};

double number(std::int64_t value) { return static_cast<double>(value); }
double seconds(Metrics::Time time) { return std::max(0.0, std::chrono::duration<double>(time).count()); }

}  // namespace

// The registry owns what the references name.
struct Metrics::Series {
  explicit Series(const Labels& labels) : make(registry, labels) {}

  Registry registry;
  Maker make;

  Gauge& open = make.gauge("kvloom_open_transfers", "Transfers that have begun and not ended.");
  Each<Outcome, kOutcomes.size()> ended = make.each("kvloom_transfers_total", "Transfers that have ended.", "outcome", kOutcomes);
  Each<Code, kCodes.size()> failures =
      make.each("kvloom_transfer_failures_total", "Transfers that have failed, by reason.", "reason", kCodes);
  Histogram& transfer = make.histogram("kvloom_transfer_seconds", "Time of a transfer that landed.", kTransferSeconds);
  Histogram& tail = make.histogram("kvloom_exposed_tail_seconds",
                                   "Time from the last layer's being computed until the transfer landed.", kTailSeconds);
  Counter& grants = make.counter("kvloom_grants_total", "Grants sent (decode) or taken (prefill).");

  Counter& posts = make.counter("kvloom_posts_total", "Posts given to the transport.");
  Counter& runs = make.counter("kvloom_runs_total", "Strided runs of posts.");
  Counter& joined = make.counter("kvloom_joined_parts_total", "Parts (chunks of a layer) that went in the post of another part.");
  Counter& posted_bytes = make.counter("kvloom_posted_bytes_total", "Bytes given to the transport.");
  Counter& delivered_bytes = make.counter("kvloom_delivered_bytes_total", "Bytes that the target has vouched for.");
  Each<Code, kCodes.size()> undelivered =
      make.each("kvloom_post_failures_total", "Posts that were not delivered, by reason.", "reason", kCodes);
  Histogram& queue = make.histogram("kvloom_post_queue_seconds", "Time that a post waited in the pacer.", kPostSeconds);
  Histogram& post = make.histogram("kvloom_post_seconds", "Time from the write until it was completed.", kPostSeconds);
  Histogram& ready = make.histogram("kvloom_ready_to_post_seconds", "Time from being computed until being posted.", kPostSeconds);

  Counter& landed_bytes = make.counter("kvloom_landed_bytes_total", "Bytes that have landed here.");
  Gauge& quarantined = make.gauge("kvloom_quarantined_transfers", "Transfers whose pages may not be used again yet.");
  Gauge& quarantined_pages = make.gauge("kvloom_quarantined_pages", "Pages that may not be used again yet.");
  Histogram& quarantine = make.histogram("kvloom_quarantine_seconds", "Time of a quarantine that has ended.", kTransferSeconds);
  Histogram& quarantine_pages =
      make.histogram("kvloom_quarantine_pages", "Pages of a quarantine that has ended.", kQuarantinePages);

  Counter& notices_sent = make.counter("kvloom_notices_sent_total", "Notices sent behind bytes.");
  Counter& notices_received = make.counter("kvloom_notices_received_total", "Notices that came behind bytes.");
  Counter& control_sent = make.counter("kvloom_control_messages_sent_total", "Control messages sent.");
  Counter& control_received = make.counter("kvloom_control_messages_received_total", "Control messages received.");

  Gauge& partners = make.gauge("kvloom_partners_up", "Partners with a connection.");
  Each<Code, kCodes.size()> lost =
      make.each("kvloom_partners_lost_total", "Partners whose connection was lost, by reason.", "reason", kCodes);
  Each<Code, kCodes.size()> refused = make.each("kvloom_hellos_refused_total", "Hellos refused, by reason.", "reason", kCodes);
  Each<Code, kCodes.size()> geometries_refused =
      make.each("kvloom_geometries_refused_total", "Geometries of peers that were refused, by reason.", "reason", kCodes);
};

Metrics::Metrics(std::string_view side, Rank rank)
    : series_(std::make_unique<Series>(Labels{{"side", std::string(side)}, {"rank", fmt::format("{}", rank.value)}})) {}
Metrics::~Metrics() = default;

void Metrics::opened() { series_->open.Increment(); }
void Metrics::ended(Outcome outcome, Code why, Time since_opened) {
  series_->open.Decrement();
  series_->ended.count(outcome);
  if (outcome == Outcome::failed) series_->failures.count(why);
  if (outcome == Outcome::landed) series_->transfer.Observe(seconds(since_opened));
}
void Metrics::granted() { series_->grants.Increment(); }
void Metrics::exposed_tail(Time from_last_ready_to_landed) { series_->tail.Observe(seconds(from_last_ready_to_landed)); }

void Metrics::queued(Time in_pacer) { series_->queue.Observe(seconds(in_pacer)); }
void Metrics::ready_to_post(Time waited) { series_->ready.Observe(seconds(waited)); }
void Metrics::posted(Bytes bytes, std::int64_t runs, std::int64_t parts) {
  series_->posts.Increment();
  series_->runs.Increment(number(runs));
  if (parts > 1) series_->joined.Increment(number(parts - 1));
  series_->posted_bytes.Increment(number(bytes.value));
}
void Metrics::delivered(Bytes bytes, Time from_write_to_completed) {
  series_->delivered_bytes.Increment(number(bytes.value));
  series_->post.Observe(seconds(from_write_to_completed));
}
void Metrics::undelivered(Code why) { series_->undelivered.count(why); }

void Metrics::landed(Bytes bytes) { series_->landed_bytes.Increment(number(bytes.value)); }
void Metrics::quarantined(std::int64_t pages) {
  series_->quarantined.Increment();
  series_->quarantined_pages.Increment(number(pages));
}
void Metrics::freed(std::int64_t pages, Time quarantine) {
  series_->quarantined.Decrement();
  series_->quarantined_pages.Decrement(number(pages));
  series_->quarantine.Observe(seconds(quarantine));
  series_->quarantine_pages.Observe(number(pages));
}

void Metrics::notice_sent() { series_->notices_sent.Increment(); }
void Metrics::notice_received() { series_->notices_received.Increment(); }
void Metrics::control_sent() { series_->control_sent.Increment(); }
void Metrics::control_received() { series_->control_received.Increment(); }

void Metrics::partner_up() { series_->partners.Increment(); }
void Metrics::partner_lost(Code why) {
  series_->partners.Decrement();
  series_->lost.count(why);
}
void Metrics::hello_refused(Code why) { series_->refused.count(why); }
void Metrics::geometry_refused(Code why) { series_->geometries_refused.count(why); }

std::string Metrics::text() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, series_->registry.Collect());
  return std::move(out).str();
}

}  // namespace kvloom
