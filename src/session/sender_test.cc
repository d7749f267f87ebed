#include "kvloom/session/sender.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <random>

#include "tests/shapes/transfers.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using shapes::granted;
using shapes::holds;
using shapes::only;
using shapes::sender_job;
using shapes::target_partner;
using State = Sender::State;
using Driver = shapes::Driven<Sender>;

// One prefill rank, two layers, `decode` ranks of a head each (or of both): 4 B a token and layer to each (or 8).
shapes::SharedPlan plan_to(const std::string& decode) { return shapes::shared_plan(shapes::gqa(2, 2), "tp=1", decode); }
const shapes::SharedPlan& one() {
  static const shapes::SharedPlan plan = plan_to("tp=1");
  return plan;
}
const shapes::SharedPlan& two() {
  static const shapes::SharedPlan plan = plan_to("tp=2");
  return plan;
}

Driver idle(SessionLimits limits = {}, bool has_payload = false) {
  return Driver(Sender(sender_job(0, limits, has_payload), 0s));
}
Driver granted_by_both() {
  Driver out = idle();
  for (const std::int32_t target : {0, 1}) out.on(granted(two(), target, {0, 8}));
  return out;
}
Sender::Ready ready(std::int32_t layer, std::int64_t tokens) { return {LayerId(layer), tokens}; }
Sender::Posted done(std::uint64_t id) { return {SendId(id), {}}; }
Error lost() { return {Code::unavailable, Scope::peer, "the connection is lost"}; }
Sender::Posted broken(std::uint64_t id) { return {SendId(id), tl::unexpected(lost())}; }
Sender::CancelFrom cancel_from(std::int32_t target, std::string why = "aborted") {
  return {target_partner(target), Rank(target), std::move(why)};
}
Error why(const Driver& driver) {
  const auto ends = only<Sender::End>(driver.did());
  return ends.empty() ? Error{Code::invalid_argument, Scope::process, "it has not ended"} : ends.front().why;
}

// ---- posting ----

TEST(Sender, PostsWhatIsBothGrantedAndReady) {
  Driver driver = idle();
  EXPECT_EQ(driver.on(ready(0, 8)), "");
  EXPECT_EQ(driver.on(granted(two(), 1, {2, 8})), "accepted to 201; post 1 to 1: 0/0 [2, 8)");
  EXPECT_EQ(driver.on(ready(1, 5)), "post 2 to 1: 0/1 [2, 5)");
  EXPECT_EQ(driver.on(granted(two(), 0, {0, 8})), "accepted to 200; post 3 to 0: 0/0 [0, 8) 0/1 [0, 5)");
  EXPECT_EQ(driver.on(ready(1, 3)), "") << "what is computed stays computed";
  EXPECT_EQ(driver.on(ready(1, 9)), "post 4 to 0: 0/1 [5, 8) last; post 5 to 1: 0/1 [5, 8) last") << "one token more is nobody's";
}

