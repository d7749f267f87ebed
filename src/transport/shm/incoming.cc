#include "kvloom/transport/shm/incoming.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvloom::shm {

namespace {

constexpr std::size_t kMostRuns = 16384;         // of one flush
constexpr std::uint64_t kAhead = 8;              // slots: what the peer has put, brought over before it is read
constexpr std::size_t kMostSources = 4096;       // regions that a peer may offer
constexpr std::int64_t kMostMapped = 1ll << 44;  // bytes of them: 16 TiB of addresses
constexpr std::int64_t kCharge =
    kSlotBytes;  // what a slot and a run cost of a budget, so that those of few bytes end a poll as well

// A line that the peer reads in a loop is only touched when there is news.
void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) {
  if (word.load(std::memory_order_relaxed) != value) word.store(value);
}

}  // namespace

Incoming::Incoming(PeerId peer, OutboxView ours, const LocalRegions& regions, Device& device, std::vector<Event>& events)
    : peer_(peer), ours_(ours), regions_(regions), device_(device), events_(events) {
  work_.reserve(kMostRuns + kPacked);
}

Expected<void> Incoming::attach(OutboxView theirs, int pid) {
  auto queue = device_.queue();
  if (!queue) return tl::unexpected(queue.error());
  queue_ = std::move(*queue);
  theirs_ = theirs;
  pid_ = pid;
  return {};
}

Expected<void> Incoming::offer(RegionId region, Bytes length, std::vector<std::byte> words, Fd fd, std::uint64_t more) {
  if (length.value <= 0 || length.value > kMostMapped)
    return fail(Scope::peer, Code::invalid_argument, "the peer offers a region of {} bytes",
                static_cast<std::uint64_t>(length.value));
  std::int64_t mapped = length.value;
  for (const auto& [id, memory] : sources_) mapped += static_cast<std::int64_t>(memory->memory().size());
  if (sources_.size() >= kMostSources || mapped > kMostMapped || more >= device_.most_descriptors()) {
    return fail(Scope::peer, Code::exhausted, "the peer offers more than {} regions, {} bytes or {} descriptors of one",
                kMostSources, kMostMapped, device_.most_descriptors());
  }
  if (offered_ || sources_.contains(region.value))
    return fail(Scope::peer, Code::parse, "the peer offers region {} twice, or inside of another offer", region.value);
  Offer offer{length, std::move(words), {}, pid_};
  if (fd) offer.descriptors.push_back(std::move(fd));
  if (more == 0) return map(region, std::move(offer));
  offered_ = Offered{region, std::move(offer), more};
  return {};
}

Expected<void> Incoming::offer_more(RegionId region, Fd fd) {
  if (!offered_ || offered_->region != region)
    return fail(Scope::peer, Code::parse, "the peer sends a descriptor of region {}, which it does not offer", region.value);
  offered_->offer.descriptors.push_back(std::move(fd));
  if (--offered_->more > 0) return {};
  Offered offered = *std::exchange(offered_, {});
  return map(region, std::move(offered.offer));
}

Expected<void> Incoming::map(RegionId region, Offer offer) {
  auto memory = device_.map(std::move(offer));
  if (!memory)
    return fail(Scope::peer, memory.error().code, "the peer offers region {}: {}", region.value, memory.error().message);
  sources_.emplace(region.value, std::move(*memory));
  return {};
}

Expected<void> Incoming::withdraw(RegionId region) {
  if (current_ && current_->write && current_->source == region.value)
    return fail(Scope::peer, Code::parse, "the peer withdrew region {} while a write reads it", region.value);
  drain();  // a peer that keeps to the protocol has no write open that reads it
  sources_.erase(region.value);
  return {};
}

void Incoming::drain() {
  if (queue_ != nullptr) queue_->drain();
}

void Incoming::revoke(Tag tag) {
  admitted_.erase(tag.value);  // it may be gone already: a write of the tag was refused, while others of it are being copied
  const auto is_of_it = [&](const Told& told) { return told.tag == tag; };
  const bool runs = (current_ && current_->tag == tag) || std::any_of(batches_.begin(), batches_.end(), [&](const Batch& batch) {
                      return std::any_of(batch.told.begin(), batch.told.end(), is_of_it);
                    });
  if (!runs) return;
  drain();
  for (Batch& batch : batches_)
    for (Told& told : batch.told)
      if (told.tag == tag) told = {tag, {Outcome::not_admitted, 0}, {}};
}

