// cases_test.cc: what broke others in time, as tests of the session's machines.  The numbers are those of our list of cases.
// Cases 1 to 16 stand with plans and bindings (bind/cases_test.cc). That a notice follows its bytes (23) is a law of transports.
#include <gtest/gtest.h>

#include <numeric>

#include "kvloom/session/source_book.h"
#include "kvloom/session/target_book.h"
#include "tests/shapes/transfers.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using shapes::granted;
using shapes::key;
using shapes::only;
using shapes::receiver_job;
using shapes::sender_job;
using shapes::shared_plan;
using shapes::source_partner;
using shapes::target_partner;
using Source = shapes::Driven<Sender>;
using Target = shapes::Driven<Receiver>;

// Of 8 tokens a head owes 32 B a layer, of two layers.
const shapes::SharedPlan& pair_of(const std::string& from, const std::string& to) {
  static std::map<std::string, shapes::SharedPlan> plans;
  shapes::SharedPlan& plan = plans[from + " " + to];
  if (plan == nullptr) plan = shared_plan(shapes::gqa(2, 2), from, to);
  return plan;
}
Source source(SessionLimits limits = {}, bool has_payload = false) {
  return Source(Sender(sender_job(0, limits, has_payload), 0s));
}
Target target(const shapes::SharedPlan& plan, bool can_revoke = false) {
  Target out(Receiver::make(receiver_job(plan, 0, {0, 8}, can_revoke)).value());
  out.on(Receiver::Begin{});
  return out;
}
Sender::Ready ready(std::int32_t layer, std::int64_t tokens) { return {LayerId(layer), tokens}; }
Sender::Posted done(std::uint64_t id) { return {SendId(id), {}}; }
Error lost() { return {Code::unavailable, Scope::peer, "the connection is lost"}; }
Sender::CancelFrom cancel_from(std::int32_t rank) { return {target_partner(rank), Rank(rank), "aborted"}; }

Progress landed(const std::vector<std::pair<std::int32_t, std::int64_t>>& layers, bool last = false) {
  Progress out;
  for (const auto& [layer, bytes] : layers) out.parts.push_back({{0, LayerId(layer)}, Bytes(bytes)});
  out.last = last;
  return out;
}
Receiver::SourceProgress from(std::int32_t rank, Progress progress) { return {Rank(rank), std::move(progress)}; }
Progress whole() { return landed({{0, 32}, {1, 32}}, true); }
Error why(const Target& target) { return only<Receiver::End>(target.did()).at(0).why; }

// Tokens of a layer that were posted to a rank, each chunk where the one before ended.
TokenRange posted(const std::vector<Sender::Post>& posts, std::int32_t rank, std::int32_t layer) {
  TokenRange out{-1, -1};
  for (const Sender::Post& post : posts)
    for (const PostPart& part : post.parts) {
      if (post.target != Rank(rank) || part.layer.layer != LayerId(layer)) continue;
      if (out.begin < 0) out = {part.chunk.begin, part.chunk.begin};
      EXPECT_EQ(part.chunk.begin, out.end);
      out.end = part.chunk.end;
    }
  return out;
}

// ---- streaming ----

TEST(Cases, Case17_APrefixThatIsSentEarlyAndItsTailAreAllTokensOnce) {
  shapes::Transfer transfer(shared_plan(shapes::mla(2), "tp=1", "tp=8,dcp=8:stripe=1"), {0, 4196});
  transfer.grant_all();
  transfer.ready_all(4096);
  transfer.complete_all();
  for (std::int32_t t = 0; t < 8; ++t) EXPECT_EQ(transfer.target(t).machine().covered(), Bytes(2 * 2 * 512));
  transfer.ready_all(4196);
  transfer.complete_all();
  EXPECT_TRUE(transfer.landed());
  Bytes sum;
  for (std::int32_t t = 0; t < 8; ++t) sum += transfer.target(t).machine().covered();
  EXPECT_EQ(sum, Bytes(4196 * 2 * 2));
  std::vector<Sender::Post> posts;
  for (const auto& [rank, post] : transfer.posts()) posts.push_back(post);
  for (std::int32_t t = 0; t < 8; ++t) EXPECT_EQ(posted(posts, t, 1), (TokenRange{0, 4196}));
}