TEST(Sender, SendsTheSameInWhateverOrderGrantsAndReadinessCome) {
  const std::vector<Sender::Event> events = {granted(two(), 0, {1, 8}), granted(two(), 1, {0, 8}), ready(0, 4), ready(0, 8),
                                             ready(1, 8)};
  std::vector<std::size_t> order = {0, 1, 2, 3, 4};
  do {
    Driver driver = idle();
    for (const std::size_t i : order) {
      driver.on(events[i]);
      for (const auto& post : only<Sender::Post>(std::vector(driver.last()))) driver.on(Sender::Posted{post.id, {}});
    }
    std::map<std::pair<Rank, CacheLayer>, std::int64_t> next = {{{Rank(0), {0, LayerId(0)}}, 1},
                                                                {{Rank(0), {0, LayerId(1)}}, 1},
                                                                {{Rank(1), {0, LayerId(0)}}, 0},
                                                                {{Rank(1), {0, LayerId(1)}}, 0}};
    int lasts = 0;
    for (const auto& post : only<Sender::Post>(driver.did())) {
      lasts += post.last ? 1 : 0;
      for (const PostPart& part : post.parts) {
        std::int64_t& at = next.at({post.target, part.layer});
        EXPECT_EQ(part.chunk.begin, at);
        at = part.chunk.end;
      }
    }
    for (const auto& [lane, end] : next) EXPECT_EQ(end, 8);
    EXPECT_EQ(lasts, 2);
    EXPECT_EQ(driver.machine().state(), State::landed);
    EXPECT_EQ(driver.count<Sender::ReleaseLayer>(), 2U);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Sender, GivesItsPayloadWithTheLastPostOfEachTarget) {
  Driver driver = idle({}, true);
  driver.on(granted(two(), 0, {0, 4}));
  driver.on(ready(0, 4));
  EXPECT_EQ(driver.on(ready(1, 4)), "post 2 to 0: 0/1 [0, 4)") << "all tokens, but not the last word";
  EXPECT_EQ(driver.on(Sender::Payload{std::vector<std::byte>(5)}), "post 3 to 0: last payload 5");
  EXPECT_EQ(driver.on(granted(two(), 1, {0, 4})), "accepted to 201; post 4 to 1: 0/0 [0, 4) 0/1 [0, 4) last payload 5");
  for (std::uint64_t id = 1; id < 4; ++id) driver.on(done(id));
  EXPECT_EQ(driver.on(done(4)), "release layer 0; release layer 1; end landed; release");
}

TEST(Sender, TellsATargetThatOwnsNothingOfItThatItIsDone) {
  // More prefill ranks than layers: rank 2 holds none, and still somebody waits for its word.
  const auto plan = shapes::shared_plan(shapes::mla(2), "cp=4:layers", "tp=2");
  ASSERT_EQ(granting_targets(*plan, Rank(2)), std::vector<Rank>{Rank(0)});
  Driver driver(Sender(sender_job(2), 0s));
  EXPECT_EQ(driver.on(granted(plan, 1, {0, 8})), "failed to 201") << "the other rank is not the one that asks";
  EXPECT_EQ(driver.on(granted(plan, 0, {0, 8})), "accepted to 200; post 1 to 0: last");
  EXPECT_EQ(driver.on(done(1)), "end landed; release");
}

TEST(Sender, SendsAStateWhenAllItsTokensAreThere) {
  const auto plan = shapes::shared_plan(shapes::stateful(), "tp=1", "tp=1");
  Driver driver = idle();
  driver.on(granted(plan, 0, {3, 8}));
  EXPECT_EQ(driver.on(ready(0, 7)), "") << "layer 0 has a state";
  EXPECT_EQ(driver.on(ready(0, 8)), "post 1 to 0: 1/0 [0, 1)");
  EXPECT_EQ(driver.on(ready(1, 7)), "post 2 to 0: 0/1 [3, 7)");
}

TEST(Sender, SendsOnlyTheWindowOfALayerThatHasOne) {
  const auto plan = shapes::shared_plan(shapes::hybrid(), "tp=1", "tp=1");
  Driver driver = idle();
  driver.on(granted(plan, 0, {2, 25}));
  EXPECT_EQ(driver.on(ready(0, 25)), "post 1 to 0: 0/0 [2, 25)");
  EXPECT_EQ(driver.on(ready(1, 18)), "") << "7 tokens slide: [18, 25)";
  EXPECT_EQ(driver.on(ready(1, 25)), "post 2 to 0: 1/1 [18, 25)");
  EXPECT_EQ(driver.on(ready(4, 25)), "") << "posts are under way and this is small";
  EXPECT_EQ(driver.on(done(1)), "post 3 to 0: 2/4 [20, 25); release layer 0") << "chunks of 10";
}

TEST(Sender, JoinsSmallPostsWhileOthersAreUnderWay) {
  SessionLimits limits;
  limits.join = Bytes(64);
  Driver driver = idle(limits);
  driver.on(granted(one(), 0, {0, 20}));  // 8 B a token
  EXPECT_EQ(driver.on(ready(0, 1)), "post 1 to 0: 0/0 [0, 1)");
  EXPECT_EQ(driver.on(ready(0, 2)), "post 2 to 0: 0/0 [1, 2)");
  EXPECT_EQ(driver.on(ready(0, 3)), "");
  EXPECT_EQ(driver.on(ready(1, 6)), "") << "7 tokens, 56 B";
  EXPECT_EQ(driver.on(ready(0, 4)), "post 3 to 0: 0/0 [2, 4) 0/1 [0, 6)") << "64 B";
  EXPECT_EQ(driver.on(ready(0, 5)), "");
  EXPECT_EQ(driver.on(done(2)), "") << "two are under way still";
  EXPECT_EQ(driver.on(done(3)), "post 4 to 0: 0/0 [4, 5)") << "fewer are: nothing is held back";
}

TEST(Sender, NeverHoldsBackTheLastPost) {
  Driver driver = idle();  // join 256 KiB
  driver.on(granted(one(), 0, {0, 4}));
  driver.on(ready(0, 1));
  driver.on(ready(0, 2));
  EXPECT_EQ(driver.on(ready(0, 4)), "");
  EXPECT_EQ(driver.on(ready(1, 3)), "");
  EXPECT_EQ(driver.on(ready(1, 4)), "post 3 to 0: 0/0 [2, 4) 0/1 [0, 4) last");
}

TEST(Sender, NeverHoldsBackTheLastTokensForThePayload) {
  Driver driver = idle({}, true);
  driver.on(granted(one(), 0, {0, 4}));
  driver.on(ready(0, 1));
  driver.on(ready(0, 2));
  driver.on(ready(0, 4));
  EXPECT_EQ(driver.on(ready(1, 4)), "post 3 to 0: 0/0 [2, 4) 0/1 [0, 4)");
}

TEST(Sender, HasNoMoreInFlightToATargetThanItMay) {
  SessionLimits limits;
  limits.in_flight_per_path = Bytes(80);
  limits.join = Bytes(0);
  Driver driver = idle(limits);
  driver.on(granted(one(), 0, {0, 25}));
  EXPECT_EQ(driver.on(ready(0, 12)), "post 1 to 0: 0/0 [0, 10)") << "10 tokens of 8 B";
  EXPECT_EQ(driver.on(ready(1, 25)), "") << "the path is full";
  EXPECT_EQ(driver.on(done(1)), "post 2 to 0: 0/0 [10, 12); post 3 to 0: 0/1 [0, 8)") << "a part is not cut to fill up a post";
  EXPECT_EQ(driver.on(ready(0, 25)), "");
  EXPECT_EQ(driver.on(done(2)), "post 4 to 0: 0/0 [12, 14)");
}

TEST(Sender, LetsEachTargetHaveAPathOfItsOwn) {
  SessionLimits limits;
  limits.in_flight_per_path = Bytes(40);
  Driver driver = idle(limits);
  driver.on(ready(0, 10));
  EXPECT_EQ(driver.on(granted(two(), 0, {0, 20})), "accepted to 200; post 1 to 0: 0/0 [0, 10)");
  EXPECT_EQ(driver.on(granted(two(), 1, {0, 20})), "accepted to 201; post 2 to 1: 0/0 [0, 10)")
      << "the other's being full is no matter";
}

TEST(Sender, SendsATokenThatIsLargerThanAllThatMayBeInFlight) {
  SessionLimits limits;
  limits.in_flight_per_path = Bytes(5);
  Driver driver = idle(limits);
  driver.on(granted(one(), 0, {0, 2}));
  EXPECT_EQ(driver.on(ready(0, 2)), "post 1 to 0: 0/0 [0, 1)");
  EXPECT_EQ(driver.on(done(1)), "post 2 to 0: 0/0 [1, 2)");
}

TEST(Sender, AnswersAGrantThatComesAgain) {
  Driver driver = idle();
  driver.on(granted(one(), 0, {0, 4}));
  EXPECT_EQ(driver.on(granted(one(), 0, {0, 4})), "accepted to 200");
  driver.on(ready(0, 4));
  EXPECT_EQ(driver.on(granted(one(), 0, {0, 4})), "accepted to 200") << "and posts nothing again";
  driver.on(cancel_from(0));
  EXPECT_EQ(driver.on(granted(one(), 0, {0, 4})), "failed to 200");
}

TEST(Sender, RefusesGrantsThatDoNotFit) {
  Driver driver = idle();
  driver.on(granted(two(), 0, {0, 4}));
  auto other_partner = granted(two(), 0, {0, 4});
  other_partner.from = PartnerId(77);
  EXPECT_EQ(driver.on(other_partner), "failed to 77");
  EXPECT_EQ(only<Sender::SendFailed>(driver.last()).at(0).why.message, "decode rank 0 has granted this before, otherwise");
  EXPECT_EQ(driver.on(granted(one(), 1, {0, 4})), "failed to 201");
  EXPECT_EQ(only<Sender::SendFailed>(driver.last()).at(0).why.message, "another decode rank has granted under another plan");
  EXPECT_EQ(driver.on(granted(two(), 5, {0, 4})), "failed to 205");
  EXPECT_EQ(only<Sender::SendFailed>(driver.last()).at(0).why.message, "prefill rank 0 has nothing for decode rank 5");
  EXPECT_EQ(driver.on(ready(0, 4)), "post 1 to 0: 0/0 [0, 4)") << "nobody is hurt";
}

// ---- layers come back ----

TEST(Sender, ReleasesALayerOnceNobodyReadsIt) {
  Driver driver = idle();
  driver.on(granted(two(), 0, {0, 8}));
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(done(1)), "") << "rank 1 has not granted yet";
  EXPECT_EQ(driver.on(granted(two(), 1, {0, 8})), "accepted to 201; post 2 to 1: 0/0 [0, 8)");
  EXPECT_EQ(driver.on(ready(1, 4)), "post 3 to 0: 0/1 [0, 4); post 4 to 1: 0/1 [0, 4)");
  EXPECT_EQ(driver.on(done(2)), "release layer 0");
  driver.on(ready(1, 8));
  EXPECT_EQ(driver.count<Sender::Post>(), 6U);
  for (std::uint64_t id = 3; id < 6; ++id) EXPECT_EQ(driver.on(done(id)), "") << id;
  EXPECT_EQ(driver.on(done(6)), "release layer 1; end landed; release");
}

