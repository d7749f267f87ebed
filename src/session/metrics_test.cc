#include "kvloom/session/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using namespace std::chrono_literals;

// A scrape as a reader that knows the format, not the library, sees it.
struct Scrape {
  std::map<std::string, std::string> types, helps;
  std::map<std::string, double> samples;  // by name and labels without side and rank: kvloom_transfers_total{outcome="failed"}
};

// kvloom_transfer_seconds of kvloom_transfer_seconds_bucket, _sum, _count.
std::string family_of(const std::string& name, const Scrape& scrape) {
  for (const std::string end : {"_bucket", "_sum", "_count"})
    if (name.ends_with(end)) {
      const std::string family = name.substr(0, name.size() - end.size());
      if (const auto at = scrape.types.find(family); at != scrape.types.end() && at->second == "histogram") return family;
    }
  return name;
}

Expected<void> read_sample(const std::string& line, Scrape& scrape) {
  static const std::regex sample(R"re((kvloom_[a-z_]+)\{((?:[a-z]+="[^"\\]*",?)*)\} ([0-9.e+-]+))re");
  std::smatch parts;
  if (!std::regex_match(line, parts, sample)) return fail(Code::parse, "not a sample: {}", line);
  if (!scrape.types.contains(family_of(parts[1], scrape))) return fail(Code::parse, "no TYPE before: {}", line);
  std::set<std::string> labels;
  std::istringstream words(parts[2]);
  for (std::string word; std::getline(words, word, ',');) labels.insert(word);
  if (labels.erase("side=\"prefill\"") + labels.erase("rank=\"3\"") != 2) return fail(Code::parse, "not of this rank: {}", line);
  std::string name = parts[1];
  for (const std::string& label : labels) name += (&label == &*labels.begin() ? "{" : ",") + label;
  if (!labels.empty()) name += "}";
  if (!scrape.samples.emplace(name, std::stod(parts[3])).second) return fail(Code::parse, "twice: {}", line);
  return {};
}

Expected<Scrape> read(const std::string& text) {
  static const std::regex about("# (HELP|TYPE) (kvloom_[a-z_]+) (.+)");
  if (!text.ends_with('\n')) return fail(Code::parse, "the last line does not end");
  Scrape scrape;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch parts;
    if (std::regex_match(line, parts, about)) {
      if (!(parts[1] == "HELP" ? scrape.helps : scrape.types).emplace(parts[2], parts[3]).second)
        return fail(Code::parse, "twice: {}", line);
    } else if (auto sample = read_sample(line, scrape); !sample) {
      return tl::unexpected(sample.error());
    }
  }
  for (const auto& [name, type] : scrape.types)
    if (!scrape.helps.contains(name)) return fail(Code::parse, "{} has no HELP", name);
  return scrape;
}

// Counters end in _total, histograms and others in a unit; histograms add up.
Expected<void> check_conventions(const Scrape& scrape) {
  for (const auto& [name, type] : scrape.types) {
    if ((type == "counter") != name.ends_with("_total")) return fail(Code::invalid_argument, "{} is a {}", name, type);
    if (type == "histogram") {
      double last = 0;
      std::map<double, double> buckets;
      for (const auto& [sample, value] : scrape.samples)
        if (sample.starts_with(name + "_bucket{le=\"")) {
          const std::string bound = sample.substr(name.size() + 12, sample.rfind('"') - name.size() - 12);
          buckets[bound == "+Inf" ? INFINITY : std::stod(bound)] = value;
        }
      for (const auto& [bound, value] : buckets) {
        if (value < last) return fail(Code::invalid_argument, "{} falls at {}", name, bound);
        last = value;
      }
      if (!buckets.contains(INFINITY) || last != scrape.samples.at(name + "_count"))
        return fail(Code::invalid_argument, "{} has {} in its buckets", name, last);
    }
  }
  return {};
}

// No counter, and no part of a histogram, is less than it was.
Expected<void> check_never_decreases(const Scrape& before, const Scrape& after) {
  for (const auto& [name, value] : before.samples) {
    const std::string family = family_of(name.substr(0, name.find('{')), before);
    if (!after.samples.contains(name)) return fail(Code::invalid_argument, "{} is gone", name);
    if (before.types.at(family) != "gauge" && after.samples.at(name) < value)
      return fail(Code::invalid_argument, "{} was {}, is {}", name, value, after.samples.at(name));
  }
  return {};
}