TEST(Cases, Case18_TheLastChunkIsTheOneWithTheLastToken) {
  // Prompt 10, chunks of 4, a lookahead of 3: the engine counts 13 and the transfer has 10.
  const auto plan = shared_plan(shapes::mla(1), "tp=1,page=1", "tp=1,page=1");
  Source sender = source();
  sender.on(granted(plan, 0, {0, 10}));
  EXPECT_EQ(sender.on(ready(0, 4)), "post 1 to 0: 0/0 [0, 4)");
  EXPECT_EQ(sender.on(ready(0, 8)), "post 2 to 0: 0/0 [4, 8)");
  EXPECT_EQ(sender.on(ready(0, 13)), "post 3 to 0: 0/0 [8, 10) last");
  EXPECT_EQ(sender.on(ready(0, 14)), "");
}

TEST(Cases, Case19_TheTargetDoesNotCountTheSourcesChunks) {
  // A prompt of 4000 in chunks of 2000; or 3000 of it were cached at the source.
  for (const std::vector<std::int64_t>& chunks :
       {std::vector<std::int64_t>{2000, 4000}, std::vector<std::int64_t>{3000, 4000}, std::vector<std::int64_t>{4000}}) {
    shapes::Transfer transfer(shared_plan(shapes::mla(2), "tp=1", "tp=2,dcp=2"), {0, 4000});
    transfer.grant_all();
    for (const std::int64_t end : chunks) {
      EXPECT_FALSE(transfer.landed());
      transfer.ready_all(end);
      transfer.complete_all();
    }
    EXPECT_TRUE(transfer.landed()) << chunks.size() << " chunks";
  }
}

TEST(Cases, Case20_TheSourceBeginsAtThePrefixAndANewAttemptHasItsOwn) {
  Source sender = source();
  sender.on(granted(pair_of("tp=1", "tp=1"), 0, {5, 8}));
  sender.on(ready(0, 3));
  EXPECT_EQ(sender.count<Sender::Post>(), 0U) << "the target has these";
  EXPECT_EQ(sender.on(ready(0, 8)), "post 1 to 0: 0/0 [5, 8)");
  // The prefix could not be loaded after all: the next attempt asks for all.
  SourceBook book{Rank(0)};
  book.know(pair_of("tp=1", "tp=1"), digest_of(*pair_of("tp=1", "tp=1")));
  std::vector<SourceBook::Action> actions;
  for (const auto& [epoch, prefix] : std::vector<std::pair<std::uint64_t, std::int64_t>>{{1, 5}, {2, 0}}) {
    SenderJob job = sender_job(0);
    Grant grant = shapes::grant_of(*pair_of("tp=1", "tp=1"), 0, {prefix, 8});
    job.key = grant.key = key(epoch);
    ASSERT_TRUE(book.offer(job, 0s, actions));
    book.message(target_partner(0), grant, 0s, actions);
  }
  book.message(target_partner(0), Cancel{key(1), Rank(0), "the prefix is lost"}, 0s, actions);
  actions.clear();
  for (const std::uint64_t epoch : {1U, 2U}) book.tell(key(epoch), ready(0, 8), 0s, actions);
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(shapes::text(std::get<Sender::Post>(std::get<SourceBook::Keyed>(actions[0]).action)), "post 1 to 0: 0/0 [0, 8)");
}

TEST(Cases, Case21_SuccessAfterAPageOfManyIsNotBelieved) {
  const auto plan = shared_plan(shapes::mla(1), "tp=1,page=1", "tp=1,page=1");
  Target receiver(Receiver::make(receiver_job(plan, 0, {0, 4453})).value());
  receiver.on(Receiver::Begin{});
  EXPECT_EQ(receiver.on(from(0, landed({{0, 2}}, true))), "end failed; release");
  EXPECT_EQ(why(receiver).message, "every source says that it is done, but there is missing: prefill rank 0: 1 layers, 8904 B");
}