TEST(Sender, ReleasesALayerThatALostTargetNeedsNoMore) {
  Driver driver = granted_by_both();
  driver.on(ready(0, 8));
  driver.on(done(1));
  EXPECT_EQ(driver.on(cancel_from(1)), "") << "post 2 reads it still";
  EXPECT_EQ(driver.on(done(2)), "quiesced to 201; release layer 0");
}

// ---- the other ways ----

TEST(Sender, AnswersQuiescedOnceNoPostIsOpen) {
  Driver driver = granted_by_both();
  driver.on(ready(0, 4));
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.count<Sender::Post>(), 4U);  // 1, 3 to rank 0; 2, 4 to rank 1
  EXPECT_EQ(driver.on(cancel_from(0)), "");
  EXPECT_EQ(driver.on(cancel_from(0)), "") << "said twice";
  EXPECT_EQ(driver.on(done(3)), "");
  EXPECT_EQ(driver.on(broken(1)), "quiesced to 200") << "how it ended is no matter";
  EXPECT_EQ(driver.on(cancel_from(0)), "quiesced to 200") << "the first answer was lost";
  EXPECT_EQ(driver.on(ready(1, 8)), "post 5 to 1: 0/1 [0, 8) last") << "rank 1 gets all of its own";
  for (const std::uint64_t id : {2U, 4U}) driver.on(done(id));
  EXPECT_EQ(driver.on(done(5)), "release layer 1; end cancelled; release");
  EXPECT_EQ(why(driver).message, "decode rank 0: aborted");
}

