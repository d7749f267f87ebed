// The machines of a few transfers, on all ranks, under any order of events: the bytes choose the plan, what the engines ask, which messages are
// delivered, doubled, dropped, altered or said by another, what the transport notices and answers, who is lost, when time passes. The laws of
// sender.h and receiver.h hold whoever lies; that nothing lands in pages that were given back holds as long as nobody has lied.
// Seeds: corpus/session_machines_fuzz.  session_machines_fuzz -max_len=1024 tests/fuzz/corpus/session_machines_fuzz
#include <array>

#include "kvloom/session/progress.h"
#include "kvloom/session/target_book.h"
#include "kvloom/session/wire.h"
#include "tests/fuzz/session_cast.h"
#include "tests/fuzz/session_laws.h"

namespace kvloom::fuzz {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostWires = 64, kMostEvents = 400, kMostActions = 1000;
constexpr std::array kNames = {"a", "b", "c"};
PartnerId source_partner(std::size_t rank) { return PartnerId(100 + rank); }
PartnerId target_partner(std::size_t rank) { return PartnerId(200 + rank); }

struct Source {
  explicit Source(std::size_t n) : rank(static_cast<std::int32_t>(n)), id(source_partner(n)), book(rank), seen(rank) {}
  Rank rank;
  PartnerId id;
  SourceBook book;
  SourceSeen seen;
};

struct Target {
  Target(std::size_t n, bool revokes) : rank(static_cast<std::int32_t>(n)), id(target_partner(n)), seen(rank, revokes) {}
  Rank rank;
  PartnerId id;
  TargetBook book;
  TargetSeen seen;
};

struct Wire {
  bool to_source = false;
  PartnerId from;
  std::size_t to = 0;  // rank
  Message message;
};

// What a post's notice says of one of its parts.
Bytes bytes_of(const Plan& plan, Rank source, Rank target, const PostPart& part) {
  const auto path = plan.path(part.layer.group, source, target);
  require(path.has_value(), "a post has a path");
  std::int64_t tokens = 0;
  for (const StridedSet& family : path->tokens) tokens += family.count_in(part.chunk.begin, part.chunk.end);
  return Bytes(tokens * path->row_bytes);
}

class World {
 public:
  World(const std::uint8_t* data, std::size_t size) : choose_(data, size), pairing_(choose_.one_of(pairings())) {
    const std::uint8_t modes = choose_.byte();
    revokes_ = (modes & 1U) != 0;
    fences_ = (modes & 2U) != 0;
    limits_.resend = 20ms;
    limits_.grace = choose_.one_of(std::array<std::chrono::nanoseconds, 3>{100ms, 1ms, 0ms});
    limits_.in_flight_per_path = Bytes(choose_.one_of(std::array{16, 100, 10000}));
    limits_.join = Bytes(choose_.one_of(std::array{0, 30, 1000}));
    limits_.joining_posts = 1 + static_cast<int>(choose_.below(2));
    for (std::size_t s = 0; s < static_cast<std::size_t>(plan().source().ranks()); ++s) {
      sources_.emplace_back(s);
      for (const Known* each : {&pairing_.plan, &pairing_.other}) sources_.back().book.know(each->plan, each->digest);
    }
    for (std::size_t t = 0; t < static_cast<std::size_t>(plan().target().ranks()); ++t) targets_.emplace_back(t, revokes_);
  }

  void run() {
    for (std::size_t i = 0; i < kMostEvents && !choose_.over(); ++i) step();
    drain();
  }

 private:
  const Plan& plan() const { return *pairing_.plan.plan; }