TEST(Cases, Case22_ALayerIsThereAfterAllItsChunksOfAllSources) {
  shapes::Transfer transfer(pair_of("tp=2", "tp=1"), {0, 8});
  transfer.grant(0);
  const Target& receiver = transfer.target(0);
  for (const std::int32_t s : {0, 1}) transfer.ready(s, LayerId(0), 5);
  transfer.complete_all();
  transfer.ready(0, LayerId(0), 8);
  transfer.complete_all();
  EXPECT_EQ(receiver.count<Receiver::Publish>(), 0U) << "a chunk of rank 1 is missing";
  transfer.ready(1, LayerId(1), 8);
  transfer.ready(0, LayerId(1), 8);
  transfer.complete_all();
  EXPECT_EQ(receiver.count<Receiver::Publish>(), 0U) << "layer 1 is there, and waits for layer 0";
  transfer.ready(1, LayerId(0), 8);
  transfer.complete_all();
  EXPECT_EQ(receiver.count<Receiver::Publish>(), 2U);
  EXPECT_TRUE(transfer.landed());
}

TEST(Cases, Case24_ARankThatOwnsNoneIsToldToo) {
  // Three tokens over four ranks.
  shapes::Transfer transfer(shared_plan(shapes::mla(1), "tp=1", "dcp=4:stripe=1"), {0, 3});
  transfer.grant_all();
  EXPECT_EQ(transfer.target(3).machine().expected(), Bytes(0));
  EXPECT_EQ(transfer.target(3).machine().state(), Receiver::State::open) << "it waits for the source's word";
  transfer.ready_all(3);
  transfer.complete_all();
  EXPECT_TRUE(transfer.landed());
}

TEST(Cases, Case24_ALostFailureIsFoundOutByAskingAgain) {
  // The source has failed, and its message is lost: the grant that is sent again finds out, long before any time is up.
  SourceBook book{Rank(0)};
  std::vector<SourceBook::Action> actions;
  const auto& plan = pair_of("tp=1", "tp=1");
  book.know(plan, digest_of(*plan));
  ASSERT_TRUE(book.offer(sender_job(0), 0s, actions));
  book.tell(key(), Sender::CancelAsked{"no memory"}, 0s, actions);
  Target receiver = target(plan);
  ASSERT_EQ(receiver.on(Receiver::Time{}, 200ms), "grant 0");
  actions.clear();
  book.message(target_partner(0), only<Receiver::SendGrant>(receiver.last())[0].grant, 0s, actions);
  ASSERT_EQ(actions.size(), 1U);
  const auto failed = std::get<Failed>(std::get<SendTo>(actions[0]).message);
  EXPECT_EQ(receiver.on(Receiver::SourceFailed{failed.source, {failed.code, Scope::transfer, failed.reason}}, 200ms), "cancel 0");
  EXPECT_EQ(receiver.on(Receiver::SourceQuiesced{Rank(0)}, 200ms), "end failed; release");
}

// ---- lifetimes ----

TEST(Cases, Case25_PagesOfAnAbortedTransferAreKeptWhileAWriteCanLand) {
  ReceiverJob job = receiver_job(pair_of("tp=1", "tp=1"), 0, {0, 8});
  job.tables[0] = {{PageId(3), PageId(4)}, 5};
  Target receiver(Receiver::make(job).value());
  receiver.on(Receiver::Begin{});
  Source sender = source();
  sender.on(granted(pair_of("tp=1", "tp=1"), 0, {0, 8}));
  sender.on(ready(0, 8));
  EXPECT_EQ(receiver.on(Receiver::CancelAsked{"aborted"}), "cancel 0");
  EXPECT_EQ(sender.on(cancel_from(0)), "release layer 1") << "a write of layer 0 is open: pages 3 and 4 are still the transfer's";
  EXPECT_EQ(sender.on(ready(1, 8)), "") << "and no other begins";
  EXPECT_EQ(receiver.on(Receiver::Time{}, 1s), "cancel 0; fence 0; end cancelled") << "the engine is told, without the pages";
  EXPECT_EQ(sender.on(done(1)), "quiesced to 200; release layer 0; end cancelled; release");
  EXPECT_EQ(receiver.on(Receiver::SourceQuiesced{Rank(0)}, 2s), "release");
}