TEST(Sender, AnswersQuiescedWhoeverAsks) {
  Driver waiting = idle();
  EXPECT_EQ(waiting.on(cancel_from(1)), "quiesced to 201");
  EXPECT_EQ(waiting.on(granted(two(), 1, {0, 8})), "quiesced to 201") << "the cancel had overtaken it";
  EXPECT_EQ(waiting.on(granted(two(), 0, {0, 8})), "accepted to 200");
  EXPECT_EQ(waiting.on({Sender::CancelFrom{PartnerId(77), Rank(0), "not mine"}}), "quiesced to 77");
  EXPECT_EQ(waiting.on(ready(0, 8)), "post 1 to 0: 0/0 [0, 8)") << "nobody cancels for another";
  waiting.on(ready(1, 8));
  waiting.on(done(1));
  EXPECT_EQ(waiting.on(done(2)), "release layer 1; end cancelled; release");
}

TEST(Sender, EndsWhenItsOnlyTargetHadCancelledBefore) {
  Driver driver = idle();
  EXPECT_EQ(driver.on(cancel_from(0)), "quiesced to 200");
  EXPECT_EQ(driver.on(granted(one(), 0, {0, 8})), "quiesced to 200; release layer 0; release layer 1; end cancelled; release");
}

TEST(Sender, IsNotCancelledByAStranger) {
  Driver driver = idle();
  EXPECT_EQ(driver.on({Sender::CancelFrom{PartnerId(77), Rank(0), "not mine"}}), "quiesced to 77");
  EXPECT_EQ(driver.on(granted(one(), 0, {0, 8})), "accepted to 200");
}

