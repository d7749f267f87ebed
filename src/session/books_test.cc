#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvloom/session/source_book.h"
#include "kvloom/session/target_book.h"
#include "tests/shapes/transfers.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using shapes::key;
using shapes::receiver_job;
using shapes::says;
using shapes::sender_job;
using shapes::source_partner;
using shapes::target_partner;

const shapes::SharedPlan& two_targets() {
  static const shapes::SharedPlan plan = shapes::shared_plan(shapes::gqa(2, 2), "tp=1", "tp=2");
  return plan;
}
const shapes::SharedPlan& two_sources() {
  static const shapes::SharedPlan plan = shapes::shared_plan(shapes::gqa(2, 2), "tp=2", "tp=1");
  return plan;
}
Error lost() { return {Code::unavailable, Scope::peer, "the connection is lost"}; }

// "to 200: accepted req#1 source=0; req#1: post 1 to 0: ..."
template <class Action>
std::string said(const std::vector<Action>& actions) {
  std::string out;
  for (const auto& action : actions) {
    out += out.empty() ? "" : "; ";
    if (const auto* send = std::get_if<SendTo>(&action)) {
      out += fmt::format("to {}: {}", send->to.value, to_string(send->message));
    } else {
      const auto& keyed = std::get<1>(action);
      out += fmt::format("{}: {}", to_string(keyed.key),
                         std::visit([](const auto& what) { return shapes::text(what); }, keyed.action));
    }
  }
  return out;
}

// ---- of sources ----

class Source {
 public:
  explicit Source(bool knows = true) {
    if (knows) book_.know(two_targets(), digest_of(*two_targets()));
  }
  std::string offer(const TransferKey& name = key(), Instant now = 0s) {
    SenderJob job = sender_job(0);
    job.key = name;
    return did([&](auto& actions) {
      const auto ok = book_.offer(job, now, actions);
      EXPECT_TRUE(ok) << ok.error().message;
    });
  }
  std::string hears(PartnerId from, const Message& message, Instant now = 0s) {
    return did([&](auto& actions) { book_.message(from, message, now, actions); });
  }
  std::string grant(std::int32_t target, const TransferKey& name = key(), Instant now = 0s, Instant time_left = 10s) {
    Grant grant = shapes::grant_of(*two_targets(), target, {0, 8}, time_left);
    grant.key = name;
    return hears(target_partner(target), grant, now);
  }
  std::string cancel(std::int32_t target, const TransferKey& name = key(), Instant now = 0s) {
    return hears(target_partner(target), Cancel{name, Rank(target), "aborted"}, now);
  }
  std::string tell(const Sender::Event& event, const TransferKey& name = key()) {
    return did([&](auto& actions) { book_.tell(name, event, 0s, actions); });
  }
  std::string gone(PartnerId partner) {
    return did([&](auto& actions) { book_.gone(partner, lost(), 0s, actions); });
  }
  std::string time(Instant now) {
    return did([&](auto& actions) { book_.time(now, actions); });
  }
  SourceBook& book() { return book_; }

 private:
  template <class What>
  std::string did(What what) {
    std::vector<SourceBook::Action> actions;
    what(actions);
    return said(actions);
  }
  SourceBook book_{Rank(0)};
};

Sender::Ready ready(std::int32_t layer, std::int64_t tokens) { return {LayerId(layer), tokens}; }

TEST(SourceBook, KeepsGrantsThatComeBeforeTheOffer) {
  Source source;
  EXPECT_EQ(source.grant(0), "to 200: accepted req#1 source=0");
  EXPECT_EQ(source.book().early(), 1U);
  EXPECT_EQ(source.grant(0), "to 200: accepted req#1 source=0") << "sent again: one grant";
  EXPECT_EQ(source.book().early(), 1U);
  EXPECT_EQ(source.offer(), "to 200: accepted req#1 source=0");
  EXPECT_EQ(source.book().early(), 0U);
  EXPECT_EQ(source.grant(0), "to 200: accepted req#1 source=0");
  EXPECT_EQ(source.tell(ready(0, 8)), "req#1: post 1 to 0: 0/0 [0, 8)");
}