  void step() {
    switch (choose_.below(20)) {
      case 0: return offer(any_source(), key());
      case 1: return begin(any_target(), key());
      case 2: return deliver(true);
      case 3: return deliver(false);
      case 4: return drop();
      case 5: return altered();
      case 6: return said_by_another();
      case 7: return ready(any_source(), key(), LayerId(static_cast<std::int32_t>(choose_.below(4))), choose_.byte() % 32);
      case 8: return tell(any_source(), key(), Sender::Payload{std::vector<std::byte>(choose_.below(3))});
      case 9: return land();
      case 10: return complete(false);
      case 11: return complete(true);
      case 12: return stray_notice();
      case 13: return source_loses(any_source(), target_partner(choose_.below(3)));
      case 14: return target_loses(any_target(), source_partner(choose_.below(4)));
      case 15: return cut_off(any_target(), any_source());
      case 16: return cancel(any_target(), key());
      case 17: return tell(any_source(), key(), Sender::CancelAsked{"preempted"});
      case 18: return pass(4ms * choose_.byte());
      default: return everybody(key());
    }
  }
  Source& any_source() { return choose_.one_of(sources_); }
  Target& any_target() { return choose_.one_of(targets_); }
  TransferKey key() {
    const std::uint8_t choice = choose_.byte();
    return {kNames[choice % kNames.size()], Epoch(1U + (choice >> 7U))};
  }

  // ---- engines ----

  // As when nothing goes wrong: everybody begins and offers a transfer, and all of it is computed.
  void everybody(const TransferKey& of) {
    for (Target& target : targets_) begin(target, of);
    for (Source& source : sources_) offer(source, of);
    for (std::size_t wires = wires_.size(); wires > 0 && !wires_.empty(); --wires) deliver(0, true);
    for (Source& source : sources_)
      for (std::int32_t layer = 0; layer < 3; ++layer) ready(source, of, LayerId(layer), kTokens);
  }
  void offer(Source& source, const TransferKey& of) {
    SenderJob job{of, source.rank, 4ms * (1 + choose_.byte()), choose_.below(4) == 0, limits_};
    const bool fresh = source.seen.offered(of, now_ + job.time);
    std::vector<SourceBook::Action> actions;
    const bool taken = source.book.offer(std::move(job), now_, actions).has_value();
    require(taken == fresh, "a transfer is offered once");
    obey(source, actions);
  }
  void begin(Target& target, const TransferKey& of) {
    if (target.seen.knows(of)) return;  // the engine's contract: another attempt has another epoch
    ReceiverJob job;
    job.key = of;
    job.rank = target.rank;
    job.plan = pairing_.plan.plan;
    job.digest = pairing_.plan.digest;
    job.range = {static_cast<std::int64_t>(choose_.below(5)) * 5, kTokens};
    for (const GroupPlan& group : plan().groups()) {
      GrantTable table;
      for (std::int64_t page = 0; page * group.target->layout.page_tokens() < kTokens; ++page) table.pages.emplace_back(page);
      table.pool_pages = 32;
      job.tables.push_back(std::move(table));
    }
    for (const Source& source : sources_) job.sources.push_back(source.id);
    job.time = 4ms * (1 + choose_.byte());
    job.can_revoke = revokes_;
    job.limits = limits_;
    target.seen.begins(job, now_ + job.time + limits_.grace);
    std::vector<TargetBook::Action> actions;
    require(target.book.begin(std::move(job), now_, actions).has_value(), "a fitting job begins");
    obey(target, actions);
  }
  void ready(Source& source, const TransferKey& of, LayerId layer, std::int64_t tokens) {
    source.seen.ready(of, layer, tokens);
    tell(source, of, Sender::Ready{layer, tokens});
  }
  void tell(Source& source, const TransferKey& of, const Sender::Event& event) {
    std::vector<SourceBook::Action> actions;
    source.book.tell(of, event, now_, actions);
    obey(source, actions);
  }
  void cancel(Target& target, const TransferKey& of) {
    std::vector<TargetBook::Action> actions;
    target.book.cancel(of, "its user left", now_, actions);
    obey(target, actions);
  }

  // ---- messages ----