TEST(Sender, IsDoneWhenNoPostIsOpenInWhateverOrderTheyEnd) {
  Driver driver = idle();
  driver.on(granted(one(), 0, {0, 8}));
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(ready(1, 8)), "post 2 to 0: 0/1 [0, 8) last");
  EXPECT_EQ(driver.on(done(2)), "release layer 1") << "post 1 may still read";
  EXPECT_EQ(driver.on(done(1)), "release layer 0; end landed; release");
}

TEST(Sender, StopsALinkWhosePostFailedAndNoOther) {
  Driver driver = granted_by_both();
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(broken(1)), "failed to 200");
  EXPECT_EQ(driver.on(ready(1, 8)), "post 3 to 1: 0/1 [0, 8) last");
  driver.on(done(2));
  EXPECT_EQ(driver.on(done(3)), "release layer 1; end failed; release");
  EXPECT_EQ(why(driver).message, "decode rank 0: the connection is lost");
}

TEST(Sender, FencesOffWhoIsGoneWhilePostsAreOpen) {
  Driver driver = granted_by_both();
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(Sender::Gone{target_partner(0), lost()}), "fence 200");
  EXPECT_EQ(driver.on(Sender::Gone{target_partner(0), lost()}), "");
  EXPECT_EQ(driver.on(Sender::Gone{PartnerId(77), lost()}), "") << "a stranger";
  driver.on(done(2));
  EXPECT_EQ(driver.on(Sender::Gone{target_partner(1), lost()}), "release layer 1") << "no post to it is open";
  EXPECT_EQ(driver.on(broken(1)), "release layer 0; end failed; release");
}

TEST(Sender, TellsEveryTargetWhenTheEngineCancels) {
  Driver driver = idle();
  driver.on(granted(two(), 0, {0, 8}));
  driver.on(ready(0, 8));
  driver.on(granted(two(), 1, {0, 8}));
  driver.on(done(1));
  EXPECT_EQ(driver.on(Sender::CancelAsked{"preempted"}), "failed to 200; failed to 201");
  EXPECT_EQ(driver.on(ready(1, 8)), "") << "nothing more is posted";
  EXPECT_EQ(driver.on(Sender::CancelAsked{"again"}), "");
  EXPECT_EQ(driver.on(cancel_from(0)), "quiesced to 200");
  EXPECT_EQ(driver.on(cancel_from(1)), "");
  EXPECT_EQ(driver.on(done(2)), "quiesced to 201; end cancelled; release");
  EXPECT_EQ(why(driver).message, "preempted");
}

TEST(Sender, EndsWhenItsTimeIsUpAndNobodyHasGranted) {
  Driver driver = idle();
  EXPECT_EQ(driver.machine().deadline(), 10s);
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(Sender::Time{}, 10s), "end failed; release");
  EXPECT_EQ(why(driver).message, "time is up; no decode rank has granted it");
}

TEST(Sender, NamesTheRanksThatItWaitedFor) {
  const auto plan = shapes::shared_plan(shapes::gqa(4, 1), "tp=1", "tp=4");
  Driver driver = idle();
  for (const std::int32_t target : {0, 2}) driver.on(granted(plan, target, {0, 8}, 1h));
  EXPECT_EQ(driver.on(Sender::Time{}, 10s), "failed to 200; failed to 202; end failed; release");
  EXPECT_EQ(why(driver).message,
            "time is up; decode ranks that have not granted: 1, 3; decode ranks that have not got all: 0, 2");
}

TEST(Sender, GivesUpALinkInTheTimeThatItsTargetGave) {
  Driver driver = idle();
  driver.on(granted(two(), 0, {0, 8}, 2s), 1s);
  driver.on(granted(two(), 1, {0, 8}, 5s), 1s);
  EXPECT_EQ(driver.machine().deadline(), 3s);
  driver.on(ready(0, 8), 2s);
  EXPECT_EQ(driver.on(Sender::Time{}, 3s), "failed to 200");
  EXPECT_EQ(driver.machine().deadline(), 4s) << "a second of grace for the open post";
  EXPECT_EQ(driver.on(Sender::Time{}, 4s), "fence 200");
  EXPECT_EQ(driver.machine().deadline(), 6s);
  EXPECT_EQ(driver.on(ready(1, 8), 5s), "post 3 to 1: 0/1 [0, 8) last");
  driver.on(done(2), 5s);
  EXPECT_EQ(driver.on(done(3), 5s), "release layer 1");
  EXPECT_EQ(driver.on(broken(1), 7s), "release layer 0; end failed; release");
  EXPECT_EQ(why(driver).message, "the time that decode rank 0 gave is up");
}