TEST(SourceBook, AnswersAStaleGrantAndServesItNever) {
  Source source;
  source.offer();
  EXPECT_EQ(source.tell(Sender::CancelAsked{"preempted"}), "req#1: end cancelled; req#1: release");
  EXPECT_EQ(source.book().open(), 0U);
  EXPECT_EQ(source.grant(0), "to 200: failed req#1 source=0 reason=\"cancelled: preempted\"");
  EXPECT_EQ(source.cancel(0), "to 200: quiesced req#1 source=0");
  EXPECT_EQ(source.tell(ready(0, 8)), "");
  std::vector<SourceBook::Action> actions;
  EXPECT_TRUE(says(source.book().offer(sender_job(0), 0s, actions),
                   "transfer req#1 has been offered before: another attempt needs another epoch"));
  EXPECT_EQ(source.offer(key(2)), "");
  EXPECT_EQ(source.grant(0, key(2)), "to 200: accepted req#2 source=0") << "the next attempt is another transfer";
}

TEST(SourceBook, RefusesToOfferWhatIsOpen) {
  Source source;
  source.offer();
  std::vector<SourceBook::Action> actions;
  EXPECT_TRUE(says(source.book().offer(sender_job(0), 0s, actions), "has been offered before"));
  EXPECT_EQ(source.book().open(), 1U);
}

TEST(SourceBook, HoldsAgainstAGrantThatItsCancelHasOvertaken) {
  Source source;
  EXPECT_EQ(source.cancel(0), "to 200: quiesced req#1 source=0") << "never heard of it, and says so";
  EXPECT_EQ(source.grant(0), "to 200: quiesced req#1 source=0");
  EXPECT_EQ(source.book().early(), 0U);
  EXPECT_EQ(source.offer(), "to 200: quiesced req#1 source=0; to 200: quiesced req#1 source=0") << "the cancel, and the grant";
  EXPECT_EQ(source.grant(1), "to 201: accepted req#1 source=0") << "the other rank has not cancelled";
  EXPECT_EQ(source.tell(ready(0, 8)), "req#1: post 1 to 1: 0/0 [0, 8)");
}

TEST(SourceBook, DropsAnEarlyGrantThatIsCancelled) {
  Source source;
  source.grant(0);
  source.grant(1);
  EXPECT_EQ(source.cancel(0), "to 200: quiesced req#1 source=0");
  EXPECT_EQ(source.book().early(), 1U);
  source.offer();
  EXPECT_EQ(source.tell(ready(0, 8)), "req#1: post 1 to 1: 0/0 [0, 8)");
}

TEST(SourceBook, IsDoneWithATransferThatAllItsTargetsHadLeftBeforeItWasOffered) {
  Source source;
  source.grant(0);
  source.cancel(0);
  source.cancel(1);
  EXPECT_EQ(source.grant(1), "to 201: quiesced req#1 source=0") << "overtaken by its cancel";
  EXPECT_THAT(source.offer(), testing::HasSubstr("req#1: end cancelled"));
  EXPECT_EQ(source.book().open(), 0U) << "and its pages are not kept for as long as it was given";
}

TEST(SourceBook, WaitsForWhoHasNotLeft) {
  Source source;
  source.grant(0);
  source.cancel(0);
  source.cancel(1);
  source.offer();
  EXPECT_EQ(source.book().open(), 1U) << "no grant of rank 1 has come: whether it takes part is not known";
}

TEST(SourceBook, WaitsForNobodyWhereTheSidesDoNotFit) {
  const Cancel whole{key(), Rank(1), "another model", true};
  Source offered, not_yet;
  offered.offer();
  EXPECT_EQ(offered.hears(PartnerId(77), whole), "req#1: end cancelled; req#1: release; to 77: quiesced req#1 source=0");
  EXPECT_EQ(not_yet.hears(PartnerId(77), whole), "to 77: quiesced req#1 source=0");
  EXPECT_EQ(not_yet.offer(), "req#1: end cancelled; req#1: release");
  EXPECT_EQ(not_yet.offer(key(2)), "") << "that transfer only";
}

