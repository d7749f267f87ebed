#include "kvloom/session/receiver.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/shapes/transfers.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using shapes::holds;
using shapes::only;
using shapes::receiver_job;
using shapes::says;
using State = Receiver::State;
using Driver = shapes::Driven<Receiver>;

// Two prefill ranks of a head each, two layers; of 8 tokens each rank owes 32 B a layer.
const shapes::SharedPlan& two_sources() {
  static const shapes::SharedPlan plan = shapes::shared_plan(shapes::gqa(2, 2), "tp=2", "tp=1");
  return plan;
}

Driver begun(bool can_revoke = false) {
  Driver out(Receiver::make(receiver_job(two_sources(), 0, {0, 8}, can_revoke)).value());
  out.on(Receiver::Begin{});
  return out;
}

using Parts = std::vector<std::pair<std::int32_t, std::int64_t>>;  // layer, bytes

Receiver::SourceProgress progress(std::int32_t source, const Parts& parts, bool last = false, std::size_t payload = 0) {
  Progress out;
  for (const auto& [layer, bytes] : parts) out.parts.push_back({{0, LayerId(layer)}, Bytes(bytes)});
  out.last = last;
  out.payload.resize(payload);
  return {Rank(source), std::move(out)};
}

Error lost() { return {Code::unavailable, Scope::peer, "the connection is lost"}; }
const Parts kAll = {{0, 32}, {1, 32}};

Error why(const Driver& driver) {
  const auto ends = only<Receiver::End>(driver.did());
  return ends.empty() ? Error{Code::invalid_argument, Scope::process, "it has not ended"} : ends.front().why;
}

// ---- the good way ----

TEST(Receiver, AdmitsEachSourceBeforeItsGrantGoesOut) {
  Driver driver(Receiver::make(receiver_job(two_sources(), 0, {3, 8})).value());
  EXPECT_EQ(driver.on(Receiver::Begin{}, 5s), "admit 0 tag 1000; grant 0; admit 1 tag 1001; grant 1");
  const Grant grant = only<Receiver::SendGrant>(driver.did())[1].grant;
  EXPECT_EQ(grant.key, shapes::key());
  EXPECT_EQ(grant.target, Rank(0));
  EXPECT_EQ(grant.digest, digest_of(*two_sources()));
  EXPECT_EQ(grant.range, (TokenRange{3, 8}));
  EXPECT_EQ(grant.time_left, 10s);
  EXPECT_EQ(grant.tag, Tag(1001));
  EXPECT_EQ(grant.tables, shapes::tables_for(*two_sources(), 8));
  EXPECT_EQ(driver.machine().expected(), Bytes(5 * 4 * 2 * 2));
  EXPECT_EQ(driver.machine().source_of(Tag(1001)), Rank(1));
  EXPECT_EQ(driver.machine().source_of(Tag(1002)), std::nullopt);
}

TEST(Receiver, PublishesLayersInOrderEachAfterAllItsBytes) {
  Driver driver = begun();
  EXPECT_EQ(driver.on(progress(0, {{1, 32}})), "");
  EXPECT_EQ(driver.on(progress(1, {{1, 32}})), "") << "layer 1 is there, but layer 0 comes first";
  EXPECT_EQ(driver.on(progress(0, {{0, 32}})), "") << "rank 1 has not sent its head";
  EXPECT_EQ(driver.on(progress(1, {{0, 28}})), "") << "a token is missing";
  EXPECT_EQ(driver.on(progress(1, {{0, 4}})), "publish 0; publish 1");
  EXPECT_EQ(driver.on(progress(0, {}, true)), "");
  EXPECT_EQ(driver.on(progress(1, {}, true)), "end landed; release");
  EXPECT_EQ(driver.machine().covered(), driver.machine().expected());
}

TEST(Receiver, PublishesTheLastLayerBeforeItEnds) {
  Driver driver = begun(true);
  driver.on(progress(0, kAll, true));
  EXPECT_EQ(driver.on(progress(1, kAll, true)),
            "publish 0; publish 1; revoke 0 tag 1000; revoke 1 tag 1001; end landed; release");
}

TEST(Receiver, HandsOverTheFirstPayloadOfEachSource) {
  Driver driver = begun();
  driver.on(progress(1, kAll, true, 3));
  driver.on(progress(1, {}, true, 9));  // said twice
  driver.on(progress(0, kAll, true));
  const auto end = only<Receiver::End>(driver.did()).at(0);
  ASSERT_EQ(end.payloads.size(), 1U) << "rank 0 had none";
  EXPECT_EQ(end.payloads[0].first, Rank(1));
  EXPECT_EQ(end.payloads[0].second.size(), 3U);
}

