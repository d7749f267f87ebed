// cluster.h: prefill and decode ranks in one process and one thread, with real sockets and a loopback transport: real endpoints, real bytes.
// Whoever tests says what the engines do; `drive` lets everything happen until something holds.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/session/source_endpoint.h"
#include "kvloom/session/target_endpoint.h"
#include "kvloom/sim/cache.h"
#include "kvloom/transport/loopback/loopback.h"
#include "tests/shapes/shapes.h"

namespace kvloom::testing_cluster {

using namespace std::chrono_literals;

inline constexpr std::int64_t kPoolPages = 96;

// A rank's memory, registered with its transport.
struct RankMemory {
  std::shared_ptr<const Side> side;
  std::unique_ptr<sim::Cache> cache;
  std::vector<Region> regions;
  LocalCache local;

  RankMemory(std::shared_ptr<const Side> of, Rank rank, Transport& transport, sim::Random& random) : side(std::move(of)) {
    std::vector<std::shared_ptr<sim::Pool>> pools;
    for (std::size_t g = 0; g < side->groups().size(); ++g) pools.push_back(std::make_shared<sim::Pool>(kPoolPages, random));
    cache = std::make_unique<sim::Cache>(side, rank, pools);
    std::vector<PlacedTensor> tensors;
    for (const auto& [group, layer] : held_tensors(*side, rank)) {
      auto& bytes = cache->bytes(static_cast<std::size_t>(group), layer);
      tensors.push_back(
          {group,
           layer,
           {{Bytes(0), Bytes(static_cast<std::int64_t>(bytes.size())), static_cast<std::int32_t>(regions.size()), Bytes(0)}}});
      regions.push_back(transport.register_memory(std::as_writable_bytes(std::span(bytes))).value());
    }
    std::vector<const Region*> all;
    for (const Region& region : regions) all.push_back(&region);
    local = LocalCache::make(side, rank, all, std::move(tensors)).value();
  }
};

// The pages of one request on one rank.
using Tables = std::vector<std::vector<PageId>>;  // [groups of the side]

struct Prefill {
  std::unique_ptr<LoopbackTransport> transport;
  std::unique_ptr<RankMemory> memory;
  std::unique_ptr<SourceEndpoint> endpoint;
  std::vector<SourceEvent> events;
  std::map<TransferKey, Tables> tables;

  ~Prefill() {
    endpoint.reset();
    memory.reset();
  }
  template <class T>
  const T* find(const TransferKey& key) const {
    for (const SourceEvent& event : events)
      if (const T* at = std::get_if<T>(&event); at != nullptr && at->key == key) return at;
    return nullptr;
  }
};

struct Decode {
  std::unique_ptr<LoopbackTransport> transport;
  std::vector<std::unique_ptr<RankMemory>> memories;  // one a geometry
  std::vector<GeometryId> geometries;
  std::unique_ptr<TargetEndpoint> endpoint;
  std::vector<TargetEvent> events;
  std::map<TransferKey, Tables> tables;
  bool sleeps = false;  // it is not polled

  ~Decode() {
    endpoint.reset();
    memories.clear();
  }
  template <class T>
  const T* find(const TransferKey& key) const {
    for (const TargetEvent& event : events)
      if (const T* at = std::get_if<T>(&event); at != nullptr && at->key == key) return at;
    return nullptr;
  }
  std::vector<LayerId> layers(const TransferKey& key) const {
    std::vector<LayerId> out;
    for (const TargetEvent& event : events)
      if (const auto* at = std::get_if<LayerLanded>(&event); at != nullptr && at->key == key) out.push_back(at->layer);
    return out;
  }
};

struct Request {
  TransferKey key;
  std::int64_t tokens = 0, prefix = 0, chunk = 1 << 20;
  std::size_t geometry = 0;
  std::vector<std::size_t> decode;  // which decode ranks, by rank of the geometry; empty: all
  std::chrono::nanoseconds time = 20s;
  bool payload = false;
  std::int64_t number = 0;  // of its content
  std::shared_ptr<LayerGate> gate;
};

inline Request request(std::int64_t tokens, std::int64_t chunk = 1 << 20, std::int64_t prefix = 0, std::string name = "req") {
  Request out;
  out.key = {std::move(name), Epoch(1)};
  out.tokens = tokens;
  out.chunk = chunk;
  out.prefix = prefix;
  out.number = static_cast<std::int64_t>(std::hash<std::string>()(out.key.name) % 1000);
  return out;
}

class Cluster {
 public:
  explicit Cluster(CacheShape shape, std::uint64_t seed = 1) : shape_(std::move(shape)), world_(seed), random_(seed) {}
  // With both sides: all prefill ranks, and as many decode ranks as their words have.
  Cluster(CacheShape shape, const std::string& prefill_words, const std::string& decode_words, std::uint64_t seed = 1)
      : Cluster(std::move(shape), seed) {
    add_prefill(prefill_words);
    add_decode(static_cast<std::size_t>(side(decode_words)->ranks()));
    describe(decode_words);
  }

