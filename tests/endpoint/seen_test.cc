// What endpoints tell about themselves while they serve: metrics and log lines of both sides. How a series is named and how a line looks is
// metrics_test.cc's and log_test.cc's; here is that the right one is told, when and of what.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tests/endpoint/cluster.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing_cluster::Cluster;
using testing_cluster::request;
using testing_cluster::Request;

// What a series stands at, named by its beginning and by a label of its own where it has one.
double value_of(const Metrics& metrics, const std::string& name, const std::string& label = "") {
  std::istringstream lines(metrics.text());
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + "{") && line.find(label) != std::string::npos) return std::stod(line.substr(line.rfind(' ')));
  ADD_FAILURE() << "no series " << name << " " << label;
  return -1;
}

// One prefill and one decode rank, with two layers of 2 B a token, on a clock that stands until a test moves it.
class Seen : public testing::Test {
 protected:
  using Lines = std::vector<std::string>;

  void SetUp() override {
    const auto keep = [](Lines& lines) {
      return [&lines](LogLevel level, std::string_view words) { lines.push_back(fmt::format("{} {}", to_string(level), words)); };
    };
    cluster.source_options.clock = cluster.target_options.clock = [this] { return clock; };
    cluster.source_sinks = {&prefill, nullptr, keep(prefill_lines), LogLevel::debug};
    cluster.target_sinks = {&decode, nullptr, keep(decode_lines), LogLevel::debug};
    cluster.add_prefill("tp=1");
    cluster.add_decode(1);
    cluster.describe("tp=1");
    cluster.begin(r);
    cluster.offer(r);
  }

  // A layer of the whole request, until prefill knows that it is there.
  void land(LayerId layer) {
    cluster.compute(r, layer, 0, r.tokens);
    clock += 3ms;
    const auto& counts = cluster.prefill[0]->endpoint->counts();
    const Bytes after = counts.delivered + kLayer;
    ASSERT_TRUE(cluster.drive([&] { return counts.delivered == after; }));
  }

  static Lines about_it(const Lines& lines) {
    Lines out;
    std::copy_if(lines.begin(), lines.end(), std::back_inserter(out),
                 [](const std::string& line) { return line.find(" transfer req#1: ") != std::string::npos; });
    return out;
  }

  static constexpr Bytes kLayer{16};
  Instant clock = 1s;
  Metrics prefill{"prefill", Rank(0)}, decode{"decode", Rank(0)};
  Lines prefill_lines, decode_lines;
  Cluster cluster{shapes::mla(2)};  // last: it tells what is above
  const Request r = request(8);
};

TEST_F(Seen, ATransferThatLandsIsCountedByteByByteAndToldLayerByLayer) {
  land(LayerId(0));
  EXPECT_EQ(value_of(prefill, "kvloom_open_transfers"), 1);
  EXPECT_EQ(value_of(decode, "kvloom_open_transfers"), 1);
  land(LayerId(1));
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  ASSERT_TRUE(cluster.landed(r));

  std::size_t runs = 0, notices = 0;  // as the transport saw them
  for (const Posted& posted : cluster.world().posted()) {
    runs += posted.runs.size();
    notices += posted.notice ? 1U : 0U;
  }
  EXPECT_EQ(value_of(prefill, "kvloom_posts_total"), 2);
  EXPECT_EQ(value_of(prefill, "kvloom_runs_total"), static_cast<double>(runs));
  EXPECT_EQ(value_of(prefill, "kvloom_joined_parts_total"), 0);
  EXPECT_EQ(value_of(prefill, "kvloom_posted_bytes_total"), 32);
  EXPECT_EQ(value_of(prefill, "kvloom_delivered_bytes_total"), 32);
  EXPECT_EQ(value_of(prefill, "kvloom_notices_sent_total"), static_cast<double>(notices));
  EXPECT_EQ(value_of(decode, "kvloom_notices_received_total"), static_cast<double>(notices));
  EXPECT_EQ(value_of(decode, "kvloom_landed_bytes_total"), 32);
  for (const char* each_post :
       {"kvloom_post_queue_seconds_count", "kvloom_ready_to_post_seconds_count", "kvloom_post_seconds_count"})
    EXPECT_EQ(value_of(prefill, each_post), 2) << each_post;
  EXPECT_EQ(value_of(prefill, "kvloom_exposed_tail_seconds_count"), 1);
  EXPECT_NEAR(value_of(prefill, "kvloom_exposed_tail_seconds_sum"), 0.003, 1e-9);
  for (const Metrics* side : {&prefill, &decode}) {
    EXPECT_EQ(value_of(*side, "kvloom_open_transfers"), 0);
    EXPECT_EQ(value_of(*side, "kvloom_transfers_total", "outcome=\"landed\""), 1);
    EXPECT_EQ(value_of(*side, "kvloom_transfer_seconds_count"), 1);
    EXPECT_NEAR(value_of(*side, "kvloom_transfer_seconds_sum"), 0.006, 1e-9);
    EXPECT_EQ(value_of(*side, "kvloom_grants_total"), 1);
    EXPECT_EQ(value_of(*side, "kvloom_partners_up"), 1);
    EXPECT_GT(value_of(*side, "kvloom_control_messages_sent_total"), 0);
    EXPECT_GT(value_of(*side, "kvloom_control_messages_received_total"), 0);
  }

  EXPECT_THAT(prefill_lines, testing::Contains("info decode rank 0 (decode): connected"));
  EXPECT_THAT(decode_lines, testing::Contains(MatchesRegex("info prefill rank 0 at tcp://127.0.0.1:[0-9]+: connected")));
  EXPECT_THAT(about_it(prefill_lines),
              ElementsAre("info transfer req#1: begins",
                          MatchesRegex("debug transfer req#1: 1 layers, 16 B in [0-9]+ runs to decode rank 0"),
                          MatchesRegex("debug transfer req#1: 1 layers, 16 B in [0-9]+ runs to decode rank 0, the last"),
                          "info transfer req#1: landed"));
  EXPECT_THAT(about_it(decode_lines), ElementsAre("info transfer req#1: begins", "debug transfer req#1: layer 0 landed",
                                                  "debug transfer req#1: layer 1 landed", "info transfer req#1: landed"));
}

