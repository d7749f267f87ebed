// Streams that wait at gates while peers come, are lost and are forgotten: nothing on the transport's thread may wait for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <thread>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/device_work.h"
#include "tests/cuda/cuda_world.h"
#include "tests/cuda/fake_driver.h"

namespace kvloom::cuda {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kSentBytes = 3 << 20;
// 2 MiB for a copy engine, 1 MiB of pages in falling order for the kernel.
const Runs kAllSent = {{Bytes(0), Bytes(0), Bytes(2 << 20)},
                       {Bytes(2 << 20), Bytes(kSentBytes - 4096), Bytes(4096), 256, Bytes(4096), Bytes(-4096)}};

CudaWorldOptions gate_world(bool fake, MemoryKind memory) {
  CudaWorldOptions out;
  out.fake = fake;
  out.memory = memory;
  out.transport.allocate_on_host = memory == MemoryKind::host;
  return out;
}

// A source in a process of its own, forked before CUDA is started here: it waits for an address, connects, waits for a key, writes all of
// its memory to it with a notice, and lives until it is killed.
class SourceProcess {
 public:
  SourceProcess(bool fake, MemoryKind memory, std::uint64_t seed) {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    socket_ = ends[0];
    pid_ = fork();
    if (pid_ != 0) {
      close(ends[1]);
      return;
    }
    close(ends[0]);
    play(ends[1], fake, memory, seed);
    _exit(0);
  }
  SourceProcess(const SourceProcess&) = delete;
  SourceProcess& operator=(const SourceProcess&) = delete;
  ~SourceProcess() {
    end();
    close(socket_);
  }