TEST(SourceBook, IsNotToldByAStrangerThatTheSidesDoNotFit) {
  const Cancel whole{key(), Rank(1), "not mine", true};
  Source source, early;
  source.offer();
  source.grant(0);
  EXPECT_EQ(source.hears(PartnerId(77), whole), "to 77: quiesced req#1 source=0");
  EXPECT_EQ(source.tell(ready(0, 8)), "req#1: post 1 to 0: 0/0 [0, 8)") << "somebody has granted it";
  early.grant(0);
  early.hears(PartnerId(77), whole);
  early.offer();
  EXPECT_EQ(early.book().open(), 1U);
}

TEST(SourceBook, LetsNobodyCancelAnEarlyGrantOfAnother) {
  Source source;
  source.grant(0);
  EXPECT_EQ(source.hears(PartnerId(77), Cancel{key(), Rank(0), "not mine"}), "to 77: quiesced req#1 source=0");
  EXPECT_EQ(source.book().early(), 1U);
}

TEST(SourceBook, RefusesWhatItCanNotRead) {
  Source stranger(false), source;
  EXPECT_EQ(stranger.grant(0),
            "to 200: failed req#1 source=0 reason=\"unsupported: the geometry is not known here: send it first\"");
  Grant grant = shapes::grant_of(*two_targets(), 0, {0, 8});
  grant.tables.clear();
  EXPECT_EQ(source.hears(target_partner(0), grant),
            "to 200: failed req#1 source=0 reason=\"invalid argument: 0 page tables of rank 0 do not fit the plan\"");
  grant = shapes::grant_of(*two_targets(), 2, {0, 8});
  EXPECT_EQ(source.hears(target_partner(0), grant),
            "to 200: failed req#1 source=0 reason=\"invalid argument: 1 page tables of rank 2 do not fit the plan\"");
  EXPECT_EQ(source.book().early(), 0U);
}

TEST(SourceBook, IsNotAskedWhatOnlySourcesSay) {
  Source source;
  source.offer();
  source.grant(0);
  for (const Message& message :
       std::vector<Message>{Accepted{key(), Rank(0)}, Quiesced{key(), Rank(0)}, Failed{key(), Rank(0), Code::io, "?"}})
    EXPECT_EQ(source.hears(target_partner(0), message), "");
  EXPECT_EQ(source.book().open(), 1U);
}

TEST(SourceBook, GivesUpEarlyGrantsWhenTheirTimeIsUp) {
  Source source;
  source.grant(0, key(), 5s, 2s);
  source.grant(1, key(), 5s, 3s);
  EXPECT_EQ(source.book().deadline(), 7s);
  EXPECT_EQ(source.time(6s), "");
  EXPECT_EQ(source.time(7s), "to 200: failed req#1 source=0 reason=\"deadline: it was never offered here\"");
  EXPECT_EQ(source.book().early(), 1U);
  EXPECT_EQ(source.book().deadline(), 8s);
  source.time(8s);
  EXPECT_EQ(source.book().early(), 0U);
  EXPECT_EQ(source.book().deadline(), kNever);
}