TEST(Cases, Case26_BytesThatComeAfterTheTimeAreNotTold) {
  Target receiver = target(pair_of("tp=2", "tp=1"));
  receiver.on(from(0, whole()));
  EXPECT_EQ(receiver.on(Receiver::Time{}, 10s), "cancel 1");
  EXPECT_EQ(receiver.on(Receiver::Time{}, 11s), "cancel 1; fence 1; end failed");
  EXPECT_EQ(receiver.on(from(1, landed({{0, 32}, {1, 32}})), 12s), "") << "all is there: too late";
  EXPECT_EQ(receiver.on(from(1, landed({}, true)), 13s), "release") << "the pages, not a second answer";
  EXPECT_EQ(receiver.count<Receiver::Publish>(), 0U);
  EXPECT_EQ(receiver.count<Receiver::End>(), 1U);
}

TEST(Cases, Case27_OnePartFailsAndTheOtherStillWrites) {
  Target receiver = target(pair_of("tp=2", "tp=1"));
  receiver.on(Receiver::SourceFailed{Rank(0), lost()});
  EXPECT_EQ(receiver.on(Receiver::SourceQuiesced{Rank(0)}), "");
  EXPECT_EQ(receiver.on(from(1, landed({{0, 32}}))), "") << "rank 1 still writes";
  EXPECT_EQ(receiver.on(Receiver::SourceQuiesced{Rank(1)}), "end failed; release");
  EXPECT_EQ(receiver.on(Receiver::SourceFailed{Rank(1), lost()}), "");
  EXPECT_EQ(receiver.count<Receiver::End>(), 1U);

  Source sender = source();
  for (const std::int32_t t : {0, 1}) sender.on(granted(pair_of("tp=1", "tp=2"), t, {0, 8}));
  sender.on(ready(0, 8));
  EXPECT_EQ(sender.on(Sender::Posted{SendId(1), tl::unexpected(lost())}), "failed to 200");
  EXPECT_EQ(sender.on(Sender::CancelAsked{"a part has failed"}), "failed to 201") << "post 2 reads the pages";
  EXPECT_EQ(sender.on(done(2)), "end failed; release");
}

TEST(Cases, Case28_AGrantAfterTheSourcesTimePostsNothing) {
  const auto& plan = pair_of("tp=1", "tp=1");
  SourceBook book{Rank(0)};
  std::vector<SourceBook::Action> actions;
  book.know(plan, digest_of(*plan));
  ASSERT_TRUE(book.offer(sender_job(0), 0s, actions));
  book.tell(key(), ready(0, 8), 1s, actions);
  book.time(10s, actions);
  ASSERT_EQ(actions.size(), 2U);
  EXPECT_TRUE(std::holds_alternative<Sender::Release>(std::get<SourceBook::Keyed>(actions[1]).action));
  actions.clear();
  book.message(target_partner(0), shapes::grant_of(*plan, 0, {0, 8}), 11s, actions);
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(to_string(std::get<SendTo>(actions[0]).message),
            "failed req#1 source=0 reason=\"deadline: time is up; no decode rank has granted it\"");
}