Expected<std::uint64_t> Incoming::available() const {
  const std::uint64_t count = theirs_.header().produced.load() - taken_;
  if (count > theirs_.shape().slots)
    return fail(Scope::peer, Code::parse, "the peer says that {} slots wait in a ring of {}", count, theirs_.shape().slots);
  return count;
}

Expected<bool> Incoming::consume(Bytes& budget) {
  const std::uint64_t taken_before = taken_, answered_before = answered_, starts_before = starts_;
  const bool resumed = partial_.has_value();
  missing_.reset();
  if (auto ok = recheck(); !ok) return tl::unexpected(ok.error());
  Bytes left = std::min(budget, queue_->room());
  budget -= left;
  if (auto ok = take_slots(left); !ok) return tl::unexpected(ok.error());
  budget += left;
  if (auto ok = flush(); !ok) return tl::unexpected(ok.error());
  return resumed || answered_ != answered_before || taken_ != taken_before || starts_ != starts_before;
}

Expected<void> Incoming::take_slots(Bytes& budget) {
  if (partial_ && budget.value > 0) {
    const Partial partial = *std::exchange(partial_, {});
    if (!current_->refused) add(partial.run, partial.done, budget);
    if (!partial_ && current_->parts_left == 0) {
      if (auto ok = finish(); !ok) return ok;
    }
  }
  while (budget.value > 0 && !partial_ && !missing_) {
    const auto count = available();
    if (!count) return tl::unexpected(count.error());
    if (*count == 0) break;
    for (std::uint64_t i = 0; i < *count && budget.value > 0 && !partial_ && !missing_; ++i) {
      if (i + kAhead < *count) __builtin_prefetch(theirs_.slot(taken_ + kAhead));
      if (auto ok = take_slot(budget); !ok) return ok;
    }
  }
  return {};
}

bool Incoming::has_news() {
  const bool answers = std::exchange(told_, answered_) != answered_;
  return answers || theirs_.header().produced.load() - taken_ <= theirs_.shape().slots / 2;
}

// Between two calls the owner may have revoked the tag or taken its region away, and the peer its memory.
Expected<void> Incoming::recheck() {
  if (!current_ || current_->refused) return {};
  if (current_->write && !sources_.contains(current_->source)) {
    return fail(Scope::peer, Code::parse, "the peer withdrew region {} while a write reads it", current_->source);
  }
  if (current_->write && !regions_.contains(current_->target)) current_->refused = Outcome::no_region;
  if (!admitted_.contains(current_->tag.value)) current_->refused = Outcome::not_admitted;
  return {};
}

Expected<void> Incoming::take_slot(Bytes& budget) {
  const auto slot = theirs_.get<Slot>(theirs_.slot(taken_));
  if (!current_) {
    if (auto ok = begin(slot); !ok || missing_) return ok;
  } else if (current_->write) {
    const auto whole = take_runs(slot, budget);
    if (!whole) return tl::unexpected(whole.error());
    if (!*whole) return {};
  } else if (auto ok = take_payload(theirs_.get<RawSlot>(theirs_.slot(taken_))); !ok) {
    return ok;
  }
  ++taken_;
  budget -= Bytes(kCharge);
  if (current_->parts_left == 0 && !partial_) return finish();
  if (work_.runs() >= kMostRuns || end_ - begin_ >= queue_->batch().value) return flush();
  return {};
}

