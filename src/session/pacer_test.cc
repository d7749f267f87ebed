#include "kvloom/session/pacer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using namespace std::chrono_literals;

TransferKey key(int n) { return {fmt::format("req-{}", n), Epoch(1)}; }

Paced post(std::uint64_t to, std::uint64_t id, std::int64_t bytes, int transfer = 0) {
  return {PartnerId(to), key(transfer), SendId(id), Bytes(bytes), Instant(0)};
}

// Whatever may go at `now`, as "partner:id"; nothing is told as done.
std::vector<std::string> going(Pacer& pacer, Instant now = Instant(0)) {
  std::vector<std::string> out;
  while (const auto next = pacer.next(now)) out.push_back(fmt::format("{}:{}", next->to.value, next->id.value));
  return out;
}

using Words = std::vector<std::string>;

constexpr PaceLimits kUnlimited{Bytes(INT64_MAX), Bytes(INT64_MAX), 0, Bytes(0)};

// ---- the laws ----

// A pacer beside what is known of it from outside: queues that anybody can check, and a diary of all that went.
class Watched {
 public:
  explicit Watched(PaceLimits limits) : pacer_(limits) {}

  void push(PartnerId to, Bytes bytes, int transfer) {
    const Paced post{to, key(transfer), SendId(++ids_), bytes, now_};
    queues_[to].push_back(post);
    pacer_.push(post);
    largest_ = std::max(largest_, bytes);
  }
  void pass(Instant time) { now_ += time; }
  void done(std::size_t which) {
    if (flying_.empty()) return;
    const auto at = flying_.begin() + static_cast<std::ptrdiff_t>(which % flying_.size());
    pacer_.done(at->to, at->bytes);
    flying_.erase(at);
  }
  Expected<void> next() {
    note_rivals();
    const auto gone = pacer_.next(now_);
    if (!gone) return {};
    auto& queue = queues_[gone->to];
    if (queue.empty() || queue.front() != *gone) return fail(Code::invalid_argument, "{} was lost or overtaken", queue.size());
    queue.pop_front();
    if (gone->bytes > Bytes(0)) flying_.push_back(*gone);
    diary_.emplace_back(now_, gone->bytes);
    for (auto& [pair, rivalry] : rivals_) rivalry.count(pair, *gone);
    return {};
  }
  Expected<void> drop(PartnerId to, std::optional<int> transfer) {
    const auto taken = transfer ? pacer_.drop(to, key(*transfer)) : pacer_.drop(to);
    return check_taken(taken, [&](const Paced& post) { return post.to == to && (!transfer || post.key == key(*transfer)); });
  }
  Expected<void> drop(int transfer) {
    return check_taken(pacer_.drop(key(transfer)), [&](const Paced& post) { return post.key == key(transfer); });
  }