TEST(Cases, Case29_OnlyDurationsCrossHosts) {
  // The source's clock is 30 years ahead.
  const Instant ahead = 24h * 365 * 30;
  Target receiver(Receiver::make(receiver_job(pair_of("tp=1", "tp=1"), 0, {0, 8})).value());
  receiver.on(Receiver::Begin{}, 77s);
  const Grant grant = only<Receiver::SendGrant>(receiver.last()).at(0).grant;
  EXPECT_EQ(grant.time_left, 10s);
  SenderJob job = sender_job(0);
  job.time = 1h;
  Source sender(Sender(job, ahead));
  sender.on(Sender::Granted{target_partner(0), std::make_shared<const Grant>(grant), pair_of("tp=1", "tp=1")}, ahead + 5s);
  EXPECT_EQ(sender.machine().deadline(), ahead + 15s);
  EXPECT_EQ(receiver.on(Receiver::Time{}, 77200ms), "grant 0");
  EXPECT_EQ(only<Receiver::SendGrant>(receiver.last()).at(0).grant.time_left, 9800ms);
}

TEST(Cases, Case30_APreemptedSourceStaysUntilItsLastQueuedWriteIsOver) {
  SessionLimits limits;
  limits.join = Bytes(0);
  const auto plan = shared_plan(shapes::gqa(2, 3), "tp=1", "tp=1");
  Source sender = source(limits);
  sender.on(granted(plan, 0, {0, 9}));
  for (const std::int32_t layer : {0, 1, 2}) sender.on(ready(layer, 8));
  ASSERT_EQ(sender.count<Sender::Post>(), 3U);
  EXPECT_EQ(sender.on(Sender::CancelAsked{"preempted"}), "failed to 200");
  EXPECT_EQ(sender.on(done(2)), "");
  EXPECT_EQ(sender.on(Sender::Posted{SendId(3), tl::unexpected(lost())}), "");
  EXPECT_EQ(sender.on(done(1)), "end cancelled; release") << "the fence of the caller ends here";
}

// Every order of the events, each order on a new machine.
template <class Event, class Check>
void in_all_orders(const std::vector<Event>& events, Check check) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  do {
    std::vector<Event> ordered;
    for (const std::size_t i : order) ordered.push_back(events[i]);
    check(ordered);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Cases, Case31_AnAbortWithBothEndsPendingReleasesOnceInAllOrders) {
  in_all_orders(std::vector<Receiver::Event>{Receiver::CancelAsked{"aborted"}, Receiver::SourceFailed{Rank(0), lost()},
                                             Receiver::SourceQuiesced{Rank(0)}, from(1, whole()),
                                             Receiver::SourceGone{Rank(1), lost()}, Receiver::SourceQuiesced{Rank(1)}},
                [](const std::vector<Receiver::Event>& events) {
                  for (const bool can_revoke : {false, true}) {
                    Target receiver = target(pair_of("tp=2", "tp=1"), can_revoke);
                    for (const auto& event : events) receiver.on(event);
                    EXPECT_EQ(receiver.count<Receiver::End>(), 1U);
                    EXPECT_EQ(receiver.count<Receiver::Release>(), 1U);
                  }
                });
  in_all_orders(std::vector<Sender::Event>{Sender::CancelAsked{"aborted"}, cancel_from(0), cancel_from(1),
                                           Sender::Gone{target_partner(1), lost()}, done(1),
                                           Sender::Posted{SendId(2), tl::unexpected(lost())}},
                [](const std::vector<Sender::Event>& events) {
                  Source sender = source();
                  for (const std::int32_t t : {0, 1}) sender.on(granted(pair_of("tp=1", "tp=2"), t, {0, 8}));
                  sender.on(ready(0, 8));
                  for (const auto& event : events) sender.on(event);
                  EXPECT_EQ(sender.count<Sender::End>(), 1U);
                  EXPECT_EQ(sender.count<Sender::Release>(), 1U);
                });
}