  SourceOptions source_options;
  TargetOptions target_options;
  Sinks source_sinks, target_sinks;  // of all that are added from now on

  std::shared_ptr<const Side> side(const std::string& words) { return std::make_shared<const Side>(shapes::side(shape_, words)); }

  // From now on ranks hold this one.
  void another_model(CacheShape shape) { shape_ = std::move(shape); }
  void add_prefill(const std::string& words) {
    const auto of = side(words);
    for (std::int32_t rank = 0; rank < of->ranks(); ++rank) {
      prefill.push_back(std::make_unique<Prefill>());
      start_prefill(prefill.size() - 1, of, Rank(rank), "tcp://127.0.0.1:*");
    }
  }
  void start_prefill(std::size_t n, const std::shared_ptr<const Side>& of, Rank rank, const std::string& address) {
    prefill[n] = std::make_unique<Prefill>();
    Prefill& p = *prefill[n];
    p.transport = world_.endpoint({});
    p.memory = std::make_unique<RankMemory>(of, rank, *p.transport, random_);
    SourceOptions options = source_options;
    options.name = "prefill";
    options.control.address = address;
    auto made = SourceEndpoint::make(options, *p.transport, p.memory->local, source_sinks);
    ASSERT_TRUE(made) << made.error().message;
    p.endpoint = std::move(*made);
  }
  // The same processes, whatever they shard: as many as the widest of all words has ranks.
  void add_decode(std::size_t ranks) {
    for (std::size_t n = 0; n < ranks; ++n) {
      decode.push_back(std::make_unique<Decode>());
      Decode& d = *decode.back();
      d.transport = world_.endpoint({});
      TargetOptions options = target_options;
      options.name = "decode";
      auto made = TargetEndpoint::make(options, *d.transport, target_sinks);
      ASSERT_TRUE(made) << made.error().message;
      d.endpoint = std::move(*made);
    }
  }
  // Decode ranks first, first + 1, ... have this geometry too.
  void describe(const std::string& words, std::size_t first = 0) {
    const auto of = side(words);
    for (std::int32_t rank = 0; rank < of->ranks(); ++rank) {
      Decode& d = *decode[first + static_cast<std::size_t>(rank)];
      d.memories.push_back(std::make_unique<RankMemory>(of, Rank(rank), *d.transport, random_));
      d.geometries.push_back(d.endpoint->describe(d.memories.back()->local).value());
    }
  }

  std::vector<SourceAddress> addresses() const {
    std::vector<SourceAddress> out;
    for (const auto& p : prefill)
      out.push_back({p->endpoint->address(), source_options.control.keys ? source_options.control.keys->public_key : ""});
    return out;
  }

  // ---- what engines do ----

  std::vector<std::size_t> ranks_of(const Request& request) const {
    if (!request.decode.empty()) return request.decode;
    std::vector<std::size_t> out;
    for (std::size_t n = 0; n < decode.size(); ++n) out.push_back(n);
    return out;
  }