TEST(Receiver, LandsAtOnceWhereNothingIsWantedOfAnybody) {
  // Decode rank 3 of four pipeline stages of a model of two layers.
  const auto plan = shapes::shared_plan(shapes::mla(2), "tp=1", "pp=4");
  Driver driver(Receiver::make(receiver_job(plan, 3, {0, 8})).value());
  EXPECT_EQ(driver.on(Receiver::Begin{}), "end landed; release");
  EXPECT_EQ(driver.machine().deadline(), kNever);
}

TEST(Receiver, OwesOnlyThePagesThatAreItsWherePagesTakeTurns) {
  const auto plan = shapes::shared_plan(shapes::mla(2), "tp=1", "dcp=4:value");
  ReceiverJob job = receiver_job(plan, 0, {0, 10});
  job.tables[0] = {{PageId(4), PageId(1), PageId(8)}, 12};
  const auto receiver = Receiver::make(job);
  ASSERT_TRUE(receiver) << receiver.error().message;
  EXPECT_EQ(receiver->expected(), Bytes((4 + 2) * 2 * 2)) << "pages 4 and 8 are rank 0's, the latter half full";
}

// ---- time ----

TEST(Receiver, SendsUnansweredGrantsAgainWithTheTimeThatIsLeft) {
  Driver driver = begun();
  EXPECT_EQ(driver.machine().deadline(), 200ms);
  EXPECT_EQ(driver.on(Receiver::Time{}, 199ms), "");
  EXPECT_EQ(driver.on(Receiver::Time{}, 200ms), "grant 0; grant 1");
  EXPECT_EQ(only<Receiver::SendGrant>(driver.last())[0].grant.time_left, 9800ms);
  driver.on(Receiver::SourceAccepted{Rank(1)}, 300ms);
  EXPECT_EQ(driver.on(Receiver::Time{}, 400ms), "grant 0");
  driver.on(progress(0, {{0, 4}}), 500ms);
  EXPECT_EQ(driver.on(Receiver::Time{}, 600ms), "") << "who sends bytes has the grant";
}

TEST(Receiver, FencesOffHalfwayThroughTheGraceAndEndsWithIt) {
  Driver driver = begun();
  EXPECT_EQ(driver.on(Receiver::Time{}, 10s), "cancel 0; cancel 1");
  std::vector<std::string> said;
  while (driver.machine().deadline() <= 11200ms) {
    const Instant now = driver.machine().deadline();
    said.push_back(fmt::format("{}: {}", (now - 10s) / 1ms, driver.on(Receiver::Time{}, now)));
  }
  EXPECT_EQ(said, (std::vector<std::string>{"200: cancel 0; cancel 1", "400: cancel 0; cancel 1",
                                            "600: cancel 0; fence 0; cancel 1; fence 1", "800: cancel 0; cancel 1",
                                            "1000: cancel 0; cancel 1; end failed", "1200: cancel 0; cancel 1"}));
  EXPECT_EQ(driver.machine().state(), State::quarantined);
  EXPECT_EQ(why(driver).code, Code::deadline);
  EXPECT_EQ(why(driver).message, "time is up; missing: prefill rank 0: 2 layers, 64 B; prefill rank 1: 2 layers, 64 B");
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(0)}, 12s), "");
  EXPECT_EQ(driver.on(Receiver::SourceCutOff{Rank(1)}, 13s), "release");
  EXPECT_EQ(driver.machine().state(), State::failed);
}

TEST(Receiver, SaysWhatIsMissingWhenOnlyTheLastWordIs) {
  Driver driver = begun();
  driver.on(progress(0, kAll, true));
  driver.on(progress(1, kAll));
  EXPECT_EQ(driver.on(Receiver::Time{}, 10s), "cancel 1") << "rank 0 has finished";
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}, 10s), "end failed; release");
  EXPECT_EQ(why(driver).message, "time is up; missing: the last word of a source");
}

TEST(Receiver, EndsInTimeHoweverTheGraceAndTheResendsStand) {
  for (const auto& [resend, grace] : std::vector<std::pair<Instant, Instant>>{{3s, 1s}, {1ms, 1s}, {600ms, 1s}, {200ms, 0s}}) {
    ReceiverJob job = receiver_job(two_sources(), 0, {0, 8});
    job.limits.resend = resend;
    job.limits.grace = grace;
    Driver driver(Receiver::make(job).value());
    driver.on(Receiver::Begin{});
    while (driver.machine().state() != State::quarantined) {
      ASSERT_LE(driver.machine().deadline(), 10s + grace) << resend / 1ms << " ms, " << grace / 1ms << " ms";
      driver.on(Receiver::Time{}, driver.machine().deadline());
    }
    EXPECT_EQ(driver.count<Receiver::End>(), 1U);
    EXPECT_EQ(driver.count<Receiver::FenceOff>(), 2U) << resend / 1ms << " ms, " << grace / 1ms << " ms";
  }
}