TEST(Sender, WaitsForPostsThatAreOpenAfterItsTimeIsUp) {
  Driver driver = idle();
  driver.on(granted(two(), 0, {0, 8}, 1h));
  driver.on(ready(0, 8));
  EXPECT_EQ(driver.on(Sender::Time{}, 10s), "failed to 200");
  EXPECT_EQ(driver.machine().state(), State::ending);
  EXPECT_EQ(driver.on(granted(two(), 1, {0, 8}), 10s), "failed to 201");
  EXPECT_EQ(driver.on(Sender::Time{}, 11s), "fence 200");
  EXPECT_EQ(driver.machine().deadline(), kNever) << "the transport will say";
  EXPECT_EQ(driver.on(broken(1), 60s), "end failed; release");
}

TEST(Sender, IgnoresEverythingOnceItHasEnded) {
  const std::vector<Sender::Event> events = {granted(one(), 0, {0, 8}),
                                             ready(0, 8),
                                             Sender::Payload{},
                                             done(1),
                                             cancel_from(0),
                                             Sender::Gone{target_partner(0), lost()},
                                             Sender::CancelAsked{"x"},
                                             Sender::Time{}};
  Driver landed = idle(), failed = idle(), cancelled = idle();
  landed.on(granted(one(), 0, {0, 0}));
  landed.on(done(1));
  failed.on(Sender::Time{}, 10s);
  cancelled.on(Sender::CancelAsked{"enough"});
  for (Driver* driver : {&landed, &failed, &cancelled}) {
    const State state = driver->machine().state();
    ASSERT_TRUE(driver->machine().terminal()) << to_string(state);
    for (const Sender::Event& event : events) EXPECT_EQ(driver->on(event, 100s), "") << to_string(state);
    EXPECT_EQ(driver->machine().state(), state);
    EXPECT_EQ(driver->machine().deadline(), kNever);
  }
}

// ---- laws ----

// Every wanted token of every layer is posted once on every path, in order, and each target gets one last word from each source.
Expected<void> check_posts(const shapes::Transfer& transfer, TokenRange range) {
  std::map<std::tuple<Rank, Rank, CacheLayer>, std::int64_t> next;  // source, target, layer: the next token
  std::map<std::pair<Rank, Rank>, int> lasts;
  for (const Path& path : transfer.plan().paths()) {
    const TokenRange want = wanted(*transfer.plan().groups()[static_cast<std::size_t>(path.group)].target, range);
    if (want.begin < want.end)
      for (const LayerId layer : transfer.plan().layer_ids(path))
        next[{path.source, path.target, {path.group, layer}}] = want.begin;
  }
  for (const auto& [source, post] : transfer.posts()) {
    if (lasts[{source, post.target}] > 0) return fail(Code::invalid_argument, "a post after the last");
    lasts[{source, post.target}] += post.last ? 1 : 0;
    for (const PostPart& part : post.parts) {
      const auto at = next.find({source, post.target, part.layer});
      if (at == next.end()) return fail(Code::invalid_argument, "{} is not wanted", shapes::text(post));
      if (part.chunk.begin != at->second || part.chunk.end <= part.chunk.begin)
        return fail(Code::invalid_argument, "{} where token {} was to come", shapes::text(post), at->second);
      at->second = part.chunk.end;
    }
  }
  for (const auto& [lane, end] : next) {
    const auto& [source, target, layer] = lane;
    const std::int64_t all = wanted(*transfer.plan().groups()[static_cast<std::size_t>(layer.group)].target, range).end;
    if (end != all)
      return fail(Code::invalid_argument, "{} to {} layer {}: up to {} of {}", source.value, target.value, layer.layer.value, end,
                  all);
  }
  for (std::int32_t s = 0; s < transfer.plan().source().ranks(); ++s)
    for (const Rank target : granting_targets(transfer.plan(), Rank(s)))
      if (lasts[{Rank(s), target}] != 1) return fail(Code::invalid_argument, "{} to {}: no last word", s, target.value);
  return {};
}