  Expected<void> begin(const Request& request, std::size_t n) {
    Decode& d = *decode[n];
    RankMemory& memory = *d.memories[request.geometry];
    Want want{request.key, d.geometries[request.geometry], addresses(), {request.prefix, request.tokens}, {}, request.time,
              request.gate};
    Tables& tables = d.tables[request.key];
    for (std::size_t g = 0; g < memory.side->groups().size(); ++g) {
      tables.push_back(memory.cache->pool(g).take(memory.cache->columns(g, request.tokens, request.tokens), request.number));
      want.tables.push_back({tables.back(), kPoolPages});
    }
    return d.endpoint->begin(std::move(want));
  }
  void begin(const Request& request) {
    for (const std::size_t n : ranks_of(request)) {
      const auto ok = begin(request, n);
      ASSERT_TRUE(ok) << ok.error().message;
    }
  }
  void offer(const Request& request) {
    for (auto& p : prefill) {
      const auto ok = p->endpoint->offer({request.key, request.time, request.payload});
      ASSERT_TRUE(ok) << ok.error().message;
      p->tables[request.key].resize(p->memory->side->groups().size());
    }
  }
  // One layer of the tokens [begin, end), on every prefill rank that has it.
  void compute(const Request& request, LayerId layer, std::int64_t begin, std::int64_t end,
               const std::shared_ptr<DeviceWork>& after = nullptr) {
    for (auto& p : prefill) {
      if (!p->tables.contains(request.key)) continue;
      sim::Cache& cache = *p->memory->cache;
      for (std::size_t g = 0; g < p->memory->side->groups().size(); ++g) {
        auto& table = p->tables[request.key][g];
        const auto columns = static_cast<std::size_t>(cache.columns(g, end, request.tokens));
        if (columns > table.size()) {
          const auto fresh = cache.pool(g).take(static_cast<std::int64_t>(columns - table.size()), request.number);
          table.insert(table.end(), fresh.begin(), fresh.end());
          const auto ok = p->endpoint->set_table(request.key, static_cast<std::int32_t>(g), {table, kPoolPages});
          ASSERT_TRUE(ok) << ok.error().message;
        }
        if (!cache.holds(g, layer)) continue;
        const bool state = p->memory->side->groups()[g].kind == GroupKind::state;
        if (!state) cache.fill(request.number, g, layer, begin, end, request.tokens, table);
        if (state && end == request.tokens) cache.fill(request.number, g, layer, 0, 1, request.tokens, table);
      }
      p->endpoint->ready(request.key, layer, end, after);
    }
  }
  void compute_all(const Request& request) {
    for (std::int64_t begin = 0; begin < request.tokens; begin += request.chunk)
      for (std::int32_t layer = 0; layer < shape_.layers() + 1; ++layer) {
        compute(request, LayerId(layer), begin, std::min(begin + request.chunk, request.tokens));
        poll();
      }
    if (request.payload)
      for (auto& p : prefill)
        std::ignore =
            p->endpoint->payload(request.key, {std::byte{42}, std::byte{static_cast<unsigned char>(p->endpoint->rank().value)}});
  }

  // A request from its beginning to its end, in which every wanted byte lands.
  testing::AssertionResult serves(const Request& request) {
    begin(request);
    offer(request);
    compute_all(request);
    const auto ended = drive([&] { return over(request); });
    return ended ? landed(request) : ended;
  }

  // ---- what happens ----

  void poll() {
    for (auto& p : prefill)
      if (p->endpoint != nullptr) p->endpoint->poll(0ns, p->events);
    for (auto& d : decode)
      if (d->endpoint != nullptr && !d->sleeps) d->endpoint->poll(0ns, d->events);
  }
  testing::AssertionResult drive(const std::function<bool()>& until, std::chrono::nanoseconds at_most = 20s) {
    const Instant end = monotonic_now() + at_most;
    while (!until()) {
      if (monotonic_now() > end) return testing::AssertionFailure() << "it did not happen";
      poll();
    }
    return testing::AssertionSuccess();
  }
  bool over(const Request& request) const {
    for (const auto& p : prefill)
      if (p->tables.contains(request.key) && p->find<SourceReleased>(request.key) == nullptr) return false;
    return decoded(request);
  }
  // Over on the decode side.
  bool decoded(const Request& request) const {
    for (const std::size_t n : ranks_of(request))
      if (decode[n]->tables.contains(request.key) && decode[n]->find<TargetReleased>(request.key) == nullptr) return false;
    return true;
  }
  // Everybody says that it landed, and every wanted byte is right.
  testing::AssertionResult landed(const Request& request) const {
    for (const auto& p : prefill) {
      const auto* ended = p->find<SourceEnded>(request.key);
      if (ended == nullptr || ended->outcome != Outcome::landed)
        return testing::AssertionFailure() << "prefill rank " << p->endpoint->rank().value << ": "
                                           << (ended == nullptr ? "not over" : ended->why.message);
    }
    for (const std::size_t n : ranks_of(request)) {
      const Decode& d = *decode[n];
      const auto* ended = d.find<TargetEnded>(request.key);
      if (ended == nullptr || ended->outcome != Outcome::landed)
        return testing::AssertionFailure() << "decode rank " << n << ": " << (ended == nullptr ? "not over" : ended->why.message);
      const RankMemory& memory = *d.memories[request.geometry];
      for (const auto& [group, layer] : held_tensors(*memory.side, memory.local.rank)) {
        const auto g = static_cast<std::size_t>(group);
        const TokenRange want = wanted(memory.side->groups()[g], {request.prefix, request.tokens});
        const auto wrong =
            memory.cache->check(request.number, g, layer, want.begin, want.end, request.tokens, d.tables.at(request.key)[g]);
        if (wrong >= 0)
          return testing::AssertionFailure()
                 << "decode rank " << n << " group " << group << " layer " << layer.value << ": token " << wrong << " is wrong";
      }
    }
    return testing::AssertionSuccess();
  }

  std::vector<std::unique_ptr<Prefill>> prefill;
  std::vector<std::unique_ptr<Decode>> decode;
  LoopbackWorld& world() { return world_; }

 private:
  CacheShape shape_;
  LoopbackWorld world_;
  sim::Random random_;
};

}  // namespace kvloom::testing_cluster
