// Sessions with real threads: engines that call from many, endpoints on their own, bytes over shared memory, real control sockets. Made to be
// run under ThreadSanitizer; what the endpoints do is endpoint_test.cc's.
#include "kvloom/session/sessions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <thread>

#include "kvloom/transport/shm/shm.h"
#include "tests/endpoint/cluster.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing_cluster::kPoolPages;
using testing_cluster::RankMemory;
using testing_cluster::Tables;

constexpr auto kLong = 20s;  // nothing below takes as long, unless it hangs

// ---- ranks ----

std::unique_ptr<ShmTransport> shm(bool listens) {
  ShmOptions options;
  options.listen = listens ? "*" : "";
  return ShmTransport::make(std::move(options)).value();
}

// A prefill rank. What its engine writes is in memory of the transport, since the target reads it there.
struct Prefill {
  std::unique_ptr<ShmTransport> transport = shm(false);
  std::shared_ptr<const Side> side;
  std::unique_ptr<sim::Cache> cache;
  std::vector<Region> regions;                                              // one a tensor
  std::map<std::pair<std::size_t, LayerId>, std::span<std::byte>> tensors;  // into regions
  LocalCache local;
  Metrics metrics;
  Trace trace;
  std::mutex engine;  // guards the pools, cache and tensors, as an engine's forward pass would
  std::unique_ptr<SourceSession> session;

  Prefill(std::shared_ptr<const Side> of, Rank rank, sim::Random& random, const SourceOptions& options = {})
      : side(std::move(of)), metrics("prefill", rank), trace("prefill rank", rank.value) {
    std::vector<std::shared_ptr<sim::Pool>> pools;
    for (std::size_t g = 0; g < side->groups().size(); ++g) pools.push_back(std::make_shared<sim::Pool>(kPoolPages, random));
    cache = std::make_unique<sim::Cache>(side, rank, pools);
    std::vector<PlacedTensor> placed;
    for (const auto& [group, layer] : held_tensors(*side, rank)) {
      const auto g = static_cast<std::size_t>(group);
      const Bytes size(static_cast<std::int64_t>(cache->bytes(g, layer).size()));
      placed.push_back({group, layer, {{Bytes(0), size, static_cast<std::int32_t>(regions.size()), Bytes(0)}}});
      regions.push_back(transport->allocate(size).value());
      tensors.emplace(std::pair(g, layer), regions.back().memory());
    }
    std::vector<const Region*> all;
    for (const Region& region : regions) all.push_back(&region);
    local = LocalCache::make(side, rank, all, std::move(placed)).value();
    session = SourceSession::make(options, *transport, local, {&metrics, &trace, {}}).value();
  }

  LayerId last_layer() const { return held_tensors(*side, local.rank).back().second; }

  // Tokens [begin, end) of one layer, of all groups that have it. Only bytes that change are written: the rest may be read meanwhile.
  void compute(std::int64_t number, LayerId layer, std::int64_t begin, std::int64_t end, std::int64_t total,
               const Tables& table) {
    const std::lock_guard lock(engine);
    for (std::size_t g = 0; g < side->groups().size(); ++g) {
      if (!cache->holds(g, layer)) continue;
      cache->fill(number, g, layer, begin, end, total, table[g]);
      const auto computed = std::as_bytes(std::span(cache->bytes(g, layer)));
      const auto there = tensors.at({g, layer});
      for (std::size_t i = 0; i < computed.size(); ++i)
        if (there[i] != computed[i]) there[i] = computed[i];
    }
  }
  // The table grows until it holds the first `tokens` tokens; true: it has grown.
  bool grow(Tables& table, std::size_t group, std::int64_t tokens, std::int64_t total, std::int64_t number) {
    const std::lock_guard lock(engine);
    const auto columns = static_cast<std::size_t>(cache->columns(group, tokens, total));
    if (columns <= table[group].size()) return false;
    const auto fresh = cache->pool(group).take(static_cast<std::int64_t>(columns - table[group].size()), number);
    table[group].insert(table[group].end(), fresh.begin(), fresh.end());
    return true;
  }
};

