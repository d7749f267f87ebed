#include "kvloom/session/pacer.h"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace kvloom {
namespace {

// A bucket of whole 1e-9 bytes gets `bytes_per_second` of them each nanosecond. Bytes and rates are below 2^63: all products fit.
constexpr std::int64_t kPerByte = 1'000'000'000;

bool fits_under(Bytes limit, Bytes in_flight, Bytes bytes) { return in_flight == Bytes(0) || bytes <= limit - in_flight; }

}  // namespace

Pacer::Pacer(PaceLimits limits) : limits_(limits), level_(Wide{limits.burst.value} * kPerByte) {
  assert(limits.in_flight >= Bytes(0) && limits.in_flight_each >= Bytes(0) && limits.bytes_per_second >= 0 &&
         limits.burst >= Bytes(0));
}

// ---- posts in and out ----

void Pacer::push(Paced post) {
  assert(post.bytes >= Bytes(0));
  const auto at = partners_.try_emplace(post.to).first;
  at->second.posts.push_back(std::move(post));
  ++waiting_;
  if (at->second.posts.size() == 1) place(at);
}

std::optional<Paced> Pacer::next(Instant now) {
  refill(now);
  const Paced* const head = turn();
  if (head == nullptr || wanted(head->bytes) > level_) return std::nullopt;
  const auto at = partners_.find(head->to);
  Partner& partner = at->second;
  Paced post = std::move(partner.posts.front());
  partner.posts.pop_front();
  --waiting_;
  clock_ = partner.served;
  partner.served += post.bytes.value;
  partner.in_flight += post.bytes;
  in_flight_ += post.bytes;
  if (limits_.bytes_per_second > 0) level_ -= Wide{post.bytes.value} * kPerByte;
  place(at);
  return post;
}

void Pacer::done(PartnerId to, Bytes bytes) {
  if (bytes == Bytes(0)) return;  // nothing waits for it, and its partner may be forgotten
  const auto at = partners_.find(to);
  assert(at != partners_.end() && bytes <= at->second.in_flight);
  at->second.in_flight -= bytes;
  in_flight_ -= bytes;
  place(at);
}

std::vector<Paced> Pacer::drop(PartnerId to, const TransferKey& key) {
  const auto at = partners_.find(to);
  if (at == partners_.end()) return {};
  return take(at, [&](const Paced& post) { return post.key == key; });
}

std::vector<Paced> Pacer::drop(const TransferKey& key) {
  std::vector<Paced> out;
  for (auto at = partners_.begin(); at != partners_.end();) {
    auto taken = take(at++, [&](const Paced& post) { return post.key == key; });
    std::move(taken.begin(), taken.end(), std::back_inserter(out));
  }
  return out;
}

std::vector<Paced> Pacer::drop(PartnerId to) {
  const auto at = partners_.find(to);
  if (at == partners_.end()) return {};
  at->second.served = clock_;
  return take(at, [](const Paced&) { return true; });
}

std::vector<Paced> Pacer::take(Partners::iterator at, const std::function<bool(const Paced&)>& which) {
  std::deque<Paced>& posts = at->second.posts;
  const auto taken = std::stable_partition(posts.begin(), posts.end(), [&](const Paced& post) { return !which(post); });
  std::vector<Paced> out(std::make_move_iterator(taken), std::make_move_iterator(posts.end()));
  posts.erase(taken, posts.end());
  waiting_ -= out.size();
  place(at);
  return out;
}

// ---- whose turn ----

bool Pacer::may_have_turn(const Partner& partner) const {
  if (partner.posts.empty()) return false;
  const Bytes bytes = partner.posts.front().bytes;
  return bytes == Bytes(0) || fits_under(limits_.in_flight_each, partner.in_flight, bytes);
}

// Puts a partner that has changed where it belongs, or forgets it where it would come back as if new.
void Pacer::place(Partners::iterator at) {
  Partner& partner = at->second;
  const bool may = may_have_turn(partner);
  if (may && partner.place && std::get<Wide>(*partner.place) == partner.served) return;
  if (partner.place) order_.erase(*partner.place);
  partner.place.reset();
  if (may) {
    partner.served = std::max(partner.served, clock_);
    partner.place = Place(partner.served, ++places_, at->first);
    order_.insert(*partner.place);
  } else if (partner.posts.empty() && partner.in_flight == Bytes(0) && partner.served <= clock_) {
    partners_.erase(at);
  }
}

// The next post, if no limit in flight holds it back.
const Paced* Pacer::turn() const {
  if (order_.empty()) return nullptr;
  const Paced& head = partners_.at(std::get<PartnerId>(*order_.begin())).posts.front();
  return head.bytes == Bytes(0) || fits_under(limits_.in_flight, in_flight_, head.bytes) ? &head : nullptr;
}

// ---- the rate ----

// How far the bucket must be filled for so many bytes to go.
Wide Pacer::wanted(Bytes bytes) const {
  if (bytes == Bytes(0) || limits_.bytes_per_second == 0) return level_;
  return Wide{std::min(bytes, limits_.burst).value} * kPerByte;
}

void Pacer::refill(Instant now) {
  if (now <= filled_) return;
  const Wide more = Wide{(now - filled_).count()} * limits_.bytes_per_second;
  level_ = std::min(level_ + more, Wide{limits_.burst.value} * kPerByte);
  filled_ = now;
}

Instant Pacer::deadline() const {
  const Paced* const head = turn();
  if (head == nullptr) return kNever;
  const Wide missing = wanted(head->bytes) - level_;
  if (missing <= 0) return filled_;
  const Wide wait = (missing + limits_.bytes_per_second - 1) / limits_.bytes_per_second;
  return wait >= Wide{(kNever - filled_).count()} ? kNever : filled_ + Instant(static_cast<std::int64_t>(wait));
}

}  // namespace kvloom