TEST(SourceBook, KeepsAsManyEarlyGrantsAsItMayAndNoMore) {
  Source source;
  Grant grant = shapes::grant_of(*two_targets(), 0, {0, 8});
  constexpr std::uint64_t kEach = SourceBook::kEarly / SourceBook::kShare;
  const auto fill = [&](PartnerId partner, std::uint64_t first) {
    for (std::uint64_t i = 0; i < kEach; ++i) {
      grant.key.epoch = Epoch(first + i);
      source.hears(partner, grant);
    }
  };
  fill(target_partner(0), 0);
  EXPECT_EQ(source.book().early(), kEach);
  EXPECT_EQ(source.grant(0, key(9998)),
            "to 200: failed req#9998 source=0 reason=\"exhausted: 512 grants of this decode rank wait here for "
            "transfers that nobody has offered, the most\"");
  EXPECT_EQ(source.grant(1, key(9998)), "to 201: accepted req#9998 source=0") << "a partner fills its own share only";
  EXPECT_EQ(source.cancel(1, key(9998)), "to 201: quiesced req#9998 source=0");
  for (std::uint64_t other = 1; other < SourceBook::kShare; ++other) fill(PartnerId(500 + other), other * kEach);
  EXPECT_EQ(source.book().early(), SourceBook::kEarly);
  EXPECT_EQ(source.grant(1, key(9999)),
            "to 201: failed req#9999 source=0 reason=\"exhausted: 4096 grants of all decode ranks wait here for "
            "transfers that nobody has offered, the most\"");
  EXPECT_EQ(source.grant(0, key(7)), "to 200: accepted req#7 source=0") << "that one is here";
  EXPECT_EQ(source.offer(key(7)), "to 200: accepted req#7 source=0");
  EXPECT_EQ(source.grant(1, key(9999)), "to 201: accepted req#9999 source=0") << "there is room again";
  EXPECT_EQ(source.grant(0, key(3)), "to 200: accepted req#3 source=0");
  EXPECT_EQ(source.gone(target_partner(0)), "") << "rank 1 may grant req#7 still";
  EXPECT_EQ(source.book().early(), SourceBook::kEarly - kEach + 1) << "that of rank 1, and all of the others";
}

TEST(SourceBook, CountsPagesOfEarlyGrantsAndHasRoomForOneOfAnySize) {
  Source source;
  Grant grant = shapes::grant_of(*two_targets(), 0, {0, 8});
  ASSERT_FALSE(grant.tables.empty());
  grant.tables[0].pages.assign(SourceBook::kEarlyPages / SourceBook::kShare + 1, kNoPage);
  grant.key.epoch = Epoch(1);
  EXPECT_EQ(source.hears(target_partner(0), grant), "to 200: accepted req#1 source=0");
  EXPECT_THAT(source.grant(0, key(2)), testing::HasSubstr("pages of grants of this decode rank wait here"));
  EXPECT_EQ(source.grant(1, key(2)), "to 201: accepted req#2 source=0");
}

TEST(SourceBook, LosesOnlyWhatThePartnerThatIsGoneHad) {
  Source source;
  source.grant(0);
  source.grant(1);
  EXPECT_EQ(source.gone(target_partner(0)), "");
  EXPECT_EQ(source.book().early(), 1U);
  source.offer();
  source.offer(key(2));
  source.grant(0, key(2));
  source.grant(1, key(2));
  EXPECT_EQ(source.gone(target_partner(0)), "");
  EXPECT_EQ(source.tell(ready(0, 8), key(2)), "req#2: post 1 to 1: 0/0 [0, 8)");
  EXPECT_EQ(source.tell(ready(0, 8)), "req#1: post 1 to 1: 0/0 [0, 8)");
}

TEST(SourceBook, TellsTimeOnlyToThoseWhoseTimeItIs) {
  Source source;
  source.offer(key(1), 0s);
  source.offer(key(2), 5s);
  EXPECT_EQ(source.book().deadline(), 10s);
  EXPECT_EQ(source.time(10s), "req#1: end failed; req#1: release");
  EXPECT_EQ(source.book().open(), 1U);
  EXPECT_EQ(source.book().deadline(), 15s);
}

TEST(SourceBook, RemembersTheTransfersThatEndedLast) {
  Source source;
  const auto end = [&](std::uint64_t epoch) {
    source.offer(key(epoch));
    source.tell(Sender::CancelAsked{"enough"}, key(epoch));
  };
  for (std::uint64_t epoch = 0; epoch < SourceBook::kRemembered; ++epoch) end(epoch);
  EXPECT_EQ(source.grant(0, key(0)), "to 200: failed req#0 source=0 reason=\"cancelled: enough\"");
  end(SourceBook::kRemembered);
  EXPECT_EQ(source.grant(0, key(0)), "to 200: accepted req#0 source=0") << "forgotten: it waits for its time, at most";
  EXPECT_EQ(source.grant(0, key(1)), "to 200: failed req#1 source=0 reason=\"cancelled: enough\"");
}