TEST(Cases, Case32_APeerThatIsSilentForEverFailsTheTransferInEveryGroup) {
  const auto plan = shared_plan(shapes::dsa(), "tp=1", "tp=1");
  Target receiver(Receiver::make(receiver_job(plan, 0, {0, 8})).value());
  receiver.on(Receiver::Begin{});
  while (receiver.count<Receiver::End>() == 0) {
    ASSERT_LE(receiver.machine().deadline(), 11s) << "time and grace";
    receiver.on(Receiver::Time{}, receiver.machine().deadline());
  }
  EXPECT_EQ(why(receiver).message, "time is up; missing: prefill rank 0: 8 layers, 192 B") << "5 of one group, 3 of the other";
  EXPECT_EQ(receiver.count<Receiver::Publish>(), 0U);
  EXPECT_EQ(receiver.count<Receiver::Release>(), 0U) << "quarantined: it may wake up and write";
}

TEST(Cases, Case33_PagesThatAreReadAreNotEvicted) {
  const auto& plan = pair_of("tp=1", "tp=1");
  Source evicted = source(), late = source();
  for (Source* sender : {&evicted, &late}) {
    sender->on(granted(plan, 0, {0, 8}));
    sender->on(ready(0, 8));
  }
  EXPECT_EQ(evicted.on(Sender::CancelAsked{"evicted"}), "failed to 200");
  EXPECT_EQ(late.on(Sender::Time{}, 10s), "failed to 200");
  EXPECT_EQ(late.on(Sender::Time{}, 11s), "fence 200");
  for (Source* sender : {&evicted, &late}) {
    EXPECT_EQ(sender->count<Sender::Release>(), 0U) << "a post reads them";
    sender->on(done(1), 12s);
    EXPECT_EQ(sender->count<Sender::Release>(), 1U);
  }
}

TEST(Cases, Case34_AnAbortInAnyStateLeavesNothingBehind) {
  const auto& plan = pair_of("tp=1", "tp=2");
  // What an engine does, in order; the abort comes after the n-th step.
  const std::vector<Sender::Event> sends = {
      granted(plan, 0, {0, 8}), ready(0, 8), granted(plan, 1, {0, 8}), ready(1, 4), done(1), Sender::CancelAsked{"first"}};
  for (std::size_t steps = 0; steps <= sends.size(); ++steps)
    for (const Sender::Event& abort : std::vector<Sender::Event>{Sender::CancelAsked{"aborted"}, Sender::Time{}}) {
      Source sender = source();
      for (std::size_t i = 0; i < steps; ++i) sender.on(sends[i]);
      if (std::holds_alternative<Sender::CancelAsked>(abort) || sender.machine().deadline() <= 10s) sender.on(abort, 10s);
      for (const auto& post : only<Sender::Post>(std::vector(sender.did()))) sender.on(Sender::Posted{post.id, {}}, 10s);
      EXPECT_TRUE(sender.machine().terminal()) << "after " << steps;
      EXPECT_EQ(sender.count<Sender::End>(), 1U) << "after " << steps;
      EXPECT_EQ(sender.count<Sender::Release>(), 1U) << "after " << steps;
    }
  const std::vector<Receiver::Event> receives = {Receiver::SourceAccepted{Rank(0)}, from(0, landed({{0, 32}})),
                                                 from(1, landed({{0, 32}}, false)), Receiver::CancelAsked{"first"},
                                                 Receiver::Time{}};
  for (std::size_t steps = 0; steps <= receives.size(); ++steps)
    for (const bool can_revoke : {false, true}) {
      Target receiver = target(pair_of("tp=2", "tp=1"), can_revoke);
      for (std::size_t i = 0; i < steps; ++i) receiver.on(receives[i], i == 4 ? 1s : 0s);
      receiver.on(Receiver::CancelAsked{"aborted"}, 1s);
      for (const std::int32_t s : {0, 1}) receiver.on(Receiver::SourceQuiesced{Rank(s)}, 1s);
      EXPECT_TRUE(receiver.machine().terminal()) << "after " << steps;
      EXPECT_EQ(receiver.count<Receiver::End>(), 1U) << "after " << steps;
      EXPECT_EQ(receiver.count<Receiver::Release>(), 1U) << "after " << steps;
    }
}