Expected<void> Incoming::begin(const Slot& slot) {
  const bool write = slot.kind == SlotKind::write;
  if ((!write && slot.kind != SlotKind::notice) || slot.reserved != 0 || slot.operation != accepted_) {
    return fail(Scope::peer, Code::parse, "the peer's slot {} is of kind {} and operation {}, where operation {} should begin",
                taken_, static_cast<std::uint32_t>(slot.kind), slot.operation, accepted_);
  }
  Current current;
  current.write = write;
  if (write) {
    const auto source = sources_.find(slot.write.source);
    if (source == sources_.end()) {
      missing_ = RegionId(slot.write.source);
      return {};
    }
    current.tag = Tag(slot.write.tag);
    current.source = slot.write.source;
    current.target = slot.write.target;
    current.parts_left = slot.write.runs;
    current.from = source->second->memory();
    if (const auto target = regions_.find(current.target); target != regions_.end()) {
      current.to = target->second->memory();
    } else {
      current.refused = Outcome::no_region;
    }
  } else {
    const auto bytes = static_cast<std::int64_t>(slot.notice.bytes);
    if (bytes < 0 || bytes > kMostNotice.value)
      return fail(Scope::peer, Code::parse, "the peer's notice has {} bytes; the most is {}", bytes, kMostNotice.value);
    current.tag = Tag(slot.notice.tag);
    current.bytes = bytes;
    current.parts_left = (slot.notice.bytes + kSlotBytes - 1) / kSlotBytes;
    current.payload.reserve(slot.notice.bytes);
  }
  if (!admitted_.contains(current.tag.value)) current.refused = Outcome::not_admitted;
  ++accepted_;
  current_ = std::move(current);
  return {};
}

// The runs of one slot, as far as the budget reaches; true if all are taken.
Expected<bool> Incoming::take_runs(const Slot& slot, Bytes& budget) {
  if (slot.kind != SlotKind::pack || !current_->base) {
    if (auto ok = take_base(slot); !ok) return tl::unexpected(ok.error());
    if (!take_run(*current_->base, budget)) return tl::unexpected(why_not(*current_->base));
    return true;
  }
  const auto pack = std::bit_cast<PackSlot>(slot);
  if (!is_packed(pack) || pack.count - current_->in_slot > current_->parts_left)
    return fail(Scope::peer, Code::parse, "the peer's slot {} packs {} runs in units of 2^{} and 2^{} bytes, where {} may follow",
                taken_, pack.count, pack.source_shift, pack.target_shift, current_->parts_left + current_->in_slot);
  if (current_->refused) {  // the base was not checked either
    current_->parts_left -= pack.count - current_->in_slot;
    current_->in_slot = pack.count;
  }
  if (current_->in_slot == 0 && take_pack(pack, budget)) return true;
  for (; current_->in_slot < pack.count && !partial_ && budget.value > 0; ++current_->in_slot) {
    const Run run = unpack_run(*current_->base, pack, current_->in_slot);
    if (!take_run(run, budget)) return tl::unexpected(why_not(run));
  }
  if (current_->in_slot < pack.count) return false;
  current_->in_slot = 0;
  return true;
}

// All runs of the slot, where nothing cuts them and nothing is wrong with any: what take_run does for each, with one look at what they share.
bool Incoming::take_pack(const PackSlot& pack, Bytes& budget) {
  const std::int64_t count = pack.count;
  const Bytes each = current_->bounds.total();
  if (budget.value <= 0 || budget.value / count <= each.value + kCharge) return false;
  const auto sum = checked_add(current_->bytes, each.value * count);  // each * count < budget
  bool holds = sum.has_value();
  std::array<Run, kPacked> runs;
  for (std::size_t i = 0; i < pack.count; ++i) {
    runs[i] = unpack_run(*current_->base, pack, i);
    holds &= current_->bounds.hold(runs[i].source_offset, runs[i].target_offset);
  }
  if (!holds) return false;  // the slow way finds the words
  current_->bytes = *sum;
  current_->parts_left -= pack.count;
  budget -= (each + Bytes(kCharge)) * count;
  work_.begin(current_->to.data(), current_->from.data(), *current_->base);
  for (std::size_t i = 0; i < pack.count; ++i) work_.add(runs[i].source_offset, runs[i].target_offset);
  end_ += each.value * count;
  return true;
}

Expected<void> Incoming::take_base(const Slot& slot) {
  if (slot.kind != SlotKind::run || slot.reserved != 0) {
    return fail(Scope::peer, Code::parse, "the peer's slot {} is of kind {}, where a run should be", taken_,
                static_cast<std::uint32_t>(slot.kind));
  }
  const Run run{Bytes(slot.run.source_offset), Bytes(slot.run.target_offset), Bytes(slot.run.bytes), slot.run.count,
                Bytes(slot.run.source_step),   Bytes(slot.run.target_step)};
  current_->base = run;
  current_->in_slot = 0;
  if (!current_->bounds.are_of(run)) current_->bounds = RunBounds(run, current_->from_length(), current_->to_length());
  return {};
}