// ---- of targets ----

class Target {
 public:
  std::string begin(const TransferKey& name = key(), Instant now = 0s, bool can_revoke = false) {
    ReceiverJob job = receiver_job(two_sources(), 0, {0, 8}, can_revoke);
    job.key = name;
    return did([&](auto& actions) {
      const auto ok = book_.begin(job, now, actions);
      EXPECT_TRUE(ok) << ok.error().message;
    });
  }
  std::string hears(PartnerId from, const Message& message, Instant now = 0s) {
    return did([&](auto& actions) { book_.message(from, message, now, actions); });
  }
  std::string notice(PartnerId from, Tag tag, const Progress& progress) {
    return did([&](auto& actions) { book_.notice(from, tag, encode_progress(progress), 0s, actions); });
  }
  std::string notice(PartnerId from, Tag tag, const std::vector<std::byte>& bytes) {
    return did([&](auto& actions) { book_.notice(from, tag, bytes, 0s, actions); });
  }
  std::string gone(PartnerId partner) {
    return did([&](auto& actions) { book_.gone(partner, lost(), 0s, actions); });
  }
  std::string cut_off(PartnerId partner) {
    return did([&](auto& actions) { book_.cut_off(partner, 0s, actions); });
  }
  std::string cancel(const TransferKey& name = key()) {
    return did([&](auto& actions) { book_.cancel(name, "the client left", 0s, actions); });
  }
  std::string time(Instant now) {
    return did([&](auto& actions) { book_.time(now, actions); });
  }
  // Tag of source rank s.
  Tag tag(std::uint64_t source, const TransferKey& name = key()) const {
    return Tag(book_.find(name)->job().first_tag.value + source);
  }
  TargetBook& book() { return book_; }

 private:
  template <class What>
  std::string did(What what) {
    std::vector<TargetBook::Action> actions;
    what(actions);
    return said(actions);
  }
  TargetBook book_;
};

Progress all(bool last = true) { return {{{{0, LayerId(0)}, Bytes(32)}, {{0, LayerId(1)}, Bytes(32)}}, last, {}}; }

TEST(TargetBook, GrantsEverySourceUnderATagOfItsOwn) {
  Target target;
  EXPECT_EQ(target.begin(),
            "req#1: admit 0 tag 1; to 100: grant req#1 target=0 tokens=[0, 8) tag=1; "
            "req#1: admit 1 tag 2; to 101: grant req#1 target=0 tokens=[0, 8) tag=2");
  target.begin(key(2));
  EXPECT_GT(target.tag(0, key(2)), target.tag(1));
  std::vector<TargetBook::Action> actions;
  EXPECT_TRUE(says(target.book().begin(receiver_job(two_sources(), 0, {0, 8}), 0s, actions),
                   "transfer req#1 is open: another attempt needs another epoch"));
  EXPECT_TRUE(actions.empty());
}

TEST(TargetBook, HandsNoticesToTheTransferOfTheirTag) {
  Target target;
  target.begin();
  target.begin(key(2));
  EXPECT_EQ(target.notice(source_partner(0), target.tag(0, key(2)), all()), "");
  EXPECT_EQ(target.notice(source_partner(1), target.tag(1), all()), "");
  EXPECT_EQ(target.notice(source_partner(1), target.tag(1, key(2)), all()),
            "req#2: publish 0; req#2: publish 1; req#2: end landed; req#2: release");
  EXPECT_EQ(target.book().open(), 1U);
  EXPECT_EQ(target.book().find(key(2)), nullptr);
  EXPECT_EQ(target.notice(source_partner(0), target.tag(0), all()),
            "req#1: publish 0; req#1: publish 1; req#1: end landed; req#1: release");
}