  void tell(std::span<const std::byte> message) const {
    EXPECT_EQ(send(socket_, message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
  }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  static std::vector<std::byte> hear(int socket) {
    std::vector<std::byte> out(4096);
    out.resize(static_cast<std::size_t>(std::max<ssize_t>(recv(socket, out.data(), out.size(), 0), 0)));
    return out;
  }
  static void play(int socket, bool fake, MemoryKind memory, std::uint64_t seed) {
    const auto address = hear(socket);
    if (address.empty()) return;
    CudaWorld world(gate_world(fake, memory));
    Party source{world.endpoint({}), {}};
    std::unique_ptr<ConformanceMemory> own;
    Region from;
    if (memory == MemoryKind::host) {
      from = *source.transport->allocate(Bytes(kSentBytes));
    } else {
      own = world.memory(Bytes(kSentBytes));
      from = *source.transport->register_memory(own->span());
    }
    world.put_random(from.memory(), seed);
    const auto target = source.transport->connect({reinterpret_cast<const char*>(address.data()), address.size()});
    if (!target || !drive({&source}, [&] { return source.count<PeerUp>() == 1; })) return;
    const auto key = hear(socket);
    const auto remote = source.transport->import_region(*target, key);
    if (!remote) return;
    source.transport->write({from.id(), *remote, kTag, kAllSent});
    source.transport->notify(*target, kTag, bytes_of("all"));
    drive({&source}, [] { return false; });  // until it is killed, or the test's deadline
  }

  int socket_ = -1;
  pid_t pid_ = -1;
};

// Opens a gate if a test has not ended in time, so that it fails rather than hangs.
class Watchdog {
 public:
  explicit Watchdog(std::shared_ptr<StreamGate> gate) : gate_(std::move(gate)), thread_([this] { watch(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { call_off(); }
  // Whether it had to open the gate.
  bool call_off() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
    return barked_;
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    barked_ = !changed_.wait_for(lock, kTestDeadline, [&] { return over_; });
    if (barked_) gate_->over();
  }

  std::shared_ptr<StreamGate> gate_;  // owners: this and the test
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false, barked_ = false;
  std::thread thread_;
};

// A target whose engine's stream waits at a gate.
struct GatedTarget {
  explicit GatedTarget(bool fake) : world(gate_world(fake, MemoryKind::allocated)) {
    party.transport = world.endpoint({});
    memory = world.memory(Bytes(kSentBytes));
    behind = world.memory(Bytes(64));
    to = *party.transport->register_memory(memory->span());
    gate = *StreamGate::make(world.gpu());
    const Driver& driver = world.gpu()->driver();
    const Current here = world.gpu()->current();
    EXPECT_EQ(driver.cuStreamCreateWithPriority(&engine, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    const auto waits = gate->wait(engine, LayerId(0));
    EXPECT_TRUE(waits) << waits.error().message;
    EXPECT_EQ(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(behind->span().data()), 1, 64, engine), CUDA_SUCCESS);
  }
  ~GatedTarget() {
    gate->over();
    const Current here = world.gpu()->current();
    world.gpu()->driver().cuStreamSynchronize(engine);
    world.gpu()->driver().cuStreamDestroy(engine);
  }
  Contexts& contexts() { return world.gpu()->contexts(); }
  bool waits() {
    const Current here = world.gpu()->current();
    return world.gpu()->driver().cuStreamQuery(engine) == CUDA_ERROR_NOT_READY;
  }
  // Takes all of a source's memory, and loses it.
  void serve(SourceProcess& source, std::uint64_t seed) {
    const std::string address = party.transport->address();
    const std::size_t up = party.count<PeerUp>(), notices = party.count<Notice>(), down = party.count<PeerDown>();
    source.tell(bytes_of(address));
    ASSERT_TRUE(drive({&party}, [&] { return party.count<PeerUp>() > up; }));
    ASSERT_TRUE(party.transport->admit(party.all<PeerUp>().back().peer, kTag));
    source.tell(*party.transport->export_region(to.id()));
    ASSERT_TRUE(drive({&party}, [&] { return party.count<Notice>() > notices || party.count<PeerDown>() > down; }));
    ASSERT_EQ(party.count<Notice>(), notices + 1) << party.text();
    std::vector<std::byte> sent(static_cast<std::size_t>(kSentBytes)), want(sent.size());
    kvloom::fill(sent, seed);
    copy_slowly(want, sent, kAllSent);
    EXPECT_EQ(world.get(memory->span()), want);
    source.end();
    ASSERT_TRUE(drive({&party}, [&] { return party.count<PeerDown>() > down; }));
  }

  CudaWorld world;
  Party party;
  std::unique_ptr<ConformanceMemory> memory, behind;
  Region to;
  std::shared_ptr<StreamGate> gate;
  CUstream engine = nullptr;
};

// Peers come, are read and die while the gate is shut; all is given back once it is open.
void expect_progress_at_a_shut_gate(bool fake) {
  std::vector<std::unique_ptr<SourceProcess>> sources;
  const std::array kinds = {MemoryKind::allocated, MemoryKind::parts, MemoryKind::host, MemoryKind::allocated};
  for (std::size_t i = 0; i < kinds.size(); ++i) sources.push_back(std::make_unique<SourceProcess>(fake, kinds[i], i));
  GatedTarget target(fake);
  Watchdog watchdog(target.gate);
  for (std::size_t i = 0; i < kinds.size(); ++i) target.serve(*sources[i], i);
  { const auto another = *StreamGate::make(target.world.gpu()); }  // a gate ends beside it
  const auto counts = dynamic_cast<CudaTransport&>(*target.party.transport).counts();
  EXPECT_EQ(counts.engine_calls, static_cast<std::int64_t>(kinds.size()));
  EXPECT_GE(counts.kernel_launches, static_cast<std::int64_t>(kinds.size()));
  EXPECT_TRUE(target.waits());
  EXPECT_FALSE(watchdog.call_off()) << "something waited for the stream that waits at the gate";
  EXPECT_EQ(target.contexts().put_off(), kinds.size()) << "the mappings of the dead";
  EXPECT_THAT(fake::stuck(), IsEmpty());  // of the fake driver
  target.gate->landed(LayerId(0));
  EXPECT_FALSE(target.party.transport->arm()) << "there is something to free";
  EXPECT_TRUE(drive({&target.party}, [&] { return target.contexts().put_off() == 0; }));
  if (fake) {
    EXPECT_THAT(fake::stuck(), IsEmpty());
    EXPECT_EQ(fake::live().opened, 0);
    EXPECT_EQ(fake::live().mappings, 0);
    EXPECT_EQ(fake::live().registered, 0);
  }
}

TEST(CudaGate, NothingOfLostPeersWaitsForAStreamAtAGate) { expect_progress_at_a_shut_gate(true); }

TEST(GpuGate, NothingOfLostPeersWaitsForAStreamAtAGate) {
  if (gpus() == 0) {
    std::puts("no GPU");
    return;
  }
  expect_progress_at_a_shut_gate(false);
}

TEST(CudaGate, EvenATransportEndsWhileOneIsShut) {
  GatedTarget target(true);
  const auto gpu = target.world.gpu();
  Party source{target.world.endpoint({}), {}};
  ASSERT_TRUE(source.transport->connect(target.party.transport->address()));
  ASSERT_TRUE(drive({&source, &target.party}, [&] { return target.party.count<PeerUp>() == 1; }));
  target.to = Region();
  source.transport.reset();
  target.party.transport.reset();
  EXPECT_GT(target.contexts().put_off(), 0U) << "its queues";
  EXPECT_THAT(fake::stuck(), IsEmpty());
  target.gate->over();
  EXPECT_EQ(target.contexts().put_off(), 0U) << "nobody polls any more: who opens the gate frees";
  EXPECT_THAT(fake::stuck(), IsEmpty());
}

TEST(CudaGate, IsShutOnlyWhileAStreamMayWait) {
  CudaWorld world(CudaWorldOptions{});
  const GpuPtr gpu = world.gpu();
  const auto gate = *StreamGate::make(gpu);
  bool freed = false;
  const auto thing = [&] { return std::shared_ptr<void>(nullptr, [&freed](void*) { freed = true; }); };
  gate->landed(LayerId(3));
  ASSERT_TRUE(gate->wait(world.stream(), LayerId(3)));
  gpu->contexts().give_back(thing());
  EXPECT_TRUE(std::exchange(freed, false)) << "layer 3 is there";
  ASSERT_TRUE(gate->wait(world.stream(), LayerId(5)));
  gpu->contexts().give_back(thing());
  gate->landed(LayerId(4));
  gpu->contexts().free_some(10);
  EXPECT_FALSE(freed);
  gate->landed(LayerId(5));
  gpu->contexts().free_some(10);
  EXPECT_TRUE(freed);
}

TEST(CudaGate, StreamsThatComeLateToAGateThatIsOverGoOn) {
  CudaWorld world(CudaWorldOptions{});
  const Current here = world.gpu()->current();
  fake::hold();
  {
    const auto gate = *StreamGate::make(world.gpu());
    ASSERT_TRUE(gate->wait(world.stream(), LayerId(7)));
  }                                                  // its end is its opening
  const auto next = *StreamGate::make(world.gpu());  // has its word
  EXPECT_EQ(fake::release(10), 1U);
  ASSERT_TRUE(next->wait(world.stream(), LayerId(0)));
  EXPECT_EQ(fake::release(10), 0U) << "nothing of this one has landed";
  next->landed(LayerId(0));
  EXPECT_EQ(fake::release(10), 1U);
  fake::release_all();
  EXPECT_EQ(fake::live().pinned, 1) << "one page for all words";
}

// An engine's thread shuts and opens gates, while the transport's gives memory back.
TEST(CudaGate, NoneIsShutWhileSomethingIsFreed) {
  CudaWorld world(CudaWorldOptions{});
  const GpuPtr gpu = world.gpu();
  const CUstream stream = world.stream();
  std::atomic<bool> over = false;
  std::thread engine([&] {
    for (int i = 0; i < 2000; ++i) {
      const auto gate = *StreamGate::make(gpu);
      EXPECT_TRUE(gate->wait(stream, LayerId(i % 3)));
      for (const int layer : {0, 1, 2}) gate->landed(LayerId(layer));
    }
    over = true;
  });
  const auto free_memory = [&gpu](std::byte* at) {
    std::this_thread::yield();  // the moment for a gate to be shut, were it allowed
    const Current here = gpu->current();
    EXPECT_EQ(gpu->driver().cuMemFree(reinterpret_cast<CUdeviceptr>(at)), CUDA_SUCCESS);
  };
  while (!over) {
    gpu->contexts().free_some(2);
    if (gpu->contexts().put_off() > Contexts::kMostPutOff / 2) continue;  // else waits would be refused
    CUdeviceptr at = 0;
    const Current here = gpu->current();
    ASSERT_EQ(gpu->driver().cuMemAlloc(&at, 64), CUDA_SUCCESS);
    gpu->contexts().give_back(std::shared_ptr<std::byte>(reinterpret_cast<std::byte*>(at), free_memory));
  }
  engine.join();
  gpu->contexts().free_some(Contexts::kMostPutOff);
  EXPECT_EQ(fake::live().allocations, 0);
  EXPECT_THAT(fake::stuck(), IsEmpty());
}

TEST(CudaGate, WhereTooMuchIsPutOffNoMoreAreShut) {
  CudaWorld world(CudaWorldOptions{});
  Contexts& contexts = world.gpu()->contexts();
  const auto gate = *StreamGate::make(world.gpu()), next = *StreamGate::make(world.gpu());
  ASSERT_TRUE(gate->wait(world.stream(), LayerId(0)));
  for (std::size_t i = 0; i < Contexts::kMostPutOff; ++i) contexts.give_back(std::make_shared<int>());
  EXPECT_THAT(next->wait(world.stream(), LayerId(0)).error().message, HasSubstr("wait for layer 0 on the host this time"));
  gate->over();
  EXPECT_TRUE(next->wait(world.stream(), LayerId(0))) << "all is freed: no transport is there to do it";
  next->over();
  EXPECT_EQ(contexts.put_off(), 0U);
}

TEST(CudaGate, ConnectionsUseTheQueuesOfFormerOnes) {
  CudaWorld world(CudaWorldOptions{});
  Party target{world.endpoint({}), {}};
  std::int64_t pinned = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    Party source{world.endpoint({}), {}};
    ASSERT_TRUE(source.transport->connect(target.transport->address()));
    ASSERT_TRUE(drive({&source, &target}, [&] { return target.count<PeerUp>() == i + 1; }));
    source.transport.reset();
    ASSERT_TRUE(drive({&target}, [&] { return target.count<PeerDown>() == i + 1; }));
    if (i == 0) pinned = fake::live().pinned;
    EXPECT_EQ(fake::live().pinned, pinned);
  }
}

}  // namespace
}  // namespace kvloom::cuda