// ---- the other ways ----

TEST(Receiver, ReleasesOnlyWhenEverySourceIsQuiet) {
  Driver driver = begun();
  EXPECT_EQ(driver.on(Receiver::CancelAsked{"the client left"}), "cancel 0; cancel 1");
  EXPECT_EQ(only<Receiver::SendCancel>(driver.last())[0].cancel.reason, "the client left");
  EXPECT_EQ(driver.on(Receiver::CancelAsked{"again"}), "");
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}), "");
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}), "") << "said twice by one";
  EXPECT_EQ(driver.on(Receiver::SourceFailed{Rank(0), lost()}), "") << "it posts no more, but what it posted may be on its way";
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(0)}), "end cancelled; release");
  EXPECT_EQ(why(driver).code, Code::cancelled);
}

TEST(Receiver, TakesALastWordForQuietWhenItIsEnding) {
  Driver driver = begun();
  driver.on(Receiver::CancelAsked{"enough"});
  EXPECT_EQ(driver.on(progress(0, kAll, true)), "") << "and publishes nothing";
  EXPECT_EQ(driver.on(progress(1, kAll, true)), "end cancelled; release");
}

TEST(Receiver, RevokesAndIsDoneWhereTheTransportCan) {
  Driver driver = begun(true);
  driver.on(progress(0, kAll, true));
  EXPECT_EQ(driver.on(Receiver::CancelAsked{"enough"}), "cancel 1; revoke 0 tag 1000; revoke 1 tag 1001; end cancelled; release");
  Driver gone = begun(true);
  EXPECT_EQ(gone.on(Receiver::SourceGone{Rank(0), lost()}),
            "cancel 0; cancel 1; revoke 0 tag 1000; revoke 1 tag 1001; end failed; release")
      << "no fence is needed";
}

TEST(Receiver, NamesTheSourceThatFailed) {
  Driver driver = begun();
  EXPECT_EQ(driver.on(Receiver::SourceFailed{Rank(1), {Code::exhausted, Scope::transfer, "no pages"}}), "cancel 0; cancel 1");
  driver.on(Receiver::SourceQuiesced{Rank(0)});
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}), "end failed; release");
  EXPECT_EQ(why(driver), (Error{Code::exhausted, Scope::transfer, "prefill rank 1: no pages"}));
}

TEST(Receiver, FencesOffWhoIsGoneOnce) {
  Driver driver = begun();
  EXPECT_EQ(driver.on(Receiver::SourceGone{Rank(0), lost()}), "fence 0; cancel 0; cancel 1");
  EXPECT_EQ(driver.on(Receiver::SourceGone{Rank(0), lost()}), "");
  EXPECT_EQ(driver.on(Receiver::SourceGone{Rank(1), lost()}), "fence 1");
  EXPECT_EQ(driver.on(Receiver::SourceCutOff{Rank(0)}), "");
  EXPECT_EQ(driver.on(Receiver::Time{}, 1s), "cancel 1; end failed") << "rank 0 is not asked again";
  EXPECT_EQ(driver.on(Receiver::SourceCutOff{Rank(1)}, 2s), "release");
}

TEST(Receiver, IsNotHurtBySourcesThatHadFinished) {
  Driver driver = begun();
  driver.on(progress(0, kAll, true));
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(0)}), "");
  EXPECT_EQ(driver.on(Receiver::SourceGone{Rank(0), lost()}), "");
  EXPECT_EQ(driver.on(Receiver::SourceCutOff{Rank(0)}), "");
  EXPECT_EQ(driver.on(progress(1, kAll, true)), "publish 0; publish 1; end landed; release");
}

TEST(Receiver, FailsWithASourceThatStoppedUnasked) {
  Driver driver = begun();
  driver.on(progress(0, kAll, true));
  EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}), "end failed; release");
  EXPECT_EQ(why(driver).message, "prefill rank 1: stopped before it was done: it knows nothing of this transfer any more");
}