struct Decode {
  std::unique_ptr<ShmTransport> transport = shm(true);
  std::unique_ptr<RankMemory> memory;
  Metrics metrics;
  Trace trace;
  std::mutex engine;  // guards the pools
  std::unique_ptr<TargetSession> session;
  GeometryId geometry;

  Decode(const std::shared_ptr<const Side>& side, Rank rank, sim::Random& random, const TargetOptions& options = {})
      : memory(std::make_unique<RankMemory>(side, rank, *transport, random)),
        metrics("decode", rank),
        trace("decode rank", 100 + rank.value),
        session(TargetSession::make(options, *transport, {&metrics, &trace, {}}).value()),
        geometry(session->describe(memory->local).value()) {}
};

struct Wish {
  TransferKey key;
  std::int64_t tokens = 0, prefix = 0, chunk = 0;
  std::int64_t number = 0;  // of its content
};

class Ranks {
 public:
  Ranks(CacheShape shape, const std::string& from, const std::string& to, const SourceOptions& source = {},
        const TargetOptions& target = {})
      : shape_(std::move(shape)), random_(7) {
    const auto prefill_side = std::make_shared<const Side>(shapes::side(shape_, from));
    const auto decode_side = std::make_shared<const Side>(shapes::side(shape_, to));
    for (std::int32_t r = 0; r < prefill_side->ranks(); ++r)
      prefill.push_back(std::make_unique<Prefill>(prefill_side, Rank(r), random_, source));
    for (std::int32_t r = 0; r < decode_side->ranks(); ++r)
      decode.push_back(std::make_unique<Decode>(decode_side, Rank(r), random_, target));
    for (const auto& p : prefill) addresses_.push_back({p->session->address(), ""});
  }

  std::int32_t layers() const { return shape_.layers(); }

  // A decode rank asks for a request's cache.
  Tables begin(Decode& d, const Wish& r, std::chrono::nanoseconds time = kLong) {
    Want want{r.key, d.geometry, addresses_, {r.prefix, r.tokens}, {}, time};
    Tables tables;
    {
      const std::lock_guard lock(d.engine);
      for (std::size_t g = 0; g < d.memory->side->groups().size(); ++g) {
        sim::Cache& cache = *d.memory->cache;
        tables.push_back(cache.pool(g).take(cache.columns(g, r.tokens, r.tokens), r.number));
        want.tables.push_back({tables.back(), kPoolPages});
      }
    }
    const auto ok = d.session->begin(std::move(want));
    EXPECT_TRUE(ok) << ok.error().message;
    return tables;
  }
  // Every wanted byte of this layer is there.
  void check(Decode& d, const Wish& r, LayerId layer, const Tables& tables) {
    for (std::size_t g = 0; g < tables.size(); ++g) {
      sim::Cache& cache = *d.memory->cache;
      if (!cache.holds(g, layer)) continue;
      const TokenRange want = wanted(d.memory->side->groups()[g], {r.prefix, r.tokens});
      EXPECT_EQ(cache.check(r.number, g, layer, want.begin, want.end, r.tokens, tables[g]), -1)
          << r.key.name << " layer " << layer.value << " at decode rank " << d.memory->local.rank.value;
    }
  }
  // What a decode engine's thread does for a request.
  void receive(Decode& d, const Wish& r) {
    const Tables tables = begin(d, r);
    for (std::int32_t layer = 0; layer < layers(); ++layer) {
      const auto landed = d.session->wait_layer(r.key, LayerId(layer), kLong);
      ASSERT_TRUE(landed) << landed.error().message;
      check(d, r, LayerId(layer), tables);
    }
    const auto ended = d.session->wait(r.key, kLong);
    ASSERT_TRUE(ended) << ended.error().message;
    EXPECT_EQ(ended->outcome, Outcome::landed) << ended->why.message;
    EXPECT_EQ(ended->payloads.size(), prefill.size());
    EXPECT_TRUE(d.session->wait_released(r.key, kLong));
  }
  // What a prefill engine's thread does for a request.
  void compute(Prefill& p, const Wish& r) {
    const auto offered = p.session->offer({r.key, kLong, true});
    ASSERT_TRUE(offered) << offered.error().message;
    Tables tables(p.side->groups().size());
    for (std::int64_t begin = 0; begin < r.tokens; begin += r.chunk) {
      const std::int64_t end = std::min(begin + r.chunk, r.tokens);
      for (std::size_t g = 0; g < tables.size(); ++g)
        if (p.grow(tables, g, end, r.tokens, r.number)) {
          const auto ok = p.session->set_table(r.key, static_cast<std::int32_t>(g), {tables[g], kPoolPages});
          ASSERT_TRUE(ok) << ok.error().message;
        }
      for (std::int32_t layer = 0; layer < layers(); ++layer) {
        p.compute(r.number, LayerId(layer), begin, end, r.tokens, tables);
        p.session->ready(r.key, LayerId(layer), end);
      }
    }
    ASSERT_TRUE(p.session->payload(r.key, {std::byte{42}}));
    for (std::int32_t layer = 0; layer < layers(); ++layer)
      EXPECT_TRUE(p.session->wait_layer_released(r.key, LayerId(layer), kLong));
    const auto ended = p.session->wait(r.key, kLong);
    ASSERT_TRUE(ended) << ended.error().message;
    EXPECT_EQ(ended->outcome, Outcome::landed) << ended->why.message;
    EXPECT_TRUE(p.session->wait_released(r.key, kLong));
  }