// False: it must not be copied.  @cost a few nanoseconds: no error is made where there is none
bool Incoming::take_run(const Run& run, Bytes& budget) {
  --current_->parts_left;
  budget -= Bytes(kCharge);
  if (current_->refused) return true;
  const auto sum = checked_add(current_->bytes, current_->bounds.total().value);
  if (!sum || !current_->bounds.hold(run.source_offset, run.target_offset)) return false;
  current_->bytes = *sum;
  add(run, 0, budget);
  return true;
}

Error Incoming::why_not(const Run& run) const {
  const auto total = check_run(run, current_->from_length(), current_->to_length());
  if (total) return {Code::overflow, Scope::peer, "the peer's write has more bytes than fit 64 bits"};
  return {total.error().code, Scope::peer, fmt::format("the peer's run: {}", total.error().message)};
}

// Bytes [done, total) of the run, as far as the budget reaches; what is left stays in partial_.
void Incoming::add(const Run& run, std::int64_t done, Bytes& budget) {
  const std::int64_t total = run.total().value;
  const std::int64_t take = std::min(total - done, std::max<std::int64_t>(budget.value, 0));
  if (work_.empty()) {
    begin_ = done;
    end_ = done;
  }
  work_.begin(current_->to.data(), current_->from.data(), run);
  work_.add(run.source_offset, run.target_offset);
  end_ += take;
  budget -= Bytes(take);
  if (done + take < total) partial_ = Partial{run, done + take};
}

Expected<void> Incoming::take_payload(const RawSlot& slot) {
  --current_->parts_left;
  const std::size_t take = std::min(kSlotBytes, static_cast<std::size_t>(current_->bytes) - current_->payload.size());
  current_->payload.insert(current_->payload.end(), slot.bytes.begin(), slot.bytes.begin() + static_cast<std::ptrdiff_t>(take));
  return {};
}

Expected<void> Incoming::finish() {
  Current done = *std::exchange(current_, {});
  if (done.refused) {
    admitted_.erase(done.tag.value);  // so that no later notice of this tag claims what did not come
    told_now_.push_back({done.tag, {*done.refused, 0}, {}});
    return {};
  }
  told_now_.push_back({done.tag, {Outcome::delivered, done.bytes}, {}});
  if (done.write) return {};
  told_now_.back().notice = std::move(done.payload);
  return flush();
}

// Begins to copy what was collected. What is at hand at once is told at once, so that the ring moves on.
Expected<void> Incoming::flush() {
  if (end_ > begin_) {
    if (auto ok = queue_->start(work_, begin_, end_); !ok) return fail(Scope::peer, ok.error().code, "{}", ok.error().message);
    ++starts_;
  }
  work_.clear();
  begin_ = end_ = 0;
  if (!told_now_.empty()) batches_.push_back({std::exchange(told_now_, {}), starts_});
  publish(ours_.header().consumed, taken_);
  return settle();
}

// Tells what is finished: to the source by answers, to our owner by notices.
Expected<void> Incoming::settle() {
  const auto finished = queue_->finished();
  if (!finished) return fail(Scope::peer, finished.error().code, "{}", finished.error().message);
  // A source that gives up on us says so before it uses its memory again. If it had not when all was read, what we read was what
  // it posted.
  load_fence();
  if (theirs_.header().closed.load() != 0) return fail(Scope::peer, Code::unavailable, "the peer closed the connection");
  for (; !batches_.empty() && batches_.front().starts <= *finished; batches_.pop_front()) {
    for (Told& told : batches_.front().told) {
      ours_.put(ours_.answer(answered_++), told.answer);
      if (told.notice) events_.emplace_back(Notice{peer_, told.tag, std::move(*told.notice)});
    }
  }
  publish(ours_.header().answered, answered_);
  return {};
}

}  // namespace kvloom::shm