  void deliver(bool take) {
    if (!wires_.empty()) deliver(choose_.below(wires_.size()), take);
  }
  void deliver(std::size_t which, bool take) {
    const Wire wire = wires_[which];
    if (take) wires_.erase(wires_.begin() + static_cast<std::ptrdiff_t>(which));
    arrive(wire);
  }
  void drop() {
    if (!wires_.empty()) wires_.erase(wires_.begin() + static_cast<std::ptrdiff_t>(choose_.below(wires_.size())));
  }
  void said_by_another() {
    if (wires_.empty()) return;
    honest_ = false;
    Wire wire = choose_.one_of(wires_);
    wire.from = wire.to_source ? target_partner(choose_.below(3)) : source_partner(choose_.below(4));
    arrive(wire);
  }
  // What decode does not let through, nobody hears.
  void altered() {
    if (wires_.empty()) return;
    honest_ = false;
    Wire wire = choose_.one_of(wires_);
    std::visit([this](auto& what) { alter(what); }, wire.message);
    auto read = decode_message(encode_message(wire.message));
    if (!read) return;
    wire.message = std::move(*read);
    arrive(wire);
  }
  template <class M>
  void alter(M& message) {
    const std::size_t which = choose_.below(8);
    const std::int64_t value = choose_.byte();
    const Rank rank(static_cast<std::int32_t>(value % 4));
    if (which == 0) message.key = {kNames[static_cast<std::size_t>(value) % kNames.size()], Epoch(value % 2 == 0 ? 1 : 2)};
    if constexpr (requires { message.source; })
      if (which == 1) message.source = rank;
    if constexpr (requires { message.target; })
      if (which == 1) message.target = rank;
    if constexpr (std::is_same_v<M, Grant>) alter_grant(message, which, value);
  }
  void alter_grant(Grant& grant, std::size_t which, std::int64_t value) {
    if (which == 2) grant.digest = value % 2 == 0 ? pairing_.other.digest : PlanDigest{1, static_cast<std::uint64_t>(value)};
    if (which == 3) grant.range = {value % 50, value * value};
    if (which == 4) grant.range.end = std::int64_t{1} << 48U;
    if (which == 5) grant.tag = Tag(static_cast<std::uint64_t>(value));
    if (which == 6) grant.time_left = std::chrono::nanoseconds(value * value * value * 100);
    if (which == 7 && value % 2 == 0 && !grant.tables.empty()) grant.tables.pop_back();
    if (which == 7 && value % 2 == 1)
      for (GrantTable& table : grant.tables) table.pages.assign(static_cast<std::size_t>(value % 8), PageId(value % 40));
  }
  void arrive(const Wire& wire) {
    if (wire.to_source)
      hear(sources_[wire.to], wire.from, wire.message);
    else
      hear(targets_[wire.to], wire.from, wire.message);
  }
  void hear(Source& source, PartnerId from, const Message& message) {
    source.seen.hears(from, &message);
    std::vector<SourceBook::Action> actions;
    source.book.message(from, message, now_, actions);
    obey(source, actions);
    source.seen.hears(from, nullptr);
  }
  void hear(Target& target, PartnerId from, const Message& message) {
    if (const auto* quiesced = std::get_if<Quiesced>(&message))
      if (from == source_partner(static_cast<std::size_t>(quiesced->source.value)))
        target.seen.hears_quiesced(quiesced->key, quiesced->source);
    std::vector<TargetBook::Action> actions;
    target.book.message(from, message, now_, actions);
    obey(target, actions);
  }

  // ---- transport ----