TEST(Receiver, BelievesNoSourceMoreThanItOwes) {
  struct Lie {
    Receiver::SourceProgress said;
    std::string words;
  };
  Receiver::SourceProgress other_group = progress(0, {{0, 4}});
  other_group.progress.parts[0].layer.group = 7;
  for (const Lie& lie : {Lie{progress(0, {{0, 33}}), "33 B of group 0 layer 0 landed, but it owes 32 B, 32 of them still"},
                         Lie{progress(1, {{0, 32}, {0, 1}}), "prefill rank 1 says what it can't"},
                         Lie{progress(0, {{2, 1}}), "1 B of group 0 layer 2 landed, but it owes 0 B"},
                         Lie{other_group, "4 B of group 7 layer 0 landed, but it owes 0 B"}}) {
    Driver driver = begun();
    EXPECT_EQ(driver.on(lie.said), "cancel 0; cancel 1");
    driver.on(Receiver::SourceQuiesced{Rank(0)});
    EXPECT_EQ(driver.on(Receiver::SourceQuiesced{Rank(1)}), "end failed; release");
    EXPECT_NE(why(driver).message.find(lie.words), std::string::npos) << why(driver).message;
  }
}

TEST(Receiver, ListensToNobodyWhomItHasNotGranted) {
  Driver driver = begun();
  const std::vector<Receiver::Event> events = {Receiver::SourceAccepted{Rank(2)},       progress(2, kAll, true),
                                               Receiver::SourceFailed{Rank(2), lost()}, Receiver::SourceQuiesced{Rank(-1)},
                                               Receiver::SourceGone{Rank(2), lost()},   Receiver::SourceCutOff{Rank(99)}};
  for (const Receiver::Event& event : events) EXPECT_EQ(driver.on(event), "");
  EXPECT_EQ(driver.machine().state(), State::open);
  EXPECT_EQ(driver.machine().covered(), Bytes(0));
}

TEST(Receiver, IgnoresEverythingOnceItHasReleased) {
  const std::vector<Receiver::Event> events = {
      Receiver::SourceAccepted{Rank(0)},       progress(0, kAll, true),           progress(1, {{0, 1000}}),
      Receiver::SourceFailed{Rank(0), lost()}, Receiver::SourceQuiesced{Rank(0)}, Receiver::SourceGone{Rank(1), lost()},
      Receiver::SourceCutOff{Rank(1)},         Receiver::CancelAsked{"late"},     Receiver::Time{}};
  Driver landed = begun(), failed = begun(true), cancelled = begun(true);
  landed.on(progress(0, kAll, true));
  landed.on(progress(1, kAll, true));
  failed.on(Receiver::SourceFailed{Rank(0), lost()});
  cancelled.on(Receiver::CancelAsked{"enough"});
  for (Driver* driver : {&landed, &failed, &cancelled}) {
    const State state = driver->machine().state();
    ASSERT_TRUE(driver->machine().terminal()) << to_string(state);
    for (const Receiver::Event& event : events) EXPECT_EQ(driver->on(event, 100s), "") << to_string(state);
    EXPECT_EQ(driver->machine().state(), state);
    EXPECT_EQ(driver->machine().deadline(), kNever);
  }
}

TEST(Receiver, RefusesJobsThatAreNotThePlans) {
  const auto with = [](auto change) {
    ReceiverJob job = receiver_job(two_sources(), 0, {0, 8});
    change(job);
    return Receiver::make(std::move(job));
  };
  EXPECT_TRUE(says(with([](ReceiverJob& job) { job.rank = Rank(1); }), "decode rank 1 of a plan for 1"));
  EXPECT_TRUE(says(with([](ReceiverJob& job) { job.tables.clear(); }), "0 page tables for 1 cache groups"));
  EXPECT_TRUE(says(with([](ReceiverJob& job) { job.sources.pop_back(); }), "1 sources for 2 prefill ranks"));
  EXPECT_TRUE(says(with([](ReceiverJob& job) { job.range = {9, 8}; }), "tokens [9, 8): the prefix must be 0 or more"));
  EXPECT_TRUE(says(with([](ReceiverJob& job) { job.range = {-1, 8}; }), "tokens [-1, 8)"));
}

// ---- the table ----

TEST(Receiver, HasATableOfEdgesThatReachesEveryState) {
  EXPECT_TRUE(holds(
      shapes::check_edges(Receiver::edges(), State::open,
                          {State::open, State::ending, State::quarantined, State::landed, State::failed, State::cancelled})));
  for (const auto& edge : Receiver::edges())
    EXPECT_TRUE(edge.from == State::open || edge.from == State::ending || edge.from == State::quarantined)
        << to_string(edge.from) << " is the end";
}