TEST(Cases, Case35_LayersThatShareABufferAreReleasedOneByOne) {
  const auto& plan = pair_of("tp=1", "tp=2");
  Source sender = source();
  for (const std::int32_t t : {0, 1}) sender.on(granted(plan, t, {0, 8}));
  sender.on(ready(0, 8));
  EXPECT_EQ(sender.on(done(1)), "") << "rank 1 is slow: layer 1 must not be written over layer 0 yet";
  EXPECT_EQ(sender.on(done(2)), "release layer 0");
  EXPECT_EQ(sender.on(ready(1, 8)), "post 3 to 0: 0/1 [0, 8) last; post 4 to 1: 0/1 [0, 8) last");
  EXPECT_EQ(sender.on(done(4)), "");
  EXPECT_EQ(sender.on(done(3)), "release layer 1; end landed; release");
}

TEST(Cases, Case36_WhatIsSaidOfAFailedAttemptIsNothingToTheNext) {
  TargetBook book;
  std::vector<TargetBook::Action> actions;
  const auto begin = [&](std::uint64_t epoch) {
    ReceiverJob job = receiver_job(pair_of("tp=1", "tp=1"), 0, {0, 8});
    job.key = key(epoch);
    EXPECT_TRUE(book.begin(job, 0s, actions));
    return book.find(key(epoch))->job().first_tag;
  };
  const auto bytes = encode_progress(landed({{0, 64}, {1, 64}}, true));
  const Tag first = begin(1);
  book.message(source_partner(0), Failed{key(1), Rank(0), Code::io, "a broken card"}, 0s, actions);
  book.message(source_partner(0), Quiesced{key(1), Rank(0)}, 0s, actions);
  EXPECT_EQ(book.open(), 0U);
  const Tag second = begin(2);
  EXPECT_NE(first, second);
  actions.clear();
  book.notice(source_partner(0), first, bytes, 0s, actions);
  book.message(source_partner(0), Failed{key(1), Rank(0), Code::io, "a broken card"}, 0s, actions);
  book.message(source_partner(0), Quiesced{key(1), Rank(0)}, 0s, actions);
  EXPECT_TRUE(actions.empty());
  EXPECT_EQ(book.find(key(2))->covered(), Bytes(0));
  EXPECT_EQ(book.find(key(2))->state(), Receiver::State::open);
  book.notice(source_partner(0), second, bytes, 0s, actions);
  EXPECT_EQ(book.open(), 0U);
}

TEST(Cases, Case37_ALostPartnerCostsItsOwnTransfersOnly) {
  const auto& plan = pair_of("tp=1", "tp=1");
  SourceBook sources{Rank(0)};
  TargetBook targets;
  std::vector<SourceBook::Action> sent;
  std::vector<TargetBook::Action> received;
  sources.know(plan, digest_of(*plan));
  // Three instances, a transfer with each.
  for (std::uint64_t i = 0; i < 3; ++i) {
    SenderJob job = sender_job(0);
    Grant grant = shapes::grant_of(*plan, 0, {0, 8});
    job.key = grant.key = key(i);
    ASSERT_TRUE(sources.offer(job, 0s, sent));
    sources.message(PartnerId(i), grant, 0s, sent);
    ReceiverJob wanted = receiver_job(plan, 0, {0, 8});
    wanted.key = key(i);
    wanted.sources = {PartnerId(i)};
    ASSERT_TRUE(targets.begin(wanted, 0s, received));
  }
  sent.clear();
  sources.gone(PartnerId(1), lost(), 0s, sent);
  targets.gone(PartnerId(1), lost(), 0s, received);
  EXPECT_EQ(sources.open(), 2U);
  for (const std::uint64_t i : {0U, 2U}) EXPECT_EQ(targets.find(key(i))->state(), Receiver::State::open);
  EXPECT_EQ(targets.find(key(1))->state(), Receiver::State::ending);
  sent.clear();
  for (const std::uint64_t i : {0U, 1U, 2U}) sources.tell(key(i), ready(0, 8), 0s, sent);
  EXPECT_EQ(sent.size(), 2U) << "the others go on at once";
}

}  // namespace
}  // namespace kvloom