// `draw`: a number below its argument.
template <class Draw>
void run_at_random(shapes::Transfer& transfer, std::int64_t total, bool has_payload, Draw draw) {
  const std::int32_t sources = transfer.plan().source().ranks(), targets = transfer.plan().target().ranks();
  const auto layers = transfer.layers();
  std::vector<std::int32_t> ungranted;
  for (std::int32_t t = 0; t < targets; ++t) ungranted.push_back(t);
  std::map<std::pair<std::int32_t, LayerId>, std::int64_t> marks;
  for (std::int32_t s = 0; s < sources; ++s)
    for (const LayerId layer : layers) marks[{s, layer}] = 0;
  std::vector<std::int32_t> unpaid;
  for (std::int32_t s = 0; has_payload && s < sources; ++s) unpaid.push_back(s);
  while (!ungranted.empty() || !marks.empty() || !unpaid.empty() || !transfer.open().empty()) {
    const std::int64_t what = draw(8);
    if (what == 0 && !ungranted.empty()) {
      const auto at = ungranted.begin() + draw(static_cast<std::int64_t>(ungranted.size()));
      transfer.grant(*at);
      ungranted.erase(at);
    } else if (what == 1 && !unpaid.empty()) {
      transfer.at_source(unpaid.back(), Sender::Payload{std::vector<std::byte>(2)});
      unpaid.pop_back();
    } else if (what < 4 && !transfer.open().empty()) {
      transfer.complete(static_cast<std::size_t>(draw(static_cast<std::int64_t>(transfer.open().size()))));
    } else if (!marks.empty()) {
      const auto at = std::next(marks.begin(), draw(static_cast<std::int64_t>(marks.size())));
      at->second = std::min(total, at->second + 1 + draw(total));
      transfer.ready(at->first.first, at->first.second, at->second);
      if (at->second == total) marks.erase(at);
    }
  }
}

RC_GTEST_PROP(Sender, SendsEachWantedTokenOnceWhateverTheChunksAndTheOrder, ()) {
  const auto draw = [](std::int64_t below) { return *rc::gen::inRange<std::int64_t>(0, below); };
  const auto pick = [&](const auto& list) {
    return list[static_cast<std::size_t>(draw(static_cast<std::int64_t>(list.size())))];
  };
  const CacheShape shape = pick(shapes::all());
  const std::string from = pick(shapes::words()), to = pick(shapes::words());
  RC_PRE(from.find("value") == std::string::npos && to.find("value") == std::string::npos);  // there tables say who sends what
  const std::int64_t total = 1 + draw(40), prefix = draw(total + 1);
  const auto plan = compile(shapes::side(shape, from), shapes::side(shape, to), total);
  RC_PRE(plan.has_value());
  SessionLimits limits;
  limits.join = Bytes(draw(200));
  limits.in_flight_per_path = Bytes(1 + draw(300));
  const bool has_payload = draw(2) == 1;
  shapes::Transfer transfer(std::make_shared<const Plan>(*plan), {prefix, total}, limits, has_payload);
  std::mt19937_64 random(static_cast<std::uint64_t>(draw(INT64_MAX)));
  run_at_random(transfer, total, has_payload,
                [&](std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); });
  if (const auto law = check_posts(transfer, {prefix, total}); !law)
    RC_FAIL(shape.model() + " " + from + " to " + to + ": " + law.error().message);
  if (const auto landed = transfer.landed(); !landed) RC_FAIL(shape.model() + " " + from + " to " + to + ": " + landed.message());
}

// ---- the table ----

TEST(Sender, HasATableOfEdgesThatReachesEveryState) {
  EXPECT_TRUE(
      holds(shapes::check_edges(Sender::edges(), State::waiting,
                                {State::waiting, State::open, State::ending, State::landed, State::failed, State::cancelled})));
  for (const auto& edge : Sender::edges())
    EXPECT_TRUE(edge.from == State::waiting || edge.from == State::open || edge.from == State::ending)
        << to_string(edge.from) << " is the end";
}

// One life of a sender with two targets, in a world without mercy.
class Life {
 public:
  explicit Life(std::uint64_t seed)
      : random_(seed),
        lucky_(draw(4) == 0),
        has_payload_(draw(2) == 0),
        plan_(draw(3) == 0 ? one() : two()),
        driver_(idle(limits(), has_payload_)) {}

  void live() {
    for (int i = 0; i < 60 && !driver_.machine().terminal(); ++i) step();
    // In the end time is up, and the transport gives every post back.
    while (!driver_.machine().terminal()) {
      if (!open_.empty()) {
        finish_post(0, true);
      } else {
        now_ = std::max(now_, driver_.machine().deadline());
        on(Sender::Time{});
      }
    }
    EXPECT_EQ(driver_.count<Sender::End>(), 1U);
    EXPECT_EQ(driver_.count<Sender::Release>(), 1U);
    EXPECT_TRUE(unanswered_.empty()) << "a cancel without an answer";
  }
  const EdgeCounts& counts() const { return driver_.counts(); }