TEST_F(Seen, LayersThatLeaveTogetherAreOnePost) {
  const Request late = request(8, 8, 0, "late");  // computed before anybody grants it
  cluster.offer(late);
  cluster.compute_all(late);
  cluster.begin(late);
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(late); }));
  EXPECT_TRUE(cluster.landed(late));
  EXPECT_EQ(value_of(prefill, "kvloom_posts_total"), 1);
  EXPECT_EQ(value_of(prefill, "kvloom_joined_parts_total"), 1);
  EXPECT_EQ(value_of(prefill, "kvloom_posted_bytes_total"), 32);
}

TEST_F(Seen, ATransferThatFailsIsCountedAndLoggedWithItsReasonOnBothSides) {
  cluster.prefill[0]->endpoint->ready(r.key, LayerId(0), r.tokens);  // and no page table
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  for (const Metrics* side : {&prefill, &decode}) {
    EXPECT_EQ(value_of(*side, "kvloom_transfers_total", "outcome=\"failed\""), 1);
    EXPECT_EQ(value_of(*side, "kvloom_transfers_total", "outcome=\"landed\""), 0);
    EXPECT_EQ(value_of(*side, "kvloom_transfer_failures_total", "reason=\"out of range\""), 1);
    EXPECT_EQ(value_of(*side, "kvloom_transfer_failures_total", "reason=\"cancelled\""), 0);
    EXPECT_EQ(value_of(*side, "kvloom_transfer_seconds_count"), 0);
  }
  EXPECT_EQ(value_of(prefill, "kvloom_post_failures_total", "reason=\"out of range\""), 1);
  EXPECT_EQ(value_of(prefill, "kvloom_posts_total"), 0);
  EXPECT_EQ(value_of(prefill, "kvloom_exposed_tail_seconds_count"), 0);
  EXPECT_EQ(value_of(decode, "kvloom_landed_bytes_total"), 0);

  const std::string why = "layer 0 of group 0: prefill rank 0 group latent: token 7 stands in column 1 (pages of 4 tokens), ";
  EXPECT_THAT(
      about_it(prefill_lines),
      ElementsAre("info transfer req#1: begins",
                  HasSubstr("warning transfer req#1: a post to decode rank 0 did not get there: out of range (transfer): " + why),
                  HasSubstr("warning transfer req#1: failed: out of range (transfer): decode rank 0: " + why)));
  EXPECT_THAT(about_it(decode_lines),
              ElementsAre("info transfer req#1: begins", HasSubstr("warning transfer req#1: failed: out of range (transfer): "
                                                                   "prefill rank 0: decode rank 0: " +
                                                                   why)));
}

TEST_F(Seen, ATransferThatIsCancelledIsNoFailure) {
  land(LayerId(0));
  cluster.decode[0]->endpoint->cancel(r.key, "its user left");
  ASSERT_TRUE(cluster.drive([&] { return cluster.over(r); }));
  for (const Metrics* side : {&prefill, &decode}) {
    EXPECT_EQ(value_of(*side, "kvloom_transfers_total", "outcome=\"cancelled\""), 1);
    EXPECT_EQ(value_of(*side, "kvloom_transfers_total", "outcome=\"failed\""), 0);
    EXPECT_EQ(value_of(*side, "kvloom_transfer_failures_total", "reason=\"cancelled\""), 0);
    EXPECT_EQ(value_of(*side, "kvloom_open_transfers"), 0);
  }
  EXPECT_EQ(value_of(prefill, "kvloom_delivered_bytes_total"), 16);
  EXPECT_EQ(value_of(prefill, "kvloom_exposed_tail_seconds_count"), 0);
  EXPECT_EQ(value_of(decode, "kvloom_landed_bytes_total"), 0);
  EXPECT_EQ(about_it(decode_lines).back(), "warning transfer req#1: cancelled: cancelled (transfer): its user left");
  EXPECT_EQ(about_it(prefill_lines).back(),
            "warning transfer req#1: cancelled: cancelled (transfer): decode rank 0: its user left");
}

}  // namespace
}  // namespace kvloom
