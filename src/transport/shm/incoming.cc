#include "kvloom/transport/shm/incoming.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "kvloom/transport/check_runs.h"

namespace kvloom::shm {

namespace {

constexpr std::size_t kMostJobs = 2048;           // of one flush
constexpr std::int64_t kBatch = 8 << 20;          // bytes of one flush: half a millisecond of copying, so the threads meet seldom
constexpr std::size_t kMostSources = 4096;        // regions that a peer may offer
constexpr std::int64_t kMostMapped = 1ll << 44;   // bytes of them: 16 TiB of addresses
constexpr std::int64_t kPrefault = 1ll << 30;     // bytes of a region whose page table entries are made at once
constexpr std::int64_t kSlotCharge = kSlotBytes;  // what a slot costs of a budget, so that slots without bytes end a poll as well

// A line that the peer reads in a loop is only touched when there is news.
void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) {
  if (word.load(std::memory_order_relaxed) != value) word.store(value);
}

}  // namespace

Incoming::Incoming(PeerId peer, OutboxView ours, const LocalRegions& regions, CopyCrew& crew, std::vector<Event>& events)
    : peer_(peer), ours_(ours), regions_(regions), crew_(crew), events_(events) {
  jobs_.reserve(kMostJobs);
}

Expected<void> Incoming::offer(RegionId region, const Fd& fd, std::uint64_t length) {
  if (length > static_cast<std::uint64_t>(kMostMapped))
    return fail(Scope::peer, Code::invalid_argument, "the peer offers a region of {} bytes", length);
  const Bytes bytes(static_cast<std::int64_t>(length));
  std::int64_t mapped = bytes.value;
  for (const auto& [id, mapping] : sources_) mapped += static_cast<std::int64_t>(mapping.memory().size());
  if (sources_.size() >= kMostSources || mapped > kMostMapped) {
    return fail(Scope::peer, Code::exhausted, "the peer offers more than {} regions or {} bytes", kMostSources, kMostMapped);
  }
  auto mapping = map_peer_memory(fd, bytes);
  if (!mapping)
    return fail(Scope::peer, mapping.error().code, "the peer offers region {}: {}", region.value, mapping.error().message);
  madvise(mapping->memory().data(), static_cast<std::size_t>(std::min(bytes.value, kPrefault)), MADV_POPULATE_READ);
  if (!sources_.emplace(region.value, std::move(*mapping)).second)
    return fail(Scope::peer, Code::parse, "the peer offers region {} twice", region.value);
  return {};
}

Expected<std::uint64_t> Incoming::available() const {
  const std::uint64_t count = theirs_.header().produced.load() - taken_;
  if (count > theirs_.shape().slots)
    return fail(Scope::peer, Code::parse, "the peer says that {} slots wait in a ring of {}", count, theirs_.shape().slots);
  return count;
}

Expected<bool> Incoming::consume(Bytes& budget) {
  const std::uint64_t before = taken_;
  const bool resumed = partial_.has_value();
  missing_.reset();
  if (auto ok = recheck(); !ok) return tl::unexpected(ok.error());
  if (partial_) {
    const Partial partial = *std::exchange(partial_, {});
    if (!current_->refused) add_job(partial.job, partial.done, budget);
    if (!partial_ && current_->parts_left == 0) {
      if (auto ok = finish(); !ok) return tl::unexpected(ok.error());
    }
  }
  while (budget.value > 0 && !partial_ && !missing_) {
    const auto count = available();
    if (!count) return tl::unexpected(count.error());
    if (*count == 0) break;
    for (std::uint64_t i = 0; i < *count && budget.value > 0 && !partial_ && !missing_; ++i) {
      if (auto ok = take_slot(budget); !ok) return tl::unexpected(ok.error());
    }
  }
  if (auto ok = flush(); !ok) return tl::unexpected(ok.error());
  return resumed || taken_ != before;
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
    if (auto ok = take_run(slot, budget); !ok) return ok;
  } else if (auto ok = take_payload(theirs_.get<RawSlot>(theirs_.slot(taken_))); !ok) {
    return ok;
  }
  ++taken_;
  budget -= Bytes(kSlotCharge);
  if (current_->parts_left == 0 && !partial_) return finish();
  if (jobs_.size() == kMostJobs || end_ - begin_ >= kBatch) return flush();
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
    current.from = source->second.memory();
    if (const auto target = regions_.find(current.target); target != regions_.end()) {
      current.to = target->second.memory;
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

Expected<void> Incoming::take_run(const Slot& slot, Bytes& budget) {
  if (slot.kind != SlotKind::run || slot.reserved != 0) {
    return fail(Scope::peer, Code::parse, "the peer's slot {} is of kind {}, where a run should be", taken_,
                static_cast<std::uint32_t>(slot.kind));
  }
  --current_->parts_left;
  if (current_->refused) return {};
  const Run run{Bytes(slot.run.source_offset), Bytes(slot.run.target_offset), Bytes(slot.run.bytes), slot.run.count,
                Bytes(slot.run.source_step),   Bytes(slot.run.target_step)};
  const auto length = [](const auto& memory) { return Bytes(static_cast<std::int64_t>(memory.size())); };
  const auto total = check_run(run, length(current_->from), length(current_->to));
  if (!total) return fail(Scope::peer, total.error().code, "the peer's run: {}", total.error().message);
  const auto sum = checked_add(current_->bytes, total->value);
  if (!sum) return fail(Scope::peer, Code::overflow, "the peer's write has more bytes than fit 64 bits");
  current_->bytes = *sum;
  add_job({current_->to.data(), current_->from.data(), run}, 0, budget);
  return {};
}

// Bytes [done, total) of the job, as far as the budget reaches; what is left stays in partial_.
void Incoming::add_job(const CopyJob& job, std::int64_t done, Bytes& budget) {
  const std::int64_t total = job.run.total().value;
  const std::int64_t take = std::min(total - done, std::max<std::int64_t>(budget.value, 0));
  if (jobs_.empty()) {
    begin_ = done;
    end_ = done;
  }
  jobs_.push_back(job);
  end_ += take;
  budget -= Bytes(take);
  if (done + take < total) partial_ = Partial{job, done + take};
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
    answers_.push_back({*done.refused, 0});
    return {};
  }
  answers_.push_back({Outcome::delivered, done.bytes});
  if (done.write) return {};
  if (auto ok = flush(); !ok) return ok;
  events_.emplace_back(Notice{peer_, done.tag, std::move(done.payload)});
  return {};
}

// Copies what was collected, and only then says so: to the source by answers, to our owner by notices.
Expected<void> Incoming::flush() {
  if (end_ > begin_) crew_.run(jobs_, begin_, end_);
  jobs_.clear();
  begin_ = end_ = 0;
  // A source that gives up on us says so before it uses its memory again. If it had not when all was read, what we read was what
  // it posted.
  load_fence();
  if (theirs_.header().closed.load() != 0) return fail(Scope::peer, Code::unavailable, "the peer closed the connection");
  for (const Answer& answer : answers_) ours_.put(ours_.answer(answered_++), answer);
  answers_.clear();
  publish(ours_.header().answered, answered_);
  publish(ours_.header().consumed, taken_);
  return {};
}

}  // namespace kvloom::shm