  // All ranks begin, and the first layer is there: every prefill rank that has it has been granted.
  void begin_all(const Wish& r) {
    for (auto& d : decode) begin(*d, r);
    for (auto& p : prefill) {
      ASSERT_TRUE(p->session->offer({r.key, kLong, false}));
      Tables tables(1);
      p->grow(tables, 0, r.tokens, r.tokens, r.number);
      ASSERT_TRUE(p->session->set_table(r.key, 0, {tables[0], kPoolPages}));
      p->compute(r.number, LayerId(0), 0, r.tokens, r.tokens, tables);
      p->session->ready(r.key, LayerId(0), r.tokens);
    }
    for (auto& d : decode) EXPECT_TRUE(d->session->wait_layer(r.key, LayerId(0), kLong));
  }

  std::vector<std::unique_ptr<Prefill>> prefill;
  std::vector<std::unique_ptr<Decode>> decode;

 private:
  CacheShape shape_;
  sim::Random random_;
  std::vector<SourceAddress> addresses_;
};

std::vector<Wish> requests(int count) {
  std::vector<Wish> out;
  for (int i = 0; i < count; ++i) out.push_back({{"req-" + std::to_string(i), Epoch(1)}, 9 + 5 * i, i, 4 + i, i});
  return out;
}

void join(std::vector<std::thread>& threads) {
  for (std::thread& thread : threads) thread.join();
}

// It is over, and did not land, for this reason.
testing::AssertionResult says_why(SourceSession& session, const TransferKey& key, const std::string& words) {
  const auto ended = session.wait(key, kLong);
  if (!ended) return testing::AssertionFailure() << ended.error().message;
  if (ended->outcome != Outcome::landed && ended->why.message.find(words) != std::string::npos)
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << to_string(ended->outcome) << ": '" << ended->why.message << "' does not say: " << words;
}

