// world.h: one schedule: a small cluster, its network, transport, processes and engines, on one virtual clock.  Drives the session code.
// Everything is drawn from the seed. Faults are drawn apart, each kind by its own count, so that one can be left out and the others stay.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kvloom/session/target_book.h"
#include "kvloom/sim/cache.h"
#include "kvloom/sim/random.h"
#include "kvloom/sim/simulate.h"

namespace kvloom::sim {

enum class FaultKind : std::uint8_t {
  message_dropped,
  message_doubled,
  message_late,
  connection_cut,
  post_failed,
  post_hung,
  post_late,
  post_half,
  killed,
  restarted,
  frozen,
  clock_drift,
  cancelled,
  preempted,
  never_offered,
  babbled,
  lied,
};
inline constexpr int kFaultKinds = 17;
const char* to_string(FaultKind kind);

using FaultId = std::pair<FaultKind, std::int64_t>;  // the how-manieth chance of its kind

// How the transport of a schedule behaves towards peers that do not answer.
enum class Fencing : std::uint8_t {
  revokes,  // writes are refused by tag: the target copies (shm)
  fences,   // a connection can be cut at any time (network)
  waits,    // only a peer that runs or is seen dead can be cut off (memory mapped by the writer)
};

class World {
 public:
  // `left_out`: faults that do not happen.  `said`: what happens, for people; nullptr: nobody listens
  World(std::uint64_t seed, const std::set<FaultId>& left_out, SimulateReport& report, std::vector<std::string>* said);
  ~World();

  // The first law that was broken; nothing if all held to the end.
  std::optional<std::string> run();
  const std::vector<FaultId>& injected() const { return injected_; }

 private:
  struct Attempt;    // of one rank at one transfer
  struct Node;       // a process
  struct Cluster;    // the ranks of a side
  struct Operation;  // a post under way
  struct Request;

  // ---- time ----
  void at(std::int64_t time, std::function<void()> what);
  void on(std::size_t node, std::int64_t time, std::function<void()> what);  // if it still lives then; after a freeze
  Instant local(const Node& node) const;
  void wake(std::size_t node);

  // ---- the cast ----
  void build();
  void start(Node& node);
  void draw_requests();
  std::int64_t pool_pages(const GroupSide& group) const;
  void begin_attempt(std::size_t request);
  Attempt& new_attempt(Node& node, std::size_t request, std::int64_t number);
  void begin_target(std::size_t request, std::size_t node, std::int64_t attempt);
  void begin_source(std::size_t request, std::size_t node, std::int64_t attempt);
  void compute(std::size_t node, const TransferKey& key, std::int64_t chunk_begin, std::size_t layer);
  void take_pages(Node& node, Attempt& attempt, std::int64_t tokens);
  void free_pages(Node& node, Attempt& attempt);
  void rank_over(std::size_t request, std::int64_t attempt);

  // ---- network ----
  void send(std::size_t from, PartnerId to, const Message& message);
  void cut_connection(std::size_t a, std::size_t b);
  void lose(std::size_t node, PartnerId partner);
  void cut_off(std::size_t node, PartnerId partner);

  // ---- transport ----
  void post(std::size_t node, const TransferKey& key, const Sender::Post& post);
  void land(const std::shared_ptr<Operation>& op, std::size_t piece);
  void finish_landing(const std::shared_ptr<Operation>& op);
  void tell_notices(PartnerId source, PartnerId target, Tag tag);
  void complete(const std::shared_ptr<Operation>& op, Expected<void> delivered);
  bool check_landing(const Operation& op, std::size_t piece);
  std::size_t target_group(const Operation& op, std::size_t source_group) const;
  void cut_link(PartnerId source, PartnerId target, const char* why);
  void fence(std::size_t node, PartnerId partner);

  // ---- processes ----
  void kill(std::size_t node);
  void restart(std::size_t node);
  void draw_process_faults();

  // ---- what the machines say ----
  void obey(std::size_t node, std::vector<SourceBook::Action>& actions);
  void obey(std::size_t node, std::vector<TargetBook::Action>& actions);
  void obey_one(std::size_t node, const TransferKey& key, Sender::Action& action);
  void obey_one(std::size_t node, const TransferKey& key, PartnerId source, Receiver::Action& action);
  void check_layer(std::size_t node, Attempt& attempt, LayerId layer);
  void ended(std::size_t node, Attempt& attempt, Outcome outcome, const Error& why);
  void released(std::size_t node, Attempt& attempt);

  // ---- laws ----
  void violate(std::string what);
  void say(const std::function<std::string()>& what);
  bool fault(FaultKind kind);
  void check_end();
  std::uint64_t strange_edges() const;

  SimulateReport& report_;
  std::vector<std::string>* said_;
  const std::set<FaultId>& left_out_;
  std::vector<FaultId> injected_;
  std::array<std::int64_t, kFaultKinds> chances_{};
  std::array<double, kFaultKinds> rates_{};
  std::uint64_t seed_;
  Random random_;

  struct Event {
    std::int64_t time;
    std::uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const { return std::pair(time, number) > std::pair(other.time, other.number); }
  };
  std::priority_queue<Event> events_;
  std::uint64_t next_event_ = 0;
  std::int64_t now_ = 0;
  std::optional<std::string> broken_;

  Fencing fencing_ = Fencing::revokes;
  SessionLimits limits_;
  std::vector<Cluster> clusters_;  // [0]: prefill; then decode groups
  std::vector<Node> nodes_;
  std::vector<Request> requests_;
  std::vector<std::vector<std::shared_ptr<const Plan>>> plans_;  // [decode group][request]
  std::map<const Plan*, PlanDigest> digests_;
  std::vector<std::shared_ptr<Operation>> operations_;                // owners: this, and events that are still to come
  std::set<std::tuple<PartnerId, PartnerId, Tag>> broken_tags_;       // of which a write has failed
  std::map<std::pair<PartnerId, PartnerId>, int> connections_;        // of source and target: how often it was made anew
  std::map<std::pair<PartnerId, PartnerId>, int> known_connections_;  // as far as the target has heard
  std::map<std::tuple<PartnerId, PartnerId, Tag>, int> granted_on_;
  std::vector<std::pair<std::size_t, PartnerId>> fenced_;  // by targets, in the actions that are being carried out
  std::uint64_t next_partner_ = 1;
};

}  // namespace kvloom::sim