  // All that has to hold at any time.
  Expected<void> check() {
    note_rivals();
    std::size_t waiting = 0;
    for (const auto& [to, queue] : queues_) waiting += queue.size();
    if (pacer_.waiting() != waiting) return fail(Code::invalid_argument, "{} wait, not {}", waiting, pacer_.waiting());
    if (auto law = check_in_flight(); !law) return law;
    if (auto law = check_deadline(); !law) return law;
    for (const auto& [pair, rivalry] : rivals_)
      if (Bytes(rivalry.most - rivalry.least) > 2 * largest_)
        return fail(Code::invalid_argument, "{} and {} are {} B apart", pair.first.value, pair.second.value,
                    rivalry.most - rivalry.least);
    return {};
  }
  // Every window that begins and ends with a post, the tightest ones.
  Expected<void> check_rate() const {
    const PaceLimits& limits = pacer_.limits();
    if (limits.bytes_per_second == 0) return {};
    for (std::size_t a = 0; a < diary_.size(); ++a) {
      Bytes sum;
      for (std::size_t b = a; b < diary_.size(); ++b) {
        sum += diary_[b].second;
        const Wide allowed = Wide{(limits.burst + largest_).value} * 1'000'000'000 +
                             Wide{(diary_[b].first - diary_[a].first).count()} * limits.bytes_per_second;
        if (Wide{sum.value} * 1'000'000'000 > allowed)
          return fail(Code::invalid_argument, "{} B in {} ns", sum.value, (diary_[b].first - diary_[a].first).count());
      }
    }
    return {};
  }
  // With time and answers all of it goes, though nobody pushes any more.
  Expected<void> check_end() {
    for (int step = 0; pacer_.waiting() > 0; ++step) {
      if (step > 10'000) return fail(Code::invalid_argument, "{} posts hang", pacer_.waiting());
      if (pacer_.deadline() == kNever) done(0);
      if (pacer_.deadline() != kNever) now_ = std::max(now_, pacer_.deadline());
      if (auto law = next(); !law) return law;
      if (auto law = check(); !law) return law;
    }
    while (!flying_.empty()) done(0);
    if (pacer_.in_flight() != Bytes(0)) return fail(Code::invalid_argument, "{} B stay in flight", pacer_.in_flight().value);
    return {};
  }

 private:
  // Bytes of one partner minus bytes of another, since both may have a turn.
  struct Rivalry {
    std::int64_t apart = 0, least = 0, most = 0;
    void count(const std::pair<PartnerId, PartnerId>& pair, const Paced& gone) {
      if (gone.to == pair.first) apart += gone.bytes.value;
      if (gone.to == pair.second) apart -= gone.bytes.value;
      least = std::min(least, apart);
      most = std::max(most, apart);
    }
  };

  Bytes flying_to(PartnerId to) const {
    Bytes sum;
    for (const Paced& post : flying_)
      if (post.to == to) sum += post.bytes;
    return sum;
  }
  bool may_have_turn(PartnerId to) const {
    const auto at = queues_.find(to);
    if (at == queues_.end() || at->second.empty()) return false;
    const Bytes bytes = at->second.front().bytes, flying = flying_to(to);
    return bytes == Bytes(0) || flying == Bytes(0) || flying + bytes <= pacer_.limits().in_flight_each;
  }
  void note_rivals() {
    for (const auto& [a, queue_a] : queues_)
      for (const auto& [b, queue_b] : queues_) {
        if (a >= b) continue;
        if (may_have_turn(a) && may_have_turn(b))
          rivals_.try_emplace({a, b});
        else
          rivals_.erase({a, b});
      }
  }
  template <class Which>
  Expected<void> check_taken(const std::vector<Paced>& taken, const Which& which) {
    std::vector<Paced> wanted;
    for (auto& [to, queue] : queues_) {
      std::copy_if(queue.begin(), queue.end(), std::back_inserter(wanted), which);
      std::erase_if(queue, which);
    }
    note_rivals();
    if (taken != wanted) return fail(Code::invalid_argument, "{} were taken out, not {}", taken.size(), wanted.size());
    return {};
  }
  Expected<void> check_in_flight() const {
    const PaceLimits& limits = pacer_.limits();
    Bytes sum;
    for (const Paced& post : flying_) {
      sum += post.bytes;
      const Bytes each = flying_to(post.to);
      if (each > limits.in_flight_each && each != post.bytes)
        return fail(Code::invalid_argument, "{} B in flight to {}", each.value, post.to.value);
    }
    if (pacer_.in_flight() != sum) return fail(Code::invalid_argument, "{} B are in flight", sum.value);
    if (sum > limits.in_flight && flying_.size() > 1) return fail(Code::invalid_argument, "{} B in flight", sum.value);
    return {};
  }
  Expected<void> check_deadline() const {
    const Instant deadline = pacer_.deadline();
    Pacer then = pacer_, before = pacer_;
    if (deadline == kNever) {
      if (then.next(now_ + 1'000'000h)) return fail(Code::invalid_argument, "`never` has come");
      return {};
    }
    if (!then.next(deadline)) return fail(Code::invalid_argument, "nothing goes at {}", deadline.count());
    if (deadline > now_ && before.next(deadline - 1ns)) return fail(Code::invalid_argument, "before {}", deadline.count());
    return {};
  }

  Pacer pacer_;
  Instant now_{0};
  std::uint64_t ids_ = 0;
  Bytes largest_;
  std::map<PartnerId, std::deque<Paced>> queues_;
  std::vector<Paced> flying_;
  std::vector<std::pair<Instant, Bytes>> diary_;
  std::map<std::pair<PartnerId, PartnerId>, Rivalry> rivals_;
};

Expected<void> any_step(Watched& watched) {
  const PartnerId to(*rc::gen::inRange<std::uint64_t>(0, 4));
  const int transfer = *rc::gen::inRange(0, 3);
  switch (*rc::gen::weightedElement<int>({{6, 0}, {6, 1}, {3, 2}, {4, 3}, {1, 4}, {1, 5}, {1, 6}})) {
    case 0: watched.push(to, Bytes(*rc::gen::inRange<std::int64_t>(0, 80)), transfer); return {};
    case 1: return watched.next();
    case 2: watched.pass(*rc::gen::element<Instant>(0ns, 1ns, 3ns, 10ns, 900ns, 1us, 70ms, 20s)); return {};
    case 3: watched.done(*rc::gen::inRange<std::size_t>(0, 8)); return {};
    case 4: return watched.drop(to, transfer);
    case 5: return watched.drop(to, std::nullopt);
    default: return watched.drop(transfer);
  }
}

RC_GTEST_PROP(Pacer, KeepsItsLaws, ()) {
  PaceLimits limits;
  limits.in_flight = Bytes(*rc::gen::inRange<std::int64_t>(0, 200));
  limits.in_flight_each = Bytes(*rc::gen::inRange<std::int64_t>(0, 120));
  limits.bytes_per_second = *rc::gen::element<std::int64_t>(0, 1, 7, 1000, 1'000'000'000, 3'000'000'001, INT64_MAX);
  limits.burst = Bytes(*rc::gen::inRange<std::int64_t>(0, 100));
  Watched watched(limits);
  Expected<void> law;
  for (int steps = *rc::gen::inRange(0, 120); law && steps > 0; --steps) {
    law = any_step(watched);
    if (law) law = watched.check();
  }
  if (law) law = watched.check_end();
  if (law) law = watched.check_rate();
  if (!law) RC_FAIL(law.error().message);
}

// ---- cases ----

TEST(Pacer, GivesBackWhatWasPushed) {
  Pacer pacer;
  const Paced pushed{PartnerId(7), {"req-7", Epoch(2)}, SendId(3), Bytes(4096), 5ns};
  pacer.push(pushed);
  EXPECT_EQ(pacer.waiting(), 1u);
  EXPECT_EQ(pacer.next(6ns), pushed);
  EXPECT_EQ(pacer.next(6ns), std::nullopt);
  EXPECT_EQ(pacer.waiting(), 0u);
  EXPECT_EQ(pacer.in_flight(), Bytes(4096));
  pacer.done(PartnerId(7), Bytes(4096));
  EXPECT_EQ(pacer.in_flight(), Bytes(0));
}

TEST(Pacer, ServesPartnersInTurn) {
  Pacer pacer(kUnlimited);
  for (const std::uint64_t to : {1u, 2u, 3u})
    for (std::uint64_t id = 1; id <= 2; ++id) pacer.push(post(to, id, 10));
  EXPECT_EQ(going(pacer), (Words{"1:1", "2:1", "3:1", "1:2", "2:2", "3:2"}));
}

TEST(Pacer, SharesBytesAndNotPosts) {
  Pacer pacer(kUnlimited);
  for (std::uint64_t id = 1; id <= 2; ++id) pacer.push(post(1, id, 40));
  for (std::uint64_t id = 1; id <= 6; ++id) pacer.push(post(2, id, 10));
  EXPECT_EQ(going(pacer), (Words{"1:1", "2:1", "2:2", "2:3", "2:4", "1:2", "2:5", "2:6"}));
}

// From a common start the two are never further apart than one post.
RC_GTEST_PROP(Pacer, KeepsTwoThatStartTogetherWithinOnePost, ()) {
  Pacer pacer(kUnlimited);
  std::map<std::uint64_t, Wide> sent;
  const auto bytes = *rc::gen::container<std::vector<std::int64_t>>(60, rc::gen::inRange<std::int64_t>(1, 100));
  for (std::uint64_t id = 0; id < bytes.size(); ++id) pacer.push(post(1 + id % 2, id, bytes[id]));
  const std::int64_t largest = *std::max_element(bytes.begin(), bytes.end());
  for (int i = 0; i < 20; ++i) {
    const auto gone = pacer.next(Instant(0));
    RC_ASSERT(gone.has_value());
    sent[gone->to.value] += gone->bytes.value;
    const Wide apart = sent[1] > sent[2] ? sent[1] - sent[2] : sent[2] - sent[1];
    RC_ASSERT(static_cast<bool>(apart <= largest));
  }
}

TEST(Pacer, ASlowTargetDoesNotHoldUpAnother) {
  Pacer pacer({Bytes(100), Bytes(40), 0, Bytes(0)});
  for (std::uint64_t id = 1; id <= 10; ++id) pacer.push(post(1, id, 20));
  EXPECT_EQ(going(pacer), (Words{"1:1", "1:2"}));  // and never an answer
  for (std::uint64_t id = 1; id <= 4; ++id) {
    pacer.push(post(2, id, 20));
    EXPECT_EQ(going(pacer), Words{fmt::format("2:{}", id)});
    pacer.done(PartnerId(2), Bytes(20));
  }
}

TEST(Pacer, ALargePostIsNotStarvedBySmallOnes) {
  Pacer pacer({Bytes(100), Bytes(100), 0, Bytes(0)});
  pacer.push(post(1, 1, 60));
  EXPECT_EQ(going(pacer), Words{"1:1"});
  pacer.push(post(2, 1, 90));
  for (std::uint64_t id = 2; id <= 9; ++id) pacer.push(post(1, id, 10));
  EXPECT_EQ(going(pacer), Words{});
  EXPECT_EQ(pacer.deadline(), kNever);
  pacer.done(PartnerId(1), Bytes(60));
  EXPECT_EQ(going(pacer), (Words{"2:1", "1:2"}));
}

TEST(Pacer, WhoWasAwayHasNoCreditForIt) {
  Pacer pacer(kUnlimited);
  for (std::uint64_t id = 1; id <= 9; ++id) pacer.push(post(1, id, 10));
  pacer.push(post(2, 1, 10));
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(pacer.next(Instant(0)));
  for (std::uint64_t id = 2; id <= 5; ++id) pacer.push(post(2, id, 10));
  EXPECT_EQ(going(pacer), (Words{"2:2", "1:6", "2:3", "1:7", "2:4", "1:8", "2:5", "1:9"}));
}

TEST(Pacer, WhoPushesOneByOneHasNoMoreThanWhoHasAQueue) {
  Pacer pacer(kUnlimited);
  for (std::uint64_t id = 1; id <= 9; ++id) pacer.push(post(1, id, 10));
  std::map<std::uint64_t, int> sent;
  pacer.push(post(2, 1, 10));
  for (std::uint64_t id = 2; id < 10; ++id) {
    const auto gone = pacer.next(Instant(0));
    ASSERT_TRUE(gone);
    ++sent[gone->to.value];
    pacer.done(gone->to, gone->bytes);
    if (gone->to == PartnerId(2)) pacer.push(post(2, id, 10));
  }
  EXPECT_EQ(sent[1], 4);
  EXPECT_EQ(sent[2], 4);
}

TEST(Pacer, APostLargerThanTheLimitGoesAlone) {
  Pacer pacer({Bytes(100), Bytes(100), 0, Bytes(0)});
  pacer.push(post(1, 1, 10));
  pacer.push(post(1, 2, 500));
  pacer.push(post(1, 3, 10));
  EXPECT_EQ(going(pacer), Words{"1:1"});
  pacer.done(PartnerId(1), Bytes(10));
  EXPECT_EQ(going(pacer), Words{"1:2"});
  EXPECT_EQ(pacer.in_flight(), Bytes(500));
  pacer.done(PartnerId(1), Bytes(500));
  EXPECT_EQ(going(pacer), Words{"1:3"});
}

TEST(Pacer, AnEmptyPostWaitsForItsTurnOnly) {
  Pacer pacer({Bytes(100), Bytes(100), 10, Bytes(100)});
  pacer.push(post(1, 1, 100));
  pacer.push(post(1, 2, 0));
  pacer.push(post(1, 3, 1));
  EXPECT_EQ(going(pacer), (Words{"1:1", "1:2"}));
  pacer.done(PartnerId(1), Bytes(0));
  EXPECT_EQ(pacer.in_flight(), Bytes(100));
}

TEST(Pacer, TheRateLetsABurstGoAndThenOneByOne) {
  Pacer pacer({Bytes(INT64_MAX), Bytes(INT64_MAX), 1000, Bytes(100)});
  for (std::uint64_t id = 1; id <= 5; ++id) pacer.push(post(1, id, 40));
  EXPECT_EQ(pacer.deadline(), Instant(0));
  EXPECT_EQ(going(pacer), (Words{"1:1", "1:2"}));
  EXPECT_EQ(pacer.deadline(), 20ms);  // 20 B are there, 40 are wanted
  EXPECT_EQ(going(pacer, 20ms - 1ns), Words{});
  EXPECT_EQ(going(pacer, 20ms), Words{"1:3"});
  EXPECT_EQ(pacer.deadline(), 60ms);
  EXPECT_EQ(going(pacer, 10s), (Words{"1:4", "1:5"}));
  EXPECT_EQ(pacer.deadline(), kNever);
}

TEST(Pacer, APostLargerThanTheBurstGoesFromAFullBucketAndLeavesItInDebt) {
  Pacer pacer({Bytes(INT64_MAX), Bytes(INT64_MAX), 1000, Bytes(100)});
  pacer.push(post(1, 1, 1));
  EXPECT_EQ(going(pacer), Words{"1:1"});
  pacer.push(post(1, 2, 1100));
  pacer.push(post(1, 3, 50));
  EXPECT_EQ(pacer.deadline(), 1ms);
  EXPECT_EQ(going(pacer, 1ms), Words{"1:2"});
  EXPECT_EQ(pacer.deadline(), 1ms + 1s + 50ms);
}

TEST(Pacer, SaysNeverWhereTheRateTakesLongerThanTimeLasts) {
  Pacer pacer({Bytes(INT64_MAX), Bytes(INT64_MAX), 1, Bytes(INT64_MAX)});
  pacer.push(post(1, 1, INT64_MAX));
  EXPECT_EQ(going(pacer), Words{"1:1"});
  pacer.done(PartnerId(1), Bytes(INT64_MAX));
  pacer.push(post(1, 2, INT64_MAX));
  EXPECT_EQ(pacer.deadline(), kNever);
}

TEST(Pacer, WithoutARateNothingWaitsForTime) {
  Pacer pacer({Bytes(100), Bytes(100), 0, Bytes(0)});
  EXPECT_EQ(pacer.deadline(), kNever);
  for (std::uint64_t id = 1; id <= 3; ++id) pacer.push(post(1, id, 50));
  EXPECT_EQ(pacer.deadline(), Instant(0));
  EXPECT_EQ(going(pacer, 7ns), (Words{"1:1", "1:2"}));
  EXPECT_EQ(pacer.deadline(), kNever);
  pacer.done(PartnerId(1), Bytes(50));
  EXPECT_EQ(pacer.deadline(), 7ns);
}

TEST(Pacer, TakesOutACancelledTransfer) {
  Pacer pacer(kUnlimited);
  for (std::uint64_t id = 1; id <= 4; ++id)
    for (const std::uint64_t to : {1u, 2u}) pacer.push(post(to, id, 10, static_cast<int>(id % 2)));
  const auto ids = [](const std::vector<Paced>& posts) {
    Words out;
    for (const Paced& p : posts) out.push_back(fmt::format("{}:{}", p.to.value, p.id.value));
    return out;
  };
  EXPECT_EQ(ids(pacer.drop(PartnerId(1), key(1))), (Words{"1:1", "1:3"}));
  EXPECT_EQ(ids(pacer.drop(PartnerId(1), key(1))), Words{});
  EXPECT_EQ(ids(pacer.drop(PartnerId(9), key(1))), Words{});
  EXPECT_EQ(ids(pacer.drop(key(0))), (Words{"1:2", "1:4", "2:2", "2:4"}));
  EXPECT_EQ(ids(pacer.drop(PartnerId(2))), (Words{"2:1", "2:3"}));
  EXPECT_EQ(pacer.waiting(), 0u);
  EXPECT_EQ(going(pacer), Words{});
}

}  // namespace
}  // namespace kvloom