  void land() {
    Source& source = any_source();
    if (!source.seen.open.empty()) land(source, choose_.below(source.seen.open.size()));
  }
  // A post's bytes are visible, and its notice is told. Notices of a tag come in the order of posting, else the transport lies.
  void land(Source& source, std::size_t which) {
    auto& open = source.seen.open;
    if (open[which].there) return;
    for (std::size_t i = 0; i < which; ++i)
      if (!open[i].there && open[i].post.grant->tag == open[which].post.grant->tag && open[i].post.to == open[which].post.to)
        honest_ = false;
    open[which].there = true;
    const Sender::Post post = open[which].post;
    Progress progress;
    for (const PostPart& part : post.parts)
      progress.parts.push_back({part.layer, bytes_of(*post.plan, source.rank, post.target, part)});
    progress.last = post.last;
    progress.payload = post.payload;
    for (Target& target : targets_)
      if (target.id == post.to) notice(target, source.id, post.grant->tag, progress);
  }
  void complete(bool fails) {
    Source& source = any_source();
    if (source.seen.open.empty()) return;
    const std::size_t which = choose_.below(source.seen.open.size());
    if (!fails && !source.seen.open[which].there) {
      if (choose_.below(2) == 0)
        honest_ = false;  // it is vouched for, and was never told
      else
        land(source, which);
    }
    if (which < source.seen.open.size()) complete(source, which, fails);
  }
  void complete(Source& source, std::size_t which, bool fails) {
    auto& open = source.seen.open;
    const OpenPost done = open[which];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
    if (!fails && done.post.last) source.seen.delivered_last(done);
    tell(source, done.key,
         Sender::Posted{done.post.id, fails ? fail(Scope::peer, Code::unavailable, "a post fails") : Expected<void>()});
  }
  void fail_posts(Source& source, PartnerId to) {
    const auto& open = source.seen.open;
    for (;;) {  // while one is told, others may come and go
      const auto at = std::find_if(open.begin(), open.end(), [to](const OpenPost& post) { return post.post.to == to; });
      if (at == open.end()) return;
      complete(source, static_cast<std::size_t>(at - open.begin()), true);
    }
  }
  void stray_notice() {
    honest_ = false;
    Target& target = any_target();
    const PartnerId from = source_partner(choose_.below(4));
    const Tag tag(choose_.byte() % 32);
    Progress progress;
    for (std::size_t part = choose_.below(4); part > 0; --part) {
      const auto at = static_cast<std::int32_t>(choose_.byte());
      progress.parts.push_back({{at % 4, LayerId(at / 4 % 4)}, Bytes(choose_.byte())});
    }
    progress.last = choose_.below(2) == 0;
    notice(target, from, tag, progress);
  }
  void notice(Target& target, PartnerId from, Tag tag, const Progress& progress) {
    if (const auto at = target.seen.find(tag); at && from == source_partner(static_cast<std::size_t>(at->second.value)))
      target.seen.notices(at->second, at->first, progress);
    std::vector<TargetBook::Action> actions;
    target.book.notice(from, tag, encode_progress(progress), now_, actions);
    obey(target, actions);
  }

  // ---- losses ----

  void source_loses(Source& source, PartnerId partner) {
    std::vector<SourceBook::Action> actions;
    source.book.gone(partner, {Code::unavailable, Scope::peer, "the connection is lost"}, now_, actions);
    obey(source, actions);
  }
  void target_loses(Target& target, PartnerId partner) {
    std::vector<TargetBook::Action> actions;
    target.book.gone(partner, {Code::unavailable, Scope::peer, "the connection is lost"}, now_, actions);
    obey(target, actions);
  }
  void cut_off(Target& target, const Source& source) {
    target.seen.cuts_off(source.rank);
    std::vector<TargetBook::Action> actions;
    target.book.cut_off(source.id, now_, actions);
    obey(target, actions);
  }

  // ---- time ----

  Instant deadline() const {
    Instant out = kNever;
    for (const Source& source : sources_) out = std::min(out, source.book.deadline());
    for (const Target& target : targets_) out = std::min(out, target.book.deadline());
    return out;
  }
  // Everybody is woken when its time has come.
  void pass(std::chrono::nanoseconds time) {
    const Instant end = now_ + time;
    for (int woken = 0; deadline() <= end; ++woken) {
      require(woken < 10000, "who is woken in time does not ask for the same moment for ever");
      now_ = std::max(now_, deadline());
      wake();
    }
    now_ = end;
    for (const Target& target : targets_) target.seen.in_time(now_);
    if (fences_)
      for (const Source& source : sources_) source.seen.in_time(now_, limits_.grace);
  }
  void wake() {
    for (Source& source : sources_)
      if (source.book.deadline() <= now_) {
        std::vector<SourceBook::Action> actions;
        source.book.time(now_, actions);
        obey(source, actions);
      }
    for (Target& target : targets_)
      if (target.book.deadline() <= now_) {
        std::vector<TargetBook::Action> actions;
        target.book.time(now_, actions);
        obey(target, actions);
      }
  }

