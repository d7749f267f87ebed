// faulty.h: any transport, with the faults that a plan says.  Stage: carry.  For tests of what stands on transports; also how
// tests see that the laws hold when things go wrong: whatever the fault, each operation completes exactly once, only what is
// wholly there is told as delivered, and no notice follows a write of its tag that failed. Time is counted in polls: nothing here
// reads a clock.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kvloom/transport/open_tags.h"
#include "kvloom/transport/transport.h"

namespace kvloom {

struct Fault {
  enum class Kind : std::uint8_t {
    none,
    drop,       // does not arrive; told as failed `polls` later
    delay,      // arrives `polls` later, and what was posted after it to this peer arrives after it
    truncate,   // its first half arrives; told as failed
    duplicate,  // arrives twice; told once
    fail,       // refused at once
  };
  Kind kind = Kind::none;
  int polls = 0;

  friend bool operator==(const Fault&, const Fault&) = default;
};

// Which fault meets which operation, counted from 0 in the order of posting.  A value: the same plan meets the same operations.
class FaultPlan {
 public:
  FaultPlan() = default;  // no faults
  static FaultPlan script(std::map<std::uint64_t, Fault> faults);
  // Each operation is met with this probability by a fault of a kind that the seed draws, delays up to 16 polls.
  static FaultPlan seeded(std::uint64_t seed, double probability);

  Fault at(std::uint64_t operation) const;

 private:
  std::map<std::uint64_t, Fault> script_;
  std::uint64_t seed_ = 0;
  double probability_ = 0;
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, FaultPlan plan) : inner_(std::move(inner)), plan_(std::move(plan)) {}

  Transport& inner() { return *inner_; }

  Abilities abilities() const override;
  Cost cost() const override { return inner_->cost(); }
  std::string address() const override { return inner_->address(); }
  Expected<PeerId> connect(std::string_view address, std::span<const std::byte> hello = {}) override {
    return inner_->connect(address, hello);
  }
  Expected<Region> allocate(Bytes length) override { return inner_->allocate(length); }
  Expected<Region> register_memory(std::span<std::byte> memory) override { return inner_->register_memory(memory); }
  Expected<std::vector<std::byte>> export_region(RegionId region) const override { return inner_->export_region(region); }
  Expected<RemoteRegion> import_region(PeerId peer, std::span<const std::byte> key) override {
    return inner_->import_region(peer, key);
  }
  Expected<void> admit(PeerId peer, Tag tag) override { return inner_->admit(peer, tag); }
  Expected<void> revoke(PeerId peer, Tag tag) override { return inner_->revoke(peer, tag); }
  PostId write(const Write& write) override;
  PostId notify(PeerId peer, Tag tag, std::span<const std::byte> payload) override;
  Expected<void> fence(PeerId peer) override;
  bool poll(PollLimit limit, std::vector<Event>& events) override;
  std::optional<int> arm() override;
  void take_over() override;

 private:
  struct Operation {
    PostId post;
    PeerId peer;
    Tag tag;
    std::optional<Write> write;      // none: a notice
    std::vector<std::byte> payload;  // of a notice
    Fault fault;
    int wait = 0;                // polls until it is forwarded
    int open = 0;                // inner posts that are not completed
    std::vector<Run> cut;        // runs of a truncated write, lent to inner
    std::optional<Error> error;  // what it will be told to have failed with
    std::optional<Bytes> delivered;
  };

  void deregister(RegionId) noexcept override {}  // regions are the inner transport's
  PostId post(Operation operation);
  void forward(std::unique_ptr<Operation> operation);
  PostId forward_once(Operation& operation);
  void take(Completed inner);
  void complete(Operation& operation);
  void fail_held(PeerId peer, const Error& reason);
  void tell_downs(std::vector<Event>& events);

  std::unique_ptr<Transport> inner_;
  FaultPlan plan_;
  std::unordered_map<std::uint64_t, std::deque<std::unique_ptr<Operation>>> held_;  // by peer, in order of posting
  std::unordered_map<std::uint64_t, std::shared_ptr<Operation>>
      forwarded_;                                     // by inner post; owners: the inner posts of one operation
  std::unordered_map<std::uint64_t, OpenTags> tags_;  // by peer
  std::vector<PeerDown> downs_;                       // to be told once nothing that was posted before is open
  std::vector<Event> events_;                         // for the next poll
  std::uint64_t next_post_ = 1;
};

}  // namespace kvloom