// What is not 0, but buckets.
std::map<std::string, double> counted(const Metrics& metrics) {
  auto scrape = read(metrics.text());
  if (!scrape) return {{scrape.error().message, 0}};
  std::erase_if(scrape->samples, [](const auto& s) { return s.second == 0 || s.first.find("_bucket") != std::string::npos; });
  return scrape->samples;
}

using Counts = std::map<std::string, double>;

void tell_everything(Metrics& metrics) {
  metrics.opened();
  metrics.granted();
  metrics.ready_to_post(1ms);
  metrics.queued(2ms);
  metrics.posted(Bytes(4096), 3, 2);
  metrics.delivered(Bytes(4096), 3ms);
  metrics.undelivered(Code::unavailable);
  metrics.landed(Bytes(512));
  metrics.exposed_tail(4ms);
  metrics.ended(Outcome::landed, Code::io, 1s);
  metrics.quarantined(10);
  metrics.freed(10, 2s);
  metrics.notice_sent();
  metrics.notice_received();
  metrics.control_sent();
  metrics.control_received();
  metrics.partner_up();
  metrics.partner_lost(Code::deadline);
  metrics.hello_refused(Code::unsupported);
}

TEST(Metrics, AreAllThereFromTheStart) {
  Metrics fresh("prefill", Rank(3)), told("prefill", Rank(3));
  tell_everything(told);
  const auto before = read(fresh.text()), after = read(told.text());
  ASSERT_TRUE(before) << before.error().message;
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(before->types.size(), 28u);
  EXPECT_EQ(before->samples.size(), after->samples.size());
  for (const auto& [name, value] : before->samples) EXPECT_EQ(value, 0) << name;
  EXPECT_TRUE(holds(check_conventions(*before)));
  EXPECT_TRUE(holds(check_conventions(*after)));
  EXPECT_TRUE(holds(check_never_decreases(*before, *after)));
}

TEST(Metrics, CountTransfersByOutcomeAndFailuresByReason) {
  Metrics metrics("prefill", Rank(3));
  for (int i = 0; i < 5; ++i) metrics.opened();
  metrics.ended(Outcome::landed, Code::io, 1500ms);
  metrics.ended(Outcome::failed, Code::deadline, 9s);
  metrics.ended(Outcome::failed, Code::unavailable, 9s);
  metrics.ended(Outcome::cancelled, Code::cancelled, 9s);
  EXPECT_EQ(counted(metrics), (Counts{{"kvloom_open_transfers", 1},
                                      {"kvloom_transfers_total{outcome=\"landed\"}", 1},
                                      {"kvloom_transfers_total{outcome=\"failed\"}", 2},
                                      {"kvloom_transfers_total{outcome=\"cancelled\"}", 1},
                                      {"kvloom_transfer_failures_total{reason=\"deadline\"}", 1},
                                      {"kvloom_transfer_failures_total{reason=\"unavailable\"}", 1},
                                      {"kvloom_transfer_seconds_count", 1},
                                      {"kvloom_transfer_seconds_sum", 1.5}}));
}

TEST(Metrics, CountPostsAndTheirTimes) {
  Metrics metrics("prefill", Rank(3));
  metrics.posted(Bytes(std::int64_t{1} << 40), 3, 1);
  metrics.posted(Bytes(24), 5, 4);
  metrics.posted(Bytes(0), 0, 0);
  metrics.ready_to_post(250us);
  metrics.queued(500us);
  metrics.delivered(Bytes(24), 125ms);
  metrics.undelivered(Code::cancelled);
  EXPECT_EQ(counted(metrics), (Counts{{"kvloom_posts_total", 3},
                                      {"kvloom_runs_total", 8},
                                      {"kvloom_joined_parts_total", 3},
                                      {"kvloom_posted_bytes_total", 1099511627800.0},
                                      {"kvloom_delivered_bytes_total", 24},
                                      {"kvloom_post_failures_total{reason=\"cancelled\"}", 1},
                                      {"kvloom_ready_to_post_seconds_count", 1},
                                      {"kvloom_ready_to_post_seconds_sum", 0.00025},
                                      {"kvloom_post_queue_seconds_count", 1},
                                      {"kvloom_post_queue_seconds_sum", 0.0005},
                                      {"kvloom_post_seconds_count", 1},
                                      {"kvloom_post_seconds_sum", 0.125}}));
}