TEST(TargetBook, BelievesNobodyWhoSpeaksForAnother) {
  Target target;
  target.begin();
  EXPECT_EQ(target.notice(source_partner(1), target.tag(0), all()), "") << "the tag of rank 0";
  EXPECT_EQ(target.notice(source_partner(0), Tag(0), all()), "");
  EXPECT_EQ(target.notice(source_partner(0), Tag(target.tag(1).value + 1), all()), "");
  for (const Message& message :
       std::vector<Message>{Accepted{key(), Rank(0)}, Quiesced{key(), Rank(0)}, Failed{key(), Rank(0), Code::io, "?"},
                            Quiesced{key(), Rank(2)}, Quiesced{key(7), Rank(1)}})
    EXPECT_EQ(target.hears(source_partner(1), message), "") << to_string(message);
  EXPECT_EQ(target.hears(PartnerId(77), Quiesced{key(), Rank(0)}), "");
  EXPECT_EQ(target.gone(PartnerId(77)), "");
  EXPECT_EQ(target.cut_off(PartnerId(77)), "");
  ASSERT_NE(target.book().find(key()), nullptr);
  EXPECT_EQ(target.book().find(key())->state(), Receiver::State::open);
  EXPECT_EQ(target.book().find(key())->covered(), Bytes(0));
  EXPECT_EQ(target.time(200ms),
            "to 100: grant req#1 target=0 tokens=[0, 8) tag=1; to 101: grant req#1 target=0 tokens=[0, 8) tag=2")
      << "nor was an answer counted";
}

TEST(TargetBook, FailsATransferOnANoticeThatCanNotBeRead) {
  Target target;
  target.begin();
  target.begin(key(2));
  EXPECT_EQ(target.notice(source_partner(0), target.tag(0), std::vector<std::byte>(3)),
            "to 100: cancel req#1 target=0 reason=\"prefill rank 0: a progress notice of 3 B: its head alone has 8\"; "
            "to 101: cancel req#1 target=0 reason=\"prefill rank 0: a progress notice of 3 B: its head alone has 8\"");
  EXPECT_EQ(target.book().find(key(2))->state(), Receiver::State::open);
}

TEST(TargetBook, ForgetsATransferOnlyWhenItsPagesAreReleased) {
  Target target;
  target.begin();
  target.cancel();
  target.hears(source_partner(0), Quiesced{key(), Rank(0)});
  EXPECT_EQ(target.book().open(), 1U);
  EXPECT_EQ(target.time(1s), "to 101: cancel req#1 target=0 reason=\"the client left\"; req#1: fence 1; req#1: end cancelled");
  EXPECT_EQ(target.book().open(), 1U) << "quarantined";
  EXPECT_EQ(target.cut_off(source_partner(1)), "req#1: release");
  EXPECT_EQ(target.book().open(), 0U);
  EXPECT_EQ(target.book().deadline(), kNever);
  EXPECT_EQ(target.cancel(), "") << "of what is over";
}

TEST(TargetBook, LosesOnlyTheTransfersOfThePartnerThatIsGone) {
  Target target;
  target.begin();
  ReceiverJob job = receiver_job(two_sources(), 0, {0, 8});
  job.key = key(1, "other");
  job.sources[1] = PartnerId(500);
  std::vector<TargetBook::Action> actions;
  ASSERT_TRUE(target.book().begin(job, 0s, actions));
  target.gone(PartnerId(500));
  EXPECT_EQ(target.book().find(key())->state(), Receiver::State::open);
  EXPECT_EQ(target.book().find(job.key)->state(), Receiver::State::ending);
}

TEST(TargetBook, CutsAReasonThatIsTooLongForTheWire) {
  Target target;
  target.begin();
  std::vector<TargetBook::Action> actions;
  target.book().cancel(key(), std::string(5000, 'x'), 0s, actions);
  ASSERT_EQ(actions.size(), 2U);
  EXPECT_EQ(std::get<Cancel>(std::get<SendTo>(actions[0]).message).reason.size(), kMaxReason);
}

}  // namespace
}  // namespace kvloom