// Of a transfer that is stopped: whether its layers are released one by one before it is over, or with its end.
testing::AssertionResult is_not_read(SourceSession& session, const TransferKey& key, LayerId layer) {
  const auto released = session.wait_layer_released(key, layer, kLong);
  if (released || released.error().code != Code::deadline || session.wait(key, 0ns)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << released.error().message;
}

// ---- many threads ----

TEST(Sessions, ManyEngineThreadsMoveManyRequestsAtOnce) {
  for (const auto& [shape, from, to] :
       {std::tuple(shapes::mla(), "cp=2:layers", "dcp=2"), std::tuple(shapes::gqa(2), "tp=1", "tp=2"),
        std::tuple(shapes::hybrid(), "tp=2", "tp=1")}) {
    Ranks ranks(shape, from, to);
    std::vector<std::thread> threads;
    for (const Wish& r : requests(4)) {
      for (auto& d : ranks.decode) threads.emplace_back([&ranks, &d, r] { ranks.receive(*d, r); });
      for (auto& p : ranks.prefill) threads.emplace_back([&ranks, &p, r] { ranks.compute(*p, r); });
    }
    join(threads);
  }
}

TEST(Sessions, SeveralThreadsTellOneTransferAndWaitForIt) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  Prefill& p = *ranks.prefill[0];
  Decode& d = *ranks.decode[0];
  const Wish r = requests(3).back();
  const Tables tables = ranks.begin(d, r);
  ASSERT_TRUE(p.session->offer({r.key, kLong, false}));
  Tables ours(1);
  p.grow(ours, 0, r.tokens, r.tokens, r.number);
  ASSERT_TRUE(p.session->set_table(r.key, 0, {ours[0], kPoolPages}));
  std::vector<std::thread> threads;
  for (std::int32_t layer = 0; layer < ranks.layers(); ++layer) {
    threads.emplace_back([&, layer] {
      for (std::int64_t begin = 0; begin < r.tokens; begin += r.chunk) {
        const std::int64_t end = std::min(begin + r.chunk, r.tokens);
        p.compute(r.number, LayerId(layer), begin, end, r.tokens, ours);
        p.session->ready(r.key, LayerId(layer), end);
      }
      EXPECT_TRUE(p.session->wait_layer_released(r.key, LayerId(layer), kLong));
    });
    threads.emplace_back([&, layer] {
      const auto landed = d.session->wait_layer(r.key, LayerId(layer), kLong);
      ASSERT_TRUE(landed) << landed.error().message;
      ranks.check(d, r, LayerId(layer), tables);
    });
  }
  threads.emplace_back([&] { EXPECT_EQ(p.session->wait(r.key, kLong).value().outcome, Outcome::landed); });
  threads.emplace_back([&] { EXPECT_EQ(d.session->wait(r.key, kLong).value().outcome, Outcome::landed); });
  join(threads);
}

TEST(Sessions, AnInterruptEndsAWaitAndNothingElse) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  Decode& d = *ranks.decode[0];
  const Wish r = requests(3).back();
  ranks.begin_all(r);
  std::atomic<int> asked = 0;
  const Interrupt third = [&asked] { return ++asked == 3; };
  const auto ended = d.session->wait(r.key, kLong, third);
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().code, Code::cancelled);
  EXPECT_THAT(ended.error().message, testing::EndsWith("still open, and the wait was interrupted"));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(d.session->open(), 1U);
  EXPECT_TRUE(d.session->wait_layer(r.key, LayerId(0), kLong, third));  // there already: nobody is asked
  EXPECT_EQ(asked, 3);
}

// In order, on one thread, and before whoever waits for it wakes.
TEST(Sessions, AnObserverHearsEverythingBeforeWhoeverWaits) {
  const auto transport = shm(true);
  std::mutex mutex;
  std::vector<TargetEvent> heard;
  const auto session = TargetSession::make({}, *transport, {}, [&](std::span<const TargetEvent> events) {
                         const std::lock_guard lock(mutex);
                         heard.insert(heard.end(), events.begin(), events.end());
                       }).value();
  const auto side = std::make_shared<const Side>(shapes::side(shapes::mla(), "tp=1"));
  const GeometryId geometry = session->describe(LocalCache::make(side, Rank(0), {}, {}).value()).value();
  const TransferKey key{"nobody's", Epoch(1)};
  ASSERT_TRUE(session->begin({key, geometry, {{"tcp://127.0.0.1:1", ""}}, {0, 0}, {{}}, 50ms}));
  ASSERT_TRUE(session->wait_released(key, kLong));
  const std::lock_guard lock(mutex);
  ASSERT_EQ(heard.size(), 2U);
  EXPECT_EQ(std::get<TargetEnded>(heard[0]).outcome, Outcome::failed);
  EXPECT_EQ(std::get<TargetReleased>(heard[1]).key, key);
}