TEST(Metrics, CountWhatLandedAndWhatIsInQuarantine) {
  Metrics metrics("prefill", Rank(3));
  metrics.granted();
  metrics.landed(Bytes(100));
  metrics.landed(Bytes(20));
  metrics.exposed_tail(-1ns);  // landed before the last `ready` was told: no tail
  metrics.quarantined(1000);
  metrics.quarantined(24);
  metrics.freed(1000, 500ms);
  EXPECT_EQ(counted(metrics), (Counts{{"kvloom_grants_total", 1},
                                      {"kvloom_landed_bytes_total", 120},
                                      {"kvloom_exposed_tail_seconds_count", 1},
                                      {"kvloom_quarantined_transfers", 1},
                                      {"kvloom_quarantined_pages", 24},
                                      {"kvloom_quarantine_pages_count", 1},
                                      {"kvloom_quarantine_pages_sum", 1000},
                                      {"kvloom_quarantine_seconds_count", 1},
                                      {"kvloom_quarantine_seconds_sum", 0.5}}));
}

TEST(Metrics, CountWhatIsSaidAndPartners) {
  Metrics metrics("prefill", Rank(3));
  for (int i = 0; i < 3; ++i) metrics.partner_up();
  metrics.partner_lost(Code::io);
  metrics.hello_refused(Code::invalid_argument);
  metrics.geometry_refused(Code::parse);
  metrics.notice_sent();
  for (int i = 0; i < 2; ++i) metrics.notice_received();
  for (int i = 0; i < 4; ++i) metrics.control_sent();
  for (int i = 0; i < 5; ++i) metrics.control_received();
  EXPECT_EQ(counted(metrics), (Counts{{"kvloom_partners_up", 2},
                                      {"kvloom_partners_lost_total{reason=\"io\"}", 1},
                                      {"kvloom_hellos_refused_total{reason=\"invalid argument\"}", 1},
                                      {"kvloom_geometries_refused_total{reason=\"parse\"}", 1},
                                      {"kvloom_notices_sent_total", 1},
                                      {"kvloom_notices_received_total", 2},
                                      {"kvloom_control_messages_sent_total", 4},
                                      {"kvloom_control_messages_received_total", 5}}));
}

TEST(Metrics, PutAValueIntoTheFirstBucketThatIsNotBelowIt) {
  Metrics metrics("prefill", Rank(3));
  metrics.delivered(Bytes(1), 1ms);
  metrics.delivered(Bytes(1), 1ms + 1us);
  metrics.delivered(Bytes(1), 1h);
  const auto scrape = read(metrics.text());
  ASSERT_TRUE(scrape);
  EXPECT_EQ(scrape->samples.at("kvloom_post_seconds_bucket{le=\"0.0005\"}"), 0);
  EXPECT_EQ(scrape->samples.at("kvloom_post_seconds_bucket{le=\"0.001\"}"), 1);
  EXPECT_EQ(scrape->samples.at("kvloom_post_seconds_bucket{le=\"0.0025\"}"), 2);
  EXPECT_EQ(scrape->samples.at("kvloom_post_seconds_bucket{le=\"1\"}"), 2);
  EXPECT_EQ(scrape->samples.at("kvloom_post_seconds_bucket{le=\"+Inf\"}"), 3);
}

TEST(Metrics, BucketsAscend) {
  const auto ascends = [](const auto& bounds) {
    return std::adjacent_find(bounds.begin(), bounds.end(), std::greater_equal<>()) == bounds.end();
  };
  EXPECT_TRUE(ascends(kPostSeconds) && ascends(kTailSeconds) && ascends(kTransferSeconds) && ascends(kQuarantinePages));
}

TEST(Metrics, AreReadWhileTheyAreCounted) {
  Metrics metrics("prefill", Rank(3));
  std::thread counting([&] {
    for (int i = 0; i < 2000; ++i) tell_everything(metrics);
  });
  auto before = read(metrics.text());
  for (int i = 0; i < 20; ++i) {
    const auto after = read(metrics.text());
    ASSERT_TRUE(before && after);
    EXPECT_TRUE(holds(check_never_decreases(*before, *after)));
    before = after;
  }
  counting.join();
  EXPECT_EQ(counted(metrics).at("kvloom_posts_total"), 2000);
  EXPECT_EQ(counted(metrics).at("kvloom_post_seconds_count"), 2000);
}

}  // namespace
}  // namespace kvloom