 private:
  SessionLimits limits() {
    SessionLimits out;
    out.in_flight_per_path = Bytes(1 + draw(60));
    out.join = Bytes(draw(30));
    return out;
  }
  std::int64_t draw(std::int64_t below) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(below)); }

  void step() {
    const auto target = static_cast<std::int32_t>(draw(plan_->target().ranks()));
    const std::int64_t what = draw(24);
    switch (lucky_ && what >= 6 && what <= 10 ? 20 : what) {
      case 0:
      case 1:
      case 2:
      case 3: return on(granted(plan_, target, {0, 8}, draw(2) == 0 ? Instant(1s) : Instant(1h)));
      case 4: return on(granted(draw(2) == 0 ? one() : two(), target, {0, 8}));
      case 5: return on(Sender::Payload{std::vector<std::byte>(1)});
      case 6: unanswered_.insert(target_partner(target)); return on(cancel_from(target));
      case 7: return on(Sender::Gone{target_partner(target), lost()});
      case 8:
        if (draw(3) == 0) on(Sender::CancelAsked{"preempted"});
        return;
      case 9:
      case 10:
        if (driver_.machine().deadline() == kNever) return;
        now_ = std::max(now_, driver_.machine().deadline());
        return on(Sender::Time{});
      case 11:
      case 12:
      case 13:
      case 14:
      case 15:
      case 16:
        if (!open_.empty())
          finish_post(static_cast<std::size_t>(draw(static_cast<std::int64_t>(open_.size()))), lucky_ || draw(12) != 0);
        return;
      default: return on(ready(static_cast<std::int32_t>(draw(2)), draw(9)));
    }
  }

  // The oldest of those to the target of the `which`-th: what is behind a notice is there before it.
  void finish_post(std::size_t which, bool delivered) {
    const Rank target = open_[which].target;
    const auto at = std::find_if(open_.begin(), open_.end(), [&](const Sender::Post& post) { return post.target == target; });
    const SendId id = at->id;
    open_.erase(at);
    on(delivered ? Sender::Posted{id, {}} : broken(id.value));
  }

  void on(const Sender::Event& event) {
    if (driver_.machine().terminal()) return;
    driver_.on(event, now_);
    for (const auto& action : std::vector(driver_.last())) {
      EXPECT_FALSE(released_) << "after the release";
      if (const auto* post = std::get_if<Sender::Post>(&action)) take(*post);
      if (const auto* layer = std::get_if<Sender::ReleaseLayer>(&action)) release(layer->layer);
      if (const auto* quiesced = std::get_if<Sender::SendQuiesced>(&action)) {
        unanswered_.erase(quiesced->to);
        for (const auto& post : open_) EXPECT_NE(post.to, quiesced->to) << "quiesced under an open post";
      }
      if (std::holds_alternative<Sender::Release>(action)) {
        released_ = true;
        EXPECT_TRUE(open_.empty()) << "pages were released under an open post";
      }
    }
  }
  void take(const Sender::Post& post) {
    EXPECT_NE(driver_.machine().state(), State::ending);
    for (const PostPart& part : post.parts) {
      EXPECT_FALSE(released_layers_.contains(part.layer.layer)) << "read after its release";
      std::int64_t& next = next_[{post.target, part.layer}];
      EXPECT_EQ(part.chunk.begin, next);
      next = part.chunk.end;
    }
    open_.push_back(post);
  }
  void release(LayerId layer) {
    EXPECT_TRUE(released_layers_.insert(layer).second) << "released twice";
    for (const auto& post : open_)
      for (const PostPart& part : post.parts) EXPECT_NE(part.layer.layer, layer) << "released under an open post";
  }

  std::mt19937_64 random_;
  bool lucky_;  // nothing but wrong grants goes wrong
  bool has_payload_;
  shapes::SharedPlan plan_;
  Driver driver_;
  Instant now_{};
  bool released_ = false;
  std::vector<Sender::Post> open_;
  std::map<std::pair<Rank, CacheLayer>, std::int64_t> next_;
  std::set<LayerId> released_layers_;
  std::set<PartnerId> unanswered_;
};

TEST(Sender, KeepsItsLawsWhateverHappensAndWalksEveryEdge) { shapes::live_and_walk_every_edge<Sender, Life>(); }

}  // namespace
}  // namespace kvloom