TEST(Sessions, MetricsAndTracesAreReadWhileTheyAreWritten) {
  Ranks ranks(shapes::mla(), "cp=2:layers", "tp=1");
  std::atomic<bool> over = false;
  std::vector<std::thread> readers, threads;
  const auto read = [&over](const Metrics& metrics, const Trace& trace) {
    do {
      EXPECT_THAT(metrics.text(), testing::HasSubstr("kvloom_"));
      EXPECT_THAT(trace.json(), testing::HasSubstr("traceEvents"));
    } while (!over);
  };
  for (auto& p : ranks.prefill) readers.emplace_back([&] { read(p->metrics, p->trace); });
  for (auto& d : ranks.decode) readers.emplace_back([&] { read(d->metrics, d->trace); });
  for (const Wish& r : requests(3)) {
    for (auto& d : ranks.decode) threads.emplace_back([&ranks, &d, r] { ranks.receive(*d, r); });
    for (auto& p : ranks.prefill) threads.emplace_back([&ranks, &p, r] { ranks.compute(*p, r); });
  }
  join(threads);
  over = true;
  join(readers);
  EXPECT_THAT(ranks.decode[0]->metrics.text(), testing::ContainsRegex("outcome=\"landed\"[^}]*} 3"));
}

// A wake-up that gets lost makes its caller wait as long as an endpoint sleeps: a minute.
TEST(Sessions, NoCallIsForgottenHoweverManyThreadsCall) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  Prefill& p = *ranks.prefill[0];
  constexpr int kThreads = 4, kCalls = 2000;
  const TransferKey nobody{"nobody's", Epoch(1)};
  const auto begun = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) {
        p.session->ready(nobody, LayerId(0), i);
        if (i % 8 != 0) continue;
        EXPECT_TRUE(p.session->set_table(nobody, 0, {}));
      }
    });
  join(threads);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, kLong);
}

// ---- deadlines ----

TEST(Sessions, AWaitEndsWithItsTimeAndSaysWhatItWaitedFor) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  auto& source = *ranks.prefill[0]->session;
  auto& target = *ranks.decode[0]->session;
  const Wish r = requests(1)[0];
  ranks.begin(*ranks.decode[0], r);
  ASSERT_TRUE(source.offer({r.key, kLong, false}));
  for (const auto wait : {0ns, std::chrono::nanoseconds(10ms)}) {
    EXPECT_TRUE(shapes::says(target.wait_layer(r.key, LayerId(0), wait), "transfer req-0#1: a layer has not landed after"));
    EXPECT_TRUE(shapes::says(target.wait(r.key, wait), "transfer req-0#1: still open after"));
    EXPECT_TRUE(shapes::says(target.wait_released(r.key, wait), "its pages are in quarantine still after"));
    EXPECT_TRUE(shapes::says(source.wait_layer_released(r.key, LayerId(0), wait), "a layer's pages are still read after"));
    EXPECT_TRUE(shapes::says(source.wait(r.key, wait), "still open after"));
    EXPECT_TRUE(shapes::says(source.wait_released(r.key, wait), "its pages are still read after"));
    EXPECT_EQ(target.wait(r.key, wait).error().code, Code::deadline);
  }
}

TEST(Sessions, NobodyWaitsForWhatIsNotKnown) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  auto& source = *ranks.prefill[0]->session;
  auto& target = *ranks.decode[0]->session;
  const TransferKey nobody{"nobody's", Epoch(1)};
  EXPECT_TRUE(shapes::says(target.wait_layer(nobody, LayerId(0), kLong), "transfer nobody's#1 is not known here"));
  EXPECT_TRUE(shapes::says(target.wait(nobody, kLong), "is not known here"));
  EXPECT_TRUE(shapes::says(source.wait(nobody, kLong), "is not known here"));
  const Wish r = requests(1)[0];
  ASSERT_TRUE(source.offer({r.key, kLong, false}));
  EXPECT_TRUE(shapes::says(source.offer({r.key, kLong, false}), "has been offered before"));
  source.forget(r.key);
  EXPECT_TRUE(shapes::says(source.wait(r.key, kLong), "is not known here"));
}