  // ---- what the machines say ----

  void send(bool to_source, PartnerId from, std::size_t to, Message message) {
    const std::size_t there = to_source ? sources_.size() : targets_.size();
    if (to < there && wires_.size() < kMostWires) wires_.push_back({to_source, from, to, std::move(message)});
  }
  void obey(Source& source, std::vector<SourceBook::Action>& actions) {
    require(actions.size() < kMostActions, "one event has no thousand consequences");
    std::vector<PartnerId> fenced;
    for (SourceBook::Action& action : actions) {
      if (auto* message = std::get_if<SendTo>(&action)) {
        source.seen.says(message->to, message->message);
        send(false, source.id, message->to.value - target_partner(0).value, std::move(message->message));
        continue;
      }
      const auto& keyed = std::get<SourceBook::Keyed>(action);
      source.seen.does(keyed.key, keyed.action, honest_);
      if (const auto* fence = std::get_if<Sender::FenceOff>(&keyed.action)) fenced.push_back(fence->partner);
    }
    require(source.book.open() <= source.seen.offers() && source.book.early() <= source.seen.grants(),
            "a book keeps no more than it was told");
    if (!fences_) return;
    for (const PartnerId partner : fenced) {  // as an endpoint does: its posts end, the connection is lost
      fail_posts(source, partner);
      source_loses(source, partner);
    }
  }
  void obey(Target& target, std::vector<TargetBook::Action>& actions) {
    require(actions.size() < kMostActions, "one event has no thousand consequences");
    std::vector<std::size_t> fenced;
    for (TargetBook::Action& action : actions) {
      if (auto* message = std::get_if<SendTo>(&action)) {
        send(true, target.id, message->to.value - source_partner(0).value, std::move(message->message));
        continue;
      }
      const auto& keyed = std::get<TargetBook::Keyed>(action);
      target.seen.does(keyed.key, keyed.action);
      if (std::holds_alternative<Receiver::FenceOff>(keyed.action))
        fenced.push_back(keyed.source.value - source_partner(0).value);
      if (honest_ && std::holds_alternative<Receiver::Release>(keyed.action))
        for (const Source& source : sources_) target.seen.stays_untouched(keyed.key, source.rank, source.seen.open);
    }
    require(target.book.open() <= target.seen.begun(), "a book keeps no more than it was told");
    if (!fences_) return;
    for (const std::size_t source : fenced) {
      target_loses(target, source_partner(source));
      cut_off(target, sources_[source]);
    }
  }

  // Whatever has happened: when every post is answered, everybody is cut off and time has passed, nothing is left.
  void drain() {
    for (int round = 0; round < 3; ++round) {
      for (Source& source : sources_)
        for (int posts = 0; !source.seen.open.empty(); ++posts) {
          require(posts < 100000, "posts come to an end");
          complete(source, 0, true);
        }
      pass(1500ms);
    }
    for (Target& target : targets_)
      for (const Source& source : sources_) cut_off(target, source);
    pass(25h);  // longer than any grant lasts
    for (const Target& target : targets_) {
      require(target.book.open() == 0 && target.book.deadline() == kNever, "a target's book is empty in the end");
      target.seen.in_the_end();
    }
    for (const Source& source : sources_) {
      require(source.book.open() == 0 && source.book.early() == 0 && source.book.deadline() == kNever,
              "a source's book is empty in the end");
      source.seen.in_the_end();
    }
  }

  Choices choose_;
  const Pairing& pairing_;
  bool revokes_ = false, fences_ = false;
  bool honest_ = true;  // nobody has said what is not so, and the transport has kept the laws of transport.h
  SessionLimits limits_;
  std::vector<Source> sources_;
  std::vector<Target> targets_;
  std::vector<Wire> wires_;
  Instant now_{};
};

}  // namespace
}  // namespace kvloom::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvloom::fuzz::World(data, size).run();
  return 0;
}