// One life of a receiver in a world without mercy.
class Life {
 public:
  explicit Life(std::uint64_t seed) : random_(seed), can_revoke_(seed % 3 == 0), driver_(make(seed)) {}

  void live() {
    on(Receiver::Begin{});
    for (int i = 0; i < 60 && !driver_.machine().terminal(); ++i) step();
    for (std::int32_t s = 0; s < 2 && driver_.machine().state() != State::open; ++s) {
      quiet_.insert(s);
      on(Receiver::SourceCutOff{Rank(s)});
    }
    check();
  }
  const EdgeCounts& counts() const { return driver_.counts(); }

 private:
  Driver make(std::uint64_t seed) const {
    static const auto nothing = shapes::shared_plan(shapes::mla(2), "tp=1", "pp=4");
    return seed % 50 == 0 ? Driver(Receiver::make(receiver_job(nothing, 3, {0, 8})).value())
                          : Driver(Receiver::make(receiver_job(two_sources(), 0, {0, 8}, can_revoke_)).value());
  }
  std::int64_t draw(std::int64_t below) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(below)); }

  void step() {
    const auto source = static_cast<std::int32_t>(draw(2));
    const auto at = static_cast<std::size_t>(source);
    switch (draw(40)) {
      case 0: return on(Receiver::SourceAccepted{Rank(source)});
      case 1: return on(Receiver::SourceFailed{Rank(source), lost()});
      case 2: quiet_.insert(source); return on(Receiver::SourceQuiesced{Rank(source)});
      case 3: return on(Receiver::SourceGone{Rank(source), lost()});
      case 4: quiet_.insert(source); return on(Receiver::SourceCutOff{Rank(source)});
      case 5: return on(Receiver::CancelAsked{"enough"});
      case 6: return on(progress(source, {{0, 1000}}));
      case 7: quiet_.insert(source); return on(progress(source, {}, true));  // finished, it says
      case 8:
      case 9:
      case 10:
      case 11:
      case 12: now_ = driver_.machine().deadline(); return on(Receiver::Time{});
      case 13: now_ += 9s; return on(Receiver::Time{});
      default: break;
    }
    const auto layer = static_cast<std::size_t>(draw(2));
    const std::int64_t bytes = std::min(left_[at][layer], std::int64_t{16});
    left_[at][layer] -= bytes;
    const bool last = left_[at][0] + left_[at][1] == 0;
    if (last) quiet_.insert(source);
    on(progress(source, {{static_cast<std::int32_t>(layer), bytes}}, last));
  }

  void on(const Receiver::Event& event) {
    if (driver_.machine().terminal()) return;
    driver_.on(event, now_);
    if (driver_.count<Receiver::Release>() == 0 || driver_.machine().expected() == Bytes(0)) return;
    if (!can_revoke_) {
      EXPECT_EQ(quiet_.size(), 2U) << "pages were released under a source";
    } else {
      EXPECT_EQ(driver_.count<Receiver::Revoke>(), 2U);
    }
  }

  void check() const {
    std::vector<std::string> published, rest;
    for (const auto& action : driver_.did()) {
      if (const auto* publish = std::get_if<Receiver::Publish>(&action)) {
        EXPECT_TRUE(rest.empty()) << "published after the end";
        published.push_back(fmt::format("{}", publish->layer.value));
      }
      if (std::holds_alternative<Receiver::End>(action)) rest.emplace_back("end");
      if (std::holds_alternative<Receiver::Release>(action)) rest.emplace_back("release");
    }
    const std::vector<std::string> order = {"0", "1"};
    ASSERT_LE(published.size(), 2U);
    EXPECT_TRUE(std::equal(published.begin(), published.end(), order.begin()));
    if (driver_.machine().terminal()) {
      EXPECT_EQ(rest, (std::vector<std::string>{"end", "release"}));
    } else {
      EXPECT_LE(rest.size(), 1U);
    }
    if (driver_.machine().state() == State::landed) {
      EXPECT_EQ(driver_.machine().covered(), driver_.machine().expected());
    }
  }

  std::mt19937_64 random_;
  bool can_revoke_;
  Driver driver_;
  Instant now_{};
  std::int64_t left_[2][2] = {{32, 32}, {32, 32}};  // [source][layer], bytes
  std::set<std::int32_t> quiet_;
};

TEST(Receiver, KeepsItsLawsWhateverHappensAndWalksEveryEdge) { shapes::live_and_walk_every_edge<Receiver, Life>(); }

}  // namespace
}  // namespace kvloom