TEST(Sessions, ATransferWhoseTimeIsUpWakesWhoWaits) {
  Ranks ranks(shapes::mla(), "tp=1", "tp=1");
  auto& source = *ranks.prefill[0]->session;
  auto& target = *ranks.decode[0]->session;
  const Wish r = requests(1)[0];
  ranks.begin(*ranks.decode[0], r, 50ms);
  ASSERT_TRUE(source.offer({r.key, 50ms, false}));
  EXPECT_TRUE(shapes::says(target.wait_layer(r.key, LayerId(0), kLong), "time"));
  EXPECT_TRUE(is_not_read(source, r.key, LayerId(0)));
  EXPECT_EQ(target.wait(r.key, kLong).value().outcome, Outcome::failed);
  EXPECT_TRUE(says_why(source, r.key, "time"));  // its own is up, or its target's
  EXPECT_TRUE(target.wait_released(r.key, kLong));
  EXPECT_TRUE(source.wait_released(r.key, kLong));
}

// ---- cancelled, destroyed ----

TEST(Sessions, ACancelWakesAllWhoWait) {
  for (const bool by_target : {true, false}) {
    Ranks ranks(shapes::mla(), "cp=2:layers", "tp=1");
    auto& target = *ranks.decode[0]->session;
    const Wish r = requests(1)[0];
    ranks.begin_all(r);  // a cancel that overtakes its grant says nothing to prefill: docs/failures.md
    constexpr int kEach = 2;
    std::latch there(static_cast<std::ptrdiff_t>(kEach * (1 + ranks.prefill.size())));
    std::vector<std::thread> threads;
    for (int i = 0; i < kEach; ++i) {
      threads.emplace_back([&] {
        there.count_down();
        EXPECT_TRUE(shapes::says(target.wait_layer(r.key, LayerId(ranks.layers() - 1), kLong), "enough"));
        EXPECT_NE(target.wait(r.key, kLong).value().outcome, Outcome::landed);
        EXPECT_TRUE(target.wait_released(r.key, kLong));
      });
      for (auto& p : ranks.prefill)
        threads.emplace_back([&] {
          there.count_down();
          EXPECT_TRUE(is_not_read(*p->session, r.key, p->last_layer()));
          EXPECT_TRUE(says_why(*p->session, r.key, "enough"));
          EXPECT_TRUE(p->session->wait_released(r.key, kLong));
        });
    }
    there.wait();
    if (by_target)
      target.cancel(r.key, "enough");
    else
      for (auto& p : ranks.prefill) p->session->cancel(r.key, "enough");
    join(threads);
  }
}

TEST(Sessions, ASessionThatIsDestroyedFailsItsOpenTransfersAtItsPeers) {
  for (const bool target_goes : {true, false}) {
    Ranks ranks(shapes::mla(), "cp=2:layers", "tp=1");
    const std::vector<Wish> all = requests(3);
    for (const Wish& r : all) ranks.begin_all(r);
    if (target_goes) {
      ranks.decode[0] = nullptr;  // with its memory
      for (const Wish& r : all)
        for (auto& p : ranks.prefill) {
          EXPECT_TRUE(is_not_read(*p->session, r.key, p->last_layer()));
          EXPECT_TRUE(says_why(*p->session, r.key, "decode rank 0"));
          EXPECT_TRUE(p->session->wait_released(r.key, kLong));
        }
    } else {
      ranks.prefill[1] = nullptr;
      for (const Wish& r : all) {
        EXPECT_TRUE(
            shapes::says(ranks.decode[0]->session->wait_layer(r.key, LayerId(ranks.layers() - 1), kLong), "prefill rank 1"));
        EXPECT_TRUE(ranks.decode[0]->session->wait_released(r.key, kLong));
      }
    }
  }
}

TEST(Sessions, AnIdleSessionIsDestroyedAtOnce) {
  const auto begun = std::chrono::steady_clock::now();
  { Ranks ranks(shapes::mla(), "cp=2:layers", "tp=1"); }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, kLong);
}

}  // namespace
}  // namespace kvloom
