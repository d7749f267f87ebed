#include "kvloom/transport/shm/outgoing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvloom/transport/shm/pack.h"

namespace kvloom::shm {

namespace {

constexpr std::uint64_t kPublishEvery = 16;  // slots: the target starts to copy while a long batch is still being put

Error refusal(Outcome outcome, const Operation& operation) {
  if (outcome == Outcome::not_admitted) {
    return {Code::cancelled, Scope::transfer,
            fmt::format("the target does not admit tag {}: it was revoked, or never granted", operation.tag.value)};
  }
  return {Code::out_of_range, Scope::transfer, fmt::format("the target has no region {} any more", operation.target.value)};
}

}  // namespace

void Outgoing::post(Operation operation) {
  if (tags_.broken(operation.tag)) return refuse(operation.post, operation.tag, OpenTags::error(operation.tag));
  tags_.open(operation.tag);
  open_.push_back(std::move(operation));
}

void Outgoing::refuse(PostId post, Tag tag, Error error) {
  tags_.open(tag);
  tags_.break_tag(tag);
  refused_.push_back({post, tag, std::move(error)});
}

void Outgoing::complete(PostId post, Tag tag, Expected<Bytes> delivered) {
  tags_.close(tag, delivered.has_value());
  events_.emplace_back(Completed{post, peer_, tag, std::move(delivered)});
}

Expected<bool> Outgoing::collect() {
  bool any = !refused_.empty();
  for (Refused& refused : std::exchange(refused_, {}))
    complete(refused.post, refused.tag, tl::unexpected(std::move(refused.error)));
  const std::uint64_t answered = theirs_.header().answered.load();
  if (answered == collected_) return any;
  if (answered < collected_ || answered > put_) {
    return fail(Scope::peer, Code::parse, "the peer answered {} operations of {} that it was sent", answered, put_);
  }
  for (; collected_ != answered; ++collected_) {
    const auto answer = theirs_.get<Answer>(theirs_.answer(collected_));
    Operation& operation = open_.front();
    if (answer.outcome == Outcome::delivered) {
      if (answer.bytes != operation.total.value) {
        return fail(Scope::peer, Code::parse, "the peer vouches for {} bytes of {}", answer.bytes, operation.total.value);
      }
      complete(operation.post, operation.tag, operation.total);
    } else {
      complete(operation.post, operation.tag, tl::unexpected(refusal(answer.outcome, operation)));
    }
    open_.pop_front();
  }
  return true;
}

Expected<std::uint64_t> Outgoing::room() const {
  const std::uint64_t consumed = theirs_.header().consumed.load();
  const std::uint64_t used = produced_ - consumed;
  if (used > ours_.shape().slots)
    return fail(Scope::peer, Code::parse, "the peer took {} slots of {} that it was sent", consumed, produced_);
  return ours_.shape().slots - used;
}

Expected<bool> Outgoing::pump(const Fd& socket) {
  blocked_ = false;
  bool any = send_withdrawals(socket);
  while (put_ - collected_ < open_.size()) {
    auto more = put(open_[put_ - collected_], socket);
    if (!more) return more;
    any |= *more;
    const Operation& operation = open_[put_ - collected_];
    if (!operation.begun || operation.parts_put != operation.parts()) break;
    ++put_;
  }
  return any;
}

// Puts what there is room for; true if anything.
Expected<bool> Outgoing::put(Operation& operation, const Fd& socket) {
  auto left = room();
  if (!left) return tl::unexpected(left.error());
  if (*left == 0 || put_ - collected_ >= ours_.shape().answers) return false;
  if (!operation.begun) {
    const Sent sent = offer(operation, socket);
    if (sent == Sent::gone) return fail(Scope::peer, Code::unavailable, "the peer hung up");
    if (sent == Sent::full) return false;
    put_head(operation);
    operation.begun = true;
    --*left;
  }
  for (; operation.parts_put < operation.parts() && *left > 0; --*left) {
    operation.is_notice() ? put_payload(operation) : put_runs(operation);
    if (produced_ % kPublishEvery == 0) publish();
  }
  publish();
  return true;
}

Sent Outgoing::offer(const Operation& operation, const Fd& socket) {
  if (operation.is_notice() || offered_.contains(operation.source.value)) return Sent::yes;
  const Offer& offer = *operation.memory->offer();
  const std::size_t messages = std::max<std::size_t>(offer.descriptors.size(), 1);
  for (; offering_ < messages; ++offering_) {
    const bool first = offering_ == 0;
    const Message message{first ? Kind::offer : Kind::more, 0, operation.source.value,
                          first ? static_cast<std::uint64_t>(offer.length.value) : 0, first ? messages - 1 : 0};
    const Fd* const fd = offer.descriptors.empty() ? nullptr : &offer.descriptors[offering_];
    const Sent sent = say(socket, message, first ? std::span<const std::byte>(offer.words) : std::span<const std::byte>(), fd);
    if (sent != Sent::yes) return sent;
  }
  offering_ = 0;
  offered_.insert(operation.source.value);
  return Sent::yes;
}

void Outgoing::put_head(const Operation& operation) {
  Slot slot = {};
  slot.operation = put_;
  if (operation.is_notice()) {
    slot.kind = SlotKind::notice;
    slot.notice = {operation.tag.value, operation.payload.size()};
  } else {
    slot.kind = SlotKind::write;
    slot.write = {operation.tag.value, operation.source.value, operation.target.value, operation.runs.size()};
  }
  ours_.put(ours_.slot(produced_++), slot);
}

void Outgoing::put_payload(Operation& operation) {
  const std::size_t begin = operation.parts_put++ * kSlotBytes;
  std::memcpy(ours_.slot(produced_++), operation.payload.data() + begin, std::min(kSlotBytes, operation.payload.size() - begin));
}

// One run, or as many as go into a slot.
void Outgoing::put_runs(Operation& operation) {
  const auto rest = operation.runs.subspan(operation.parts_put);
  if (operation.parts_put > 0) {
    PackSlot pack = pack_runs(operation.runs[operation.base], rest);
    if (pack.count > 0) {
      pack.kind = static_cast<std::uint32_t>(SlotKind::pack);
      ours_.put(ours_.slot(produced_++), pack);
      operation.parts_put += pack.count;
      return;
    }
  }
  const Run& run = rest.front();
  Slot slot = {};
  slot.kind = SlotKind::run;
  slot.run = {run.source_offset.value, run.target_offset.value, run.bytes.value, run.count,
              run.source_step.value,   run.target_step.value};
  ours_.put(ours_.slot(produced_++), slot);
  operation.base = operation.parts_put++;
}

Sent Outgoing::say(const Fd& socket, const Message& message, std::span<const std::byte> tail, const Fd* fd) {
  const Sent sent = send(socket, message, tail, fd);
  blocked_ |= sent == Sent::full;
  return sent;
}

bool Outgoing::send_withdrawals(const Fd& socket) {
  const std::size_t before = withdrawn_.size();
  std::erase_if(withdrawn_, [&](RegionId region) {
    if (blocked_) return false;
    if (std::any_of(open_.begin(), open_.end(), [&](const Operation& o) { return !o.is_notice() && o.source == region; }))
      return false;
    if (!offered_.contains(region.value)) return true;
    if (say(socket, {Kind::withdraw, 0, region.value, 0, 0}, {}, nullptr) != Sent::yes) return false;
    offered_.erase(region.value);
    return true;
  });
  return withdrawn_.size() != before;
}

Expected<bool> Outgoing::has_work() const {
  if (!refused_.empty() || theirs_.header().answered.load() != collected_) return true;
  if (blocked_ || put_ - collected_ >= open_.size() || put_ - collected_ >= ours_.shape().answers) return false;
  const auto left = room();
  if (!left) return tl::unexpected(left.error());
  return *left >= ours_.shape().slots / 2;
}

void Outgoing::fail_all(const Error& reason) {
  for (Refused& refused : std::exchange(refused_, {}))
    complete(refused.post, refused.tag, tl::unexpected(std::move(refused.error)));
  for (const Operation& operation : std::exchange(open_, {})) complete(operation.post, operation.tag, tl::unexpected(reason));
}

}  // namespace kvloom::shm
