#include "kvloom/session/endpoint.h"

#include <poll.h>

#include <algorithm>
#include <ctime>
#include <tuple>

#include "kvloom/plan/text.h"
#include "kvloom/plan/wire.h"

namespace kvloom {

Instant monotonic_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

Expected<void> check_options(const EndpointOptions& options) {
  if (options.name.size() > kMaxName)
    return fail(Code::invalid_argument, "a rank's name of {} B: at most {}", options.name.size(), kMaxName);
  if (options.heartbeat <= options.heartbeat.zero() || options.silence <= options.heartbeat)
    return fail(Code::invalid_argument,
                "a heartbeat of {} ns and a silence of {} ns: the first must be above 0 and below the second",
                options.heartbeat.count(), options.silence.count());
  return {};
}

Expected<LocalCache> LocalCache::make(std::shared_ptr<const Side> side, Rank rank, std::span<const Region* const> regions,
                                      std::vector<PlacedTensor> tensors) {
  LocalCache out;
  for (const Region* region : regions) {
    out.regions.push_back(region->id());
    out.lengths.push_back(region->length());
  }
  auto memory = CacheMemory::make(*side, rank, out.lengths, tensors);
  if (!memory) return tl::unexpected(memory.error());
  out.side = std::move(side);
  out.rank = rank;
  out.tensors = std::move(tensors);
  out.memory = std::move(*memory);
  return out;
}

Expected<std::shared_ptr<const Side>> KnownSides::find(const std::vector<std::uint8_t>& bytes) {
  std::string key(bytes.begin(), bytes.end());
  if (const auto at = sides_.find(key); at != sides_.end()) return at->second;
  auto side = decode_side(bytes);
  if (!side) return tl::unexpected(side.error());
  auto made = std::make_shared<const Side>(std::move(*side));
  sides_.emplace(key, made);
  order_.push_back(std::move(key));
  if (order_.size() > kMost) {
    sides_.erase(order_.front());
    order_.pop_front();
  }
  return made;
}

namespace {

bool needs_total(const Side& side) {
  return std::any_of(side.groups().begin(), side.groups().end(), [](const GroupSide& g) { return g.tokens.needs_total(); });
}

}  // namespace

Expected<KnownPlan> KnownPlans::find(const std::shared_ptr<const Side>& source, const std::shared_ptr<const Side>& target,
                                     std::int64_t total) {
  if (!needs_total(*source) && !needs_total(*target)) total = kUnbounded;
  const Key key(source, target, total);
  if (const auto at = plans_.find(key); at != plans_.end()) return at->second;
  auto compiled = compile_read(source, target, total);
  if (!compiled) return tl::unexpected(compiled.error());
  KnownPlan made{std::make_shared<const Plan>(std::move(*compiled)), {}};
  made.digest = digest_of(*made.plan);
  plans_.emplace(key, made);
  order_.push_back(key);
  if (order_.size() > kMost) {
    plans_.erase(order_.front());
    order_.pop_front();
  }
  return made;
}

void Pulse::need(bool needed, Instant now) {
  if (needed && !needed_) heard_ = pinged_ = now;
  needed_ = needed;
}

bool Pulse::is_due(Instant now, std::chrono::nanoseconds heartbeat) {
  if (!needed_ || now - pinged_ < heartbeat) return false;
  pinged_ = now;
  return true;
}

void wait_readable(std::span<const int> fds, std::chrono::nanoseconds at_most) {
  std::vector<pollfd> polled;
  polled.reserve(fds.size());
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  constexpr std::chrono::nanoseconds kMost = std::chrono::hours(1);
  const auto time = std::clamp(at_most, std::chrono::nanoseconds(0), kMost);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec timeout{seconds.count(), (time - seconds).count()};
  ::ppoll(polled.data(), polled.size(), &timeout, nullptr);
}

}  // namespace kvloom
